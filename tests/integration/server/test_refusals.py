"""What is not served is refused: a 4xx in OpenAI's shape, with a sentence and the field's name."""

import gzip
import json
import socket

import openai
import pytest
from tests.served import Served

from kv8.server.protocol.chat import ChatCompletionRequest
from kv8.server.protocol.completions import CompletionRequest

HELLO = [{"role": "user", "content": "hello"}]


def error_of(answer, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", "?")), error
    return error


def chat(served: Served, **fields):
    return served.client().post(
        "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2} | fields
    )


def complete(served: Served, **fields):
    return served.client().post(
        "/v1/completions", json={"prompt": "hello", "max_tokens": 2} | fields
    )


@pytest.mark.parametrize("field", sorted(ChatCompletionRequest.refused))
def test_openai_fields_that_chat_does_not_do_are_refused_by_name(served, field) -> None:
    error = error_of(chat(served, **{field: {"what": ["ever"]}}))
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize("field", sorted(CompletionRequest.refused))
def test_openai_fields_that_completions_do_not_do_are_refused_by_name(served, field) -> None:
    assert error_of(complete(served, **{field: "whatever"}))["param"] == field


@pytest.mark.parametrize(
    ("request_type", "send"), [(ChatCompletionRequest, chat), (CompletionRequest, complete)]
)
def test_values_that_ask_for_nothing_pass(served, request_type, send) -> None:
    neutral = {
        name: refusal.neutral[0]
        for name, refusal in request_type.refused.items()
        if refusal.neutral
    }
    assert neutral
    assert send(served, **neutral).status_code == 200


@pytest.mark.parametrize("send", [chat, complete])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nope": 1}, "nope"),
        ({"nope": None}, "nope"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"n": "1"}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 7}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"nope": 1}}, "stream_options.nope"),
        ({"model": 7}, "model"),
    ],
)
def test_values_that_cannot_be_are_refused_by_field(served, send, fields, param) -> None:
    assert error_of(send(served, **fields))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "owner", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "user", "content": []}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_conversations_that_cannot_be_are_refused_by_place(served, fields, param) -> None:
    told = error_of(chat(served, **fields))["param"]
    assert told is not None
    assert told.startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [""]},
        {"prompt": ["a", 1]},
        {"prompt": [1, "a"]},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": {"text": "a"}},
        {"prompt": [-1]},
        {"prompt": [10**9]},
        {"prompt": [260]},
        {"prompt": None},
        {"logprobs": 10**6},
        {"logprobs": True},
        {"echo": 1},
    ],
)
def test_prompts_that_cannot_be_are_refused(served, fields) -> None:
    error_of(complete(served, **fields))


@pytest.mark.parametrize(
    ("send", "field"),
    [(chat, "max_tokens"), (chat, "max_completion_tokens"), (complete, "max_tokens")],
)
def test_more_tokens_than_fit_are_refused_with_how_many_would(served, send, field) -> None:
    longest = served.state.config.max_model_len
    others = {"max_tokens": None} if field != "max_tokens" else {}
    error = error_of(send(served, **{field: longest} | others))
    assert error["param"] == field
    room = int(error["message"].split("Ask for ")[1].split()[0])
    assert 0 < room < longest
    answer = send(served, **{field: room, "stop": None} | others)
    assert answer.status_code == 200
    assert error_of(send(served, **{field: room + 1} | others))["param"] == field


def test_too_many_prompts_are_told_with_how_many_there_may_be(served) -> None:
    error = error_of(complete(served, prompt=["x"] * 1025))
    assert error["param"] == "prompt"
    assert "at most 1024" in error["message"]


def test_the_message_says_what_would_be_served(served) -> None:
    longest = served.state.config.max_model_len
    error = error_of(complete(served, prompt="x" * (longest + 5)))
    assert f"A prompt of {longest - 1} tokens or less fits" in error["message"]
    # What the message promises holds: the begin token takes one place.
    shortest = {"max_tokens": 1}
    assert complete(served, prompt="x" * (longest - 2), **shortest).status_code == 200
    assert complete(served, prompt="x" * (longest - 1), **shortest).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "x",}',
        b"[1, 2]",
        b"null",
        b'"prompt"',
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ["a", "\\udfff"]}',
        b'{"prompt": "x", "stop": "\\ud800"}',
        b'{"prompt": "x", "\\ud800": 1}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_request_are_refused(served, body) -> None:
    answer = served.client().post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    error_of(answer)


def test_lone_surrogates_in_messages_are_refused(served) -> None:
    body = b'{"messages": [{"role": "user", "content": "a \\ud83d b"}], "max_tokens": 1}'
    headers = {"content-type": "application/json"}
    error_of(served.client().post("/v1/chat/completions", content=body, headers=headers))


def test_a_body_of_another_type_is_refused(served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        body = json.dumps({"prompt": "x"}).encode()
        answer = served.client().post(
            "/v1/completions", content=body, headers={"content-type": kind}
        )
        error_of(answer)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_in_the_query_are_refused(served, path) -> None:
    body = {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    answer = served.client().post(path, params={"stream": "true"}, json=body)
    assert "'stream' in the query" in error_of(answer)["message"]


def test_a_compressed_body_is_refused(served) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body = gzip.compress(b'{"prompt": "x"}')
    answer = served.client().post("/v1/completions", content=body, headers=headers)
    assert "compressed" in error_of(answer)["message"]


def test_a_slash_too_many_is_told_and_not_redirected(served) -> None:
    """A redirect would name the scheme and host behind a proxy, and most clients drop its body."""
    answer = served.client().post("/v1/completions/", json={"prompt": "x"})
    assert "/v1/completions/" in error_of(answer, 404)["message"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/kv_cache", "/"])
def test_head_is_get_without_the_body(served, path) -> None:
    answer = served.client().head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 0


def test_unknown_paths_methods_and_models(served) -> None:
    client = served.client()
    assert "/v1/nope" in error_of(client.get("/v1/nope"), 404)["message"]
    wrong_method = client.get("/v1/completions")
    assert "GET" in error_of(wrong_method, 405)["message"]
    assert wrong_method.headers["allow"] == "POST"
    error = error_of(complete(served, model="gpt-4"), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "tiny" in error["message"]
    error_of(client.get("/v1/models/gpt-4"), 404)


def test_the_official_client_understands_refusals(served) -> None:
    client = served.openai()
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=HELLO, logit_bias={"5": 1})
    assert refused.value.param == "logit_bias"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt="x")


def test_tokens_that_are_none_are_refused(served) -> None:
    client = served.client()
    assert error_of(client.post("/detokenize", json={"tokens": [5, 10**6]}))["param"] == "tokens[1]"
    error_of(client.post("/detokenize", json={"tokens": [-1]}))
    error_of(client.post("/tokenize", json={"prompt": "a", "messages": HELLO}))
    error_of(client.post("/tokenize", json={}))


def test_what_is_no_http_harms_nobody(served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    for garbage in (b"\x00" * 100, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x16\x03\x01"):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(garbage)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(4096):
                pass
    assert complete(served).status_code == 200
