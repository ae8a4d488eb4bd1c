"""From the start to the end of a server: loading, draining, ending, in this process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.served import PATIENCE, Gate, Served, proven_engine, serving

from kv8.errors import ModelError

LONG = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def slow_start(tiny_model):
    """A server whose engine loads once the event is set."""
    let = threading.Event()

    def make_engine(options):
        assert let.wait(PATIENCE)
        return proven_engine(options)

    server = Served(tiny_model(), make_engine=make_engine)
    yield server, let
    let.set()
    server.stop()
    server.stop()
    server.join()


def test_while_it_loads_it_says_so(slow_start) -> None:
    server, let = slow_start
    client = server.client()
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "loading")
    refused = client.post("/v1/completions", json=LONG)
    assert refused.status_code == 503
    assert "loading" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert client.get("/v1/models").status_code == 200
    assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
    let.set()
    server.until_ready()
    assert client.get("/health").json()["status"] == "ready"
    assert client.post("/v1/completions", json=LONG).status_code == 200
    server.until(lambda: "ready" in server.said)


def test_a_server_that_loads_can_be_stopped(slow_start) -> None:
    server, _ = slow_start
    server.stop()
    server.join()
    assert server.finished is True


def test_a_start_that_fails_late_is_told_and_ends_the_server(tiny_model) -> None:
    def make_engine(options):
        raise ModelError("The weights are not what they were.")

    server = Served(tiny_model(), make_engine=make_engine)
    server.join()
    assert isinstance(server.failure, ModelError)


def test_draining_finishes_what_was_accepted(tiny_model) -> None:
    with serving(tiny_model()) as server, ThreadPoolExecutor(1) as pool:
        expected = server.client().post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        gate = Gate()
        gate.guard(server)
        gate.opened.clear()
        answer = pool.submit(server.client().post, "/v1/completions", json=LONG)
        server.until(lambda: not server.on_loop(lambda: server.state.engine.is_idle))
        server.stop()
        server.until(lambda: server.client().get("/health").json()["status"] == "draining")
        refused = server.client().post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert "stopping" in refused.json()["error"]["message"]
        gate.opened.set()
        assert answer.result(PATIENCE).json()["choices"][0]["text"] == expected
        server.join()
        assert server.finished is True


@pytest.mark.parametrize("how", ["a second signal", "the time is up"])
def test_what_is_not_finished_in_time_is_ended_with_an_error(tiny_model, how) -> None:
    timeout = 0.1 if how == "the time is up" else PATIENCE
    with serving(tiny_model(), drain_timeout=timeout) as server, ThreadPoolExecutor(1) as pool:
        gate = Gate()
        gate.guard(server)
        gate.opened.clear()
        answer = pool.submit(server.client().post, "/v1/completions", json=LONG)
        server.until(lambda: not server.on_loop(lambda: server.state.engine.is_idle))
        server.stop()
        if how == "a second signal":
            server.stop()
        told = answer.result(PATIENCE)
        assert told.status_code == 503
        assert "stopped" in told.json()["error"]["message"]
        gate.opened.set()
        server.join()
        assert server.finished is False


def test_an_idle_server_ends_at_once(tiny_model) -> None:
    with serving(tiny_model()) as server:
        assert server.client().get("/health").status_code == 200
        server.stop()
        server.join()
        assert server.finished is True
