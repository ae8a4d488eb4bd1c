"""Triton's kernels or FlashAttention 3's, chosen by a clock that tests set; see test_flash3.py."""

from dataclasses import replace

import pytest
import torch
from tests.attention_backends import triton_backend
from tests.attention_cases import gather_rows, make_batch, make_case, run_step, same_bits
from tests.flash3_stand_in import stand_in

from kv8.attention.kernel_choice import (
    KernelChoice,
    KindChoice,
    MadeUpWork,
    Race,
    kind_of,
)
from kv8.formats.encode import bits

WORK = MadeUpWork(prompt=24, sequences=2, context=20)
PROMPT, DECODE = [(0, 0, 18)], [(0, 17, 18)]


@pytest.fixture(autouse=True)
def each_backend():
    """These tests are about one backend."""


class Flash3:
    """The stand-in, which notes its calls; ``spoil`` makes it wrong."""

    def __init__(self, spoil=lambda output, arguments: output):
        self.calls, self._spoil = [], spoil

    def __call__(self, **arguments):
        self.calls.append(arguments)
        return self._spoil(stand_in(**arguments), arguments)


class Clock:
    """Says of FlashAttention 3's work what ``seconds`` says, by its arguments; 1 of triton's."""

    def __init__(self, flash3, seconds):
        self._flash3, self._seconds = flash3, seconds

    def __call__(self, work):
        [backend] = work.args
        if backend.name == "triton":  # which need not be computed to say so
            return 1.0
        work()
        return self._seconds(self._flash3.calls[-1])


def by_phase(prefill, decode):
    return lambda arguments: decode if arguments["max_seqlen_q"] == 1 else prefill


def new_backend(flash3):
    triton_backend()  # or skip
    from kv8.attention.measured import MeasuredBackend

    return MeasuredBackend(flash3)


def small_case(**options):
    defaults = {"stored_as": "bfloat16", "dtype": torch.bfloat16, "heads": (4, 2)}
    return make_case([20], **defaults | options)


def measured(case, flash3, seconds, *more):
    """Return a backend that has measured layers like those of the cases, and uses what it found."""
    backend = new_backend(flash3)
    subjects = [(each.layer, each.call) for each in (case, *more)]
    choice = backend.measure(subjects, WORK, torch.bfloat16, Clock(flash3, seconds))
    backend.use(choice)
    flash3.calls.clear()
    return backend, choice


def decided(case, flash3):
    """Return a backend that takes FlashAttention 3 for everything, without having measured."""
    race = Race(triton=2.0, flash3=1.0)
    backend = new_backend(flash3)
    backend.use(KernelChoice({kind_of(case.layer, case.call): KindChoice(race, race)}))
    return backend


def attends(backend, flash3, case, steps, **changes):
    """Return whether FlashAttention 3 computes a step, and what came out."""
    flash3.calls.clear()
    batch = replace(make_batch(case, steps), **changes)
    found = backend.attend(case.layer, gather_rows(case.queries, steps), batch, case.call)
    return bool(flash3.calls), found


@pytest.mark.parametrize(("prefill", "decode"), [(0.9, 1.1), (1.1, 0.9)])
def test_the_faster_one_attends_in_each_phase(prefill, decode):
    case, flash3 = small_case(window=9, softcap=3.0), Flash3()
    backend, choice = measured(case, flash3, by_phase(prefill, decode))
    run_step(case, PROMPT, backend)  # stores
    for steps, seconds in ((PROMPT, prefill), (DECODE, decode)):
        taken, found = attends(backend, flash3, case, steps)
        assert taken is (seconds < 1)
        if not taken:
            _, expected = attends(triton_backend(), flash3, case, steps)
            assert same_bits(found, expected)
    [text] = choice.described().values()
    assert f"flash3 {prefill * 1e6:,.0f} µs" in text
    assert "triton 1,000,000 µs" in text


def other_head(output, arguments):
    return output.flip(1)


def one_key_less(output, arguments):
    return stand_in(**arguments | {"cache_seqlens": arguments["cache_seqlens"] - 1})


def no_scale(output, arguments):
    return output * 1.5


def not_a_number(output, arguments):
    return output * torch.nan


