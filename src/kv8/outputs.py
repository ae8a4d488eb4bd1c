"""What a finished (or streaming) request gives back; names and meanings are vLLM's."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """One candidate token: natural-log probability, rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which of the ``n`` completions.
        text: the generated text.
        token_ids: the generated tokens.
        cumulative_logprob: sum of the chosen tokens' log probabilities, if they were asked for.
        logprobs: for each token, candidates by token number; `None` if not asked for.
        finish_reason: ``stop`` (end token, stop token or stop string), ``length``, ``abort``, or
            ``error``; `None` while running.
        stop_reason: the stop string or stop token that ended it; `None` for the end token.
        error: what failed, if it ended with ``error``.
        refused: whether that lay in what was asked for, not in the engine.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: bool = False


@dataclass
class RequestOutput:
    """One prompt and its completions.

    Attributes:
        request_id: the engine's name for the request.
        prompt: the prompt's text, if it was given as text.
        prompt_token_ids: the prompt's tokens.
        prompt_logprobs: for each prompt token (the first has none), candidates by token number.
        outputs: the completions.
        finished: whether every completion has ended.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
