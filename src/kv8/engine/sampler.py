"""From logits to tokens: each row by its own parameters, each draw from its own seed.

The random number behind output token i of a sequence is a function of (seed, i) and of nothing
else. There is no generator state, so neither the other rows of a step nor a preemption can move it.
"""

import hashlib
import math
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from kv8.engine.logprobs import token_logprobs
from kv8.engine.penalties import Penalties
from kv8.engine.token_mask import TokenMask
from kv8.engine.truncation import keep_min_p, keep_top_k, keep_top_p
from kv8.engine.upload import take_rows, to_device
from kv8.errors import EngineError, KV8Error, RequestError
from kv8.outputs import Logprob
from kv8.sampling_params import SamplingParams

# Values of the rows drawn from at once, in float64: on a CPU 1 MiB, which stays in a core's cache
# and is measured to take half the time of all rows at once; elsewhere 128 MiB.
_CPU_VALUES, _DEVICE_VALUES = 2**17, 2**24

_IMPOSSIBLE = torch.tensor(-math.inf)

_NOTHING_LEFT = (
    "no token is left to choose: until min_tokens, the model's end tokens and stop_token_ids are "
    "banned, and these are all there are"
)


class SamplingState:
    """What sampling needs to know of one sequence, from its first token to its last.

    Args:
        params: the request's parameters.
        token_ids: the sequence's own list, prompt then output; it grows as tokens are accepted and
            is read here, never written.
        num_prompt_tokens: how many of them are the prompt.
        vocab_size: V.
        seed: of this sequence; see `sequence_seed`.
        end_token_ids: the model's end tokens, banned until ``min_tokens`` unless ignored.
        mask: of structured output, this sequence's own.

    Attributes:
        mask: the same.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        vocab_size: int,
        seed: int,
        end_token_ids: Collection[int] = (),
        mask: TokenMask | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._penalties = (
            Penalties(params, num_prompt_tokens, vocab_size) if Penalties.wanted(params) else None
        )
        ends = set(params.stop_token_ids or ()) | set(() if params.ignore_eos else end_token_ids)
        self.mask = mask
        self._banned_early = sorted(token for token in ends if token < vocab_size)

    @property
    def adjusts(self) -> bool:
        """Whether the next token's logits are changed before the choice."""
        return self._penalties is not None or self.mask is not None or self._bans

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The output so far."""
        return self._token_ids[self._num_prompt_tokens :]

    @property
    def _bans(self) -> bool:
        return bool(self._banned_early) and self._num_output_tokens < self.params.min_tokens

    @property
    def _num_output_tokens(self) -> int:
        return len(self._token_ids) - self._num_prompt_tokens

    def adjust(self, logits: torch.Tensor) -> None:
        """Apply penalties, mask and bans to ``logits`` (float32 [V]) in place.

        Raises:
            RequestError: the mask cannot be made.
        """
        if self._penalties is not None:
            self._penalties.apply(logits, self._token_ids)
        if self.mask is not None:
            allowed = self.mask.allowed(self.output_token_ids)
            torch.where(allowed.to(logits.device), logits, _IMPOSSIBLE, out=logits)
        if self._bans:
            logits[self._banned_early] = -math.inf

    def uniform(self) -> float:
        """Return the number in [0, 1) behind the next output token."""
        key = struct.pack("<QQ", self.seed % 2**64, self._num_output_tokens)
        bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return (bits >> 11) * 2.0**-53


def sequence_seed(params: SamplingParams, index: int, *, engine_seed: int, request: int) -> int:
    """Return the seed of completion ``index`` of a request.

    A request's own seed decides alone; without one, the engine's seed and the request's number
    since the start do.
    """
    if params.seed is not None:
        return params.seed + index
    key = struct.pack("<QQQ", engine_seed % 2**64, request, index)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class SampledToken:
    """The outcome for one row: a token, or why there is none.

    Attributes:
        token_id: the chosen token; `None` if there was no choosing.
        logprobs: what the parameters asked for, `None` if nothing.
        error: why no token could be chosen; `None` if one was. A `RequestError` if that lies in
            what was asked for.
    """

    token_id: int | None
    logprobs: dict[int, Logprob] | None = None
    error: KV8Error | None = None


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """Choose one token a row. Appends nothing: the caller does, once it accepts the token.

    On a GPU the host waits for the device once, for the tokens; a second time only for what it
    needs to see: log probabilities, penalties and masks.

    Args:
        logits: float32 [R, V], left as they are.
        states: R sequences.

    Returns:
        R outcomes. A row with NaN, without one finite maximum, with every token banned, or whose
        mask cannot be made, has an error and no token.
    """
    if not states:
        return []
    errors: list[KV8Error | None] = [None] * len(states)
    # NaN wins a maximum, so one reduction finds the best tokens, NaN, +inf, and rows of only -inf.
    peaks, best = logits.max(dim=1)
    adjusted, adjusted_peaks = _adjusted(logits, states, errors), peaks
    if adjusted is not logits:
        adjusted_peaks, best = adjusted.max(dim=1)
    tokens = _choose(adjusted, best, states)
    found = torch.stack([peaks.double(), adjusted_peaks.double(), tokens.double()]).tolist()
    chosen = [int(token) for token in found[2]]
    for row, (peak, adjusted_peak) in enumerate(zip(*found[:2], strict=True)):
        if not math.isfinite(peak):
            errors[row] = EngineError(f"the model's logits have no finite maximum ({peak})")
        elif errors[row] is None and not math.isfinite(adjusted_peak):
            errors[row] = RequestError(_NOTHING_LEFT)
    sound = [error is None for error in errors]
    reports = _report_logprobs(logits, states, chosen, sound)
    return [
        SampledToken(token, report) if error is None else SampledToken(None, error=error)
        for token, report, error in zip(chosen, reports, errors, strict=True)
    ]


def _adjusted(
    logits: torch.Tensor, states: Sequence[SamplingState], errors: list[KV8Error | None]
) -> torch.Tensor:
    """Return ``logits`` [R, V] after penalties, masks and bans: a copy, unless no row has any.

    A row that cannot be adjusted gets its reason in ``errors``.
    """
    rows = [row for row, state in enumerate(states) if state.adjusts]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        try:
            states[row].adjust(logits[row])
        except RequestError as error:
            errors[row] = errors[row] or error
    return logits


def _choose(
    logits: torch.Tensor, best: torch.Tensor, states: Sequence[SamplingState]
) -> torch.Tensor:
    """Return a token a row, int64 [R]; ``best`` is each row's most likely one.

    Rows without a finite maximum get any number.
    """
    random = [row for row, state in enumerate(states) if not state.params.greedy]
    num_values = _CPU_VALUES if logits.device.type == "cpu" else _DEVICE_VALUES
    step = max(1, num_values // logits.shape[1])
    chosen = best
    for start in range(0, len(random), step):
        rows = random[start : start + step]
        drawn = _draw(take_rows(logits, rows), [states[row] for row in rows])
        chosen = chosen.index_copy(0, to_device(rows, torch.int64, logits.device), drawn)
    return chosen


def _draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    params = [state.params for state in states]
    probs = truncated_probs(logits, params)
    # The tokens stand in the order of their numbers, whatever truncation did: which token a random
    # number falls on must not depend on how the candidates were found.
    bounds = probs.cumsum(dim=1, dtype=torch.float64)
    total = bounds[:, -1:]
    uniform = to_device([state.uniform() for state in states], torch.float64, probs.device)
    target = torch.minimum(
        uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(bounds, target, right=True)[:, 0]


def truncated_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the distribution each row draws from.

    Args:
        logits: float32 [R, V], penalties and bans applied, each row with a finite maximum.
        params: R parameters, none of them greedy. In this order: temperature, min-p, top-k, and
            top-p over what is left.

    Returns:
        float32 [R, V]; 0 for tokens that are out.
    """
    temperature = to_device([p.temperature for p in params], torch.float32, logits.device)
    # The maximum goes to 0 before the division, so that no temperature can overflow it.
    scaled = logits - logits.amax(dim=1, keepdim=True)
    scaled /= temperature.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    keep_min_p(scaled, [p.min_p for p in params])
    top_k = [p.top_k for p in params]
    keep_top_k(scaled, top_k)
    keep_top_p(scaled, [p.top_p for p in params], most=max(top_k) if min(top_k) > 0 else None)
    return torch.softmax(scaled, dim=1)


def _report_logprobs(
    logits: torch.Tensor,
    states: Sequence[SamplingState],
    chosen: Sequence[int],
    sound: Sequence[bool],
) -> list[dict[int, Logprob] | None]:
    reports: list[dict[int, Logprob] | None] = [None] * len(states)
    counts = [state.params.logprobs for state in states]
    rows = [i for i, count in enumerate(counts) if sound[i] and count is not None]
    if not rows:
        return reports
    entries = token_logprobs(
        logits[rows], [chosen[i] for i in rows], [counts[i] or 0 for i in rows]
    )
    for row, entry in zip(rows, entries, strict=True):
        reports[row] = entry
    return reports
