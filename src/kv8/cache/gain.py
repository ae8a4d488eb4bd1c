"""What the quantized cache really saves: bytes by window class, against the model's own dtype.

Where some layers stay in 16 bits, or hold only a window, the saving is not that of the format; and
it depends on the length of the sequences. Said before anyone pays for it.
"""

from dataclasses import dataclass

from kv8.cache.capacity import group_blocks
from kv8.cache.layout import CacheLayout, make_layout
from kv8.formats.base import FORMATS
from kv8.geometry import ModelGeometry
from kv8.layer_plan import LayerFormat, LayerPlan
from kv8.units import format_bytes


@dataclass(frozen=True)
class ClassBytes:
    """Bytes that one sequence holds in the layers of one window, padding and part blocks included.

    Attributes:
        window: the window, `None` for layers that see everything.
        layers: numbers of the layers.
        held_bytes: bytes under the plan.
        model_dtype_bytes: bytes if every layer were stored in the model's dtype.
    """

    window: int | None
    layers: tuple[int, ...]
    held_bytes: int
    model_dtype_bytes: int

    @property
    def ratio(self) -> float:
        """How many times more fits in these layers."""
        return self.model_dtype_bytes / self.held_bytes

    def __str__(self) -> str:
        count = len(self.layers)
        name = "layer" if count == 1 else "layers"
        sees = "full attention" if self.window is None else f"a window of {self.window:,}"
        return (
            f"{count} {name} with {sees}: {format_bytes(self.held_bytes)} in place of "
            f"{format_bytes(self.model_dtype_bytes)}"
        )


@dataclass(frozen=True)
class CapacityGain:
    """How many times more sequences of a length fit than in the model's dtype, and why no more.

    Attributes:
        num_tokens: the length.
        classes: bytes of such a sequence, window by window.
    """

    num_tokens: int
    classes: tuple[ClassBytes, ...]

    @property
    def ratio(self) -> float:
        """How many times more sequences of this length fit in the same memory."""
        held = sum(c.held_bytes for c in self.classes)
        return sum(c.model_dtype_bytes for c in self.classes) / held

    @property
    def limiting(self) -> ClassBytes | None:
        """The class that gains least, `None` if all gain the same."""
        least = min(self.classes, key=lambda c: c.ratio)
        most = max(self.classes, key=lambda c: c.ratio)
        return least if least.ratio < most.ratio else None

    def __str__(self) -> str:
        text = f"{self.ratio:.2f}x the sequences of {self.num_tokens:,} tokens"
        return text if self.limiting is None else f"{text}, limited by {self.limiting}"


def capacity_gain(geometry: ModelGeometry, layout: CacheLayout, num_tokens: int) -> CapacityGain:
    """Return what ``layout`` saves over the model's dtype when sequences have ``num_tokens``."""
    model_format = FORMATS[geometry.model_dtype]
    plan = LayerPlan(tuple(LayerFormat(x.layer, model_format) for x in geometry.layers))
    plain = make_layout(geometry, plan, layout.block_size, layout.max_chunk)
    held, unquantized = _held_bytes(layout, num_tokens), _held_bytes(plain, num_tokens)
    layers: dict[int | None, tuple[int, ...]] = {}
    for group in layout.groups:
        layers[group.window] = tuple(sorted((*layers.get(group.window, ()), *group.layers)))
    return CapacityGain(
        num_tokens,
        tuple(ClassBytes(w, layers[w], held[w], unquantized[w]) for w in layers),
    )


def describe_gain(geometry: ModelGeometry, layout: CacheLayout, max_model_len: int) -> str:
    """Say in a sentence what ``layout`` saves, and where shorter sequences would gain less."""
    gain = capacity_gain(geometry, layout, max_model_len)
    text = f"Gain over a cache in {geometry.model_dtype}: {gain}"
    window = None if gain.limiting is None else gain.limiting.window
    if window is not None and window < max_model_len:
        text += f"; {capacity_gain(geometry, layout, window).ratio:.2f}x at {window:,} tokens"
    return f"{text}."


def _held_bytes(layout: CacheLayout, num_tokens: int) -> dict[int | None, int]:
    """Return the bytes of a decoding sequence's blocks, by window."""
    held: dict[int | None, int] = {}
    for group in layout.groups:
        held_bytes = group_blocks(group, num_tokens, 1) * layout.block_bytes
        held[group.window] = held.get(group.window, 0) + held_bytes
    return held
