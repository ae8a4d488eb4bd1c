"""The copy of the block tables on a device: only new entries travel, and it is never behind."""

import random

import numpy as np
import torch
from tests.unit.engine.scheduling import finish_step, make_request, make_scheduler

from kv8.engine.block_tables import BlockTables
from kv8.engine.upload import send, take_rows, unpack, upload

CPU = torch.device("cpu")


def test_the_mirror_follows_a_busy_run() -> None:
    """Requests that come, grow, end and are preempted; rows that change hands; tables that grow."""
    draw = random.Random(3)
    scheduler, cache = make_scheduler(
        num_blocks=300, block_size=4, windows=(None, 5), max_num_batched_tokens=30, max_num_seqs=9
    )
    tables = BlockTables(cache, 128, CPU, mirrored=True)
    travelled = 0
    for sequence in range(40):
        length, most = draw.randrange(1, 60), draw.randrange(2, 20)
        scheduler.add(make_request(str(sequence), sequence, length, max_tokens=most))
    steps = 0
    while scheduler.has_unfinished:
        steps += 1
        chunks = scheduler.schedule()
        tables.retire(scheduler.running)
        rows = torch.tensor([tables.extend(chunk) for chunk in chunks])
        fresh = upload(tables.take_fresh(), CPU)
        travelled += len(fresh[0])
        tables.write(*fresh)
        width = max(-(-chunk.stop // 4) for chunk in chunks)
        for group, selected in enumerate(tables.select(rows, width)):
            for row, chunk in enumerate(chunks):
                used = -(-chunk.stop // 4)
                first = cache.layout.groups[group].first_visible_block(chunk.start)
                expected = cache.block_table(chunk.request.sequence, group)[first:used]
                assert selected[row, first:used].tolist() == list(expected)
        finish_step(scheduler, chunks)
        if steps % 17 == 0:
            scheduler.preempt_all()
    assert tables.host.shape[1] > 4, "the tables had to grow"
    assert steps > 50
    assert travelled < steps * 9 * 2 * 8, "whole tables travelled"


def test_arrays_of_all_kinds_in_one_piece() -> None:
    arrays = (
        np.arange(3, dtype=np.int64),
        np.array([], dtype=np.int32),
        np.arange(10, dtype=np.int32).reshape(2, 5),
        np.array([[1.5], [-2.0]], dtype=np.float64),
    )
    packed = send(arrays, CPU)
    assert packed.dtype is torch.uint8
    for tensor, array in zip(unpack(packed, arrays), arrays, strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 16 == packed.data_ptr() % 16 or not len(array)


def test_all_rows_are_taken_without_a_copy() -> None:
    values = torch.arange(12).view(4, 3)
    assert take_rows(values, range(4)) is values
    assert torch.equal(take_rows(values, [1, 3]), values[[1, 3]])
