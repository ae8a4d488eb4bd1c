"""Plain counts, always on: what the cache's stores did to the values, and what the engine did."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from kv8.attention.layer import LayerCounters
from kv8.engine.latency import Latencies
from kv8.engine.request import Request
from kv8.outputs import FinishReason


@dataclass(frozen=True)
class StoreCounts:
    """One side (K or V) of one layer since the counters were last reset.

    Attributes:
        stored: values stored.
        saturated: of these, beyond the format's finite range, stored as its largest value.
        underflowed: of these, not zero but stored as zero.
        not_a_number: of these, NaN.
    """

    stored: int = 0
    saturated: int = 0
    underflowed: int = 0
    not_a_number: int = 0

    @property
    def saturated_share(self) -> float:
        """Share of stored values that saturated, from 0 to 1."""
        return self.saturated / self.stored if self.stored else 0.0

    @property
    def underflowed_share(self) -> float:
        """Share of stored values that underflowed, from 0 to 1."""
        return self.underflowed / self.stored if self.stored else 0.0


@dataclass(frozen=True)
class LayerStoreCounts:
    """Both sides of one layer."""

    k: StoreCounts
    v: StoreCounts


class CacheCounters:
    """The counters of all quantized layers in one tensor, so that reading them is one copy.

    Args:
        layers: numbers of the layers that store quantized values.
        device: where the cache is.
    """

    def __init__(self, layers: Iterable[int], device: torch.device) -> None:
        self._index = {layer: i for i, layer in enumerate(layers)}
        self._counts = torch.zeros(len(self._index), 2, 4, dtype=torch.int64, device=device)

    def layer(self, layer: int) -> LayerCounters:
        """Return the views one layer's store counts into."""
        k, v = self._counts[self._index[layer]]
        return LayerCounters(k=k, v=v)

    def read(self) -> dict[int, LayerStoreCounts]:
        """Return the counts so far by layer number."""
        counts = self._counts.tolist()
        return {
            layer: LayerStoreCounts(*(StoreCounts(*side) for side in counts[i]))
            for layer, i in self._index.items()
        }

    def reset(self) -> None:
        """Start again from zero; the views stay valid."""
        self._counts.zero_()


@dataclass
class EngineCounters:
    """What one engine has done since it started.

    Attributes:
        steps: forward passes.
        computed_tokens: tokens of those, prompt and output, recomputed ones too.
        prompt_tokens: prompt tokens of sequences that got their first token.
        generated_tokens: tokens generated.
        cached_prompt_tokens: prompt tokens taken from the prefix cache, of sequences that ended.
        failed_steps: steps that failed.
        finished: sequences that ended, by reason.
        latencies: how long they took.
    """

    steps: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_prompt_tokens: int = 0
    failed_steps: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    latencies: Latencies = field(default_factory=Latencies)

    def count_token(self, request: Request) -> None:
        """Count the token that ``request`` has just gained."""
        self.generated_tokens += 1
        if request.last_token_at is None:
            self.prompt_tokens += request.num_prompt_tokens
        self.latencies.token(request)

    def count_finished(self, request: Request, reason: FinishReason) -> None:
        """Count one sequence that ended with ``reason``."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.cached_prompt_tokens += request.num_cached_tokens or 0
        if reason in ("stop", "length"):
            self.latencies.completed(request)
