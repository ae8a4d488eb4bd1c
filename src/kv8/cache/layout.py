"""Where keys and values lie: groups of layers, bytes of a block, addresses inside the arena.

The cache is one arena of N blocks of equal bytes. A block belongs to one group of layers at a time
and holds keys and values of successive tokens for every layer of that group. Only layers that see
the same window share a group, because they let go of a token at the same moment; all groups draw
from one free list, so memory flows to whoever needs it.

A block is one *part* of B tokens, or several where the layers of its group take fewer bytes a token
than those of other groups. Block tables name parts, so to attention every group is a pool of parts
of B tokens, and only allocation knows that some are had several at a time.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from kv8.cache.grouping import WindowClass, split_into_groups
from kv8.errors import UnsupportedModelError
from kv8.geometry import ModelGeometry
from kv8.layer_plan import LayerPlan

# What a quantized layer keeps besides its codes: a float32 scale a head for K and for V, and for
# each of the two an int64 [4] of counters (`kv8.attention.layer.LayerCounters`).
_SCALE_BYTES = 4
_COUNTER_BYTES = 4 * 8


class Arrangement(enum.Enum):
    """How blocks are laid out in the arena.

    ``SLOT_MAJOR``: one layer's keys and values of all blocks lie together, block by block (fast to
    stream); possible when every group has the same slots, which models of one window class always
    have.
    ``PAGE_MAJOR``: all bytes of one block lie together.
    """

    SLOT_MAJOR = "slot-major"
    PAGE_MAJOR = "page-major"


@dataclass(frozen=True)
class LayerSlot:
    """A layer's place in each part of its group's blocks.

    Attributes:
        layer: the model's layer number.
        item_bytes: bytes of one code.
        side_bytes: bytes of B tokens' keys (and as many of values).
        offset: bytes of the part that lie before this layer's keys.
    """

    layer: int
    item_bytes: int
    side_bytes: int
    offset: int


@dataclass(frozen=True)
class Placement:
    """Byte addresses of one layer's keys and values in an arena of known size.

    The keys of part n are the ``side_bytes`` bytes from ``k_offset + n * stride``.

    Attributes:
        k_offset: where the keys of part 0 begin.
        v_offset: where the values of part 0 begin.
        stride: bytes from one part to the next.
        side_bytes: bytes of one part's keys.
        num_parts: parts in the arena, if this group had all of it.
    """

    k_offset: int
    v_offset: int
    stride: int
    side_bytes: int
    num_parts: int


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a block table.

    Attributes:
        index: the group's number, from 0.
        layers: numbers of its layers that store keys and values, in the order of their slots.
        window: tokens a query sees, itself included; `None` for all before it.
        parts: parts of B tokens in one block.
        block_tokens: tokens in one block, ``parts * B``.
        used_bytes: bytes of a block that its layers use; the rest of the block is padding.
    """

    index: int
    layers: tuple[int, ...]
    window: int | None
    parts: int
    block_tokens: int
    used_bytes: int

    def first_visible_block(self, position: int) -> int:
        """Return the first block that a query at ``position`` or later can still see."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_tokens


@dataclass(frozen=True)
class CacheLayout:
    """The shape of the cache, whatever its size.

    Attributes:
        block_size: B, tokens that an entry of a block table stands for.
        max_chunk: most tokens one step computes; a window group holds that many on top of its
            window while a prompt is computed.
        groups: the cache groups, by index.
        block_bytes: bytes of a block, the same in all groups.
        arrangement: how blocks lie in the arena.
        bytes_per_token: bytes of codes one token needs in all layers, padding not counted.
        scale_bytes: bytes of K and V scales and of counters, outside the arena.
        slots: each storing layer's place in a block, by layer number.
        group_by_layer: the group of every layer with attention; layers that read another's keys
            and values have that layer's group.
    """

    block_size: int
    max_chunk: int
    groups: tuple[CacheGroup, ...]
    block_bytes: int
    arrangement: Arrangement
    bytes_per_token: int
    scale_bytes: int
    slots: Mapping[int, LayerSlot]
    group_by_layer: Mapping[int, int]

    def group_of(self, layer: int) -> int:
        """Return the index of the group ``layer`` belongs to; raises `KeyError` if unknown."""
        return self.group_by_layer[layer]

    @property
    def padding_bytes(self) -> int:
        """Unused bytes in one block of each group."""
        return sum(self.block_bytes - group.used_bytes for group in self.groups)

    def placement(self, layer: int, num_blocks: int) -> Placement:
        """Return where ``layer``'s keys and values lie in an arena of ``num_blocks`` blocks."""
        slot = self.slots[layer]
        parts = self.groups[self.group_of(layer)].parts
        k_offset, v_offset = slot.offset, slot.offset + slot.side_bytes
        stride = self.block_bytes // parts
        if self.arrangement is Arrangement.SLOT_MAJOR:
            k_offset = slot.offset * num_blocks
            v_offset, stride = k_offset + slot.side_bytes, 2 * slot.side_bytes
        return Placement(k_offset, v_offset, stride, slot.side_bytes, parts * num_blocks)