def fails(output, arguments):
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("stored_as", "spoil", "said"),
    [
        ("fp8_e4m3", other_head, "differs from the triton kernels by"),
        ("fp8_e4m3", one_key_less, "differs from the triton kernels by"),
        ("bfloat16", one_key_less, "differs from the triton kernels by"),
        ("fp8_e4m3", no_scale, "differs from the triton kernels by"),
        ("bfloat16", not_a_number, "differs from the triton kernels by inf times"),
        ("bfloat16", fails, "it failed with RuntimeError: no kernel image is available"),
    ],
)
def test_what_is_wrong_or_fails_is_out(stored_as, spoil, said, caplog):
    case = small_case(stored_as=stored_as, fp8_queries=stored_as != "bfloat16")
    flash3 = Flash3(spoil)
    backend, choice = measured(case, flash3, by_phase(0.1, 0.1))
    [text] = choice.described().values()
    assert said in text
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert said in record.getMessage()
    run_step(case, PROMPT, backend)
    assert not flash3.calls


def test_measuring_touches_neither_cache_nor_scales_nor_counters():
    case = small_case(stored_as="fp8_e4m3", fp8_queries=True, spread=100.0)
    layer, flash3 = case.layer, Flash3()
    tensors = (bits(layer.k_codes), bits(layer.v_codes), layer.k_scale, layer.v_scale,
               layer.q_scale, layer.counters.k, layer.counters.v)  # fmt: skip
    before = [tensor.clone() for tensor in tensors]
    state = torch.get_rng_state()
    _, choice = measured(case, flash3, by_phase(0.9, 0.9))
    assert "prompts by flash3" in str(choice.described())  # they agree in FP8 attention as well
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert torch.equal(torch.get_rng_state(), state)  # nor what is drawn afterwards


def test_recorded_steps_are_tritons():
    case, flash3 = small_case(), Flash3()
    backend = decided(case, flash3)
    assert backend.capturable
    run_step(case, PROMPT, backend)
    taken, found = attends(backend, flash3, case, DECODE, lengths_on_device=True)
    assert not taken
    _, expected = attends(triton_backend(), flash3, case, DECODE)
    assert same_bits(found, expected)
    assert attends(backend, flash3, case, DECODE)[0]


def test_each_kind_of_layer_goes_by_its_own_measurement():
    wide, narrow, flash3 = small_case(), small_case(window=5), Flash3()
    odd = small_case(stored_as="fp8_e4m3")  # no q scales: nothing for FlashAttention 3

    def seconds(arguments):
        return 0.5 if arguments["window_size"] == (-1, -1) else 2.0

    backend, choice = measured(wide, flash3, seconds, narrow, odd)
    assert len(choice.by_kind) == 3
    assert "needs q scales" in choice.described()["fp8_e4m3, all tokens"]
    for case, expected in ((wide, True), (narrow, False), (odd, False)):
        run_step(case, PROMPT, backend)
        assert attends(backend, flash3, case, PROMPT)[0] is expected


def test_a_kind_that_was_not_measured_is_tritons():
    case, flash3 = small_case(), Flash3()
    backend = new_backend(flash3)
    run_step(case, PROMPT, backend)
    backend.use(KernelChoice())
    assert not attends(backend, flash3, case, PROMPT)[0]
    sinks = small_case(sinks=True)
    _, choice = measured(sinks, flash3, by_phase(0.1, 0.1))
    assert "no attention sinks" in choice.described()["bfloat16, all tokens"]


def test_scales_that_flash_attention_3_cannot_take_are_left_to_triton():
    """They may change while an engine runs; others are read where they lie."""
    case, flash3 = small_case(stored_as="fp8_e4m3", fp8_queries=True), Flash3()
    backend = decided(case, flash3)
    run_step(case, PROMPT, backend)
    once = attends(backend, flash3, case, PROMPT)
    case.layer.v_scale.mul_(2)
    twice = attends(backend, flash3, case, PROMPT)
    assert once[0]
    assert twice[0]
    assert torch.equal(twice[1], once[1] * 2)
    case.layer.q_scale[1] *= 2
    backend.scales_changed()
    taken, found = attends(backend, flash3, case, PROMPT)
    assert not taken
    assert same_bits(found, attends(triton_backend(), flash3, case, PROMPT)[1])


@pytest.mark.parametrize("limit", [1, 2, 3, 17, 10**6])
def test_made_up_work_is_within_the_limits(limit):
    work = MadeUpWork.within(max_num_seqs=limit, max_num_batched_tokens=limit, max_model_len=limit)
    for lengths in (work.prefill, work.decode):
        assert all(1 <= new <= context <= limit for new, context in lengths)
    assert len(work.decode) <= limit
    assert sum(new for new, _ in work.prefill) <= max(limit, 3)
