"""Many clients at once, and clients that go away, dawdle, or find the queue full."""

import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from tests.served import PATIENCE, Gate, serving

from kv8.server.engine_thread import EngineState

LONG = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def held(tiny_model):
    """A server that runs two sequences and lets two more wait, and the gate before its steps."""
    with serving(tiny_model(), max_num_seqs=2, max_queued=2, max_num_batched_tokens=64) as server:
        gate = Gate()
        gate.guard(server)
        yield server, gate
        gate.opened.set()


def start(server, **fields) -> socket.socket:
    """Send a completion request on a raw socket; nothing of the answer is read."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)), timeout=PATIENCE)
    body = httpx.Request("POST", server.url, json=LONG | fields).content
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    raw.sendall(head.encode() + body)
    return raw


def in_work(server) -> int:
    return server.on_loop(lambda: server.state.engine.admission.num_sequences)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(held, stream) -> None:
    server, gate = held
    raw = start(server, stream=stream, max_tokens=500)
    server.until(lambda: server.blocks_in_use() > 0)
    gate.opened.clear()
    raw.close()
    server.until(lambda: in_work(server) == 0)
    gate.opened.set()
    server.until(lambda: server.blocks_in_use() == 0)
    assert server.on_engine(lambda engine: engine.counters.finished) == {"abort": 1}
    assert not server.on_engine(lambda engine: engine.has_unfinished)


def test_a_client_that_leaves_while_it_waits_is_forgotten(held) -> None:
    server, gate = held
    gate.opened.clear()
    running = [start(server), start(server)]
    waiting = start(server)
    server.until(lambda: in_work(server) == 3)
    waiting.close()
    server.until(lambda: in_work(server) == 2)
    for raw in running:
        raw.close()
    server.until(lambda: in_work(server) == 0)
    gate.opened.set()
    server.until(lambda: server.blocks_in_use() == 0)


def test_a_reader_that_stops_reading_stalls_nobody(held, tiny_model) -> None:
    server, _ = held
    idler = start(server, stream=True, max_tokens=500, logprobs=20)
    idler.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    answers = [server.client().post("/v1/completions", json=LONG) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    # The idler's own work ends too, and gives its blocks back, although nobody reads.
    server.until(lambda: server.blocks_in_use() == 0)
    idler.close()
    server.until(lambda: in_work(server) == 0)


def test_a_slow_reader_gets_everything_in_larger_pieces(served) -> None:
    fields = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 200}
    client = served.openai()
    extra = {"extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**fields, **extra).choices[0].text
    stream = client.completions.create(**fields, **extra, stream=True)
    first = next(stream)
    served.until(lambda: served.blocks_in_use() == 0)  # the engine is done with it
    assert first.choices[0].text + "".join(chunk.choices[0].text for chunk in stream) == whole


def test_a_full_queue_says_when_to_come_back(held) -> None:
    server, gate = held
    gate.opened.clear()
    sockets = [start(server) for _ in range(4)]
    server.until(lambda: in_work(server) == 4)
    refused = server.client().post("/v1/completions", json=LONG)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == "queue_full"
    assert "4 of 4 sequences" in error["message"]
    with pytest.raises(openai.RateLimitError):
        server.openai().completions.create(model=server.state.model_name, prompt="hello")
    gate.opened.set()
    for raw in sockets:
        raw.close()
    server.until(lambda: in_work(server) == 0)
    assert server.client().post("/v1/completions", json=LONG).status_code == 200


def test_more_completions_than_ever_fit_is_no_matter_of_waiting(held) -> None:
    server, _ = held
    for fields in ({"n": 5}, {"prompt": ["a", "b", "c"], "n": 2}):
        refused = server.client().post("/v1/completions", json=LONG | fields)
        assert refused.status_code == 400
        assert "--max-queued" in refused.json()["error"]["message"]
    fits = server.client().post("/v1/completions", json=LONG | {"n": 4, "max_tokens": 2})
    assert fits.status_code == 200


def test_a_request_is_accepted_as_a_whole_or_not_at_all(held) -> None:
    server, _ = held
    prompts = ["a", "b", "x" * 10_000]
    assert (
        server.client().post("/v1/completions", json=LONG | {"prompt": prompts}).status_code == 400
    )
    server.until(lambda: in_work(server) == 0)
    assert server.blocks_in_use() == 0
    assert not server.on_engine(lambda engine: engine.has_unfinished)


def test_requests_beside_each_other_are_answered_as_alone(served, llm) -> None:
    from kv8 import SamplingParams

    prompts = [f"prompt number {i} " * (1 + i % 7) for i in range(24)]
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    expected = [
        llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].text for prompt in prompts
    ]

    def ask(prompt: str) -> str:
        client = served.openai()
        fields = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 12}
        if len(prompt) % 2:
            return client.completions.create(**fields).choices[0].text
        stream = client.completions.create(**fields, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == expected
    assert served.blocks_in_use() == 0


def test_a_failing_step_is_told_and_the_next_request_served(held) -> None:
    server, gate = held
    gate.error = RuntimeError("a bit fell over")

    def mend(engine) -> None:
        """Fail the request's step, but not the probe that follows."""
        run = engine.runner.run

        def once(step):
            try:
                return run(step)
            finally:
                gate.error = None

        engine.runner.run = once

    server.on_engine(mend)
    answer = server.client().post("/v1/completions", json=LONG)
    assert answer.status_code == 500
    assert "a bit fell over" in answer.json()["error"]["message"]
    assert server.client().post("/v1/completions", json=LONG).status_code == 200
    assert server.client().get("/health").status_code == 200
    assert server.blocks_in_use() == 0


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), SystemExit("torn down")])
def test_a_crash_is_told_to_everybody(held, error) -> None:
    """Pitfall 50: an engine that answers nobody any more does not stay healthy."""
    server, gate = held
    gate.opened.clear()
    streams = start(server, stream=True)
    with ThreadPoolExecutor(3) as pool:
        waiting = [
            pool.submit(server.client().post, "/v1/completions", json=LONG) for _ in range(3)
        ]
        server.until(lambda: in_work(server) == 4)
        gate.error = error
        gate.opened.set()
        answers = [future.result(PATIENCE) for future in waiting]
    for answer in answers:
        assert answer.status_code in (500, 503)
        assert str(error) in answer.json()["error"]["message"]
    told = b"".join(iter(lambda: streams.recv(4096), b""))
    assert str(error).encode() in told
    assert b"[DONE]" not in told
    server.until(lambda: server.state.engine.state is EngineState.FAILED)
    health = server.client().get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "failed"
    assert str(error) in health.json()["reason"]
    later = server.client().post("/v1/completions", json=LONG)
    assert later.status_code == 503
    assert str(error) in later.json()["error"]["message"]
    assert server.client().get("/v1/models").status_code == 200
