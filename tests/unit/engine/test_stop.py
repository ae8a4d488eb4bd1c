"""Stop strings across pieces, stop tokens, and the text that is released meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text_tokenizers import byte_level

from kv8.engine.detokenizer import Detokenizer, TokenDecoder
from kv8.engine.stop import OutputText, Stop, StopStrings
from kv8.sampling_params import SamplingParams


def feed(stops: StopStrings, parts: list[str], armed_from: int = 0) -> tuple[list[str], str | None]:
    released = []
    for i, part in enumerate(parts):
        text, found = stops.push(part, armed=i >= armed_from)
        released.append(text)
        if found is not None:
            return released, found
    return [*released, stops.flush()], None


def oracle(strings: list[str], text: str, include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - (0 if include else len(longest))], longest
    return text, None


def test_a_string_over_two_pieces_is_held_and_found() -> None:
    released, found = feed(StopStrings(["</end>"]), ["a</", "e", "nd>b"])
    assert released == ["a", "", ""]
    assert found == "</end>"


def test_a_false_start_is_released_as_soon_as_it_is_one() -> None:
    released, found = feed(StopStrings(["abcd"]), ["xab", "c", "e", "ab"])
    assert released == ["x", "", "abce", "", "ab"]
    assert found is None


short = st.text("ab", min_size=1, max_size=4)


@given(st.lists(short, max_size=3), st.lists(st.text("abc", max_size=5), max_size=8), st.booleans())
def test_pieces_make_no_difference(strings: list[str], parts: list[str], include: bool) -> None:
    released, found = feed(StopStrings(strings, include=include), parts)
    assert ("".join(released), found) == oracle(strings, "".join(parts), include)


@given(st.lists(short, min_size=1, max_size=3), st.lists(st.text("abc", max_size=4), max_size=8))
def test_nothing_counts_before_it_is_armed(strings: list[str], parts: list[str]) -> None:
    released, found = feed(StopStrings(strings), parts, armed_from=len(parts))
    assert "".join(released) == "".join(parts)
    assert found is None


def output_text(**params) -> OutputText:
    detokenizer = Detokenizer(TokenDecoder(byte_level()), [], skip_special_tokens=True)
    return OutputText(detokenizer, SamplingParams(**params), [byte_level().eos_token_id])


def ids(text: str) -> list[int]:
    return byte_level().encode(text)


def test_the_end_token_stops_without_a_reason_and_without_text() -> None:
    output = output_text(skip_special_tokens=False)
    assert output.append(ids("a")[0]) is None
    assert output.append(byte_level().eos_token_id) == Stop(None)
    output.finish()
    assert output.text == "a"


def test_the_end_token_can_be_ignored() -> None:
    output = output_text(ignore_eos=True)
    assert output.append(byte_level().eos_token_id) is None


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_the_reason(include: bool) -> None:
    [a, b] = ids("ab")
    output = output_text(stop_token_ids=[b], include_stop_str_in_output=include)
    assert output.append(a) is None
    assert output.append(b) == Stop(b)
    output.finish()
    assert output.text == ("ab" if include else "a")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_the_reason(include: bool) -> None:
    output = output_text(stop=["안녕"], include_stop_str_in_output=include)
    stops = [output.append(token) for token in ids("x안녕")]
    assert stops[-1] == Stop("안녕")
    assert not any(stops[:-1])
    output.finish()
    assert output.text == ("x안녕" if include else "x")


def test_held_text_is_part_of_the_output_when_it_ends_otherwise() -> None:
    output = output_text(stop=["abc"])
    for token in ids("xab"):
        output.append(token)
    assert output.text == "x"
    output.finish()
    assert output.text == "xab"


def test_nothing_stops_before_min_tokens() -> None:
    output = output_text(stop=["aa"], min_tokens=3)
    stops = [output.append(token) for token in ids("aa")]
    assert stops == [None, None]
    assert output.append(ids("a")[0]) == Stop("aa")
    output.finish()
    assert output.text == "a"
