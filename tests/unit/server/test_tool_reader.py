"""Tool calls in a text that comes in pieces, and what only looks like one."""

import json
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from kv8.server.tool_format import ToolFormat
from kv8.server.tool_reader import ToolReader

WRAPPED = ToolFormat(
    "<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n", "name", "arguments"
)
LISTED = ToolFormat("[CALLS] [", "]", ", ", "name", "arguments")
BARE = ToolFormat("", "", None, "name", "parameters")
STYLES = {"wrapped": WRAPPED, "listed": LISTED, "bare": BARE}
NAMES = {"look", "tell"}

LOOK = '{"name": "look", "arguments": {"where": "a \\"b\\" } {"}}'
TELL = '{"name": "tell", "arguments": {}}'


def read(style: ToolFormat, *pieces: str) -> tuple[str, list[tuple[str, dict]]]:
    """Return the content and the calls of an answer, put together."""
    reader = ToolReader(style, NAMES)
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish()
    assert all(delta.content or delta.tool_calls for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    assert reader.called is bool(calls)
    content = "".join(delta.content for delta in deltas)
    return content, [(call.function.name, json.loads(call.function.arguments)) for call in calls]


BOTH = [("look", {"where": 'a "b" } {'}), ("tell", {})]


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        (WRAPPED, "Hello.", "Hello.", []),
        (WRAPPED, "", "", []),
        (WRAPPED, " \n", "", []),
        (WRAPPED, f"<tool_call>\n{LOOK}\n</tool_call>", "", BOTH[:1]),
        (WRAPPED, f"<tool_call>{LOOK}</tool_call>", "", BOTH[:1]),
        (WRAPPED, f"Hm.\n<tool_call>\n{LOOK}\n</tool_call>", "Hm.\n", BOTH[:1]),
        (
            WRAPPED,
            f"<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>\n{TELL}\n</tool_call>\n",
            "",
            BOTH,
        ),
        (WRAPPED, f"<tool_call>\n{TELL}", "", BOTH[1:]),
        (WRAPPED, f"<tool_call>\n{TELL}\n</tool", "", BOTH[1:]),
        (WRAPPED, f"<tool_call>\n{TELL}\n</tool_call> bye", " bye", BOTH[1:]),
        (WRAPPED, "<tool_call>\nhm", "<tool_call>\nhm", []),
        (WRAPPED, '<tool_call>\n{"name": "loo', '<tool_call>\n{"name": "loo', []),
        (WRAPPED, '<tool_call>{"name": "fly"} x', '<tool_call>{"name": "fly"} x', []),
        (WRAPPED, '<tool_call>{"name": ["look"]}', '<tool_call>{"name": ["look"]}', []),
        (WRAPPED, '<tool_call>{"a": NaN}', '<tool_call>{"a": NaN}', []),
        (WRAPPED, "a < b <tool", "a < b <tool", []),
        (WRAPPED, f"<tool_<tool_call>{TELL}", "<tool_", BOTH[1:]),
        (WRAPPED, '<tool_call>{"name": "tell"}</tool_call>', "", BOTH[1:]),
        (LISTED, f"[CALLS] [{LOOK}, {TELL}]", "", BOTH),
        (LISTED, f"[CALLS][{LOOK},{TELL}]", "", BOTH),
        (LISTED, f"Hm. [CALLS] [{TELL}] bye", "Hm. bye", BOTH[1:]),
        (LISTED, "[CALLS] none", "[CALLS] none", []),
        (BARE, LOOK.replace("arguments", "parameters"), "", BOTH[:1]),
        (BARE, " " + TELL.replace("arguments", "parameters"), "", BOTH[1:]),
        (BARE, '{"a": 1}', '{"a": 1}', []),
        (BARE, f"Say {TELL}", f"Say {TELL}", []),
    ],
)
def test_what_is_read(style: ToolFormat, text: str, content: str, calls: list) -> None:
    got_content, got_calls = read(style, text)
    assert got_calls == calls
    assert got_content.replace("  ", " ") == content


MARKS = ["<tool_call>", "</tool_call>", "<tool", "[CALLS] [", "]", ", ", "{", "}", '"', "\\", " "]
WORDS = ["\n", "text", "é", '{"name": "look"}', LOOK, TELL, TELL.replace("arguments", "parameters")]
parts = st.sampled_from([*MARKS, *WORDS])


@given(
    style=st.sampled_from(sorted(STYLES)),
    text=st.lists(parts, max_size=9).map("".join),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
@example(style="wrapped", text=f"<tool_call>\n{LOOK}\n</tool_call>", cuts=list(range(300)))
@example(style="listed", text=f"x [CALLS] [{LOOK}, {TELL}]", cuts=list(range(300)))
def test_how_the_text_is_cut_makes_no_difference(style: str, text: str, cuts: list[int]) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    assert read(STYLES[style], *pieces) == read(STYLES[style], text)


def test_text_is_passed_on_as_soon_as_it_is_sure() -> None:
    reader = ToolReader(WRAPPED, NAMES)
    assert [d.content for d in reader.push("Hello <tool")] == ["Hello "]
    assert [d.content for d in reader.push("box>")] == ["<toolbox>"]


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    reader = ToolReader(WRAPPED, NAMES)
    [delta] = reader.push('<tool_call>{"name": "look", "arguments": {"where": "\\ud800"}}')
    assert delta.tool_calls[0].function.arguments == '{"where": "\\ud800"}'


def test_arguments_nested_beyond_reason_are_text() -> None:
    text = '<tool_call>{"name": "look", "arguments": ' + '{"a":' * 200_000
    text += "1" + "}" * 200_001
    content, calls = read(WRAPPED, text)
    assert (content, calls) == (text, [])
