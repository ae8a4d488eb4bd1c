"""The histogram against plain arithmetic on all values, whatever the order and the cuts."""

from fractions import Fraction
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv8.calibration.histogram import NUM_BINS, MagnitudeHistogram, bin_values
from kv8.calibration.ranges import SampleRanges
from kv8.calibration.statistics import (
    STATISTICS,
    Settings,
    SideObserved,
    candidate_scales,
    fitting_scale,
)
from kv8.formats.base import FP8_E4M3, FP8_E5M2
from kv8.formats.encode import decode, encode, encode_counting

EXAMPLES = settings(max_examples=60)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
FORMATS = st.sampled_from([FP8_E4M3, FP8_E5M2])
# Rounding to 8 significant bits moves a value by at most this share.
BIN = 2.0**-8


@st.composite
def tensors(draw: st.DrawFn, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Draw values [T, heads, D] of very different sizes, zeros and a few outliers among them."""
    chosen = dtype or draw(DTYPES)
    shape = draw(st.tuples(st.integers(1, 30), st.integers(1, 3), st.integers(1, 8)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(shape, generator=generator)
    low, high = (-24, 14) if chosen is torch.float16 else (-35, 35)
    exponents = torch.randint(
        draw(st.integers(low, 0)), draw(st.integers(1, high)), shape, generator=generator
    )
    values = torch.ldexp(values, exponents)
    values[torch.rand(shape, generator=generator) < 0.1] = 0.0
    return values.to(chosen)


def of(*pieces: torch.Tensor) -> MagnitudeHistogram:
    histogram = MagnitudeHistogram(pieces[0].shape[1])
    for piece in pieces:
        histogram.observe(piece)
    return histogram


def assert_same(one: MagnitudeHistogram, other: MagnitudeHistogram) -> None:
    assert torch.equal(one.counts, other.counts)
    assert torch.equal(one.absmax, other.absmax)
    assert one.num_tokens == other.num_tokens


@EXAMPLES
@given(tensors(), st.randoms(use_true_random=False))
def test_neither_order_nor_cuts_matter(values: torch.Tensor, random) -> None:
    whole = of(values)
    order = list(range(len(values)))
    random.shuffle(order)
    pieces = list(values[order].split(random.randint(1, len(values))))
    assert_same(of(*pieces), whole)
    merged = MagnitudeHistogram(values.shape[1])
    for piece in pieces:
        merged.merge(of(piece))
    assert_same(merged, whole)
    assert_same(MagnitudeHistogram.from_tensors(merged.tensors()), whole)


@EXAMPLES
@given(tensors())
def test_every_value_is_counted_in_its_bin(values: torch.Tensor) -> None:
    histogram = of(values)
    assert histogram.num_values == values.shape[0] * values.shape[2]
    assert torch.equal(histogram.absmax, values.abs().amax(dim=(0, 2)).float())
    for head in range(values.shape[1]):
        kept = torch.repeat_interleave(bin_values(), histogram.counts[head])
        exact = values[:, head].float().abs().flatten().sort().values
        limits = exact.clamp(bin_values()[1]) * (exact != 0)  # what is smaller has the first bin
        if values.dtype is torch.bfloat16:
            assert torch.equal(kept, limits)
        else:
            assert bool(((kept - limits).abs() <= BIN * limits).all())


@EXAMPLES
@given(tensors(), st.sampled_from([0.5, 0.9, 0.99, 0.999, 1.0]))
def test_a_quantile_is_that_of_the_values(values: torch.Tensor, share: float) -> None:
    found = of(values).quantile(share)
    for head in range(values.shape[1]):
        exact = values[:, head].float().abs().flatten().sort().values
        rank = max(1, ceil(Fraction(str(share)) * len(exact)))
        wanted = float(exact[rank - 1])
        smallest = float(bin_values()[1])
        assert abs(float(found[head]) - wanted) <= BIN * wanted + (smallest if wanted else 0)
        if values.dtype is torch.bfloat16 and wanted >= smallest:
            assert float(found[head]) == wanted


@EXAMPLES
@given(tensors(dtype=torch.bfloat16), FORMATS, st.floats(0.05, 20))
def test_shares_and_errors_are_those_of_storing(values, kv_format, factor: float) -> None:
    """What the report says of bfloat16 values is exactly what the cache does to them."""
    values = values * (values.abs() >= bin_values()[1])
    scale = factor * fitting_scale(values.abs().amax(dim=(0, 2)).float(), kv_format)
    histogram = of(values)
    for head in range(values.shape[1]):
        of_head = values[:, head]
        _, counts = encode_counting(of_head, scale[head], kv_format)
        stored, saturated, underflowed, _ = counts.tolist()
        assert float(histogram.saturated_share(scale, kv_format)[head]) == saturated / stored
        assert float(histogram.underflowed_share(scale, kv_format)[head]) == underflowed / stored
        read = decode(encode(of_head, scale[head], kv_format), scale[head], kv_format)
        error = (read.double() - of_head.double()).square().sum()
        # Two sums of the same float64 squares in another order.
        torch.testing.assert_close(
            histogram.squared_error(scale, kv_format)[head], error, rtol=1e-12, atol=0
        )


@EXAMPLES
@given(tensors(), FORMATS)
def test_the_absmax_scale_saturates_nothing_and_the_next_smaller_does(values, kv_format) -> None:
    absmax = values.abs().amax(dim=(0, 2)).float()
    scale = fitting_scale(absmax, kv_format)
    assert not of(values).saturated_share(scale, kv_format).any()
    _, counts = encode_counting(values, scale.unsqueeze(1), kv_format)
    assert int(counts[1]) == 0
    smaller = scale.nextafter(torch.tensor(0.0)).nextafter(torch.tensor(0.0))
    assert bool((absmax / smaller > kv_format.finite_max)[absmax > 1e-10].all())


@settings(max_examples=20)
@given(tensors(dtype=torch.bfloat16), FORMATS, st.sampled_from(["tensor", "attn_head"]))
def test_mse_picks_what_trying_all_candidates_on_all_values_picks(
    values, kv_format, strategy
) -> None:
    values = values * (values.abs() >= bin_values()[1])
    ranges = SampleRanges(values.shape[1])
    observed = SideObserved(of(values), ranges, torch.bfloat16)
    chosen = STATISTICS["mse"](observed, Settings(kv_format, strategy))
    heads = (
        [values[:, [h]] for h in range(values.shape[1])] if strategy == "attn_head" else [values]
    )
    for found, of_head in zip(chosen.tolist(), heads, strict=True):
        absmax = of_head.abs().amax().float().reshape(1)
        candidates = candidate_scales(absmax, kv_format).flatten()
        exact = of_head.double()
        errors = [
            float(
                (decode(encode(of_head, s, kv_format), s, kv_format).double() - exact)
                .square()
                .sum()
            )
            for s in candidates
        ]
        # Candidates whose errors are equal but for the order of the sum are equally good.
        good = [
            float(s)
            for s, e in zip(candidates, errors, strict=True)
            if e <= min(errors) * (1 + 1e-12)
        ]
        assert found in good


def test_bfloat16_values_are_bins() -> None:
    values = bin_values()
    assert len(values) == NUM_BINS
    assert torch.equal(values, values.to(torch.bfloat16).float())
    assert bool((values.diff() > 0).all())


def test_an_empty_histogram_has_no_numbers_to_give() -> None:
    empty = MagnitudeHistogram(2)
    empty.observe(torch.empty(0, 2, 16, dtype=torch.bfloat16))
    scale = torch.ones(2)
    assert empty.num_tokens == empty.num_values == 0
    assert empty.quantile(0.99).tolist() == [0, 0]
    assert empty.saturated_share(scale, FP8_E4M3).tolist() == [0, 0]
    assert empty.squared_error(scale, FP8_E4M3).tolist() == [0, 0]
    assert_same(MagnitudeHistogram.from_tensors(empty.tensors()), empty)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_value_that_is_no_number_is_never_forgotten(odd: float, dtype: torch.dtype) -> None:
    values = torch.zeros(3, 2, 4, dtype=dtype)
    spoiled = values.clone()
    spoiled[1, 1, 2] = odd
    histogram = of(values, spoiled, values)
    assert not histogram.finite
    merged = of(values)
    merged.merge(histogram)
    merged.merge(of(values))
    assert not merged.finite
    assert of(values).finite


def test_what_lies_outside_of_the_bins_is_kept_in_the_outermost() -> None:
    tiny, huge = 2.0**-60, 2.0**60
    histogram = of(torch.tensor([tiny, huge, 0.0]).reshape(3, 1, 1))
    assert histogram.counts[0, [0, 1, -1]].tolist() == [1, 1, 1]
    assert histogram.absmax.tolist() == [huge]
    assert float(histogram.underflowed_share(torch.ones(1), FP8_E4M3)) == pytest.approx(1 / 3)
    assert float(histogram.saturated_share(torch.ones(1), FP8_E4M3)) == pytest.approx(1 / 3)
