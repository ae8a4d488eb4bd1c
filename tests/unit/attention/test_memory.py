"""How much the reference backend holds at once."""

import pytest
import torch
from tests.attention_cases import make_batch, make_case, new_backend
from torch.profiler import profile

LENGTH = 8192
MIB = 2**20


def peak_bytes(stored_as: str, *, fp8_queries: bool = False) -> int:
    """Return the most bytes held at once by an 8k prefill of one layer, beyond what it is given."""
    case = make_case(
        [LENGTH],
        stored_as=stored_as,
        heads=(2, 2),
        head_dim=32,
        dtype=torch.bfloat16,
        fp8_queries=fp8_queries,
    )
    batch, backend = make_batch(case, [(0, 0, LENGTH)]), new_backend()
    with torch.inference_mode(), profile(profile_memory=True) as profiled:
        backend.store(case.layer, case.keys[0], case.values[0], batch)
        backend.attend(case.layer, case.queries[0], batch, case.call)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 0
    return peak


@pytest.fixture(scope="module")
def peak_of_bfloat16() -> int:
    return peak_bytes("bfloat16")


def test_an_8k_prefill_stays_small(peak_of_bfloat16):
    """The logits of one head alone would be 256 MiB; what is held is tiles of 4 MiB."""
    assert peak_of_bfloat16 < 32 * MIB


def test_a_quantized_cache_needs_no_more_at_its_peak(peak_of_bfloat16):
    """Pitfall 64: an 8k prefill over FP8 codes holds at most what it holds over bfloat16."""
    assert peak_bytes("fp8_e4m3") <= peak_of_bfloat16
