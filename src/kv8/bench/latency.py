"""One request at a time: prefill and decode by context length, and the memory of a long prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kv8.bench.phases import bench_phases
from kv8.bench.report import Report
from kv8.bench.startup import bench_prefill_memory
from kv8.bench.workload import Workload
from kv8.engine.resolve import resolve_options
from kv8.options import EngineOptions

_CONTEXTS: Final = (32, 1024, 3500, 7500)
_MEMORY_CONTEXT: Final = 8000
_MEMORY_REPEATS: Final = 3


def bench_latency(
    model: str,
    contexts: Sequence[int],
    dtypes: Sequence[str],
    *,
    steps: int,
    options: Mapping[str, Any],
    repeats: int,
    seed: int,
    command: Sequence[str],
) -> Report:
    """Return speed and peak memory of single requests; without ``contexts``, of those that fit.

    Raises:
        KV8Error: the model or a context cannot be served, or a request fails.
    """
    asked = EngineOptions(model=model, **options)
    limit = resolve_options(asked).geometry.max_position
    workloads = [Workload(1, context, steps) for context in contexts or _CONTEXTS]
    if not contexts:
        workloads = [w for w in workloads if w.longest(asked.max_num_batched_tokens) <= limit]
    report = Report("latency", f"{model}, one request at a time.")
    bench_phases(
        report,
        model,
        dtypes,
        workloads,
        options=options,
        repeats=repeats,
        seed=seed,
        command=command,
    )
    bench_prefill_memory(
        report,
        model,
        dtypes,
        min(_MEMORY_CONTEXT, limit - 1),
        options=options,
        repeats=min(repeats, _MEMORY_REPEATS),
    )
    return report
