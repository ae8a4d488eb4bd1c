"""What the formats cost: quantized against unquantized attention, bounded by format arithmetic.

Apart from test_reference.py on purpose. There a kernel is wrong if it leaves float32 rounding;
here a scale is wrong, or lost, if the error leaves what rounding to so many bits can cause.
"""

import math
from dataclasses import replace

import pytest
import torch
from tests.attention_cases import (
    fresh_pool,
    gather_rows,
    make_batch,
    make_case,
    new_backend,
    run_step,
    visible_codes,
)

from kv8.attention.naive import naive_attention
from kv8.formats.base import FORMATS
from kv8.formats.encode import decode, encode

# Half the distance between neighbours, relative to a normal value: 2^-(mantissa bits + 1).
HALF_ULP = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}
STEPS = [(0, 0, 40), (1, 0, 17)]


def exact_attention(case, steps):
    """Attention over the unquantized K and V, in float64."""
    layer = replace(case.layer, format=FORMATS["float32"], k_scale=None, v_scale=None, q_scale=None)
    plain = replace(case, layer=layer)
    plain = replace(plain, layer=replace(layer, **_float32_pools(case)))
    new_backend().store(
        plain.layer,
        gather_rows(case.keys, steps),
        gather_rows(case.values, steps),
        make_batch(case, steps),
    )
    queries = gather_rows(case.queries, steps)
    return naive_attention(plain.layer, queries, make_batch(case, steps), case.call)


def _float32_pools(case):
    shape = case.layer.k_codes.shape
    return {
        "k_codes": torch.zeros(shape),
        "v_codes": torch.zeros(shape),
        "counters": None,
    }


