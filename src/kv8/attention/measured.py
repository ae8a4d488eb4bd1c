"""The triton kernels and FlashAttention 3's, each where it was measured to be the faster one.

`auto` takes it for a cache on a GPU where `flash_attn_interface` is installed. The triton kernels
store, decode in recorded steps, and attend wherever nothing was measured.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kv8.attention.backend import AttentionBackend, AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.flash3 import Flash3Backend
from kv8.attention.kernel_choice import (
    KernelChoice,
    KindChoice,
    LayerKind,
    MadeUpWork,
    Timer,
    kind_of,
)
from kv8.attention.kernel_race import race
from kv8.attention.layer import LayerAttention
from kv8.attention.triton import TritonBackend


class MeasuredBackend:
    """Two backends and a `KernelChoice` between them; until `use` is called, triton's alone.

    A recorded decode step is always triton's: FlashAttention 3 promises neither that rows without
    context give zeros nor that it looks at no length on the host.

    Args:
        attend: as for `Flash3Backend`.

    Raises:
        ImportError: FlashAttention 3, Triton or a GPU is missing; says which.
    """

    name = "measured"
    capturable = True

    def __init__(self, attend: Callable[..., Any] | None = None) -> None:
        self._attend = attend
        self._triton = TritonBackend()
        self._flash3 = Flash3Backend(attend, self._triton)
        self._choice = KernelChoice()
        # For each layer that has attended: what does, in batches with prompts and without.
        self._known: dict[int, tuple[LayerAttention, tuple[AttentionBackend, AttentionBackend]]]
        self._known = {}

    def refuses(self, layer: LayerAttention) -> str | None:
        """Return why this backend cannot serve ``layer``, or `None` if it can."""
        return self._triton.refuses(layer)

    def reserve(
        self, layers: Sequence[LayerAttention], max_sequences: int, max_context: int
    ) -> int:
        """Make triton's workspace, as `TritonBackend.reserve`."""
        return self._triton.reserve(layers, max_sequences, max_context)

    def store(
        self, layer: LayerAttention, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """Quantize ``key`` and ``value`` ([T, K, D]), count, and scatter them to the slots."""
        self._triton.store(layer, key, value, batch)

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
    ) -> torch.Tensor:
        """Return attention of ``query`` ([T, H, D]) over the stored codes; same shape and dtype."""
        if batch.lengths_on_device:
            return self._triton.attend(layer, query, batch, call)
        known = self._known.get(id(layer))
        if known is None or known[0] is not layer:
            # Keeps the layer, so that the number `id` gave is not used again.
            known = self._known[id(layer)] = (layer, self._backends_of(layer, call))
        prefill, decode = known[1]
        backend = decode if batch.num_tokens == batch.num_sequences else prefill
        return backend.attend(layer, query, batch, call)

    def measure(
        self,
        subjects: Sequence[tuple[LayerAttention, AttentionCall]],
        work: MadeUpWork,
        dtype: torch.dtype,
        timer: Timer | None = None,
    ) -> KernelChoice:
        """Return what is fastest over layers like ``subjects``; see `ChoosesKernels.measure`."""
        triton = TritonBackend()  # backends of their own: they keep what they were called with
        flash3 = Flash3Backend(self._attend, triton)
        found: dict[LayerKind, KindChoice] = {}
        for layer, call in subjects:
            kind = kind_of(layer, call)
            if found.get(kind, KindChoice()).prefill is not None:
                continue
            reason = flash3.refuses(layer) or flash3.leaves(layer, dtype, call)
            found[kind] = (
                race(triton, flash3, (layer, call), work, dtype, timer)
                if reason is None
                else KindChoice(problem=reason)
            )
        return KernelChoice(found)

    def use(self, choice: KernelChoice) -> None:
        """Attend by what was chosen from now on."""
        self._choice = choice
        self._known.clear()

    def scales_changed(self) -> None:
        """Look anew at which layers FlashAttention 3 can serve: that depends on their q scales."""
        self._known.clear()

    def _backends_of(
        self, layer: LayerAttention, call: AttentionCall
    ) -> tuple[AttentionBackend, AttentionBackend]:
        """Return what attends over ``layer`` in batches with prompts, and without."""
        kind = kind_of(layer, call)
        chosen = [self._choice.kernels(kind, decodes=decodes) for decodes in (False, True)]
        if "flash3" in chosen and self._flash3.refuses(layer) is not None:
            chosen = ["triton", "triton"]
        prefill, decode = (self._flash3 if c == "flash3" else self._triton for c in chosen)
        return prefill, decode
