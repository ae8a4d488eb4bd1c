"""Statistics by name: what each gives, what each refuses, and that sides do not mix."""

import pytest
import torch
from tests.checkpoint_folders import geometry_of
from tests.observing import numbers

from kv8.calibration.histogram import MagnitudeHistogram
from kv8.calibration.moving_average import moving_average_scale
from kv8.calibration.observations import Observations
from kv8.calibration.ranges import SampleRanges
from kv8.calibration.scales import make_scales
from kv8.calibration.statistics import STATISTICS, Settings, SideObserved, fitting_scale
from kv8.errors import RequestError
from kv8.formats.base import FP8_E4M3, FP8_E5M2
from kv8.formats.encode import decode, encode
from kv8.scales.scale import OriginKind

GEOMETRY = geometry_of(1, 4, 2)
EPS = float(torch.finfo(torch.float32).eps)


def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Observations:
    """Return observations of one layer and one sample."""
    observations = Observations(str(k.dtype).removeprefix("torch."))
    for side, values in (("q", q), ("k", k), ("v", v)):
        observations.observe("first", 0, side, values, [0], [len(values)])  # type: ignore[arg-type]
    observations.count("first", len(q), 1)
    return observations


def normal(heads: int, factor: float = 1.0, *, seed: int = 0, num_tokens: int = 50) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return factor * torch.randn(num_tokens, heads, 16, generator=generator)


def test_absmax_over_the_largest_value_of_the_format() -> None:
    """Pitfall 18: where values are small a measured scale is far below 1; it is not raised."""
    k = normal(2)
    k = 0.5 * k / k.abs().max()
    observations = seen(normal(4), k, normal(2, 300.0))
    for kv_format in (FP8_E4M3, FP8_E5M2):
        scale = make_scales(observations, GEOMETRY, kv_format).layer(0).k
        assert scale is not None
        # At most one float32 step above the quotient.
        assert scale.values[0] == pytest.approx(0.5 / kv_format.finite_max, rel=2**-23)
        assert scale.origin.kind is OriginKind.CALIBRATION
        assert str(scale.origin).endswith("50 tokens, absmax")


def test_a_scale_for_each_head_or_one_for_all() -> None:
    k = normal(2) * torch.tensor([1.0, 100.0]).reshape(2, 1)
    observations = seen(normal(4), k, normal(2))
    one = make_scales(observations, GEOMETRY, FP8_E4M3, strategy="tensor")
    each = make_scales(observations, GEOMETRY, FP8_E4M3, strategy="attn_head")
    heads = fitting_scale(k.abs().amax(dim=(0, 2)), FP8_E4M3).tolist()
    assert each.layer(0).k.values == tuple(heads)
    assert one.layer(0).k.values == (max(heads),)
    assert len(each.layer(0).q.values) == 4


def test_sides_do_not_mix() -> None:
    """Pitfall 23: K, V and Q have a scale each, and none moves with another side."""
    q, k, v = normal(4), normal(2, 40.0, seed=1), normal(2, 0.1, seed=2)
    before = numbers(make_scales(seen(q, k, v), GEOMETRY, FP8_E4M3))
    more_q = numbers(make_scales(seen(100 * q, k, v), GEOMETRY, FP8_E4M3))
    assert {side: more_q[0, side] for side in "kv"} == {side: before[0, side] for side in "kv"}
    more_k = numbers(make_scales(seen(q, 16 * k, v), GEOMETRY, FP8_E4M3))
    assert more_k[0, "v"] == before[0, "v"]
    assert more_k[0, "q"] == before[0, "q"]
    assert more_k[0, "k"] == (16 * before[0, "k"][0],)


