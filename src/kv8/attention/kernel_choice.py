"""Which of two sets of GPU kernels attends, as measured: for each kind of layer and of batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.layer import LayerAttention

Kernels = Literal["triton", "flash3"]
Timer = Callable[[Callable[[], object]], float]  # runs some work and returns the seconds it took


@dataclass(frozen=True)
class LayerKind:
    """What of a layer, and of the model's call, decides how fast attention over it is."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    format: str
    fp8_attention: bool
    softcap: float | None
    sinks: bool

    def __str__(self) -> str:
        parts = [self.format, "all tokens" if self.window is None else f"window {self.window:,}"]
        return ", ".join(parts + ["FP8 attention"] * self.fp8_attention)


def kind_of(layer: LayerAttention, call: AttentionCall) -> LayerKind:
    """Return the kind of ``layer`` as the model calls it."""
    geometry = layer.geometry
    return LayerKind(
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        window=geometry.window,
        format=layer.format.name,
        fp8_attention=layer.q_scale is not None,
        softcap=call.softcap,
        sinks=call.sinks is not None,
    )


@dataclass(frozen=True)
class MadeUpWork:
    """The sizes of what is timed.

    Attributes:
        prompt: tokens of a prompt, of which most are computed at once.
        sequences: sequences that decode side by side.
        context: tokens the longest of them sees.
    """

    prompt: int = 8192
    sequences: int = 32
    context: int = 2048

    @classmethod
    def within(
        cls, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> "MadeUpWork":
        """Return sizes that are typical of an engine with these limits, and within them."""
        most = cls()
        return cls(
            prompt=min(most.prompt, max_num_batched_tokens, max_model_len),
            sequences=min(most.sequences, max_num_seqs),
            context=min(most.context, max_model_len),
        )

    @property
    def prefill(self) -> list[tuple[int, int]]:
        """New tokens and context of each sequence of a step with prompts: a prompt, the end of
        one whose beginning is stored, and a sequence that decodes.
        """
        few = max(1, self.prompt // 8)
        whole = max(1, self.prompt - few - 1)
        return [(whole, whole), (few, self.prompt), (1, max(1, self.prompt // 2))]

    @property
    def decode(self) -> list[tuple[int, int]]:
        """New tokens and context of each sequence that decodes, contexts of different lengths."""
        step = self.context // (2 * self.sequences)
        return [(1, max(1, self.context - step * number)) for number in range(self.sequences)]


@dataclass(frozen=True)
class Race:
    """Seconds both kernels took for one batch, medians."""

    triton: float
    flash3: float

    @property
    def faster(self) -> Kernels:
        """Which took less time."""
        return "flash3" if self.flash3 < self.triton else "triton"

    def __str__(self) -> str:
        return f"triton {self.triton * 1e6:,.0f} µs, flash3 {self.flash3 * 1e6:,.0f} µs"


@dataclass(frozen=True)
class KindChoice:
    """What attends over one kind of layer.

    Attributes:
        prefill: the race over a batch with prompts; `None` if there was none.
        decode: likewise over one in which all sequences decode.
        problem: why there was none.
    """

    prefill: Race | None = None
    decode: Race | None = None
    problem: str = ""

    def kernels(self, *, decodes: bool) -> Kernels:
        """Return what attends in a batch of which all sequences decode, or not all."""
        race = self.decode if decodes else self.prefill
        return "triton" if race is None else race.faster

    def __str__(self) -> str:
        if self.prefill is None or self.decode is None:
            return f"triton: {self.problem}"
        return (
            f"prompts by {self.prefill.faster} ({self.prefill}), "
            f"decoding by {self.decode.faster} ({self.decode})"
        )


@dataclass(frozen=True)
class KernelChoice:
    """What attends over each kind of layer; the triton kernels over any other."""

    by_kind: Mapping[LayerKind, KindChoice] = field(default_factory=dict)

    def kernels(self, kind: LayerKind, *, decodes: bool) -> Kernels:
        """Return what attends over layers of ``kind``."""
        return self.by_kind.get(kind, KindChoice()).kernels(decodes=decodes)

    def described(self) -> dict[str, str]:
        """Return what was chosen and measured, by kind of layer, for people."""
        return {str(kind): str(chosen) for kind, chosen in self.by_kind.items()}


@runtime_checkable
class ChoosesKernels(Protocol):
    """A backend that has more than one set of kernels, and uses the faster ones."""

    def measure(
        self,
        subjects: Sequence[tuple[LayerAttention, AttentionCall]],
        work: MadeUpWork,
        dtype: torch.dtype,
        timer: Timer | None = None,
    ) -> KernelChoice:
        """Return what is fastest over layers like ``subjects``, measured on made-up tensors.

        ``dtype`` is the queries'; ``timer`` measures, by default the device's own clock.
        """

    def use(self, choice: KernelChoice) -> None:
        """Attend by what was chosen from now on."""

    def scales_changed(self) -> None:
        """Look anew at which layers each set of kernels can serve."""
