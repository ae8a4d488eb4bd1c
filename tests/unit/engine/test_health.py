"""When a cache counts as clipping, and how it is said."""

import pytest
import torch

from kv8.engine.counters import CacheCounters, LayerStoreCounts, StoreCounts
from kv8.engine.health import CacheHealth, find_saturation, find_underflow, spell_layers
from kv8.formats.base import FP8_E4M3
from kv8.layer_plan import LayerFormat, LayerPlan
from kv8.scales.scale import LayerScales, ModelScales, Origin, OriginKind, Scale

DEFAULT = Scale((1.0,), Origin(OriginKind.DEFAULT, "1.0"))
MEASURED = Scale((0.1,), Origin(OriginKind.CHECKPOINT, "k_scale"))
PLAN = LayerPlan(tuple(LayerFormat(layer, FP8_E4M3) for layer in range(6)))


def counts(k, v=0, *, stored=1_000_000):
    return LayerStoreCounts(k=StoreCounts(stored, k), v=StoreCounts(stored, v))


def scales(kind, layers=range(6)):
    return ModelScales({layer: LayerScales(k=kind, v=kind) for layer in layers})


def test_layers_are_spelled_as_the_skip_list_takes_them() -> None:
    assert spell_layers([3, 0]) == "0,3"
    assert spell_layers([5, 1, 2, 3]) == "1-3,5"
    assert spell_layers([0, 1]) == "0-1"


@pytest.mark.parametrize(
    ("kind", "clipped", "found"),
    [
        (DEFAULT, 0, 0),
        (DEFAULT, 9, 0),
        (DEFAULT, 10, 1),
        (MEASURED, 9_999, 0),
        (MEASURED, 10_000, 1),
    ],
)
def test_a_calibrated_scale_may_clip_more_than_a_default_one(kind, clipped, found) -> None:
    assert len(find_saturation({2: counts(clipped)}, scales(kind))) == found


def test_nothing_stored_is_nothing_clipped() -> None:
    assert find_saturation({2: counts(0, stored=0)}, scales(DEFAULT)) == []
    assert find_saturation({2: counts(5, stored=10)}, ModelScales()) == []


@pytest.mark.parametrize(("lost", "found"), [(499_999, 0), (500_000, 1), (1_000_000, 1)])
@pytest.mark.parametrize("kind", [DEFAULT, MEASURED])
def test_a_scale_under_which_most_values_vanish_is_too_large(lost, found, kind) -> None:
    stored = LayerStoreCounts(k=StoreCounts(1_000_000, 0, lost), v=StoreCounts(1_000_000))
    assert len(find_underflow({2: stored}, scales(kind))) == found
    assert find_saturation({2: stored}, scales(kind)) == []


class FixedCounters(CacheCounters):
    def __init__(self, found) -> None:
        super().__init__([], torch.device("cpu"))
        self.found = found
        self.reads = 0

    def read(self):
        self.reads += 1
        return self.found


def test_one_warning_with_everything_in_it(caplog) -> None:
    health = CacheHealth(PLAN, scales(DEFAULT), ["sliding_window"])
    counters = FixedCounters({0: counts(250_000), 2: counts(0, 500), 3: counts(0)})
    health.check(counters, during="so far")
    health.check(counters, during="so far")
    (record,) = caplog.records
    message = record.getMessage()
    assert "fp8_e4m3" in message
    assert "it has no calibrated scale and uses 1.0" in message
    assert "layer 0 k 25 %, layer 2 v 0.05 %" in message
    # The remedy keeps what is skipped already.
    assert message.endswith("--kv-cache-dtype-skip-layers sliding_window,0,2")
    assert counters.reads == 1  # once warned, the counters are left alone


def test_scales_that_do_not_fit_are_told_from_missing_ones(caplog) -> None:
    health = CacheHealth(PLAN, scales(MEASURED))
    health.check(FixedCounters({1: counts(500_000)}), during="so far")
    assert "its scales do not fit this text" in caplog.text


def test_values_stored_as_zero_are_told_from_clipped_ones(caplog) -> None:
    health = CacheHealth(PLAN, scales(MEASURED))
    lost = LayerStoreCounts(k=StoreCounts(10, 0, 10), v=StoreCounts(10))
    health.check(FixedCounters({1: counts(500_000), 3: lost}), during="so far")
    clipping, vanishing = (record.getMessage() for record in caplog.records)
    assert "clips values" in clipping
    assert "layer 1 k 50 %" in clipping
    assert "stores most values as zero (its scales are too large)" in vanishing
    assert "Share lost so far: layer 3 k 100 %." in vanishing


def test_new_scales_may_be_warned_about_again(caplog) -> None:
    health = CacheHealth(PLAN, scales(DEFAULT))
    counters = FixedCounters({1: counts(500_000)})
    health.check(counters, during="so far")
    health.scales_changed(scales(MEASURED))
    health.check(counters, during="so far")
    assert len(caplog.records) == 2


def test_counters_count_where_the_store_writes() -> None:
    counters = CacheCounters([4, 1], torch.device("cpu"))
    counters.layer(1).k.add_(torch.tensor([10, 2, 1, 0]))
    counters.layer(4).v.add_(torch.tensor([8, 0, 0, 3]))
    found = counters.read()
    assert found[1].k == StoreCounts(10, 2, 1, 0)
    assert found[1].k.saturated_share == 0.2
    assert found[1].k.underflowed_share == 0.1
    assert found[1].v == StoreCounts()
    assert found[1].v.saturated_share == 0.0
    assert found[4].v.not_a_number == 3
    view = counters.layer(1).k
    counters.reset()
    assert counters.read()[1].k == StoreCounts()
    view.add_(1)
    assert counters.read()[1].k.stored == 1
