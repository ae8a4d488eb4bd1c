"""Any float32, any scale: codes are the nearest, counts add up, order is kept."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fp8_table import nearest_code

from kv8.formats.base import FORMATS
from kv8.formats.encode import bits, decode, encode, encode_counting

FP8 = st.sampled_from([FORMATS["fp8_e4m3"], FORMATS["fp8_e5m2"]])
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ANY = st.floats(width=32)
SCALES = st.floats(min_value=2.0**-60, max_value=2.0**60, width=32)


@given(FP8, st.lists(FINITE, min_size=1, max_size=30), SCALES)
def test_codes_are_the_nearest_to_the_quotient(kv_format, values, scale):
    values = torch.tensor(values, dtype=torch.float32)
    quotients = values / torch.tensor(scale, dtype=torch.float32)
    codes = bits(encode(values, scale, kv_format)).tolist()
    for code, quotient in zip(codes, quotients, strict=True):
        negative = bool(quotient.signbit())
        largest = Fraction(kv_format.finite_max)
        exact = Fraction(quotient.item()) if quotient.isfinite() else largest
        assert code == nearest_code(kv_format.name, exact, negative=negative)


@given(FP8, st.lists(ANY, min_size=1, max_size=30), SCALES)
def test_counts_are_those_of_the_codes(kv_format, values, scale):
    values = torch.tensor(values, dtype=torch.float32)
    codes, counts = encode_counting(values, scale, kv_format)
    decoded = decode(codes, None, kv_format)
    quotients = values.double() / scale
    assert counts[0] == len(values)
    assert counts[1] == (quotients.float().abs() > kv_format.finite_max).sum()
    assert counts[2] == ((decoded == 0) & (values != 0)).sum()
    assert counts[3] == values.isnan().sum()
    assert torch.equal(decoded.isnan(), values.isnan())
    assert not decoded.isinf().any()


@given(FP8, st.lists(FINITE, min_size=2, max_size=30), SCALES)
def test_order_and_sign_are_kept(kv_format, values, scale):
    values = torch.tensor(sorted(values), dtype=torch.float32)
    decoded = decode(encode(values, scale, kv_format), None, kv_format)
    assert (decoded.diff() >= 0).all()
    mirrored = decode(encode(-values, scale, kv_format), None, kv_format)
    assert torch.equal(mirrored, -decoded)


@given(FP8, st.integers(0, 255), st.integers(-40, 40))
def test_a_power_of_two_scale_loses_nothing(kv_format, code, exponent):
    code = torch.tensor([code], dtype=torch.uint8).view(getattr(torch, kv_format.torch_dtype))
    value = decode(code, 2.0**exponent, kv_format)
    if value.isfinite():
        assert torch.equal(bits(encode(value, 2.0**exponent, kv_format)), bits(code))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@given(name=st.sampled_from(["bfloat16", "float16"]), values=st.lists(FINITE, min_size=1))
def test_16_bit_stores_stay_finite_and_near(source, name, values):
    kv_format = FORMATS[name]
    values = torch.tensor(values, dtype=torch.float32).to(source)
    values = values[values.isfinite()]
    codes, counts = encode_counting(values, None, kv_format)
    assert codes.isfinite().all()
    clamped = values.float().clamp(-kv_format.finite_max, kv_format.finite_max)
    half_ulp = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[name]
    error = (codes.float() - clamped).abs()
    assert (error <= clamped.abs() * half_ulp + kv_format.smallest / 2).all()
    assert counts[1] == (values.float().abs() > kv_format.finite_max).sum()
