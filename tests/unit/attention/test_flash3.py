"""FlashAttention 3 as a backend: what it is given, checked by a stand-in that computes from it."""

import pytest
import torch
from tests.attention_backends import triton_backend
from tests.attention_cases import make_case, run_step
from tests.flash3_stand_in import stand_in

from kv8.attention.reference import ReferenceBackend

CONTEXTS = [(0, 0, 18), (1, 0, 16), (2, 0, 3)]
MIXED = [(2, 3, 33), (1, 16, 17), (0, 18, 20)]


@pytest.fixture(autouse=True)
def each_backend():
    """These tests are about one backend."""


@pytest.fixture
def backend():
    triton_backend()
    from kv8.attention.flash3 import Flash3Backend

    return Flash3Backend(stand_in)


@pytest.mark.parametrize("stored_as", ["fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize("features", [{}, {"window": 5, "softcap": 3.0}])
def test_it_is_given_what_the_reference_computes_from(backend, stored_as, features):
    """Scales a hundredfold apart between heads; chunks, decode and whole prompts in one step.

    Weights are not rounded to e4m3 here: half a step of them, and the output's rounding.
    """
    case = make_case(
        [20, 17, 33],
        stored_as=stored_as,
        block_size=4,
        dtype=torch.bfloat16,
        fp8_queries=stored_as == "fp8_e4m3",
        spread=100.0,
        **features,
    )
    assert backend.refuses(case.layer) is None
    for steps in (CONTEXTS, MIXED):
        found = run_step(case, steps, backend)
        expected = run_step(case, steps, ReferenceBackend())
        assert found.dtype == torch.bfloat16
        peak = torch.cat(case.values).abs().float().amax((0, 2)).repeat_interleave(2)[:, None]
        tolerance = (2.0**-4 if case.layer.q_scale is not None else 0) + 2 * 2.0**-8
        assert ((found - expected).float().abs() <= tolerance * peak * 1.1).all()


@pytest.mark.parametrize(
    "options", [{"fp8_queries": True, "sinks": True}, {"stored_as": "float16"}], ids=str
)
def test_what_it_cannot_do_is_left_to_the_triton_kernels(backend, options):
    case = make_case([20], dtype=torch.bfloat16, **options)
    assert backend.refuses(case.layer) is None
    found = run_step(case, [(0, 0, 20)], backend)
    assert torch.equal(found, run_step(case, [(0, 0, 20)], triton_backend()))


def test_it_says_what_flash_attention_3_cannot_do(backend):
    def refusal(**options):
        return backend.refuses(make_case([1], **options).layer)

    assert "no fp8_e5m2 cache" in refusal(stored_as="fp8_e5m2", fp8_queries=True)
    assert "no float32 cache" in refusal(stored_as="float32")
    assert "needs q scales" in refusal(stored_as="fp8_e4m3")
    assert "head size 264" in refusal(head_dim=264)
    assert "head size 20" in refusal(head_dim=20)
    layer = make_case([1], fp8_queries=True).layer
    layer.q_scale[1] *= 2
    assert "one q scale for all query heads of a KV head" in backend.refuses(layer)


def test_without_flash_attention_3_it_does_not_load():
    from kv8.attention.flash3 import Flash3Backend

    with pytest.raises(ImportError, match="FlashAttention 3 is not installed"):
        Flash3Backend()
