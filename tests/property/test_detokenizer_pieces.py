"""Pieces put together equal the text decoded at once, whatever the tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text_tokenizers import byte_fallback, byte_level

from kv8.engine.detokenizer import Detokenizer, TokenDecoder

texts = st.text(
    st.sampled_from("abthe ndok\n\t안녕하세요한국어é👩\u200d👧🏽漢ß\u0301")
    | st.characters(codec="utf-8"),
    max_size=60,
)
token_lists = st.lists(st.integers(0, 270), max_size=80)


def pieces(tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(TokenDecoder(tokenizer), prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in output), detokenizer.flush()]


def at_once(tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    decode = tokenizer.decode
    return decode(prompt + output, skip_special_tokens=skip)[
        len(decode(prompt, skip_special_tokens=skip)) :
    ]


@settings(max_examples=300)
@given(token_lists, st.booleans())
def test_any_bytes_of_a_byte_level_tokenizer(output: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    assert "".join(pieces(tokenizer, [], output, skip=skip)) == at_once(
        tokenizer, [], output, skip=skip
    )


@settings(max_examples=300)
@given(texts, texts, st.sampled_from(["level", "fallback"]))
def test_any_text_after_any_prompt(before: str, after: str, kind: str) -> None:
    tokenizer = byte_level() if kind == "level" else byte_fallback()
    prompt = tokenizer.encode(before, add_special_tokens=False)
    output = tokenizer.encode(before + after, add_special_tokens=False)[len(prompt) :]
    parts = pieces(tokenizer, prompt, output)
    assert "".join(parts) == at_once(tokenizer, prompt, output)


@settings(max_examples=300)
@given(texts, st.sampled_from(["level", "fallback"]))
def test_whole_text_comes_out_in_whole_characters(text: str, kind: str) -> None:
    tokenizer = byte_level() if kind == "level" else byte_fallback()
    text = text.replace("\ufffd", "")
    parts = pieces(tokenizer, [], tokenizer.encode(text, add_special_tokens=False))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 300), max_size=80))
def test_broken_byte_fallback_keeps_every_whole_character(output: list[int]) -> None:
    """One wrong byte makes this kind of tokenizer show a whole run of bytes as broken.

    Text already returned cannot be taken back, so the pieces may show more than decoding at once;
    they end alike from the last byte token on.
    """
    tokenizer = byte_fallback()
    output = [min(token, len(tokenizer) - 1) for token in output]
    got, whole = "".join(pieces(tokenizer, [], output)), at_once(tokenizer, [], output)
    assert got.replace("\ufffd", "").endswith(whole.rpartition("\ufffd")[2])
    if "\ufffd" not in whole:
        assert got == whole
