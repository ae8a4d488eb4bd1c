"""Who gets in, with how much, and from where."""

import pytest
from tests.served import serving

HELLO = {"prompt": "hello", "max_tokens": 1}
KEYS = ["first-key", "zweiter-Schlüssel"]


@pytest.fixture(scope="module")
def guarded(tiny_model):
    with serving(
        tiny_model(),
        api_key=KEYS,
        max_body_size="8KiB",
        allowed_origins=["https://example.org"],
    ) as server:
        yield server


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer first-key2",
        "Bearer first-ke",
        "Basic first-key",
        "first-key",
        "Bearer first-key zweiter-Schlüssel",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/kv_cache", "/openapi.json"])
def test_without_a_key_nothing_is_told(guarded, value, path) -> None:
    headers = {} if value is None else {"authorization": value.encode()}
    answer = guarded.client().get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(guarded, key) -> None:
    for scheme in ("Bearer", "bearer"):
        headers = {"authorization": f"{scheme} {key}".encode()}
        client = guarded.client(headers=headers)
        assert client.get("/v1/models").status_code == 200
        assert client.post("/v1/completions", json=HELLO).status_code == 200


def test_without_a_key_work_is_refused_and_health_is_told(guarded) -> None:
    client = guarded.client()
    assert client.post("/v1/completions", json=HELLO).status_code == 401
    assert client.get("/health").json() == {"status": "ready", "reason": None}
    assert client.get("/").status_code == 200


def body_of(num_bytes: int) -> bytes:
    frame = b'{"max_tokens":1,"prompt":[%s]}'
    ids = b"9," * ((num_bytes - len(frame) + 2) // 2)
    return (frame % ids.rstrip(b",")).ljust(num_bytes)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(
    ("num_bytes", "status"), [(8192, 400), (8193, 413), (100_000, 413), (10_000_000, 413)]
)
def test_large_bodies_are_refused(guarded, announced, num_bytes, status) -> None:
    """The largest body allowed gets as far as the engine, which says its prompt is too long."""
    body = body_of(num_bytes)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEYS[0]}"}
    pieces = (body[i : i + 4096] for i in range(0, len(body), 4096))
    answer = guarded.client().post(
        "/v1/completions", content=body if announced else pieces, headers=headers
    )
    assert answer.status_code == status
    message = answer.json()["error"]["message"]
    assert ("8.00 KiB" if status == 413 else "tokens or less fits") in message


def preflight_of(server, origin: str):
    return server.client().options(
        "/v1/completions",
        headers={
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        },
    )


def test_pages_of_allowed_origins_may_ask(guarded) -> None:
    answer = preflight_of(guarded, "https://example.org")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://example.org"
    refused = preflight_of(guarded, "https://evil.example")
    assert "access-control-allow-origin" not in refused.headers


def test_by_default_no_page_may_ask(served) -> None:
    answer = preflight_of(served, "https://example.org")
    assert answer.status_code == 405
    headers = {"origin": "https://example.org"}
    plain = served.client().get("/health", headers=headers)
    assert not {name for name in plain.headers if name.startswith("access-control")}


def test_by_default_it_listens_on_this_machine_alone(served) -> None:
    assert served.url.startswith("http://127.0.0.1:")
