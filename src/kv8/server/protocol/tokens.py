"""``/tokenize`` and ``/detokenize``: what they take and what they give; shapes are vLLM's."""

from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from kv8.server.protocol.messages import Message
from kv8.server.protocol.strict import Body, ListOf, TokenId


class TokenizeRequest(Body):
    """A prompt or a conversation to turn into tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = None
    add_generation_prompt: bool = Field(
        True, description="With messages: whether the template adds what begins an answer."
    )
    return_token_strs: bool = Field(False, description="Add each token's text.")

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages: give exactly one of them.")
        return self


class TokenizeResponse(BaseModel):
    """A text's tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Tokens to turn into text."""

    model: str | None = None
    tokens: ListOf[TokenId]


class DetokenizeResponse(BaseModel):
    """The tokens' text, special tokens written out."""

    prompt: str
