"""Encode and decode against a table computed from the bit layout, code by code."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from tests.fp8_table import finite_magnitudes, nearest_code, value_of

from kv8.formats.base import FORMATS
from kv8.formats.encode import bits, decode, encode, encode_counting, torch_dtype

FP8 = ["fp8_e4m3", "fp8_e5m2"]
PLAIN = ["bfloat16", "float16", "float32"]
INF, NAN = math.inf, math.nan


def codes_of(values, name, scale=None):
    return bits(encode(torch.as_tensor(values), scale, FORMATS[name]))


def all_codes(name):
    return torch.arange(256, dtype=torch.uint8).view(torch_dtype(FORMATS[name]))


@pytest.mark.parametrize("name", FP8)
class TestTable:
    def test_decode_is_exact_over_all_256_codes(self, name):
        """Pitfalls 30, 31: what a byte means is checked against the layout, not against a cast."""
        decoded = decode(all_codes(name), None, FORMATS[name])
        assert decoded.dtype == torch.float32
        for code, value in enumerate(decoded.tolist()):
            expected = value_of(name, code)
            if expected is None:
                assert not math.isfinite(value), hex(code)
            else:
                assert Fraction(value) == expected, hex(code)
                assert math.copysign(1, value) == (-1 if code & 0x80 else 1), hex(code)

    def test_every_number_encodes_to_its_own_code(self, name):
        decoded = decode(all_codes(name), None, FORMATS[name])
        numbers = decoded.isfinite()
        assert torch.equal(codes_of(decoded, name)[numbers], bits(all_codes(name))[numbers])

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_rounding_at_every_boundary(self, name, sign):
        """Between all neighbours, subnormals included: the midpoint and a step to either side."""
        table = finite_magnitudes(name)
        values = []
        for low, high in pairwise(table):
            middle = torch.tensor(float((low + high) / 2))
            assert Fraction(middle.item()) == (low + high) / 2
            values += [middle.nextafter(torch.tensor(0.0)), middle, middle.nextafter(middle + 1)]
        values = torch.stack(values) * sign
        expected = [nearest_code(name, Fraction(v), negative=sign < 0) for v in values.tolist()]
        assert codes_of(values, name).tolist() == expected

    def test_rounding_of_random_values(self, name):
        random = torch.Generator().manual_seed(1)
        exponents = torch.rand(4000, generator=random) * 50 - 30
        values = torch.randn(4000, generator=random) * exponents.exp2()
        expected = [nearest_code(name, Fraction(v), negative=v < 0) for v in values.tolist()]
        assert codes_of(values, name).tolist() == expected

    def test_division_is_true_division(self, name):
        """A product with 1/scale rounds twice, and now and then to another code."""
        kv_format = FORMATS[name]
        scale = torch.tensor(0.3)
        magnitudes = torch.tensor([float(m) for m in finite_magnitudes(name)])
        values = ((magnitudes[1:] + magnitudes[:-1]) / 2) * scale
        quotients = (values.double() / scale.double()).float()  # float32 division, rounded once
        expected = [nearest_code(name, Fraction(q), negative=False) for q in quotients.tolist()]
        assert bits(encode(values, scale, kv_format)).tolist() == expected
        by_product = bits(encode(values * (1 / scale), None, kv_format)).tolist()
        assert by_product != expected, "this data cannot tell the two apart"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_division_happens_in_float32_whatever_the_input(self, name, dtype):
        values = torch.randn(500, generator=torch.Generator().manual_seed(2)).to(dtype)
        scale = torch.tensor(0.0371)
        assert torch.equal(codes_of(values, name, scale), codes_of(values.float(), name, scale))

    def test_scales_of_4_and_a_quarter_round_trip(self, name):
        """Pitfall 29: stored = value / scale, at both ends; right for scales other than 1."""
        kv_format = FORMATS[name]
        random = torch.Generator().manual_seed(3)
        half_ulp = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}[name]
        for scale in (0.25, 1.0, 4.0):
            values = torch.randn(1000, generator=random) * scale * 8
            codes = encode(values, scale, kv_format)
            back = decode(codes, scale, kv_format)
            # Half a step: relative to normal values, absolute below them.
            bound = (values.abs() * half_ulp).clamp(min=kv_format.smallest / 2 * scale)
            assert ((back - values).abs() <= bound).all()
            assert torch.equal(decode(codes, None, kv_format) * scale, back)

    def test_a_scale_per_head_broadcasts(self, name):
        values = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(4))
        scale = torch.tensor([0.01, 1.0, 10.0])
        codes = encode(values, scale[:, None], FORMATS[name])
        for head in range(3):
            alone = encode(values[:, head], scale[head], FORMATS[name])
            assert torch.equal(bits(codes[:, head]), bits(alone))

    def test_a_scale_changes_the_stored_bytes(self, name):
        """Pitfall 40: e5m2 is divided by its scale just as e4m3 is."""
        values = torch.linspace(-3, 3, 50)
        assert not torch.equal(codes_of(values, name, 0.03), codes_of(values, name))


class TestBeyondTheRange:
    @pytest.mark.parametrize(
        ("name", "largest", "code"), [("fp8_e4m3", 448.0, 0x7E), ("fp8_e5m2", 57344.0, 0x7B)]
    )
    def test_overflow_saturates_and_is_counted(self, name, largest, code):
        """Pitfall 38: 449, 464, 465, 1e6, infinities and NaN have one stated outcome each."""
        over = [largest * f for f in (449 / 448, 464 / 448, 465 / 448, 1e6)] + [INF]
        values = torch.tensor([*over, *(-v for v in over), NAN, 1.0])
        codes, counts = encode_counting(values, None, FORMATS[name])
        assert bits(codes)[:5].tolist() == [code] * 5
        assert bits(codes)[5:10].tolist() == [code | 0x80] * 5
        decoded = decode(codes, None, FORMATS[name])
        assert decoded[10].isnan()
        assert decoded[:10].abs().tolist() == [largest] * 10
        assert counts.tolist() == [12, 10, 0, 1]
        assert counts.dtype == torch.int64

    @pytest.mark.parametrize("name", FP8)
    def test_the_largest_value_itself_is_no_overflow(self, name):
        largest = FORMATS[name].finite_max
        values = torch.tensor([largest, -largest])
        assert encode_counting(values, None, FORMATS[name])[1].tolist() == [2, 0, 0, 0]
        above = values.nextafter(values * 2)
        assert encode_counting(above, None, FORMATS[name])[1].tolist() == [2, 2, 0, 0]

    @pytest.mark.parametrize("name", FP8)
    def test_underflow_is_counted_and_zero_is_not(self, name):
        half = FORMATS[name].smallest / 2
        values = torch.tensor([half, -half, half * 1.01, 0.0, -0.0, 1e-40, 2 * half])
        codes, counts = encode_counting(values, None, FORMATS[name])
        assert (bits(codes) & 0x7F).tolist() == [0, 0, 1, 0, 0, 0, 1]
        assert counts.tolist() == [7, 0, 3, 0]

    @pytest.mark.parametrize("name", FP8)
    def test_a_scale_too_large_underflows_a_scale_too_small_saturates(self, name):
        values = torch.ones(3)
        assert encode_counting(values, 1e30, FORMATS[name])[1].tolist() == [3, 0, 3, 0]
        assert encode_counting(values, 1e-38, FORMATS[name])[1].tolist() == [3, 3, 0, 0]

    @pytest.mark.parametrize("name", FP8)
    def test_counting_changes_no_code(self, name):
        values = torch.randn(300) * torch.tensor([1e-6, 1.0, 1e6]).repeat(100)
        codes, counts = encode_counting(values, 0.5, FORMATS[name])
        assert torch.equal(bits(codes), codes_of(values, name, 0.5))
        assert counts[0] == 300

    @pytest.mark.parametrize("name", FP8)
    def test_nothing_is_counted_in_an_empty_tensor(self, name):
        codes, counts = encode_counting(torch.empty(0, 2, 8), None, FORMATS[name])
        assert codes.shape == (0, 2, 8)
        assert counts.tolist() == [0, 0, 0, 0]


class TestPlainFormats:
    @pytest.mark.parametrize("name", PLAIN)
    def test_the_same_type_passes_through_bit_for_bit(self, name):
        values = torch.randn(200).to(torch_dtype(FORMATS[name]))
        values[:3] = torch.tensor([INF, -INF, NAN], dtype=values.dtype)
        codes, counts = encode_counting(values, None, FORMATS[name])
        assert torch.equal(bits(codes), bits(values))
        assert counts.tolist() == [200, 0, 0, 1]

    @pytest.mark.parametrize("stored", PLAIN)
    @pytest.mark.parametrize("model", [torch.bfloat16, torch.float16, torch.float32])
    def test_another_type_is_converted_never_reinterpreted(self, stored, model):
        """Pitfall 32: a float16 cache of a bfloat16 model holds its values, not its bits."""
        values = torch.randn(500, generator=torch.Generator().manual_seed(5)).to(model)
        decoded = decode(encode(values, None, FORMATS[stored]), None, FORMATS[stored])
        half_ulp = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}[stored]
        tiny = FORMATS[stored].smallest
        assert ((decoded - values.float()).abs() <= values.float().abs() * half_ulp + tiny).all()

    def test_a_16_bit_store_saturates_rather_than_become_infinite(self):
        values = torch.tensor([1e5, -1e5, INF, 65504.0, 1e-9], dtype=torch.bfloat16)
        codes, counts = encode_counting(values, None, FORMATS["float16"])
        assert codes.isfinite().all()
        assert codes[:3].tolist() == [65504.0, -65504.0, 65504.0]
        assert counts.tolist() == [5, 4, 1, 0]  # bfloat16 rounds 65504 up to 65536

        largest = torch.tensor([3.4e38])
        codes, counts = encode_counting(largest, None, FORMATS["bfloat16"])
        assert codes.item() == FORMATS["bfloat16"].finite_max
        assert counts.tolist() == [1, 1, 0, 0]

    @pytest.mark.parametrize("name", ["bfloat16", "float16"])
    def test_stated_ranges(self, name):
        info = torch.finfo(torch_dtype(FORMATS[name]))
        assert FORMATS[name].finite_max == info.max
        assert FORMATS[name].smallest == info.smallest_normal * info.eps

    def test_float32_holds_everything(self):
        values = torch.tensor([INF, 1e-45, 3.0], dtype=torch.float32)
        assert torch.equal(encode(values, None, FORMATS["float32"]), values)

    @pytest.mark.parametrize("name", PLAIN)
    def test_a_scale_is_refused_not_ignored(self, name):
        with pytest.raises(AssertionError, match="takes no scale"):
            encode(torch.ones(2), 2.0, FORMATS[name])


def test_codes_of_another_format_are_refused():
    """Pitfall 30: a reader takes the format from the cache; bytes of another are no input."""
    with pytest.raises(AssertionError, match="not fp8_e5m2"):
        decode(all_codes("fp8_e4m3"), None, FORMATS["fp8_e5m2"])


def test_bits_view_strided_codes_in_place():
    """Pitfall 36: codes travel as integers, whatever they stand for."""
    arena = torch.zeros(4, 40, dtype=torch.uint8)
    view = arena.view(torch.float8_e4m3fn)[:, 8:24].view(4, 2, 2, 4)
    bits(view)[:] = torch.arange(64, dtype=torch.uint8).view(4, 2, 2, 4) + 190
    assert arena[:, 8:24].flatten().tolist() == list(range(190, 254))
    assert arena[:, :8].sum() == arena[:, 24:].sum() == 0


def test_prepared_code_sees_a_changed_scale():
    """Pitfall 54: encoding traces whole, and the scale is read when it runs, not when traced."""
    kv_format, scale = FORMATS["fp8_e4m3"], torch.tensor(0.5)
    values = torch.linspace(-3, 3, 64)
    compiled = torch.compile(encode_counting, backend="aot_eager", fullgraph=True)
    for factor in (1.0, 4.0):
        scale.mul_(factor)
        codes, counts = compiled(values, scale, kv_format)
        expected, expected_counts = encode_counting(values, scale, kv_format)
        assert torch.equal(bits(codes), bits(expected))
        assert torch.equal(counts, expected_counts)
        assert torch.equal(bits(codes), codes_of(values / scale.item(), "fp8_e4m3"))
