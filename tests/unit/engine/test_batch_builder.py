"""A schedule as tensors: rows, positions, tables and slots, step after step."""

import pytest
import torch
from tests.unit.engine.scheduling import finish_step, make_request, make_scheduler, run_step

from kv8.engine.batch_builder import BatchBuilder, logit_rows
from kv8.engine.scheduler import ScheduledChunk

CPU = torch.device("cpu")


def check_step(step, chunks, cache) -> None:
    """Compare every tensor with the plain loop it stands for."""
    block_size = cache.layout.block_size
    row = 0
    expected_rows = []
    for s, (chunk, num_rows) in enumerate(zip(chunks, step.row_counts, strict=True)):
        assert step.attention.query_starts[s] == row
        assert step.attention.context_lens[s] == chunk.stop
        for position in range(chunk.start, chunk.stop):
            assert step.input_ids[row] == chunk.request.token_ids[position]
            assert step.positions[row] == position
            for group in cache.layout.groups:
                table = cache.block_table(chunk.request.sequence, group.index)
                block = table[position // block_size]
                slot = block * block_size + position % block_size
                assert step.attention.slots[group.index][row] == slot
            row += 1
        for group in cache.layout.groups:
            table = cache.block_table(chunk.request.sequence, group.index)
            first = group.first_visible_block(chunk.start) * group.parts
            for entry in range(first, -(-chunk.stop // block_size)):
                assert step.attention.block_tables[group.index][s, entry] == table[entry]
        wanted = logit_rows(chunk)
        assert num_rows == len(wanted)
        expected_rows += [row - chunk.num_tokens + offset for offset in wanted]
    assert step.attention.num_tokens == row == len(step.input_ids)
    assert step.rows.tolist() == expected_rows
    assert step.attention.query_starts.dtype == torch.int32
    assert {t.dtype for t in step.attention.slots} == {torch.int64}
    assert {t.dtype for t in step.attention.block_tables} == {torch.int32}


@pytest.mark.parametrize("windows", [(None,), (None, 5), (3, None, 9)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_step_of_a_busy_run(block_size, windows) -> None:
    scheduler, cache = make_scheduler(
        num_blocks=200 // block_size + 30, block_size=block_size, windows=windows,
        max_num_batched_tokens=11, max_num_seqs=4,
    )  # fmt: skip
    builder = BatchBuilder(cache, 64, CPU)
    for sequence, (length, max_tokens, prompt) in enumerate(
        [(1, 3, None), (17, 20, None), (33, 5, None), (33, 9, 2), (16, 30, None), (40, 2, 2)]
    ):
        scheduler.add(
            make_request(
                str(sequence), sequence, length, max_tokens=max_tokens, prompt=prompt,
                wants_prompt_logits=sequence == 4,
            )
        )  # fmt: skip
    steps = 0
    while scheduler.has_unfinished:
        steps += 1
        chunks = scheduler.schedule()
        check_step(builder.build(chunks, scheduler.running), chunks, cache)
        finish_step(scheduler, chunks)
        if steps == 12:
            scheduler.preempt_all()  # tables of old blocks must not be seen again
    assert steps > 20


def test_rows_are_taken_back_from_those_who_left() -> None:
    scheduler, cache = make_scheduler(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=64)
    builder = BatchBuilder(cache, 32, CPU)
    for sequence in range(10):
        scheduler.add(make_request(str(sequence), sequence, 5, max_tokens=2))
    while scheduler.has_unfinished:
        before = scheduler.schedule()
        check_step(builder.build(before, scheduler.running), before, cache)
        run_step(scheduler)


def test_tables_grow_with_the_requests_that_run() -> None:
    """Any ``max_num_seqs`` costs what is run of it, and rows keep their blocks as tables grow."""
    scheduler, cache = make_scheduler(num_blocks=128, max_num_seqs=10**9)
    builder = BatchBuilder(cache, 64, CPU)
    for sequence in range(21):
        scheduler.add(make_request(str(sequence), sequence, 1 + sequence % 6, max_tokens=9))
        chunks = scheduler.schedule()  # one more each step, while the others decode
        check_step(builder.build(chunks, scheduler.running), chunks, cache)
        for chunk in chunks:
            scheduler.commit(chunk)
            chunk.request.token_ids.append(7)


def chunk_of(request, start, num_tokens):
    return ScheduledChunk(request, start, num_tokens)


def test_rows_whose_logits_are_wanted() -> None:
    plain = make_request("a", 0, 10)
    assert list(logit_rows(chunk_of(plain, 0, 4))) == []
    assert list(logit_rows(chunk_of(plain, 4, 6))) == [5]
    asking = make_request("b", 1, 10, wants_prompt_logits=True)
    assert list(logit_rows(chunk_of(asking, 0, 4))) == [0, 1, 2, 3]
    asking.num_prompt_logits = 4
    assert list(logit_rows(chunk_of(asking, 4, 6))) == [0, 1, 2, 3, 4, 5]
    asking.num_prompt_logits = 6  # preempted after a later chunk, computed again
    assert list(logit_rows(chunk_of(asking, 0, 4))) == []
    assert list(logit_rows(chunk_of(asking, 4, 4))) == [2, 3]
    asking.num_prompt_logits = 9
    assert list(logit_rows(chunk_of(asking, 4, 6))) == [5]
    single = make_request("c", 2, 1, wants_prompt_logits=True)
    assert list(logit_rows(chunk_of(single, 0, 1))) == [0]
