"""What an engine counts, as Prometheus metric families. The engine itself counts plain numbers.

Names that begin with ``vllm:`` mean what they mean in vLLM, so that dashboards made for it work;
what only kv8 counts begins with ``kv8:``.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TypeAlias, get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kv8.engine.latency import Histogram, Latencies
from kv8.engine.snapshot import EngineSnapshot
from kv8.outputs import FinishReason
from kv8.server.engine_thread import EngineState
from kv8.server.layer_metrics import layer_families
from kv8.server.observation import Observation

_MODEL = ["model_name"]
_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_Kind: TypeAlias = Callable[..., GaugeMetricFamily | CounterMetricFamily]
# name, help, where the number is found
_Numbers: TypeAlias = tuple[tuple[str, str, Callable[[EngineSnapshot], float]], ...]
_Times: TypeAlias = tuple[tuple[str, str, Callable[[Latencies], Histogram]], ...]

_GAUGES: _Numbers = (
    ("vllm:num_requests_running", "Sequences that hold cache blocks.", lambda e: e.num_running),
    (
        "vllm:num_requests_waiting",
        "Sequences that wait for cache blocks, preempted ones among them.",
        lambda e: e.num_waiting,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Share of cache blocks that running sequences reference, from 0 to 1.",
        lambda e: e.blocks.usage,
    ),
    ("kv8:kv_cache_bytes", "Bytes of the cache.", lambda e: e.report.memory_bytes),
    (
        "kv8:kv_cache_bytes_per_token",
        "Bytes one token takes in all layers.",
        lambda e: e.report.capacity.bytes_per_token,
    ),
    (
        "kv8:kv_cache_capacity_tokens",
        "Tokens held when requests of the longest allowed length fill the cache.",
        lambda e: e.report.capacity.tokens,
    ),
)
_COUNTERS: _Numbers = (
    (
        "vllm:prompt_tokens",
        "Prompt tokens of sequences that got their first token, cached ones included.",
        lambda e: e.counters.prompt_tokens,
    ),
    ("vllm:generation_tokens", "Tokens generated.", lambda e: e.counters.generated_tokens),
    (
        "vllm:num_preemptions",
        "Times a running sequence gave up its cache blocks, to be computed again later.",
        lambda e: e.num_preemptions,
    ),
    (
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache; a preempted sequence asks again when it resumes.",
        lambda e: e.prefix.query_tokens,
    ),
    (
        "vllm:prefix_cache_hits",
        "Of the tokens looked up in the prefix cache, those found.",
        lambda e: e.prefix.hit_tokens,
    ),
    (
        "kv8:prefix_cache_evictions",
        "Cached blocks taken for other contents.",
        lambda e: e.prefix.evictions,
    ),
    (
        "kv8:computed_tokens",
        "Tokens computed, prompt and output; again after a preemption.",
        lambda e: e.counters.computed_tokens,
    ),
    ("kv8:engine_steps", "Forward passes.", lambda e: e.counters.steps),
    (
        "kv8:engine_failed_steps",
        "Forward passes that failed.",
        lambda e: e.counters.failed_steps,
    ),
)
_HISTOGRAMS: _Times = (
    (
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        lambda t: t.time_to_first_token,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "From one token of a sequence to its next.",
        lambda t: t.inter_token,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of each completed sequence.",
        lambda t: t.time_per_output_token,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "From a request's arrival to its end, of completed sequences.",
        lambda t: t.request,
    ),
)


class ObservationCollector(Collector):
    """One look at a server, as metric families.

    Args:
        seen: the look.
    """

    def __init__(self, seen: Observation) -> None:
        self._seen = seen

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        engine, model = self._seen.engine, self._seen.model
        for name, text, read in _GAUGES:
            yield _number(GaugeMetricFamily, name, text, model, read(engine))
        for name, text, read in _COUNTERS:
            yield _number(CounterMetricFamily, name, text, model, read(engine))
        for name, text, histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=_MODEL)
            times = histogram(engine.counters.latencies)
            family.add_metric([model], _buckets(times), times.total)
            yield family
        yield from self._by_label()
        yield from layer_families(engine.report, model)

    def _by_label(self) -> Iterator[Metric]:
        """Yield the families whose samples a label tells apart, and what describes the cache."""
        seen, engine = self._seen, self._seen.engine
        yield _split(
            CounterMetricFamily,
            "vllm:request_success",
            "Sequences that ended, by reason; abort and error stand here too.",
            seen.model,
            ("finished_reason", {r: engine.counters.finished.get(r, 0) for r in _REASONS}),
        )
        yield _split(
            GaugeMetricFamily,
            "kv8:kv_cache_blocks",
            "Cache blocks: used by running sequences, cached for reuse, or free.",
            seen.model,
            ("use", engine.blocks.by_use()),
        )
        yield _split(
            GaugeMetricFamily,
            "kv8:server_state",
            "1 for the state the server is in, 0 for the others.",
            seen.model,
            ("state", {state.value: int(seen.state is state) for state in EngineState}),
        )
        held = engine.report.capacity
        info = InfoMetricFamily("vllm:cache_config", "How the cache was made.", labels=_MODEL)
        info.add_metric(
            [seen.model],
            {
                "block_size": str(held.block_size),
                "num_gpu_blocks": str(held.num_blocks),
                "cache_dtype": ",".join(sorted({layer.dtype for layer in engine.report.layers})),
                "max_model_len": str(held.max_model_len),
            },
        )
        yield info


def _number(kind: _Kind, name: str, text: str, model: str, value: float) -> Metric:
    family = kind(name, text, labels=_MODEL)
    family.add_metric([model], value)
    return family


def _split(
    kind: _Kind, name: str, text: str, model: str, by: tuple[str, Mapping[str, float]]
) -> Metric:
    label, values = by
    family = kind(name, text, labels=[*_MODEL, label])
    for key, value in values.items():
        family.add_metric([model, key], value)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound, as Prometheus wants them."""
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
