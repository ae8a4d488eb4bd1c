"""``/v1/chat/completions``: what it takes and what it gives."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from kv8.sampling_params import MAX_LOGPROBS
from kv8.server.protocol.common import (
    OMITTED,
    GenerationRequest,
    PromptLogprobs,
    Refusal,
    TokenIds,
    UsageBody,
)
from kv8.server.protocol.messages import Message
from kv8.server.protocol.strict import ListOf
from kv8.server.protocol.tools import Tool, ToolCall, ToolCallDelta, ToolChoice

_TEXT_ONLY = "kv8 reads and writes text alone."


class ChatCompletionRequest(GenerationRequest):
    """A conversation to answer."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "audio": Refusal(_TEXT_ONLY),
        "function_call": Refusal("Its successor is tool_choice.", "none"),
        "functions": Refusal("Its successor is tools.", []),
        "logit_bias": Refusal("Leave it out.", {}),
        "metadata": Refusal("kv8 stores nothing.", {}),
        "modalities": Refusal(_TEXT_ONLY, ["text"]),
        "prediction": Refusal("kv8 does not speculate."),
        "prompt_cache_key": Refusal("Equal prefixes are found by what they say, without a key."),
        "reasoning_effort": Refusal("Say it in the prompt, as the model was trained to be told."),
        "safety_identifier": Refusal("kv8 keeps no record of users."),
        "service_tier": Refusal("There is one.", "auto", "default"),
        "store": Refusal("kv8 stores nothing.", False),
        "user": Refusal("kv8 keeps no record of users."),
        "verbosity": Refusal("Say it in the prompt."),
        "web_search_options": Refusal("kv8 searches nothing."),
    }

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(
        None, ge=1, description="Most tokens of an answer; by default as many as fit."
    )
    max_tokens: int | None = Field(None, ge=1, description="The older name of the same.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: ListOf[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = Field(
        True, description="Whether the template adds what begins an answer."
    )

    @model_validator(mode="after")
    def _check_pairs(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs has a meaning only with logprobs=true.")
        given = self.max_completion_tokens, self.max_tokens
        if None not in given and given[0] != given[1]:
            raise ValueError(
                "max_tokens is the older name of max_completion_tokens, and they differ. Give one."
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens to report besides the chosen one."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of an answer, whichever name it was given under."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TopLogprob(BaseModel):
    """One of the most likely tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] | None = Field(description="Null where the token is no whole characters.")


class TokenLogprob(TopLogprob):
    """The token at a place, and what else was likely there."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    """Log probabilities of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = OMITTED


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = Field(
        description="The stop string or stop token that ended it; null for the model's end token."
    )
    token_ids: TokenIds = OMITTED


class ChatCompletion(BaseModel):
    """All answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs = OMITTED
    prompt_token_ids: TokenIds = OMITTED


class ChatDelta(BaseModel):
    """What a message gained."""

    role: Literal["assistant"] | None = OMITTED
    content: str | None = OMITTED
    tool_calls: list[ToolCallDelta] | None = OMITTED


class ChatChunkChoice(BaseModel):
    """What one answer gained."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | None = OMITTED
    token_ids: TokenIds = OMITTED


class ChatChunk(BaseModel):
    """One piece of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    prompt_logprobs: PromptLogprobs = OMITTED
    prompt_token_ids: TokenIds = OMITTED