@pytest.mark.parametrize("stored_as", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("spread", [1.0, 1000.0])
def test_error_is_bounded_by_half_an_ulp_of_keys_and_values(stored_as, spread):
    """|logit error| <= half ulp · Σ|q·k|, and from it the output's."""
    case = make_case([40, 17], stored_as=stored_as, spread=spread, heads=(4, 4))
    found = run_step(case, STEPS).double()
    expected = exact_attention(case, STEPS)
    half_ulp, kv_format = HALF_ULP[stored_as], case.layer.format
    row = 0
    for s, start, end in STEPS:
        for position in range(start, end):
            q = case.queries[s][position].double()  # [H, D]
            k = case.keys[s][: position + 1].double().transpose(0, 1)  # [H, n, D]
            v = case.values[s][: position + 1].double().transpose(0, 1)
            k_step = _half_step(k, case.layer.k_scale, half_ulp, kv_format)
            v_step = _half_step(v, case.layer.v_scale, half_ulp, kv_format)
            logit_error = (k_step @ q.abs()[..., None]).amax((1, 2)) * case.call.softmax_scale
            # Weights change by a factor within e^(±2·error); see docs/numerics.md.
            spread_v = v.abs().amax(1)
            bound = torch.expm1(2 * logit_error)[:, None] * spread_v + v_step.amax(1)
            assert ((found[row] - expected[row]).abs() <= bound * (1 + 1e-5)).all()
            row += 1


def _half_step(values, scale, half_ulp, kv_format):
    smallest = kv_format.smallest / 2 * scale.double()[:, None, None]
    return torch.maximum(values.abs() * half_ulp, smallest)


@pytest.mark.parametrize(
    ("stored_as", "lowest", "highest"),
    [
        # A uniform error of half an ulp at most, mantissas spread evenly over an octave, has a
        # root mean square of half_ulp/sqrt(3) · sqrt(mean of (1/m)²) = half_ulp · 0.408.
        ("fp8_e4m3", 2.0**-4 * 0.35, 2.0**-4 * 0.45),
        ("fp8_e5m2", 2.0**-3 * 0.35, 2.0**-3 * 0.45),
    ],
)
def test_measured_error_of_stored_values_is_that_of_the_format(stored_as, lowest, highest):
    """Neither larger (a wrong scale) nor smaller (bytes nobody rounded)."""
    case = make_case([64], stored_as=stored_as, head_dim=64)
    run_step(case, [(0, 0, 64)])
    for stored, values in zip(
        visible_codes(case, 0, 63), (case.keys[0], case.values[0]), strict=True
    ):
        relative = ((stored - values.double()) / values.double())[values.abs() > 0.01]
        assert lowest < relative.square().mean().sqrt() < highest


@pytest.mark.parametrize("factor", [1.0, 1000.0, 1e-3])
def test_fp8_attention_tracks_native_queries(factor):
    """Pitfall 25: queries are divided by their own scale; Q times 1000, K over 1000 is no matter.

    Rounding Q moves a logit by at most half an ulp · Σ|q·k|, rounding the weights moves the output
    by half an ulp of Σ weight·|v| (and 2^-17 a key for weights below the normal ones).
    """
    case = make_case([40, 17], fp8_queries=True)
    layer = replace(
        case.layer, q_scale=case.layer.q_scale * factor, k_scale=case.layer.k_scale / factor
    )
    case = replace(
        case,
        layer=layer,
        queries=[q * factor for q in case.queries],
        keys=[k / factor for k in case.keys],
    )
    found = run_step(case, STEPS)
    native = run_step(replace(fresh_pool(case), layer=replace(layer, q_scale=None)), STEPS)
    row = 0
    for s, start, end in STEPS:
        for position in range(start, end):
            k, v = (
                side.repeat_interleave(2, 1).transpose(0, 1)
                for side in visible_codes(case, s, position)
            )
            q = case.queries[s][position]
            scale = layer.q_scale[:, None]
            rounded = decode(encode(q, scale, FORMATS["fp8_e4m3"]), scale, FORMATS["fp8_e4m3"])
            moved = (k @ (rounded - q).double()[..., None])[..., 0].abs().amax(-1)
            limit = (k.abs() @ q.abs().double()[..., None])[..., 0].amax(-1)
            assert (moved <= HALF_ULP["fp8_e4m3"] * limit * 1.001).all()
            peak = v.abs().amax((1, 2))
            bound = torch.expm1(2 * moved * case.call.softmax_scale) + 2.0**-4
            bound = (bound + k.shape[1] * 2.0**-17) * peak * 1.001
            assert ((found[row] - native[row]).abs().amax(-1) <= bound).all()
            row += 1


def test_small_weights_do_not_underflow():
    """A weight of 2^-14 still has full precision, for its code stands for weight · 2^8.

    One key takes nearly all; 500 others have weight 2^-14 each and all of the value.
    """
    case = make_case([501], heads=(1, 1), fp8_queries=True, head_dim=16)
    case.keys[0].zero_(), case.values[0].fill_(1.0), case.queries[0].zero_()
    case.values[0][0] = 0.0
    case.queries[0][500, 0, 0] = 1.0
    case.keys[0][0, 0, 0] = 4.0
    # logit of key 0: 4 · softmax scale, to be 14 · ln 2.
    case = replace(case, call=replace(case.call, softmax_scale=14 * math.log(2) / 4))
    found = run_step(case, [(0, 0, 501)])[500, 0, 0].item()
    expected = 500 * 2.0**-14 / (1 + 500 * 2.0**-14)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stored_as", ["fp8_e4m3", "bfloat16"])
def test_error_does_not_grow_up_to_64k_keys(stored_as):
    """Pitfall 43: sums over long contexts keep float32's accuracy; constant values are the worst.

    Blocked summation is off by far less than n·u; 100·u is what 1,000 keys show too.
    """
    head_dim, u = 32, 2.0**-24
    generator = torch.Generator().manual_seed(7)
    errors = {}
    for length in (1024, 65536):
        case = make_case([length], heads=(2, 1), head_dim=head_dim, stored_as=stored_as)
        case.values[0][:, :, ::2] = 3.0
        batch = make_batch(case, [(0, 0, length)])
        backend = new_backend()
        backend.store(case.layer, case.keys[0], case.values[0], batch)
        query = torch.randn(1, 2, head_dim, generator=generator)
        step = make_batch(case, [(0, length - 1, length)])
        found = backend.attend(case.layer, query, step, case.call).double()
        expected = naive_attention(case.layer, query, step, case.call)
        errors[length] = ((found - expected).abs().max() / 3).item()
    assert errors[1024] <= 100 * u
    assert errors[65536] <= 100 * u