@pytest.mark.parametrize("kv_format", [FP8_E4M3, FP8_E5M2])
def test_a_percentile_lets_outliers_saturate(kv_format) -> None:
    k = normal(2, num_tokens=1000)
    k[0, 0, 0] = 1000.0
    observations = seen(normal(4, num_tokens=1000), k, normal(2, num_tokens=1000))
    scales = {
        percent: make_scales(
            observations, GEOMETRY, kv_format, statistic="percentile", percentile=percent
        )
        .layer(0)
        .k.values[0]
        for percent in (50, 99.9, 100)
    }
    exact = k.abs().flatten().sort().values
    for percent, scale in scales.items():
        rank = -(-len(exact) * percent // 100)
        # Within a bin of the histogram.
        assert scale * kv_format.finite_max == pytest.approx(float(exact[int(rank) - 1]), rel=2**-8)
    assert scales[100] * kv_format.finite_max == pytest.approx(1000.0)


def test_mse_errs_less_than_any_other_statistic() -> None:
    k = normal(2, num_tokens=2000).to(torch.bfloat16)
    k[0, :, 0] = 30000.0  # under the absolute maximum, most values are subnormal and coarse
    observations = seen(k.repeat(1, 2, 1), k, k)
    errors = {}
    for name in ("absmax", "percentile", "mse"):
        scale = make_scales(observations, GEOMETRY, FP8_E4M3, statistic=name).layer(0).k.values[0]
        read = decode(encode(k, scale, FP8_E4M3), scale, FP8_E4M3)
        errors[name] = float((read.double() - k.double()).square().sum())
    assert errors["mse"] == min(errors.values())


def test_a_head_that_is_all_zero_has_a_constant_scale_that_says_so() -> None:
    k = normal(2)
    k[:, 1] = 0.0
    observations = seen(normal(4), k, torch.zeros(50, 2, 16))
    for name in STATISTICS:
        scales = make_scales(
            observations, GEOMETRY, FP8_E4M3, strategy="attn_head", statistic=name
        ).layer(0)
        assert scales.k.values[1] == EPS
        assert scales.k.values[0] != EPS
        assert scales.v.values == (EPS, EPS)
        assert str(scales.k.origin).endswith("1 of 2 all zero")
        assert str(scales.v.origin).endswith("2 of 2 all zero")


def test_a_percentile_of_mostly_zeros_keeps_what_is_not_zero() -> None:
    values = torch.zeros(100, 1, 10)
    values[3, 0, 3] = 7.0
    histogram = MagnitudeHistogram(1)
    histogram.observe(values)
    observed = SideObserved(histogram, SampleRanges(1), torch.float32)
    found = STATISTICS["percentile"](observed, Settings(FP8_E4M3, "tensor", 50))
    assert found.tolist() == fitting_scale(torch.tensor([7.0]), FP8_E4M3).tolist()


@pytest.mark.parametrize(
    ("dtype", "eps"),
    [(torch.bfloat16, 0.0078125), (torch.float16, 0.0009765625), (torch.float32, EPS)],
)
def test_the_moving_average_of_zeros_is_the_dtypes_epsilon(dtype, eps: float) -> None:
    ranges = SampleRanges(1)
    ranges.add([0, 1], torch.zeros(2, 1), torch.zeros(2, 1))
    assert moving_average_scale(ranges, dtype, FP8_E4M3, per_head=True).tolist() == [eps]


def test_the_moving_average_starts_at_the_first_sample_and_follows_slowly() -> None:
    ranges = SampleRanges(1)
    ranges.add([2, 0, 1], torch.zeros(3, 1), torch.tensor([[448.0], [44.8], [448.0]]))
    average = 44.8 * 0.99**2 + 448.0 * (0.01 + 0.01 * 0.99)
    found = moving_average_scale(ranges, torch.float32, FP8_E4M3, per_head=True)
    assert float(found) == pytest.approx(average / 448, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statistic": "max"}, "statistic='max' is not known. Allowed: absmax, percentile"),
        ({"strategy": "head"}, "strategy='head' is not known. Allowed: tensor, attn_head"),
        ({"statistic": "percentile", "percentile": 0}, "more than 0 and at most 100, got 0"),
        ({"statistic": "percentile", "percentile": 101}, "at most 100, got 101"),
        ({"percentile": 90}, "'absmax' has none"),
    ],
)
def test_what_is_not_known_is_refused(options: dict, message: str) -> None:
    observations = seen(normal(4), normal(2), normal(2))
    with pytest.raises(RequestError, match=message):
        make_scales(observations, GEOMETRY, FP8_E4M3, **options)
