"""Incremental detokenization over real tokenizer kinds: byte-level and byte fallback."""

import pytest
from tests.text_tokenizers import byte_fallback, byte_level

from kv8.engine.detokenizer import Detokenizer, TokenDecoder

TEXT = "Grüße, 안녕하세요! 👩‍👩‍👧 family — ok\n  two  spaces"


def pieces(tokenizer, output: list[int], prompt: list[int] = [], **options) -> list[str]:  # noqa: B006
    options = {"skip_special_tokens": True} | options
    detokenizer = Detokenizer(TokenDecoder(tokenizer), prompt, **options)
    return [*(detokenizer.push(token) for token in output), detokenizer.flush()]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_no_piece_holds_half_a_character(make) -> None:
    tokenizer = make()
    parts = pieces(tokenizer, tokenizer.encode(TEXT, add_special_tokens=False))
    assert "".join(parts) == TEXT
    assert "\ufffd" not in "".join(parts)
    assert parts[-1] == ""


def test_a_leading_space_after_the_prompt_stays() -> None:
    tokenizer = byte_fallback()
    prompt = tokenizer.encode("a dog", add_special_tokens=False)
    both = tokenizer.encode("a dog a cat", add_special_tokens=False)
    assert "".join(pieces(tokenizer, both[len(prompt) :], prompt)) == " a cat"


def test_special_tokens_show_only_when_asked() -> None:
    tokenizer = byte_level()
    end = tokenizer.convert_tokens_to_ids("<end>")
    output = [*tokenizer.encode("안"), end, *tokenizer.encode("b")]
    assert "".join(pieces(tokenizer, output)) == "안b"
    assert "".join(pieces(tokenizer, output, skip_special_tokens=False)) == "안<end>b"


def test_tokens_without_text_are_passed_over() -> None:
    """A model's vocabulary is often padded beyond its tokenizer's."""
    tokenizer = byte_level()
    output = [*tokenizer.encode("a"), *[len(tokenizer) + 7] * 1000, *tokenizer.encode("b")]
    assert "".join(pieces(tokenizer, output)) == "ab"


def test_an_unfinished_character_shows_at_the_end() -> None:
    tokenizer = byte_level()
    parts = pieces(tokenizer, tokenizer.encode("a漢")[:-1])
    assert parts[-1].startswith("\ufffd")
    assert "".join(parts[:-1]) == "a"


def test_a_character_begun_in_the_prompt_is_finished() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("한국어", add_special_tokens=False)
    detokenizer = Detokenizer(TokenDecoder(tokenizer), ids[:-1], skip_special_tokens=True)
    assert detokenizer.push(ids[-1]) + detokenizer.flush() in ("어", "")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("kind", ["text", "broken bytes", "long prompt"])
def test_each_token_costs_a_window_not_the_whole_text(make, kind: str) -> None:
    tokenizer = make()
    decoder = TokenDecoder(tokenizer)
    longest, calls = 0, 0
    plain = decoder.decode

    def counting(token_ids):
        nonlocal longest, calls
        longest, calls = max(longest, len(token_ids)), calls + 1
        return plain(token_ids)

    decoder.decode = counting  # type: ignore[method-assign]
    ids = tokenizer.encode("안녕 and more 한국어 " * 100, add_special_tokens=False)
    broken = tokenizer.encode("안", add_special_tokens=False)[-1:] * 2000
    output = broken if kind == "broken bytes" else ids
    detokenizer = Detokenizer(
        decoder, ids if kind == "long prompt" else [], skip_special_tokens=True
    )
    for token in output:
        detokenizer.push(token)
    assert longest <= 65
    assert calls <= 2 * len(output) + 6
