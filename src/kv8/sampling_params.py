"""How a request's tokens are chosen and when it ends; validated once, immutable afterwards.

Names and meanings are vLLM's for everything both have.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from kv8.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request.

    Attributes:
        n: how many completions of the prompt.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the most likely tokens whose probabilities sum to at least this, in (0, 1].
        top_k: keep this many most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        presence_penalty: subtracted from the logit of every token generated so far, in [-2, 2].
        frequency_penalty: subtracted once for each time it was generated, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in the
            prompt or the output; more than 0, 1 is off.
        seed: makes the request repeatable whatever else runs beside it.
        stop: strings that end the output; they are not part of it.
        stop_token_ids: tokens that end the output.
        ignore_eos: go on after the model's end token.
        max_tokens: most tokens to generate; `None` for as many as fit.
        min_tokens: no end token or stop string ends the output before this many tokens.
        logprobs: report this many most likely tokens (and the chosen one) for each output token.
        prompt_logprobs: the same for each prompt token after the first.
        include_stop_str_in_output: keep the stop string that ended the output.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: a value is out of range, or two contradict each other.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            self._require_int(name)
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._require_int(name)
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.0, math.inf),
        ):
            self._require_between(name, low, high)
        self._require(self.n >= 1, "n", "at least 1")
        self._require(self.top_p > 0, "top_p", "more than 0 and at most 1")
        self._require(self.repetition_penalty > 0, "repetition_penalty", "more than 0")
        self._require(self.top_k >= -1, "top_k", "-1 or 0 (all tokens) or a positive number")
        self._require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        limit = self.max_tokens if self.max_tokens is not None else self.min_tokens
        self._require(0 <= self.min_tokens <= limit, "min_tokens", "from 0 to max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            allowed = f"from 0 to {MAX_LOGPROBS}"
            self._require(value is None or 0 <= value <= MAX_LOGPROBS, name, allowed)
        self._require(
            self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a signed 64-bit integer"
        )
        object.__setattr__(self, "stop_strings", self._stop_strings())
        object.__setattr__(self, "stop_token_ids", self._stop_token_ids())

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def _stop_strings(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold non-empty strings, got {text!r}.")
        return stop

    def _stop_token_ids(self) -> tuple[int, ...]:
        ids = tuple(self.stop_token_ids or ())
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise RequestError(f"stop_token_ids must hold token numbers, got {token!r}.")
        return ids

    def _require(self, condition: bool, name: str, allowed: str) -> None:
        if not condition:
            raise RequestError(f"{name} must be {allowed}, got {getattr(self, name)!r}.")

    def _require_int(self, name: str) -> None:
        value = getattr(self, name)
        valid = isinstance(value, int) and not isinstance(value, bool)
        self._require(valid, name, "a whole number")

    def _require_between(self, name: str, low: float, high: float) -> None:
        value: Any = getattr(self, name)
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        allowed = (
            f"a number from {low:g} to {high:g}" if high < math.inf else f"a number >= {low:g}"
        )
        self._require(valid and math.isfinite(value) and low <= value <= high, name, allowed)


SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams) if f.init)
