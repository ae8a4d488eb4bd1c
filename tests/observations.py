"""What a server might see of its engine, without one: for tests of whatever shows it."""

from collections.abc import Sequence
from typing import Any

from kv8.cache.capacity import Capacity
from kv8.cache.manager import CacheStats
from kv8.engine.counters import EngineCounters, StoreCounts
from kv8.engine.layer_report import LayerReport
from kv8.engine.report import KVCacheReport
from kv8.engine.resolve import Decision
from kv8.engine.snapshot import BlockUse, EngineSnapshot
from kv8.scales.scale import Origin, OriginKind, Scale
from kv8.server.engine_thread import EngineState
from kv8.server.observation import Observation

DEFAULT = Scale((1.0,), Origin(OriginKind.DEFAULT))
STORED = 1_000_000


def layer(number: int, *, clipped: tuple[int, int] = (0, 0), **more: Any) -> LayerReport:
    """Return a quantized layer; of a million keys and a million values, so many were clipped."""
    clipped_keys, clipped_values = clipped
    values: dict[str, Any] = {
        "type": "full_attention",
        "dtype": "fp8_e4m3",
        "skipped_by": None,
        "reads_layer": None,
        "bytes_per_token": 384,
        "k": Scale((0.0625,), Origin(OriginKind.CHECKPOINT, f"layers.{number}.k_scale")),
        "v": DEFAULT,
        "k_counts": StoreCounts(STORED, clipped_keys, 7, 0),
        "v_counts": StoreCounts(STORED, clipped_values, 0, 0),
    }
    return LayerReport(layer=number, **(values | more))


def native_layer(number: int, *, skipped_by: str | None = None) -> LayerReport:
    """Return a layer whose keys and values are not quantized."""
    plain = {"k": None, "v": None, "k_counts": None, "v_counts": None}
    return layer(number, dtype="bfloat16", skipped_by=skipped_by, **plain)


def capacity(num_layers: int) -> Capacity:
    """Return a cache of 1,000 blocks of 16 tokens."""
    bytes_per_token = 384 * num_layers
    return Capacity(
        memory_bytes=16_000 * bytes_per_token,
        block_size=16,
        block_bytes=16 * bytes_per_token,
        num_blocks=1000,
        bytes_per_token=bytes_per_token,
        padding_bytes=0,
        scale_bytes=0,
        max_model_len=8192,
        tokens=16_000,
        max_concurrency=1.95,
        longest_sequence=16_000,
    )


def snapshot(layers: Sequence[LayerReport], **more: Any) -> EngineSnapshot:
    """Return an engine that has worked for a while."""
    counters = EngineCounters(
        steps=420,
        computed_tokens=5000,
        prompt_tokens=4000,
        generated_tokens=1300,
        finished={"stop": 11, "length": 3},
    )
    for milliseconds in (40, 60, 900):
        counters.latencies.time_to_first_token.observe(milliseconds / 1000)
    for _ in range(100):
        counters.latencies.inter_token.observe(0.021)
    values: dict[str, Any] = {
        "report": KVCacheReport(
            layers=tuple(layers),
            capacity=capacity(len(layers)),
            settings=(
                Decision("model", "smollm2", "built in"),
                Decision("kv_cache_dtype", "fp8_e4m3", "as asked with fp8"),
            ),
            messages=("A request of 8,192 tokens takes 2.00x less memory.",),
            storage_bytes=1 << 26,
        ),
        "num_running": 5,
        "num_waiting": 2,
        "num_preemptions": 1,
        "blocks": BlockUse(used=370, cached=200, free=430),
        "prefix": CacheStats(queries=15, query_tokens=4000, hit_tokens=1000, evictions=3),
        "counters": counters,
    }
    return EngineSnapshot(**(values | more))


def observation(
    layers: Sequence[LayerReport], *, state: EngineState = EngineState.READY, **more: Any
) -> Observation:
    """Return one look at a server of model ``smollm2``; ``more`` are fields of the snapshot."""
    failure = "RuntimeError: the disk is on fire" if state is EngineState.FAILED else None
    return Observation("smollm2", state, failure, 3725.0, snapshot(layers, **more))
