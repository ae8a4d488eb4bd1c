"""The report on a KV cache: the layer table, what the cache holds, and the settings in effect."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kv8.cache.capacity import Capacity
from kv8.engine.counters import LayerStoreCounts
from kv8.engine.layer_report import LayerReport
from kv8.engine.layer_table import layer_summary, layer_table
from kv8.engine.resolve import Decision, ResolvedConfig
from kv8.engine.runner import Runner, ScaleStatus
from kv8.scales.scale import LayerScales, ModelScales, OriginKind
from kv8.units import format_bytes

_LONG = ("layers", "settings", "messages")


@dataclass(frozen=True)
class KVCacheReport:
    """The whole cache: every layer, what it holds, and the settings in effect.

    Attributes:
        layers: every layer with attention, in the model's order.
        capacity: what the cache holds.
        settings: effective settings with their reasons.
        messages: what else was decided.
        storage_bytes: bytes really allocated; `None` if nothing is (``kv8 inspect``).
        stale: whether the weights have changed since the scales were calibrated.
    """

    layers: tuple[LayerReport, ...]
    capacity: Capacity
    settings: tuple[Decision, ...] = ()
    messages: tuple[str, ...] = ()
    storage_bytes: int | None = None
    stale: bool = False

    @property
    def memory_bytes(self) -> int:
        """Bytes of the cache: those allocated, or before that those planned."""
        return self.capacity.cache_bytes if self.storage_bytes is None else self.storage_bytes

    @property
    def calibrated(self) -> bool | None:
        """Whether all scales in use were measured, for these weights; `None` if none is in use."""
        scales = [s for layer in self.layers for s in (layer.k, layer.v) if s is not None]
        if not scales:
            return None
        return not self.stale and all(s.origin.kind is not OriginKind.DEFAULT for s in scales)

    @property
    def saturated_share(self) -> float:
        """Share of all stored quantized values that were beyond the format's finite range."""
        counts = [c for layer in self.layers for c in (layer.k_counts, layer.v_counts) if c]
        stored = sum(c.stored for c in counts)
        return sum(c.saturated for c in counts) / stored if stored else 0.0

    def brief(self) -> dict[str, Any]:
        """Return the report without its layers, as plain data."""
        return {name: value for name, value in self.as_json().items() if name not in _LONG} | {
            "dtypes": dict(Counter(layer.dtype for layer in self.layers)),
            "saturated_share": self.saturated_share,
        }

    def summary(self) -> str:
        """Return the table in short: one line for each run of layers that are alike."""
        return layer_summary(self.layers)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        held = self.capacity
        return {
            "layers": [layer.as_json() for layer in self.layers],
            "bytes_per_token": held.bytes_per_token,
            "tokens": held.tokens,
            "max_concurrency": held.max_concurrency,
            "max_model_len": held.max_model_len,
            "memory_bytes": self.memory_bytes,
            "block_size": held.block_size,
            "num_blocks": held.num_blocks,
            "calibrated": self.calibrated,
            "stale": self.stale,
            "settings": {s.name: {"value": s.value, "reason": s.reason} for s in self.settings},
            "messages": list(self.messages),
        }

    def __str__(self) -> str:
        verb = "would take" if self.storage_bytes is None else "takes"
        return "\n".join(
            [
                layer_table(self.layers),
                f"{self.capacity.bytes_per_token:,} bytes a token in all layers; the cache {verb} "
                f"{format_bytes(self.memory_bytes)} and holds {self.capacity}.",
                *(f"  {line}" for line in (*self.settings, *self.messages)),
            ]
        )


def planned_report(config: ResolvedConfig) -> KVCacheReport:
    """Return the report of an engine that was not started: plan, scales and sizes, no counts."""
    sizes = {
        layer.layer: layer.values_per_token * config.plan.format(layer.layer).bytes_per_value
        for layer in config.geometry.layers
    }
    dtypes = {entry.layer: entry.format.name for entry in config.plan.layers}
    return KVCacheReport(
        layers=_layers(config, config.scales, dtypes, sizes, {}),
        capacity=config.capacity,
        settings=config.decisions,
        messages=config.messages,
    )


def live_report(config: ResolvedConfig, runner: Runner) -> KVCacheReport:
    """Return the report of a running engine; types and bytes are those of its tensors."""
    names = {entry.format.torch_dtype: entry.format.name for entry in config.plan.layers}
    dtypes = {}
    for number, layer in runner.layers.items():
        stored = str(layer.k_codes.dtype).removeprefix("torch.")
        dtypes[number] = names.get(stored, stored)
    sizes = {
        layer.layer: runner.pool.bytes_per_token(layer.layer) if layer.owns_kv else 0
        for layer in config.geometry.layers
    }
    return KVCacheReport(
        layers=_layers(config, runner.scales, dtypes, sizes, runner.counters.read()),
        capacity=config.capacity,
        settings=config.decisions,
        messages=config.messages,
        storage_bytes=runner.pool.storage_bytes,
        stale=runner.scale_status is ScaleStatus.STALE,
    )


def _layers(
    config: ResolvedConfig,
    scales: ModelScales,
    dtypes: Mapping[int, str],
    sizes: Mapping[int, int],
    counts: Mapping[int, LayerStoreCounts],
) -> tuple[LayerReport, ...]:
    skipped = {entry.layer: entry.skipped_by for entry in config.plan.layers}
    reports = []
    for layer in config.geometry.layers:
        quantized = config.plan.format(layer.layer).quantized
        stored = scales.layer(layer.kv_source) if quantized else LayerScales()
        queries = quantized and config.fp8_queries
        seen = counts.get(layer.layer)
        reports.append(
            LayerReport(
                layer=layer.layer,
                type=layer.type,
                dtype=dtypes[layer.layer],
                skipped_by=skipped[layer.layer],
                reads_layer=None if layer.owns_kv else layer.kv_source,
                bytes_per_token=sizes[layer.layer],
                q=scales.layer(layer.layer).q if queries else None,
                k=stored.k,
                v=stored.v,
                k_counts=None if seen is None else seen.k,
                v_counts=None if seen is None else seen.v,
            )
        )
    return tuple(reports)
