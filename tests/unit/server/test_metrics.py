"""The metrics: names, values and labels, read back by Prometheus's own parsers."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.observations import layer, native_layer, observation

from kv8.scales.scale import Origin, OriginKind, Scale
from kv8.server.engine_thread import EngineState
from kv8.server.metric_families import ObservationCollector
from kv8.server.observation import Observation

DOCS = Path(__file__).resolve().parents[3] / "docs"
LAYERS = [layer(0, clipped=(250, 3)), native_layer(1, skipped_by="1")]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def exposed(seen: Observation) -> str:
    registry = CollectorRegistry()
    registry.register(ObservationCollector(seen))
    return generate_latest(registry).decode()


def samples(seen: Observation) -> Samples:
    """Return every sample's value by name and labels; all carry the model's name."""
    found = {}
    for family in parse_text(exposed(seen)):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "smollm2"
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_what_vllm_counts_too_has_its_names() -> None:
    found = samples(observation(LAYERS))
    assert value(found, "vllm:num_requests_running") == 5
    assert value(found, "vllm:num_requests_waiting") == 2
    assert value(found, "vllm:kv_cache_usage_perc") == 0.37
    assert value(found, "vllm:prefix_cache_queries_total") == 4000
    assert value(found, "vllm:prefix_cache_hits_total") == 1000
    assert value(found, "vllm:num_preemptions_total") == 1
    assert value(found, "vllm:prompt_tokens_total") == 4000
    assert value(found, "vllm:generation_tokens_total") == 1300
    assert value(found, "vllm:request_success_total", finished_reason="stop") == 11
    assert value(found, "vllm:request_success_total", finished_reason="error") == 0
    assert value(found, "vllm:time_to_first_token_seconds_count") == 3
    assert value(found, "vllm:time_to_first_token_seconds_sum") == pytest.approx(1.0)
    assert value(found, "vllm:time_to_first_token_seconds_bucket", le="0.06") == 2
    assert value(found, "vllm:time_to_first_token_seconds_bucket", le="1.0") == 3
    assert value(found, "vllm:time_to_first_token_seconds_bucket", le="+Inf") == 3
    assert value(found, "vllm:inter_token_latency_seconds_count") == 100
    info = {"block_size": "16", "num_gpu_blocks": "1000", "max_model_len": "8192"}
    assert value(found, "vllm:cache_config_info", cache_dtype="bfloat16,fp8_e4m3", **info) == 1


def test_every_layer_and_side_says_what_storing_did_to_it() -> None:
    found = samples(observation(LAYERS))
    assert value(found, "kv8:kv_cache_saturated_values_total", layer="0", side="k") == 250
    assert value(found, "kv8:kv_cache_saturated_values_total", layer="0", side="v") == 3
    assert value(found, "kv8:kv_cache_underflowed_values_total", layer="0", side="k") == 7
    assert value(found, "kv8:kv_cache_stored_values_total", layer="0", side="v") == 1_000_000
    assert value(found, "kv8:kv_cache_nan_values_total", layer="0", side="v") == 0
    # A layer that is not quantized clips nothing, which is not the same as 0 of some.
    per_layer = [dict(labels) for name, labels in found if name.startswith("kv8:kv_cache_s")]
    assert {labels.get("layer") for labels in per_layer} == {"0"}


def test_the_origin_of_a_scale_is_an_info_metric() -> None:
    found = samples(observation([layer(3)]))
    origin = {"origin": "checkpoint", "detail": "layers.3.k_scale"}
    kinds = {"granularity": "tensor", "dtype": "fp8_e4m3"}
    assert value(found, "kv8:kv_cache_scale_info", layer="3", side="k", **origin, **kinds) == 1
    assert value(found, "kv8:kv_cache_scale_value", layer="3", side="k", head="all") == 0.0625
    assert value(found, "kv8:kv_cache_calibrated") == 0  # v has the default


def test_a_scale_of_each_head_is_a_sample_of_each_head() -> None:
    per_head = Scale((0.5, 0.25), Origin(OriginKind.CALIBRATION, "4,096 tokens"))
    found = samples(observation([replace(layer(0), k=per_head, v=per_head)]))
    assert value(found, "kv8:kv_cache_scale_value", layer="0", side="v", head="1") == 0.25
    assert value(found, "kv8:kv_cache_calibrated") == 1


def test_nothing_is_called_calibrated_where_nothing_has_a_scale() -> None:
    found = samples(observation([native_layer(0)]))
    assert not [name for name, _ in found if name == "kv8:kv_cache_calibrated"]


@pytest.mark.parametrize("state", list(EngineState))
def test_the_state_is_one_of_four(state) -> None:
    found = samples(observation(LAYERS, state=state))
    for other in EngineState:
        expected = float(other is state)
        assert value(found, "kv8:server_state", state=other.value) == expected


def test_a_name_with_quotes_and_line_breaks_stays_one_label() -> None:
    hostile = 'a"b\\c\nd'
    seen = Observation(hostile, EngineState.READY, None, 1.0, observation(LAYERS).engine)
    models = {
        sample.labels["model_name"]
        for family in parse_text(exposed(seen))
        for sample in family.samples
    }
    assert models == {hostile}


def test_openmetrics_is_well_formed() -> None:
    registry = CollectorRegistry()
    registry.register(ObservationCollector(observation(LAYERS)))
    families = list(parse_openmetrics(openmetrics.generate_latest(registry).decode()))
    kinds = {family.name: family.type for family in families}
    assert kinds["vllm:generation_tokens"] == "counter"
    assert kinds["kv8:kv_cache_scale"] == "info"
    assert kinds["vllm:inter_token_latency_seconds"] == "histogram"


def test_the_documentation_lists_every_metric() -> None:
    page = (DOCS / "monitoring.md").read_text()
    documented = set(re.findall(r"^\| `((?:vllm|kv8):\w+)` \|", page, flags=re.M))
    there = {re.sub("_(bucket|count|sum)$", "", name) for name, _ in samples(observation(LAYERS))}
    assert documented == there
