"""Which layers share a block: packs the layers of each window class into groups of like bytes.

All groups draw blocks of one size from one free list, so a group whose layers need fewer bytes than
the largest group leaves the rest of each of its blocks unused. This module chooses the split that
leaves least.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# What one more group costs, as a share of the memory: every step builds, for each group, a block
# table and a list of slots. Without a price, 29 + 5 layers would become 34 groups of one layer to
# save the 3 % that 7 groups of five leave unused.
GROUP_PRICE = 1 / 512


@dataclass(frozen=True)
class WindowClass:
    """The layers that see the same window, and the bytes each needs in a block.

    Attributes:
        window: the window they share, `None` for all tokens.
        layer_bytes: bytes of one block's keys and values by layer number.
        long_share: blocks such a layer holds for the longest sequence, relative to a layer that
            sees everything; 1 for that one.
    """

    window: int | None
    layer_bytes: Mapping[int, int]
    long_share: float

    @property
    def total_bytes(self) -> int:
        """Bytes of all the class's layers in a block."""
        return sum(self.layer_bytes.values())


Split = list[list[list[int]]]
"""For each class, its groups, each a list of layer numbers."""


def split_into_groups(classes: Sequence[WindowClass]) -> Split:
    """Return the groups of each class; the largest group's bytes are the block's.

    One class is one group, with nothing unused. Otherwise every block size at which some class
    splits evenly is tried, and the best of them has the smallest sum of: the share of memory left
    unused, taken where it is worst, for short sequences (every layer holds every token) or for
    the longest (window layers hold their window); and `GROUP_PRICE` for each group.
    """
    if len(classes) == 1:
        return [[list(classes[0].layer_bytes)]]
    best: tuple[float, Split] | None = None
    for block_bytes in sorted(set(_candidate_block_bytes(classes)), reverse=True):
        split = [_pack(c.layer_bytes, block_bytes) for c in classes]
        cost = _cost(classes, split)
        if best is None or cost < best[0]:
            best = (cost, split)
    assert best is not None
    return best[1]


def _candidate_block_bytes(classes: Sequence[WindowClass]) -> Iterator[int]:
    largest_layer = max(max(c.layer_bytes.values()) for c in classes)
    for window_class in classes:
        for num_groups in range(1, len(window_class.layer_bytes) + 1):
            loads = [0] * num_groups
            for layer_bytes in sorted(window_class.layer_bytes.values(), reverse=True):
                loads[loads.index(min(loads))] += layer_bytes
            if max(loads) >= largest_layer:
                yield max(loads)


def _pack(layer_bytes: Mapping[int, int], block_bytes: int) -> list[list[int]]:
    """First fit, largest first; layers of one size stay in the model's order."""
    groups: list[list[int]] = []
    room: list[int] = []
    for layer, size in sorted(layer_bytes.items(), key=lambda item: -item[1]):
        index = next((i for i, free in enumerate(room) if size <= free), len(groups))
        if index == len(groups):
            groups.append([])
            room.append(block_bytes)
        groups[index].append(layer)
        room[index] -= size
    return groups


def _cost(classes: Sequence[WindowClass], split: Split) -> float:
    block_bytes = max(
        sum(c.layer_bytes[layer] for layer in group)
        for c, groups in zip(classes, split, strict=True)
        for group in groups
    )

    def unused_share(weights: list[float]) -> float:
        held = sum(w * len(groups) * block_bytes for w, groups in zip(weights, split, strict=True))
        used = sum(w * c.total_bytes for w, c in zip(weights, classes, strict=True))
        return 1 - used / held

    short = unused_share([1.0] * len(classes))
    long = unused_share([c.long_share for c in classes])
    return max(short, long) + GROUP_PRICE * sum(len(groups) for groups in split)
