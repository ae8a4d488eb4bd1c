"""Tool calls in chat: what the template is told, what the answer must look like, how it is read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kv8.errors import RequestError
from kv8.server.protocol.chat import ChatCompletionRequest
from kv8.server.protocol.errors import ApiError
from kv8.server.protocol.messages import (
    AssistantMessage,
    Message,
    ToolMessage,
    as_template_input,
)
from kv8.server.protocol.tools import FunctionDefinition, NamedToolChoice
from kv8.server.state import ServerState
from kv8.server.structured import form_field
from kv8.server.tool_format import ToolFormat, find_tool_format
from kv8.server.tool_grammar import call_grammar
from kv8.server.tool_reader import ToolReader
from kv8.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True)
class ToolUse:
    """What tools mean for one request; by default nothing.

    Attributes:
        template_options: keywords for the chat template.
        sampling_options: sampling parameters.
        style: how the model calls, if it may.
        names: what it may call.
    """

    template_options: Mapping[str, Any] = field(default_factory=dict)
    sampling_options: Mapping[str, Any] = field(default_factory=dict)
    style: ToolFormat | None = None
    names: frozenset[str] = frozenset()

    def reader(self) -> ToolReader | None:
        """Return what reads one answer; `None` if an answer is text and nothing else."""
        return None if self.style is None else ToolReader(self.style, self.names)


@dataclass(frozen=True)
class _Markers:
    """A model's way of calling, and the tokens that spell its markers."""

    style: ToolFormat
    added_tokens: Mapping[str, int]
    special: bool


async def tool_use(body: ChatCompletionRequest, state: ServerState) -> ToolUse:
    """Return what the tools of ``body`` mean for its prompt and its answers.

    Raises:
        ApiError: the model's template has no tools, or the fields contradict each other.
    """
    callable_tools = _callable_tools(body)
    mentioned = any(_mentions_tools(message) for message in body.messages)
    if not callable_tools and not mentioned:
        return ToolUse()
    template = state.texts.chat_template
    try:
        markers = await state.texts.use(lambda tokenizer: _markers(tokenizer, template))
    except RequestError as error:
        raise ApiError(400, str(error), param="tools" if body.tools else "messages") from None
    if not callable_tools:
        return ToolUse()
    options: dict[str, Any] = {"skip_special_tokens": False} if markers.special else {}
    grammar = _grammar(body, callable_tools, markers)
    if grammar is not None:
        options["structured_outputs"] = StructuredOutputsParams(grammar=grammar)
    return ToolUse(
        # Templates that show a tool show all of it, as it was given.
        template_options={
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        },
        sampling_options=options,
        style=markers.style,
        names=frozenset(function.name for function in callable_tools),
    )


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as templates read them: the arguments of past calls as an object.

    Raises:
        ApiError: such arguments are no JSON object.
    """
    plain = [as_template_input(message) for message in messages]
    for number, message in enumerate(plain):
        for call in message.get("tool_calls", ()):
            function = call["function"]
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                raise ApiError(
                    400,
                    f"messages[{number}] calls {function['name']} with arguments that are no JSON "
                    f"object: {function['arguments']!r:.80}.",
                    param=f"messages[{number}].tool_calls",
                )
            function["arguments"] = arguments
    return plain


def _callable_tools(body: ChatCompletionRequest) -> list[FunctionDefinition]:
    """Return the functions an answer may call; none if it must not call any."""
    functions = [tool.function for tool in body.tools or ()]
    choice = body.tool_choice
    names = [function.name for function in functions]
    if not functions:
        for name, value in (
            ("tool_choice", choice),
            ("parallel_tool_calls", body.parallel_tool_calls),
        ):
            if value not in (None, "none"):
                raise ApiError(
                    400, f"{name} has a meaning only with tools; there are none.", param=name
                )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(
            400, f"tools holds {twice} more than once. Names must differ.", param="tools"
        )
    if choice == "none":
        return []
    if functions and form_field(body) is not None:
        raise ApiError(
            400,
            f"{form_field(body)} says what the answer is, and tools let it be calls instead. Give "
            f"one of the two, or tool_choice='none'.",
            param="tools",
        )
    if isinstance(choice, NamedToolChoice):
        wanted = choice.function.name
        if wanted not in names:
            raise ApiError(
                400,
                f"tool_choice wants {wanted}, which is not among tools: {', '.join(names)}.",
                param="tool_choice",
            )
        return [function for function in functions if function.name == wanted]
    return functions


def _grammar(
    body: ChatCompletionRequest, functions: Sequence[FunctionDefinition], markers: _Markers
) -> str | None:
    """Return the grammar that answers must follow, `None` if any text will do."""
    must_call = body.tool_choice == "required" or isinstance(body.tool_choice, NamedToolChoice)
    parallel = body.parallel_tool_calls is not False
    if not must_call and parallel and not any(function.strict for function in functions):
        return None
    if not must_call and not markers.style.begin.strip():
        raise ApiError(
            400,
            "tools: strict functions and parallel_tool_calls=false need a model that marks where a "
            "call begins, which this one's chat template does not. Leave them out, or give "
            "tool_choice='required'.",
            param="tools",
        )
    named = isinstance(body.tool_choice, NamedToolChoice)
    return call_grammar(
        functions,
        markers.style,
        markers.added_tokens,
        parallel=parallel and not named,
        must_call=must_call,
    )


def _mentions_tools(message: Message) -> bool:
    if isinstance(message, AssistantMessage):
        return bool(message.tool_calls)
    return isinstance(message, ToolMessage)


def _markers(tokenizer: Any, template: str | None) -> _Markers:
    style = find_tool_format(tokenizer, template)
    text = style.begin + style.end + (style.between or "")
    added = {
        token: number for token, number in tokenizer.get_added_vocab().items() if token in text
    }
    known = tokenizer.added_tokens_decoder
    return _Markers(style, added, any(known[number].special for number in added.values()))
