"""What chat and text completion have in common: their fields, and how they refuse others."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from kv8.sampling_params import MAX_LOGPROBS, SamplingParams
from kv8.server.mailbox import Usage
from kv8.server.protocol.strict import Body, ListOf, Strict, TokenId
from kv8.server.protocol.structured import ResponseFormat, StructuredOutputs

MOST_CHOICES = 128  # as OpenAI has it
LARGEST_SEED = 2**63 - 1
_ABOUT = ("title", "description", "default")  # of a field, whatever type it has

Stop = str | ListOf[str] | None

# Of answers: fields that OpenAI does not have are there when they were asked for, never null.
OMITTED: Any = Field(None, exclude_if=lambda value: value is None)
TokenIds = list[int] | None
PromptLogprobs = list[dict[str, Any] | None] | None


class Refusal:
    """A field of OpenAI's that asks for something kv8 does not do.

    Args:
        reason: why, and what to do instead.
        neutral: values that ask for nothing; a field with one of them is let pass, as is null.
    """

    def __init__(self, reason: str, *neutral: Any) -> None:
        self.reason = reason
        self.neutral = neutral

    def lets_pass(self, value: Any) -> bool:
        """Whether ``value`` asks for nothing."""
        return value is None or any(value == n and type(value) is type(n) for n in self.neutral)


class StreamOptions(Strict):
    """How a streamed answer is told."""

    include_usage: bool = Field(
        False, description="Send a last chunk with the tokens read and written."
    )


class GenerationRequest(Body):
    """Fields of chat and text completion alike."""

    refused: ClassVar[Mapping[str, Refusal]] = {}

    model: str | None = Field(
        None, description="A served name; by default the only model there is."
    )
    n: int = Field(1, ge=1, le=MOST_CHOICES, description="Completions of each prompt.")
    temperature: float = Field(1.0, ge=0, description="0 always takes the most likely token.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 or -1 keeps all.")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0)
    seed: int | None = Field(None, ge=-LARGEST_SEED - 1, le=LARGEST_SEED)
    stop: Stop = Field(None, description="Up to here, without it.")
    stop_token_ids: ListOf[TokenId] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = Field(False, description="Add prompt_token_ids and token_ids.")
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        """Refuse by name what kv8 does not do; a known field that is null was left out."""
        if not isinstance(body, dict):
            return body
        for name, refusal in cls.refused.items():
            if name in body and not refusal.lets_pass(body[name]):
                raise ValueError(f"{name} is not supported. {refusal.reason}")
        return {
            name: value
            for name, value in body.items()
            if name not in cls.refused and not (value is None and name in cls.model_fields)
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe the fields, with null for each that may be left out: `_refuse` takes both."""
        described = handler.resolve_ref_schema(handler(core))
        required = described.get("required", ())
        for name, field in described["properties"].items():
            if name not in required and {"type": "null"} not in field.get("anyOf", ()):
                told = {key: field.pop(key) for key in _ABOUT if key in field}
                described["properties"][name] = {"anyOf": [field, {"type": "null"}]} | told
        return described

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options has a meaning only with stream=true.")
        return self

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Return what the engine is told; ``more`` are fields whose names differ.

        Raises:
            RequestError: two fields contradict each other.
        """
        names = (
            "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
            "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids",
            "ignore_eos", "min_tokens", "include_stop_str_in_output", "skip_special_tokens",
        )  # fmt: skip
        fields = {name: getattr(self, name) for name in names}
        return SamplingParams(**fields | {"prompt_logprobs": self.prompt_logprobs} | more)


class PromptTokensDetails(BaseModel):
    """Where a prompt's keys and values came from."""

    cached_tokens: int


class UsageBody(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_body(usage: Usage) -> UsageBody:
    """Return counts of tokens as OpenAI tells them."""
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )
