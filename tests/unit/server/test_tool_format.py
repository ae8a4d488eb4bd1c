"""How a model calls tools is read off its chat template."""

import pytest
from tests.text_tokenizers import byte_level
from tests.tool_templates import BARE, LISTED, PYTHONIC, WITHOUT_RESULTS, WITHOUT_TOOLS, WRAPPED

from kv8.errors import RequestError
from kv8.server.tool_format import ToolFormat, find_tool_format


def test_calls_wrapped_one_by_one() -> None:
    assert find_tool_format(byte_level(), WRAPPED) == ToolFormat(
        begin="<tool_call>\n",
        end="\n</tool_call>",
        between="\n</tool_call>\n<tool_call>\n",
        name_key="name",
        arguments_key="arguments",
    )


def test_calls_in_a_list() -> None:
    style = find_tool_format(byte_level(), LISTED)
    assert (style.begin, style.between, style.end) == ("[CALLS] [", ", ", "]")


def test_one_bare_call() -> None:
    style = find_tool_format(byte_level(), BARE)
    assert (style.begin, style.between, style.end) == ("", None, "")
    assert style.arguments_key == "parameters"


def test_a_template_that_opens_every_answer_with_an_empty_thought() -> None:
    thinking = WRAPPED.replace("<|assistant|>", "<|assistant|><think>\n\n</think>\n\n", 1)
    thinking = thinking.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>{{ thought(m) }}", 1)
    macro = (
        "{% macro thought(m) %}{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
        "{% endmacro %}"
    )
    style = find_tool_format(byte_level(), macro + thinking)
    assert style == find_tool_format(byte_level(), WRAPPED)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (WITHOUT_TOOLS, "leaves them out"),
        (WITHOUT_RESULTS, "leaves out what they answer"),
        (PYTHONIC, "does not write a call as a JSON object"),
        (WRAPPED + "{{ raise_exception('never') }}", r"fails on them \(never\)"),
        ("{{ broken", "fails on them"),
    ],
)
def test_a_template_that_cannot_do_it_is_refused_with_the_reason(template: str, said: str) -> None:
    with pytest.raises(RequestError, match=f"tools cannot be used with this model: .*{said}"):
        find_tool_format(byte_level(), template)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(RequestError, match="tools cannot be used with this model"):
        find_tool_format(byte_level())
