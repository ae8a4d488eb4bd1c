"""Tools a chat model may call, and the calls it makes: the fields of OpenAI's API."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from kv8.server.protocol.strict import Strict

_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class FunctionDefinition(Strict):
    """A function the model may call."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments; by default there are none."
    )
    strict: bool | None = Field(None, description="Whether arguments always fit the schema.")


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    """Which function."""

    name: str


class NamedToolChoice(Strict):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class FunctionCall(Strict):
    """The function that was called, and with what."""

    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(Strict):
    """A call in a message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolCallDelta(BaseModel):
    """A call in a streamed answer; it comes whole. ``index`` counts the calls of a message."""

    index: int
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def whole(self) -> ToolCall:
        """Return the call as a message has it."""
        return ToolCall(id=self.id, type=self.type, function=self.function)
