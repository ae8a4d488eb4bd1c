"""Answers that must call tools, or may: what their grammar lets through."""

import pytest
from tests.text_tokenizers import byte_level

from kv8.engine.grammars import Grammars
from kv8.errors import RequestError
from kv8.server.protocol.tools import FunctionDefinition
from kv8.server.tool_format import ToolFormat
from kv8.server.tool_grammar import call_grammar
from kv8.structured_outputs import StructuredOutputsParams

WRAPPED = ToolFormat(
    "<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n", "name", "arguments"
)
LISTED = ToolFormat("[CALLS] [", "]", ", ", "name", "arguments")
BARE = ToolFormat("", "", None, "name", "parameters")

LOOK = FunctionDefinition(
    name="look",
    parameters={
        "type": "object",
        "properties": {"where": {"$ref": "#/$defs/place"}},
        "required": ["where"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["here", "there"]}},
    },
)
TELL = FunctionDefinition(name="tell")
LOOKS = '{"name": "look", "arguments": {"where": "here"}}'
TELLS = '{"name": "tell", "arguments": {}}'


def accepts(text: str, style: ToolFormat, *, tools=(LOOK, TELL), added=None, **how: bool) -> bool:
    """Return whether an answer of ``text`` follows the grammar to its end."""
    tokenizer = byte_level()
    how = {"parallel": True, "must_call": True} | how
    grammar = call_grammar(tools, style, added or {}, **how)
    end = tokenizer.eos_token_id
    compiled = Grammars(tokenizer, {end}, len(tokenizer))
    mask = compiled.open(StructuredOutputsParams(grammar=grammar))
    try:
        return bool(mask.allowed(tokenizer.encode(text, add_special_tokens=False))[end])
    except RequestError:
        return False


@pytest.mark.parametrize("must_call", [True, False])
def test_calls_as_the_template_writes_them(must_call: bool) -> None:
    assert accepts(f"<tool_call>\n{LOOKS}\n</tool_call>", WRAPPED, must_call=must_call)
    two = f"<tool_call>\n{LOOKS}\n</tool_call>\n<tool_call>\n{TELLS}\n</tool_call>"
    assert accepts(two, WRAPPED, must_call=must_call)
    assert not accepts(two, WRAPPED, must_call=must_call, parallel=False)
    assert accepts(f"[CALLS] [{LOOKS}, {TELLS}]", LISTED, must_call=must_call)
    assert not accepts(f"[CALLS] [{LOOKS}", LISTED, must_call=must_call)


def test_a_bare_call() -> None:
    assert accepts(TELLS.replace("arguments", "parameters"), BARE)
    assert not accepts(TELLS, BARE)


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize(
    "wrong",
    [
        LOOKS.replace("here", "nowhere"),
        LOOKS.replace("look", "fly"),
        LOOKS.replace("where", "when"),
        TELLS.replace("{}", '{"a": 1}'),
    ],
)
def test_a_call_that_does_not_fit_its_schema_cannot_be_made(wrong: str, must_call: bool) -> None:
    assert not accepts(f"<tool_call>\n{wrong}\n</tool_call>", WRAPPED, must_call=must_call)


def test_only_the_given_functions_can_be_called() -> None:
    assert not accepts(f"<tool_call>\n{LOOKS}\n</tool_call>", WRAPPED, tools=[TELL])


def test_text_alone_is_no_call() -> None:
    for text in ("", "Hello.", f"Hm. <tool_call>\n{LOOKS}\n</tool_call>"):
        assert not accepts(text, WRAPPED)


@pytest.mark.parametrize(
    "text", ["", "Hello.\nThere.", "a < b <tool", f"Hm.\n<tool_call>\n{LOOKS}\n</tool_call>"]
)
def test_an_answer_that_may_call_may_also_say_anything(text: str) -> None:
    assert accepts(text, WRAPPED, must_call=False)


def test_a_marker_that_is_a_token_of_its_own_is_that_token() -> None:
    """Spelled out letter by letter it is something else: the model never saw it so."""
    tokenizer = byte_level()
    begin, the = tokenizer.bos_token, tokenizer.convert_tokens_to_ids("the")
    style = ToolFormat(f"{begin} ", "the", f"the{begin} ", "name", "arguments")
    added = {begin: tokenizer.bos_token_id, "the": the}
    for must_call in (True, False):
        grammar = call_grammar([TELL], style, added, parallel=True, must_call=must_call)
        compiled = Grammars(tokenizer, {tokenizer.eos_token_id}, len(tokenizer))
        mask = compiled.open(StructuredOutputsParams(grammar=grammar))
        call = tokenizer.encode(f" {TELLS}", add_special_tokens=False)
        one = [tokenizer.bos_token_id, *call, the]
        assert mask.allowed([])[tokenizer.bos_token_id]
        assert mask.allowed(one + one)[tokenizer.eos_token_id]
