"""Lone surrogates, which are no text, are found wherever they are."""

import pytest

from kv8.server.protocol.errors import ApiError
from kv8.server.protocol.text import require_text


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"prompt": "a\ud800"}, "prompt holds"),
        ({"messages": [{}, {"content": "\udfff"}]}, r"messages\[1\].content holds"),
        ({"tools": [{"deep": {"er": ["é", "\ud8ff"]}}]}, r"tools\[0\].deep.er\[1\] holds"),
        ({"tools": {"\ud800": 1}}, "A name in tools holds"),
        ({"\ud800": 1}, "A name in the body holds"),
    ],
)
def test_lone_surrogates_are_found(body, place) -> None:
    with pytest.raises(ValueError, match=place):
        require_text(body)


@pytest.mark.parametrize("body", [{"a": "é€\U0001f600", "b": [1, None, True, 1.5]}, [], None, 7])
def test_text_passes(body) -> None:
    require_text(body)


def test_deep_bodies_are_no_matter() -> None:
    body: list = []
    for _ in range(50_000):
        body = [body]
    require_text(body)
    require_text({"a": body})
    while body:  # taking it apart at once would be as deep
        body = body.pop()


def test_an_error_that_quotes_a_lone_surrogate_can_be_sent() -> None:
    error = ApiError(400, "no \ud800", param="\udfff").body()["error"]
    assert error["message"] == r"no \ud800"
    assert error["param"] == r"\udfff"
