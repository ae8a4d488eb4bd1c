"""Scales on every path: metamorphic relations that hold whatever the data."""

from dataclasses import replace

import pytest
import torch
from tests.attention_cases import gather_rows, make_batch, make_case, new_backend, run_step

from kv8.attention.naive import naive_attention

LENGTHS = [20, 17, 33]
CONTEXTS = [(0, 0, 18), (1, 0, 16), (2, 0, 3)]
PATHS = {
    "prefill": CONTEXTS,
    "decode": [(0, 17, 18), (1, 15, 16), (2, 2, 3)],
    "chunk": [(0, 5, 18)],
    "mixed": [(0, 9, 18), (1, 15, 16), (2, 0, 3)],
}


def attend(case, path, *, backend=None, scale=1.0, **changes):
    """Attend over fixed bytes with changed scales."""
    steps = PATHS[path]
    layer = replace(case.layer, **changes)
    call = replace(case.call, softmax_scale=case.call.softmax_scale * scale)
    query, batch = gather_rows(case.queries, steps), make_batch(case, steps)
    if backend is None:
        return new_backend().attend(layer, query, batch, call)
    return backend(layer, query, batch, call)


@pytest.fixture(params=[False, True], ids=["native", "fp8 queries"])
def case(request):
    case = make_case(LENGTHS, spread=30.0, softcap=3.0, sinks=True, fp8_queries=request.param)
    run_step(case, CONTEXTS)
    return case


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("backend", [None, naive_attention], ids=["reference", "naive"])
class TestMetamorphic:
    def test_doubling_the_v_scale_doubles_the_output(self, case, path, backend):
        """Pitfall 27: to the bit, since both are powers of two apart."""
        once = attend(case, path, backend=backend)
        twice = attend(case, path, backend=backend, v_scale=case.layer.v_scale * 2)
        assert torch.equal(twice, once * 2)
        assert (once != 0).all()

    def test_doubling_the_k_scale_is_doubling_the_softmax_scale(self, case, path, backend):
        """Pitfall 27: and it does change the output."""
        by_k = attend(case, path, backend=backend, k_scale=case.layer.k_scale * 2)
        by_call = attend(case, path, backend=backend, scale=2.0)
        assert torch.equal(by_k, by_call)
        assert not torch.equal(by_k, attend(case, path, backend=backend))

    def test_one_head_s_scale_changes_that_head_alone(self, case, path, backend):
        once = attend(case, path, backend=backend)
        for name in ("k_scale", "v_scale"):
            scale = getattr(case.layer, name).clone()
            scale[1] *= 2
            changed = attend(case, path, backend=backend, **{name: scale})
            assert torch.equal(changed[:, :2], once[:, :2])
            assert (changed[:, 2:] != once[:, 2:]).any()


@pytest.mark.parametrize("path", PATHS)
def test_the_q_scale_has_an_effect_and_cancels(path):
    """Doubled with the query, it doubles the logits and rounds no differently."""
    case = make_case(LENGTHS, fp8_queries=True)
    run_step(case, CONTEXTS)
    doubled = replace(case, queries=[q * 2 for q in case.queries])
    found = attend(doubled, path, q_scale=case.layer.q_scale * 2, scale=0.5)
    assert torch.equal(found, attend(case, path))
    assert not torch.equal(attend(case, path, q_scale=case.layer.q_scale * 1.37), found)


def test_a_scale_updated_in_place_takes_effect_at_once():
    """Pitfall 54: the backend keeps no copy: the tensor's new value is used by the next call."""
    case, backend = make_case(LENGTHS), new_backend()
    batch, query = make_batch(case, CONTEXTS), gather_rows(case.queries, CONTEXTS)
    key, value = gather_rows(case.keys, CONTEXTS), gather_rows(case.values, CONTEXTS)
    backend.store(case.layer, key, value, batch)
    before = backend.attend(case.layer, query, batch, case.call)
    address = case.layer.v_scale.data_ptr()

    case.layer.v_scale.mul_(2)
    assert torch.equal(backend.attend(case.layer, query, batch, case.call), before * 2)
    case.layer.k_scale.mul_(2)
    backend.store(case.layer, key, value, batch)
    after = backend.attend(case.layer, query, batch, case.call)
    # Powers of two: bytes halve, scales double, and only what underflows is lost.
    assert (after - before).abs().max() <= 2.0**-9
    assert case.layer.v_scale.data_ptr() == address
