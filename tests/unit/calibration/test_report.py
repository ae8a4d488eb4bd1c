"""The report: its figures against their definitions, its warnings, its table and its JSON."""

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.calibration.reports import TOKENS, make_geometry, observe, report_on

from kv8.calibration.histogram import MagnitudeHistogram
from kv8.calibration.observations import Observations
from kv8.calibration.report import make_report
from kv8.calibration.report_side import SideReport, relative_error
from kv8.calibration.scales import make_scales
from kv8.errors import ScaleError
from kv8.formats.base import FP8_E4M3, FP8_E5M2
from kv8.formats.encode import decode, encode

GEOMETRY = make_geometry()


def _row(report, layer: int, side: str) -> SideReport:
    [row] = [row for row in report.rows if (row.layer, row.side) == (layer, side)]
    return row


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_a_row_holds_range_and_scale(strategy):
    report = report_on(
        observe(GEOMETRY, ranges={(1, "k"): [4.48, 448.0]}), GEOMETRY, strategy=strategy
    )
    assert [(row.layer, row.side) for row in report.rows] == [
        (layer, side) for layer in (0, 1) for side in "qkv"
    ]
    row = _row(report, 1, "k")
    assert row.amax == pytest.approx((4.48, 448.0))
    assert row.scale == pytest.approx((1.0,) if strategy == "tensor" else (0.01, 1.0))
    assert row.change == pytest.approx(0, abs=1e-6)
    assert all(0 < high <= amax for high, amax in zip(row.p99_9, row.amax, strict=True))
    assert _row(report, 1, "q").amax == (1.0,) * 4


