"""How a request's tokens are chosen and when it ends; validated once, immutable afterwards.

Names and meanings are vLLM's for everything both have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kv8.errors import RequestError
from kv8.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20


def _param(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request. What each means stands beside it, for every reader.

    Raises:
        RequestError: a value is out of range, or two contradict each other.
    """

    n: int = _param(1, "How many completions of the prompt.")
    temperature: float = _param(
        1.0, "0 always takes the most likely token; otherwise logits are divided by it."
    )
    top_p: float = _param(
        1.0, "Keep the most likely tokens that reach this probability together, in (0, 1]."
    )
    top_k: int = _param(0, "Keep this many most likely tokens; 0 or -1 keeps all.")
    min_p: float = _param(
        0.0, "Drop tokens less likely than this share of the most likely one, in [0, 1]."
    )
    presence_penalty: float = _param(
        0.0, "Subtracted from the logit of every token generated so far, in [-2, 2]."
    )
    frequency_penalty: float = _param(
        0.0, "Subtracted once for each time a token was generated, in [-2, 2]."
    )
    repetition_penalty: float = _param(
        1.0,
        "Divides positive and multiplies negative logits of tokens seen in the prompt or the "
        "output; more than 0, and 1 is off.",
    )
    seed: int | None = _param(None, "Makes the request repeatable whatever else runs beside it.")
    stop: str | list[str] | tuple[str, ...] | None = _param(
        None, "Strings that end the output; they are not part of it."
    )
    stop_token_ids: list[int] | tuple[int, ...] | None = _param(None, "Tokens that end the output.")
    ignore_eos: bool = _param(False, "Go on after the model's end token.")
    max_tokens: int | None = _param(16, "Most tokens to generate; without a limit, as many as fit.")
    min_tokens: int = _param(
        0, "No end token, stop token or stop string ends the output before this many tokens."
    )
    logprobs: int | None = _param(
        None,
        "Report this many most likely tokens, and the chosen one, for each output token: the "
        "model's own log probabilities, before temperature, penalties and truncation.",
    )
    prompt_logprobs: int | None = _param(None, "The same for each prompt token after the first.")
    include_stop_str_in_output: bool = _param(
        False, "Keep the stop string or stop token that ended the output in its text."
    )
    skip_special_tokens: bool = _param(True, "Leave special tokens out of the text.")
    structured_outputs: StructuredOutputsParams | None = _param(
        None, "The form the output must have: a JSON schema, a regular expression, and so on."
    )
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
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            self._require(isinstance(getattr(self, name), bool), name, "True or False")
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
        self._check_structured_outputs()
        object.__setattr__(self, "stop_strings", self._stop_strings())
        object.__setattr__(self, "stop_token_ids", self._stop_token_ids())

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def _check_structured_outputs(self) -> None:
        form = self.structured_outputs
        if form is None:
            return
        kind = isinstance(form, StructuredOutputsParams)
        self._require(kind, "structured_outputs", "a StructuredOutputsParams")
        # An output that is complete ends there; nothing could follow it that keeps the form.
        self._require(not self.ignore_eos, "ignore_eos", "False with structured_outputs")
        self._require(self.min_tokens == 0, "min_tokens", "0 with structured_outputs")

    def _stop_strings(self) -> tuple[str, ...]:
        strings = [self.stop] if isinstance(self.stop, str) else self._listed("stop")
        for text in strings:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold non-empty strings, got {text!r}.")
        return tuple(strings)

    def _stop_token_ids(self) -> tuple[int, ...]:
        ids = self._listed("stop_token_ids")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise RequestError(f"stop_token_ids must hold token numbers, got {token!r}.")
        return tuple(ids)

    def _listed(self, name: str) -> Sequence[Any]:
        value = getattr(self, name)
        self._require(value is None or isinstance(value, list | tuple), name, "a list")
        return value or ()

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


SAMPLING_FIELDS = {f.name: f for f in fields(SamplingParams) if f.init}
