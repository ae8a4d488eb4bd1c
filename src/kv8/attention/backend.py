"""The operation set every attention backend implements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention


@dataclass(frozen=True)
class AttentionCall:
    """What a model passes with each attention call, besides the tensors.

    Attributes:
        softmax_scale: factor on q·k before the softmax.
        softcap: logits become ``softcap * tanh(logits / softcap)``; `None` for no cap.
        sinks: float32 [H], one extra logit a head in the softmax's denominator; `None` for none.
        window: see `LayerGeometry.window`.
    """

    softmax_scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    window: int | None


@runtime_checkable
class ReservesWorkspace(Protocol):
    """A backend that works in memory of its own, which it can make before steps are recorded."""

    def reserve(
        self, layers: Sequence[LayerAttention], max_sequences: int, max_context: int
    ) -> int:
        """Make it large enough for any decode batch of that size; return its bytes.

        ``max_context`` is the most tokens that a block table has room for.
        """


class AttentionBackend(Protocol):
    """Stores new keys and values, and attends over stored codes only (never over fresh K/V).

    Attributes:
        name: as the user writes it.
        capturable: whether it serves a batch with ``lengths_on_device``, and does nothing that a
            CUDA graph cannot hold.
    """

    name: str
    capturable: bool

    def refuses(self, layer: LayerAttention) -> str | None:
        """Return why this backend cannot serve ``layer``, or `None` if it can."""

    def store(
        self, layer: LayerAttention, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """Quantize ``key`` and ``value`` ([T, K, D], model dtype) and scatter them to the slots.

        Counts into ``layer.counters``. Writes nothing but the batch's slots.
        """

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
    ) -> torch.Tensor:
        """Return attention of ``query`` ([T, H, D]) over the stored codes; same shape and dtype."""
