"""What storing did to the values of every layer, and under which scales, as metric families."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from kv8.engine.counters import StoreCounts
from kv8.engine.report import KVCacheReport
from kv8.scales.scale import SIDES, Scale

_LABELS = ["model_name", "layer", "side"]
_COUNTS: tuple[tuple[str, str, Callable[[StoreCounts], int]], ...] = (
    ("stored", "Values stored quantized.", lambda c: c.stored),
    (
        "saturated",
        "Values beyond the format's finite range, stored as its largest value.",
        lambda c: c.saturated,
    ),
    ("underflowed", "Values that were not zero but are stored as zero.", lambda c: c.underflowed),
    ("nan", "Values that were not a number.", lambda c: c.not_a_number),
)


def layer_families(report: KVCacheReport, model: str) -> Iterator[Metric]:
    """Yield the families of all quantized layers; ``side`` is k, v, or q where queries are too."""
    yield from _counts(report, model)
    yield from _scales(report, model)


def _counts(report: KVCacheReport, model: str) -> Iterator[Metric]:
    sides = [
        ([model, str(layer.layer), side], counts)
        for layer in report.layers
        for side in SIDES
        if (counts := layer.counts(side)) is not None
    ]
    for name, text, read in _COUNTS:
        family = CounterMetricFamily(f"kv8:kv_cache_{name}_values", text, labels=_LABELS)
        for labels, counts in sides:
            family.add_metric(labels, read(counts))
        yield family


def _scales(report: KVCacheReport, model: str) -> Iterator[Metric]:
    info = InfoMetricFamily(
        "kv8:kv_cache_scale", "Where each layer's scales came from.", labels=_LABELS
    )
    value = GaugeMetricFamily(
        "kv8:kv_cache_scale_value",
        "The scales: stored = value / scale. head is all where one scale serves every head.",
        labels=[*_LABELS, "head"],
    )
    for layer in report.layers:
        for side in SIDES:
            scale = layer.scale(side)
            if scale is None:
                continue
            labels = [model, str(layer.layer), side]
            info.add_metric(labels, _origin(scale, layer.dtype))
            for head, number in _heads(scale):
                value.add_metric([*labels, head], number)
    yield info
    yield value
    calibrated = GaugeMetricFamily(
        "kv8:kv_cache_calibrated",
        "1 if all scales in use were measured for these weights, 0 if not; absent where none is.",
        labels=["model_name"],
    )
    if report.calibrated is not None:
        calibrated.add_metric([model], float(report.calibrated))
    yield calibrated


def _origin(scale: Scale, dtype: str) -> dict[str, str]:
    return {
        "origin": scale.origin.kind.value,
        "detail": scale.origin.detail,
        "granularity": "head" if scale.per_head else "tensor",
        "dtype": dtype,
    }


def _heads(scale: Scale) -> Iterator[tuple[str, float]]:
    if not scale.per_head:
        yield "all", scale.values[0]
        return
    for head, number in enumerate(scale.values):
        yield str(head), number