@given(
    st.floats(0.01, 4.0),
    st.sampled_from([FP8_E4M3, FP8_E5M2]),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
@settings(max_examples=30)
def test_the_error_is_that_of_storing_the_values(scale, kv_format, seed, tiny):
    """Root mean square of decode(encode(x)) - x over that of x; the histogram holds bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(40, 3, 8, generator=generator).bfloat16()
    if tiny:
        values = values * torch.tensor([1.0, 1e-3, 0.0]).bfloat16().view(3, 1)
    histogram = MagnitudeHistogram(3)
    histogram.observe(values)
    scales = torch.tensor([scale])
    stored = decode(encode(values.float(), scales, kv_format), scales, kv_format)
    error = (stored - values.float()).double().square().sum(dim=(0, 2)).sqrt()
    size = values.double().square().sum(dim=(0, 2)).sqrt()
    expected = max(float(e / s) for e, s in zip(error, size, strict=True) if s > 0)
    # Both sum the same doubles in another order.
    assert relative_error(histogram, scales, kv_format) == pytest.approx(expected, rel=1e-9)


def test_held_out_text_is_judged_and_has_no_say_in_scales():
    """Pitfall 23: scales are judged by text they were not made from."""
    ordinary = report_on(observe(GEOMETRY), GEOMETRY)
    wild = report_on(observe(GEOMETRY, by_part={"held_out": 10.0}), GEOMETRY)
    for one, other in zip(ordinary.rows, wild.rows, strict=True):
        assert (one.amax, one.p99_9, one.scale, one.change) == (
            other.amax,
            other.p99_9,
            other.scale,
            other.change,
        )
        assert one.saturated_share == 0
        assert one.error is not None
        assert one.error < 0.04
        # Nine tenths of what is drawn evenly up to 10 lie above 1; TOKENS * 8 * heads draws.
        assert other.saturated_share == pytest.approx(0.9, abs=0.08)
    assert any("held-out values that saturate are up to" in text for text in wild.warnings)
    assert ordinary.warnings == ()


def test_what_underflows_is_counted():
    geometry = make_geometry(1)
    # Head 0 is 2**20 times larger: under one scale the other is below half the smallest code.
    observations = observe(geometry, ranges={(0, "v"): [2.0**20, 1.0]})
    row = _row(report_on(observations, geometry), 0, "v")
    # Half the values are head 1's and become zero, and almost none of head 0's do.
    assert row.underflowed_share == pytest.approx(0.5, abs=0.01)
    assert row.error == pytest.approx(1.0)  # of the head that is lost, not of the tensor

    by_head = _row(report_on(observations, geometry, strategy="attn_head"), 0, "v")
    assert by_head.underflowed_share is not None
    assert by_head.underflowed_share < 0.01
    assert by_head.error is not None
    assert by_head.error < 0.04


def test_a_tensor_whose_heads_differ_too_much_is_named_with_the_remedy():
    observations = observe(GEOMETRY, ranges={(1, "v"): [2.0**20, 1.0]})
    [warning] = report_on(observations, GEOMETRY).warnings
    assert warning.startswith(
        "Layer 1 (v): storing changes the held-out values of a head by up to 100 %"
    )
    assert "strategy attn_head" in warning
    assert report_on(observations, GEOMETRY, strategy="attn_head").warnings == ()


def test_what_a_low_percentile_clips_is_laid_to_it():
    report = report_on(observe(GEOMETRY), GEOMETRY, statistic="percentile", percentile=50)
    assert len(report.warnings) == 2
    for warning in report.warnings:
        assert "leave out what is beyond percentile 50: use a higher one, or" in warning
        assert "attn_head" not in warning


def test_one_place_is_named_once():
    observations = observe(GEOMETRY, ranges={(1, "v"): [2.0**20, 1.0]})
    [warning] = report_on(observations, GEOMETRY).warnings
    assert "(layer 1, v)" not in warning


@pytest.mark.parametrize(("factor", "unstable"), [(1.24, False), (1.26, True), (0.5, True)])
@pytest.mark.parametrize("statistic", ["absmax", "percentile", "mse", "llmcompressor"])
def test_halves_that_disagree_are_unstable(factor, unstable, statistic):
    observations = observe(GEOMETRY, by_part={"second": factor, "held_out": 0.5})
    report = report_on(observations, GEOMETRY, statistic=statistic)
    expected = max(factor, 1 / factor) - 1
    if statistic == "absmax":
        assert report.rows[0].change == pytest.approx(expected, rel=1e-6)
        assert any("unstable" in text for text in report.warnings) is unstable
    assert report.rows[0].change == pytest.approx(expected, rel=0.25)


def test_a_figure_that_looks_like_its_limit_is_not_said_to_exceed_itself():
    observations = observe(GEOMETRY, by_part={"second": 1.252, "held_out": 0.5})
    [warning] = report_on(observations, GEOMETRY).warnings
    assert "scales that differ by up to a little more than 25 %. The scales are" in warning


def test_the_worst_place_is_named():
    observations = observe(make_geometry(4), ranges={(2, "k"): 0.0})
    for layer, factor in ((0, 1.5), (1, 3.0), (2, 1.0)):
        observations.observe("first", layer, "k", torch.full((1, 2, 8), factor), [0], [1])
    for layer in (3,):
        observations.observe("first", layer, "k", torch.zeros(1, 2, 8), [0], [1])
    for layer in range(4):
        for side in "qv":
            heads = 4 if side == "q" else 2
            observations.observe("first", layer, side, torch.zeros(1, heads, 8), [0], [1])
    observations.count("first", 1, 0)
    warnings = report_on(observations, make_geometry(4)).warnings
    assert warnings[0].startswith("Layers 0-2 (k): the two halves of the data give scales that")
    assert "(layer 2, k)" in warnings[0]  # a layer that one half never moved differs most


@pytest.mark.parametrize(
    ("parts", "warning"),
    [
        (("first", "second"), "No text was held out.* It takes four samples or more"),
        (("first", "held_out"), "one sample to measure.* Use more samples"),
    ],
)
def test_what_cannot_be_known_is_said(parts, warning):
    report = report_on(observe(GEOMETRY, parts), GEOMETRY)
    row = report.rows[0]
    assert (row.change is None) is ("second" not in parts)
    unknown = row.saturated_share, row.underflowed_share, row.error
    assert (unknown == (None, None, None)) is ("held_out" not in parts)
    [found] = report.warnings
    assert re.search(warning, found)
    json.dumps(report.as_dict(), allow_nan=False)
    assert report.as_table()


def test_a_silent_head_is_said():
    observations = observe(GEOMETRY, ranges={(0, "v"): [0.0, 1.0], (1, "v"): 0.0})
    report = report_on(observations, GEOMETRY, strategy="attn_head")
    assert any(
        text.startswith("Layers 0, 1 (v): a head was zero throughout") for text in report.warnings
    )
    assert _row(report, 1, "v").error == 0
    assert _row(report, 1, "v").underflowed_share == 0


def test_a_layer_that_reads_another_s_keys_has_queries_only():
    geometry = make_geometry(3, reads={2: 0})
    report = report_on(observe(geometry), geometry)
    assert [row.side for row in report.rows if row.layer == 2] == ["q"]
    assert report.reads == {2: 0}
    assert "full_attention (reads layer 0)" in report.as_table()


def test_a_layer_nobody_saw_is_an_error_with_its_name():
    """Pitfall 16: there is no report on scales that were never measured."""
    seen = observe(make_geometry(2))
    scales = make_scales(seen, make_geometry(2), FP8_E4M3)
    conditions = report_on(seen, make_geometry(2)).conditions
    with pytest.raises(ScaleError, match="keys of layer 2"):
        make_report(seen, scales, make_geometry(3), conditions)
    with pytest.raises(ScaleError, match="Nothing was observed"):
        report_on(Observations(), make_geometry(1))


def test_json_is_plain_and_complete():
    report = report_on(observe(GEOMETRY), GEOMETRY, strategy="attn_head")
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    rows = found.pop("layers")
    assert found == {
        "model": "tiny",
        "kv_cache_dtype": "fp8_e4m3",
        "strategy": "attn_head",
        "statistic": "absmax",
        "data": "texts.txt",
        "data_digest": report.conditions.samples.digest,
        "tokens_asked": 1000,
        "tokens_used": 3 * TOKENS,
        "tokens_by_part": {"first": TOKENS, "second": TOKENS, "held_out": TOKENS},
        "samples_by_part": {"first": 1, "second": 1, "held_out": 1},
        "reads_layer": {},
        "warnings": [],
    }
    assert len(rows) == 6
    assert rows[1]["scale"] == list(report.rows[1].scale)
    assert rows[1].keys() == SideReport.__dataclass_fields__.keys()


def test_the_table_reads_as_inspect_s_does():
    observations = observe(
        make_geometry(1), ranges={(0, "q"): 4.48, (0, "k"): [8.96, 44.8], (0, "v"): 0.448}
    )
    report = report_on(observations, make_geometry(1), strategy="attn_head")
    lines = str(report).splitlines()
    assert lines[0] == "tiny: one fp8_e4m3 scale a head, from the absmax"
    assert lines[1] == (
        "96 tokens of 1,000 asked for, from texts.txt, in 3 samples, 1 of them held out"
    )
    assert lines[2].split() == [
        *("layer", "type", "amax", "p99.9", "scale"),
        *("halves", "differ", "saturated", "underflowed", "error"),
    ]
    assert lines[3].split()[:4] == ["0", "full_attention", "q", "4.48"]
    assert lines[4].split()[:2] == ["k", "8.96..44.8"]
    assert lines[4].split()[3] == "0.02..0.1"
    assert lines[5].split()[0] == "v"
    assert len(lines) == 6
