"""The messages of a conversation."""

from typing import Annotated, Any, Literal

from pydantic import Field

from kv8.server.protocol.strict import ListOf, Strict
from kv8.server.protocol.tools import ToolCall


class TextPart(Strict):
    """A piece of a message's text; kv8 reads no other kind of content."""

    type: Literal["text"]
    text: str


Content = str | Annotated[ListOf[TextPart], Field(min_length=1)]


class SystemMessage(Strict):
    """What the model is told first. A developer's message is one: chat templates know no other."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(Strict):
    """What the user says."""

    role: Literal["user"]
    content: Content


class AssistantMessage(Strict):
    """What the model said; without text only if it called tools."""

    role: Literal["assistant"]
    content: Content | None = None
    refusal: None = None
    tool_calls: Annotated[ListOf[ToolCall], Field(min_length=1)] | None = None


class ToolMessage(Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


def as_template_input(message: Message) -> dict[str, Any]:
    """Return a message as chat templates read it."""
    plain: dict[str, Any] = message.model_dump(exclude_none=True)
    plain.setdefault("content", None)
    if plain["role"] == "developer":
        plain["role"] = "system"
    return plain
