"""One sequence on its way through the engine: its tokens, how far it is computed, how it ended.

Plain Python; everything that can be derived from the token list is a property.
"""

import enum
import time
from dataclasses import dataclass, field

from kv8.outputs import FinishReason


class RequestState(enum.Enum):
    """Where a request stands. Preempted requests are waiting again, their tokens kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, kw_only=True)
class Request:
    """One sequence (one of the ``n`` completions of a prompt).

    Attributes:
        request_id: the caller's name for it.
        sequence: order of arrival; also the cache's name for the sequence.
        token_ids: the prompt, then every token generated so far.
        num_prompt_tokens: how many of ``token_ids`` are the prompt; at least 1.
        max_tokens: most tokens to generate.
        wants_prompt_logits: whether the logits of all prompt positions are needed, which rules out
            taking them from the prefix cache.
        leader: another request with the same prompt; this one waits until the leader has computed
            it, so that the prompt is computed once and shared.
        num_computed_tokens: tokens whose keys and values are in the cache.
        num_cached_tokens: prompt tokens found in the prefix cache when the request was first
            admitted; `None` before that.
        num_prompt_logits: prompt positions whose logits have been delivered; survives preemption.
        arrived_at: when it came, by `time.monotonic`, as are the other times.
        first_token_at: when it got its first token; `None` before that.
        last_token_at: when it got its latest token.
    """

    request_id: str
    sequence: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    wants_prompt_logits: bool = False
    leader: "Request | None" = None
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_prompt_logits: int = 0
    num_preemptions: int = field(default=0)
    arrived_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not computed yet; 1 when the request is decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_total_tokens(self) -> int:
        """Length the sequence has if it generates all it may."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.state is RequestState.FINISHED

    @property
    def reached_max_tokens(self) -> bool:
        """Whether the request has generated all it may."""
        return self.num_output_tokens >= self.max_tokens

    @property
    def follows_unready_leader(self) -> bool:
        """Whether the leader is still computing the prompt the two share."""
        leader = self.leader
        return (
            leader is not None
            and not leader.finished
            and leader.num_computed_tokens < leader.num_prompt_tokens
        )
