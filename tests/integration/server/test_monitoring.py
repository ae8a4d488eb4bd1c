"""/metrics and /v1/kv_cache of a running server: they tell what happened, in every state."""

import json
import threading

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.command_line import kv8
from tests.served import PATIENCE, Served, proven_engine, serving
from tests.tiny_models import LAYERS

WORK = {"prompt": "a prompt of some length", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
TOO_SMALL = {layer: {"k": 1e-4, "v": 1e-4} for layer in range(LAYERS)}


def metrics(server: Served) -> dict[tuple[str, ...], float]:
    """Return every sample by name and the values of its labels but the model's."""
    answer = server.client().get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in parse_text(answer.text):
        for sample in family.samples:
            labels = {key: name for key, name in sample.labels.items() if key != "model_name"}
            found[sample.name, *labels.values()] = sample.value
    return found


def kv_cache(server: Served) -> dict:
    answer = server.client().get("/v1/kv_cache")
    assert answer.status_code == 200
    return answer.json()


def complete(server: Served, **more: object) -> dict:
    answer = server.client().post("/v1/completions", json={**WORK, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def test_counts_are_those_of_the_answers(tiny_model) -> None:
    with serving(tiny_model(), kv_cache_dtype="fp8") as server:
        usages = [complete(server) for _ in range(3)] + [complete(server, n=2, temperature=1.0)]
        found, seen = metrics(server), kv_cache(server)
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert generated == 5 * 20
    assert found["vllm:generation_tokens_total",] == generated
    assert found["vllm:prompt_tokens_total",] == 5 * usages[0]["prompt_tokens"]
    assert found["vllm:request_success_total", "length"] == 5
    assert found["vllm:time_to_first_token_seconds_count",] == 5
    assert found["vllm:inter_token_latency_seconds_count",] == 5 * 19
    assert found["vllm:request_time_per_output_token_seconds_count",] == 5
    assert found["vllm:e2e_request_latency_seconds_count",] == 5
    waited = found["vllm:time_to_first_token_seconds_sum",]
    assert 0 < waited < found["vllm:e2e_request_latency_seconds_sum",]
    assert found["vllm:prefix_cache_hits_total",] > 0
    assert found["vllm:num_requests_running",] == 0
    assert found["vllm:kv_cache_usage_perc",] == 0
    assert found["kv8:kv_cache_blocks", "cached"] > 0
    assert found["kv8:server_state", "ready"] == 1
    assert found["process_resident_memory_bytes",] > 1e6
    # K and V of every layer got every token that was computed: 2 heads of 16 values each.
    computed = found["kv8:computed_tokens_total",]
    for layer in range(LAYERS):
        for side in "kv":
            key = str(layer), side
            assert found["kv8:kv_cache_stored_values_total", *key] == computed * 32
    assert seen["counters"]["generated_tokens"] == generated
    assert seen["counters"]["finished"] == {"length": 5}
    assert seen["latency"]["inter_token"]["count"] == 5 * 19
    assert seen["layers"][2]["k"]["stored"] == computed * 32


def test_what_clips_is_counted_and_named(tiny_model) -> None:
    """Pitfall 41: scales that do not fit are seen from outside, with the layer and the share."""
    with serving(tiny_model(), kv_cache_dtype="fp8", kv_scales=TOO_SMALL) as server:
        complete(server)
        found, seen = metrics(server), kv_cache(server)
    for layer in range(LAYERS):
        assert found["kv8:kv_cache_saturated_values_total", str(layer), "k"] > 0
        assert seen["layers"][layer]["k"]["saturated_share"] > 0.01
    named = {(m["layer"], m["side"]) for m in seen["misfits"] if m["kind"] == "saturated"}
    assert named == {(layer, side) for layer in range(LAYERS) for side in "kv"}
    assert seen["layers"][0]["k"]["origin"].startswith("given in Python")
    assert found["kv8:kv_cache_calibrated",] == 1


def test_the_document_says_what_inspect_says(tiny_model) -> None:
    """Pitfall 69: fp8 is shown as e4m3, with granularity, origin and how attention computes."""
    with serving(tiny_model(), kv_cache_dtype="fp8") as server:
        seen = kv_cache(server)
    words = ("inspect", tiny_model(), "--kv-cache-dtype", "fp8", "--kv-cache-memory", "2MiB")
    report = kv8(*words, "--json").json
    for name in ("settings", "messages", "bytes_per_token", "tokens", "max_model_len"):
        assert seen[name] == report[name]
    assert seen["settings"]["kv_cache_dtype"]["value"] == "fp8_e4m3"
    assert "tensor" in json.dumps(seen["settings"]["k and v scales"])
    assert {layer["dtype"] for layer in seen["layers"]} == {"fp8_e4m3"}


def test_openmetrics_for_who_asks_for_it(served) -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    answer = served.client().get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert len(list(parse_openmetrics(answer.text))) > 20


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "application/openmetrics-text; version=x.y",
        "text/plain; version=",
        ";;,;=,",
        "\xff",
    ],
)
def test_any_accept_header_gets_metrics(served, accept) -> None:
    headers = {"Accept": accept.encode("latin-1")}
    assert served.client().get("/metrics", headers=headers).status_code == 200


def test_while_it_loads_the_plan_is_told(tiny_model) -> None:
    let = threading.Event()

    def make_engine(options):
        assert let.wait(PATIENCE)
        return proven_engine(options)

    server = Served(tiny_model(), kv_cache_dtype="fp8", make_engine=make_engine)
    try:
        seen, found = kv_cache(server), metrics(server)
        assert seen["state"] == "loading"
        assert len(seen["layers"]) == LAYERS
        assert seen["use"]["blocks"]["free"] == seen["num_blocks"]
        assert found["kv8:server_state", "loading"] == 1
        assert found["vllm:generation_tokens_total",] == 0
        let.set()
        server.until_ready()
        assert kv_cache(server)["state"] == "ready"
    finally:
        let.set()
        server.stop()
        server.stop()
        server.join()


def test_after_a_failure_the_last_that_was_seen_is_told(tiny_model) -> None:
    def fail() -> None:
        raise RuntimeError("out of luck")

    with serving(tiny_model(), kv_cache_dtype="fp8") as server:
        complete(server)
        before = kv_cache(server)
        server.on_engine(lambda engine: setattr(engine, "step", fail))
        assert server.client().post("/v1/completions", json=WORK).status_code == 503
        seen, found = kv_cache(server), metrics(server)
    assert seen["state"] == "failed"
    assert "out of luck" in seen["failure"]
    assert seen["counters"] == before["counters"]
    assert found["kv8:server_state", "failed"] == 1
    assert found["vllm:generation_tokens_total",] == 20


def test_the_page_is_open_and_its_numbers_are_not(tiny_model) -> None:
    with serving(tiny_model(), api_key=["secret"]) as server:
        client = server.client()
        assert client.get("/").status_code == 200
        assert client.get("/static/page.js").status_code == 200
        for path in ("/metrics", "/v1/kv_cache"):
            assert client.get(path).status_code == 401
            key = {"Authorization": "Bearer secret"}
            assert client.get(path, headers=key).status_code == 200
