"""Decode steps recorded once for each batch size, and played back without Python or launches.

A decode step of a large model is a thousand small kernels, and starting them takes longer than
running them. Recorded as one graph they start at once. A graph reads and writes fixed addresses, so
its input lies in a `StaticBatch`, and scales are changed in place. It computes a fixed number of
sequences, so there is one graph for each of some sizes (`bucket_sizes`), and a step takes the next
larger one, padded.

How a computation is recorded is the caller's choice: on a GPU as a CUDA graph
(`kv8.engine.cuda_graph`). What is recorded must neither wait for the device nor depend on what the
host knows of lengths.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch

from kv8.attention.backend import AttentionBackend
from kv8.attention.layer import LayerAttention
from kv8.engine.static_batch import StaticBatch
from kv8.engine.step_input import StepInput
from kv8.models.hook import HookedModel

# Runs a computation as often as it needs to, records it, and returns what plays it back.
Capture = Callable[[Callable[[], None]], Callable[[], object]]

_SMALL: Final = (1, 2, 4)
_STEP: Final = 8  # up to 256 sequences, and twice as much beyond
_STEP_ENDS: Final = 256


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to record, rising; the last one is ``max_num_seqs``."""
    sizes = (
        *_SMALL,
        *range(_STEP, _STEP_ENDS, _STEP),
        *range(_STEP_ENDS, max_num_seqs, 2 * _STEP),
    )
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class DecodeGraphs:
    """A model's decode step, recorded for some batch sizes.

    Args:
        model: the model.
        layers: what the backend knows of each of its layers.
        backend: stores and attends.
        batch: where the input goes.
    """

    def __init__(
        self,
        model: HookedModel,
        layers: Mapping[int, LayerAttention],
        backend: AttentionBackend,
        batch: StaticBatch,
    ) -> None:
        self._model, self._layers, self._backend, self._batch = model, layers, backend, batch
        shape = (batch.max_seqs, model.geometry.vocab_size)
        self._logits = torch.empty(shape, dtype=torch.float32, device=model.device)
        self._replays: dict[int, Callable[[], object]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers for input and output."""
        return self._batch.num_bytes + self._logits.nbytes

    def record(self, size: int, capture: Capture) -> None:
        """Record the step of ``size`` sequences; meanwhile all of them are padding."""
        self._batch.clear()
        self._replays[size] = capture(lambda: self.compute(size))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes that are recorded, rising."""
        return tuple(sorted(self._replays))

    def bucket(self, num_seqs: int) -> int | None:
        """Return the batch size that a step of ``num_seqs`` sequences takes; `None` if too many."""
        return next((size for size in self.sizes if size >= num_seqs), None)

    def run(self, step: StepInput) -> torch.Tensor | None:
        """Compute a decode step; return float32 [S, V], valid until the next one.

        `None` if the step is none that was recorded: more sequences, or more than one token each.
        """
        num_seqs = len(step.arrays.query_lens)
        size = self.bucket(num_seqs) if step.decodes else None
        if size is None:
            return None
        self._batch.write(step)
        self._replays[size]()
        return self._logits[:num_seqs]

    def compare(self, size: int) -> float:
        """Return the largest difference between logits played back and computed, of what the batch
        holds: 0 where the device rounds alike both ways.
        """
        self._replays[size]()
        played = self._logits[:size].clone()
        self.compute(size)
        return float((self._logits[:size] - played).abs().max())

    @torch.inference_mode()
    def compute(self, size: int) -> None:
        """Compute what the first ``size`` rows of the batch hold: the step that is recorded."""
        batch = self._batch
        with self._model.bound(batch.attention(size), self._layers, self._backend):
            logits = self._model.forward(
                batch.input_ids[:size], batch.positions[:size], batch.rows[:size]
            )
        self._logits[:size].copy_(logits)
