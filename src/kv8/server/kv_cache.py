"""``GET /v1/kv_cache``: what the cache is, how full it is, and what storing did to the values."""

from typing import Any

from fastapi import APIRouter

from kv8._version import __version__
from kv8.engine.counters import LayerStoreCounts
from kv8.engine.health import find_saturation, find_underflow
from kv8.engine.latency import Histogram
from kv8.engine.report import KVCacheReport
from kv8.engine.snapshot import EngineSnapshot
from kv8.scales.scale import LayerScales, ModelScales
from kv8.server.observation import Observation, Observer


def router(observer: Observer) -> APIRouter:
    """Return the route of the cache's document; it answers in every state of the server."""
    routes = APIRouter()

    @routes.get("/v1/kv_cache")
    async def kv_cache() -> dict[str, Any]:
        """Answer with the layer table, origins, counters, capacity and effective settings."""
        return document(await observer.look())

    return routes


def document(seen: Observation) -> dict[str, Any]:
    """Return a look at the server as plain data.

    The report's own fields are those of ``kv8 inspect --json``.
    """
    return {
        "object": "kv_cache",
        "model": seen.model,
        "state": seen.state.value,
        "failure": seen.failure,
        "version": __version__,
        "uptime_seconds": seen.uptime,
        **seen.engine.report.as_json(),
        "warnings": list(seen.engine.warnings),
        "misfits": _misfits(seen.engine.report),
        "use": _use(seen.engine),
        "counters": _counters(seen.engine),
        "latency": _latency(seen.engine),
    }


def _use(engine: EngineSnapshot) -> dict[str, Any]:
    return {
        "running": engine.num_running,
        "waiting": engine.num_waiting,
        "usage": engine.blocks.usage,
        "blocks": engine.blocks.by_use(),
    }


def _counters(engine: EngineSnapshot) -> dict[str, Any]:
    counters, prefix = engine.counters, engine.prefix
    return {
        "steps": counters.steps,
        "failed_steps": counters.failed_steps,
        "computed_tokens": counters.computed_tokens,
        "prompt_tokens": counters.prompt_tokens,
        "generated_tokens": counters.generated_tokens,
        "finished": counters.finished,
        "preemptions": engine.num_preemptions,
        "prefix_cache": {
            "query_tokens": prefix.query_tokens,
            "hit_tokens": prefix.hit_tokens,
            "evictions": prefix.evictions,
        },
    }


def _latency(engine: EngineSnapshot) -> dict[str, Any]:
    times = engine.counters.latencies
    return {
        "time_to_first_token": _times(times.time_to_first_token),
        "inter_token": _times(times.inter_token),
        "time_per_output_token": _times(times.time_per_output_token),
        "request": _times(times.request),
    }


def _times(histogram: Histogram) -> dict[str, Any]:
    return {"count": histogram.count, "sum_seconds": histogram.total}


def _misfits(report: KVCacheReport) -> list[dict[str, Any]]:
    """Return the layers and sides that the engine warns of, by what it warns of."""
    scales = {layer.layer: LayerScales(k=layer.k, v=layer.v) for layer in report.layers}
    counts = {
        layer.layer: LayerStoreCounts(layer.k_counts, layer.v_counts)
        for layer in report.layers
        if layer.k_counts is not None and layer.v_counts is not None
    }
    return [
        {"layer": found.layer, "side": found.side, "kind": kind, "share": found.share}
        for kind, misfits in (
            ("saturated", find_saturation(counts, ModelScales(scales))),
            ("underflowed", find_underflow(counts, ModelScales(scales))),
        )
        for found in misfits
    ]
