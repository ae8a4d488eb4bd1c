"""Bytes no client of ours would send: each gets an answer or a closed connection, none a crash."""

import json
import socket
from collections.abc import Iterator

import pytest
from tests.served import PATIENCE, Served, serving
from tests.tiny_models import TinyModel

PATH = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"


@pytest.fixture(scope="module")
def served(tiny_model: TinyModel) -> Iterator[Served]:
    with serving(tiny_model(), max_body_size="64KiB") as server:
        yield server


@pytest.fixture(autouse=True)
def still_serves(served: Served) -> Iterator[None]:
    """Whatever a test sent, the next request is served and no block is lost."""
    yield
    answer = served.client().post(PATH, json={"prompt": "hello", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    served.until(lambda: served.blocks_in_use() == 0)


def post(served: Served, body: bytes, content_type: str = "application/json") -> tuple[int, dict]:
    """Send bytes as a body; return the status and the error."""
    headers = {"content-type": content_type}
    answer = served.client().post(PATH, content=body, headers=headers)
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].rstrip().endswith((".", ")"))
    return answer.status_code, error


def raw(served: Served, sent: bytes, *, end: bool = True) -> bytes:
    """Send bytes over a socket and return all that comes back until the server closes.

    ``end`` says whether that is all; to the server, the client then has gone.
    """
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(sent)
        if end:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"1e999",
        b"\xff\xfe\x00",
        b'{"prompt": "a" "b"}',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "n": 1e3}',
        b'{"prompt": "a", "seed": 99999999999999999999999999}',
        b'{"prompt": "a", "max_tokens": -1}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": ["\\udfff", ""]}',
        b'{"prompt": [-1]}',
        b'{"prompt": [999999]}',
        b'{"prompt": [[]]}',
        b'{"prompt": [true]}',
        b'{"prompt": ["a", 1]}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": "a", "": 1}',
        b'{"prompt": "a", "__class__": "x"}',
        b"[" * 30_000,
        b'{"prompt":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"prompt": "a", "structured_outputs": {"json": ' + b'{"a":' * 9_000 + b"1" + b"}" * 9_002,
    ],
    ids=range(27),
)
def test_a_body_that_makes_no_sense_is_answered_with_a_sentence(
    served: Served, body: bytes
) -> None:
    status, error = post(served, body)
    assert status == 400
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "a/b"])
def test_what_is_not_sent_as_json_is_refused(served: Served, content_type: str) -> None:
    status, error = post(served, b'prompt="a"', content_type)
    assert status == 400
    assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "prompt is given more than once"),
        (b'{"prompt": "a", "stream_options": {"x": 1, "x": 1}}', "x is given more than once"),
        (b'{"prompt": "a", "logit_bias": {"1": NaN}}', "NaN is no number"),
        (b"[" * 60_000, "nested too deeply"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5_000 + b"}", "too many digits"),
        (b'{"prompt": "a"} x', "Extra data at character 16"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"{%s}" % b",".join(b'"%d":1' % n for n in range(4097)), "an object of 4,097 members"),
        (b"{%s}" % b",".join(b'"%d":1' % n for n in range(4096)), "And 4094 more"),
    ],
    ids=range(9),
)
def test_what_a_body_says_twice_or_too_much_is_told(served: Served, body: bytes, told: str) -> None:
    """Of two fields of one name, Python's reader ignores the first."""
    status, error = post(served, body)
    assert status == 400
    assert told in error["message"]


def test_a_body_beyond_the_limit_is_refused_however_it_is_sent(served: Served) -> None:
    big = json.dumps({"prompt": "a" * 10_000_000}).encode()
    status, error = post(served, big)
    assert status == 413
    assert "64.00 KiB" in error["message"]

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(big), 50_000):
            yield big[start : start + 50_000]

    headers = {"content-type": "application/json"}
    answer = served.client().post(PATH, content=pieces(), headers=headers)
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/one\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    ],
    ids=range(8),
)
def test_what_is_no_http_is_turned_away(served: Served, sent: bytes) -> None:
    try:
        answer = raw(served, sent)
    except OSError:
        return  # it hung up, which is an answer
    assert answer == b"" or answer.split(b" ")[1].startswith(b"4")


def test_half_a_request_takes_nothing_from_others(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    halves = [
        b"POST /v1/comple",
        HEAD + b"Content-Length: 100\r\n\r\n",
        HEAD + b"Content-Length: 100\r\n\r\n{",
    ]
    connections = []
    for half in halves * 20:
        connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
        connection.sendall(half)
        connections.append(connection)
    answer = served.client().post(PATH, json={"prompt": "hello", "max_tokens": 2})
    assert answer.status_code == 200
    for connection in connections:
        connection.close()


def test_many_that_hang_up_at_once_leave_nothing(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True})
    fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sent = HEAD + fields.encode() + body.encode()
    for _ in range(40):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(sent)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", PATH, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/../../etc/passwd", 404),
        ("GET", "/static/../../../etc/passwd", 404),
        ("GET", "/static/%2e%2e/%2e%2e/app.py", 404),
        ("GET", "/%00", 404),
    ],
)
def test_a_wrong_door_is_told_in_openais_shape(
    served: Served, method: str, path: str, status: int
) -> None:
    sent = f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
    answer = raw(served, sent, end=False)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split(b" ")[1]) == status
    assert json.loads(body)["error"]["message"]
