"""The document of /v1/kv_cache: complete, plain JSON, and in step with ``kv8 inspect --json``."""

import json

from tests.observations import layer, native_layer, observation

from kv8.engine.counters import StoreCounts
from kv8.server.engine_thread import EngineState
from kv8.server.kv_cache import document


def test_it_is_strict_json_with_the_report_in_it() -> None:
    seen = observation([layer(0, clipped=(250, 0)), native_layer(1, skipped_by="1")])
    found = json.loads(json.dumps(document(seen), allow_nan=False))
    assert found.items() >= json.loads(json.dumps(seen.engine.report.as_json())).items()
    assert found["model"] == "smollm2"
    assert found["state"] == "ready"
    assert found["failure"] is None
    assert found["uptime_seconds"] == 3725.0
    assert found["layers"][0]["k"]["origin"] == "checkpoint: layers.0.k_scale"
    assert found["settings"]["kv_cache_dtype"]["value"] == "fp8_e4m3"
    assert found["use"]["blocks"] == {"used": 370, "cached": 200, "free": 430}
    assert found["use"]["usage"] == 0.37
    assert found["counters"]["finished"] == {"stop": 11, "length": 3}
    assert found["counters"]["prefix_cache"]["hit_tokens"] == 1000
    assert found["latency"]["time_to_first_token"]["count"] == 3


def test_misfits_are_what_the_engine_warns_of() -> None:
    # v has the default scale, which should clip less than one value in 100,000; k a calibrated one.
    layers = [
        layer(0, clipped=(9_999, 9)),
        layer(1, clipped=(10_000, 10)),
        layer(2, v_counts=StoreCounts(1000, 0, 500, 0)),
        native_layer(3),
    ]
    assert document(observation(layers))["misfits"] == [
        {"layer": 1, "side": "k", "kind": "saturated", "share": 0.01},
        {"layer": 1, "side": "v", "kind": "saturated", "share": 1e-5},
        {"layer": 2, "side": "v", "kind": "underflowed", "share": 0.5},
    ]


def test_a_failed_server_says_what_failed() -> None:
    found = document(observation([layer(0)], state=EngineState.FAILED))
    assert found["state"] == "failed"
    assert found["failure"] == "RuntimeError: the disk is on fire"


def test_before_anything_is_stored_there_are_no_misfits_and_no_shares() -> None:
    found = document(observation([layer(0, k_counts=None, v_counts=None)]))
    assert found["misfits"] == []
    assert "saturated" not in found["layers"][0]["k"]
