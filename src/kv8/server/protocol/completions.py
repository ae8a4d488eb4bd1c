"""``/v1/completions``: what it takes and what it gives."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from kv8.sampling_params import MAX_LOGPROBS
from kv8.server.protocol.common import (
    OMITTED,
    GenerationRequest,
    PromptLogprobs,
    Refusal,
    TokenIds,
    UsageBody,
)
from kv8.server.protocol.strict import ListOf, TokenId

_TokenIds = Annotated[ListOf[TokenId], Field(min_length=1)]
_MOST_PROMPTS = 1024


class CompletionRequest(GenerationRequest):
    """Prompts to go on from."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "best_of": Refusal("Ask for n completions, and choose.", 1),
        "logit_bias": Refusal("Leave it out.", {}),
        "suffix": Refusal("kv8 only goes on from a prompt's end."),
        "user": Refusal("kv8 keeps no record of users."),
    }

    prompt: (
        str
        | _TokenIds
        | Annotated[ListOf[str], Field(min_length=1, max_length=_MOST_PROMPTS)]
        | Annotated[ListOf[_TokenIds], Field(min_length=1, max_length=_MOST_PROMPTS)]
    ) = Field(description="Text, token numbers, or a list of either.")
    max_tokens: int | None = Field(16, ge=1, description="Most tokens of a completion.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = Field(False, description="Begin each completion with its prompt.")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        first = self.prompt[0]
        return [self.prompt] if isinstance(first, int) else self.prompt  # type: ignore[return-value]


class CompletionLogprobs(BaseModel):
    """Log probabilities of a completion's tokens, list by list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One completion, or what it gained."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs = OMITTED
    prompt_token_ids: TokenIds = OMITTED
    token_ids: TokenIds = OMITTED


class Completion(BaseModel):
    """All completions, or a piece of a streamed answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