def make_layout(
    geometry: ModelGeometry, plan: LayerPlan, block_size: int, max_chunk: int
) -> CacheLayout:
    """Return the layout of a model's cache under ``plan``.

    Depends on nothing that a refusal tells the user to change: a layout that changed with the
    maximum length could make the suggested length wrong.

    Args:
        geometry: the model.
        plan: the format of every layer.
        block_size: B.
        max_chunk: most tokens one step computes, as set by the user (``max_num_batched_tokens``).

    Raises:
        UnsupportedModelError: no layer of the model stores keys and values.
    """
    if not geometry.kv_layers:
        raise UnsupportedModelError(
            f"{geometry.architecture} has no attention layer that stores keys and values, so "
            "there is nothing for a KV cache to hold."
        )
    item_bytes = {x.layer: plan.format(x.layer).bytes_per_value for x in geometry.kv_layers}
    side_bytes = {
        x.layer: x.num_kv_heads * block_size * x.head_dim * item_bytes[x.layer]
        for x in geometry.kv_layers
    }
    classes = _window_classes(geometry, side_bytes)
    groups: list[CacheGroup] = []
    slots: dict[int, LayerSlot] = {}
    for window_class, split in zip(classes, split_into_groups(classes), strict=True):
        for layers in split.groups:
            # Codes of more bytes first: every offset is then a multiple of its own code's bytes.
            ordered = sorted(layers, key=lambda n: (-item_bytes[n], -side_bytes[n]))
            offset = 0
            for number in ordered:
                slots[number] = LayerSlot(number, item_bytes[number], side_bytes[number], offset)
                offset += 2 * side_bytes[number]
            groups.append(
                CacheGroup(
                    index=len(groups),
                    layers=tuple(ordered),
                    window=window_class.window,
                    parts=split.parts,
                    block_tokens=split.parts * block_size,
                    used_bytes=split.parts * offset,
                )
            )
    arrangement = _arrangement(groups, slots)
    block_bytes = max(group.used_bytes for group in groups)
    if arrangement is Arrangement.PAGE_MAJOR:
        # Every part of every group begins at a multiple of its codes' bytes.
        unit = math.lcm(*(g.parts * max(item_bytes[n] for n in g.layers) for g in groups))
        block_bytes = -(-block_bytes // unit) * unit
    group_of_owner = {number: group.index for group in groups for number in group.layers}
    return CacheLayout(
        block_size=block_size,
        max_chunk=max_chunk,
        groups=tuple(groups),
        block_bytes=block_bytes,
        arrangement=arrangement,
        bytes_per_token=sum(2 * side for side in side_bytes.values()) // block_size,
        scale_bytes=sum(
            2 * (layer.num_kv_heads * _SCALE_BYTES + _COUNTER_BYTES)
            for layer in geometry.kv_layers
            if plan.format(layer.layer).quantized
        ),
        slots=slots,
        group_by_layer={x.layer: group_of_owner[x.kv_source] for x in geometry.layers},
    )


def _window_classes(
    geometry: ModelGeometry, side_bytes: Mapping[int, int]
) -> tuple[WindowClass, ...]:
    """Return the storing layers by the widest window any reader of theirs has, full first."""
    windows: dict[int, int | None] = {}
    for layer in geometry.layers:
        source, window = layer.kv_source, layer.window
        known = windows.get(source, 0)
        windows[source] = None if window is None or known is None else max(window, known)
    by_window: dict[int | None, dict[int, int]] = {}
    for layer in geometry.kv_layers:
        number = layer.layer
        by_window.setdefault(windows[number], {})[number] = 2 * side_bytes[number]
    return tuple(
        WindowClass(window, by_window[window], _long_share(window, geometry.max_position))
        for window in sorted(by_window, key=lambda w: (w is not None, -(w or 0)))
    )


def _long_share(window: int | None, longest: int) -> float:
    return 1.0 if window is None else min(1.0, window / max(1, longest))


def _arrangement(groups: list[CacheGroup], slots: Mapping[int, LayerSlot]) -> Arrangement:
    """Slot-major if the largest group's slots begin with those of each other group."""

    def shapes(group: CacheGroup) -> list[tuple[int, int]]:
        return [(slots[n].item_bytes, slots[n].side_bytes) for n in group.layers]

    longest = max((shapes(group) for group in groups), key=len)
    same = all(
        group.parts == 1 and shapes(group) == longest[: len(group.layers)] for group in groups
    )
    return Arrangement.SLOT_MAJOR if same else Arrangement.PAGE_MAJOR
