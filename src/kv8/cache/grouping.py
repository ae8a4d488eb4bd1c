"""Which layers share a block, and how many tokens of them: the split that leaves least unused.

All groups draw blocks of one size from one free list, so where groups need different bytes for a
token something stays unused. Two things can be chosen for each window class: how many of its layers
form a group, and how many parts of B tokens a block of theirs is cut into. Gemma 3 with its 15
window layers in 16 bits and its 3 full layers in 8 has blocks of three layers: 16 tokens of window
layers, or 32 tokens of full ones, and not a byte to spare.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# What one more group costs, as a share of the memory: every step builds, for each group, a block
# table and a list of slots. Without a price, 29 + 5 layers would become 34 groups of one layer to
# save the 3 % that 7 groups of five leave unused.
GROUP_PRICE = 1 / 512
# What one more part costs: the last block of a sequence is emptier, and prefixes are found in
# larger steps.
PART_PRICE = 1 / 128
# Powers of two, because the sizes of the formats are, and every part must begin at an address
# that is a multiple of a code's bytes.
PARTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class WindowClass:
    """The layers that see the same window.

    Attributes:
        window: the window they share, `None` for all tokens.
        layer_bytes: bytes of B tokens' keys and values, by layer number.
        long_share: tokens such a layer holds of the longest sequence, as a share; 1 without a
            window.
    """

    window: int | None
    layer_bytes: Mapping[int, int]
    long_share: float

    @property
    def total_bytes(self) -> int:
        """Bytes of B tokens in all the class's layers."""
        return sum(self.layer_bytes.values())


@dataclass(frozen=True)
class ClassSplit:
    """How one class is split.

    Attributes:
        groups: layer numbers of each group.
        parts: parts of B tokens in a block of these groups.
    """

    groups: tuple[tuple[int, ...], ...]
    parts: int

    def held_bytes(self, block_bytes: int) -> float:
        """Return the bytes B tokens take in all groups, what stays unused included."""
        return len(self.groups) * block_bytes / self.parts

    @property
    def price(self) -> float:
        """What the split costs besides unused memory, as a share of the memory."""
        return GROUP_PRICE * len(self.groups) + PART_PRICE * (self.parts - 1)


def split_into_groups(classes: Sequence[WindowClass]) -> list[ClassSplit]:
    """Return the split of each class.

    One class is one group, with nothing unused. Otherwise every block size at which some class
    splits evenly is tried. The best has the least cost: the share of memory left unused, taken
    where it is worst, for short sequences (every layer holds every token) or for the longest
    (window layers hold their window); and the price of its groups and parts.
    """
    if len(classes) == 1:
        return [ClassSplit((tuple(classes[0].layer_bytes),), 1)]
    best: tuple[float, list[ClassSplit]] | None = None
    for block_bytes in sorted(set(_candidate_block_bytes(classes)), reverse=True):
        splits = [_best_split(c, block_bytes) for c in classes]
        unused = (
            _unused_share(classes, splits, block_bytes, [1.0] * len(classes)),
            _unused_share(classes, splits, block_bytes, [c.long_share for c in classes]),
        )
        cost = max(unused) + sum(split.price for split in splits)
        if best is None or cost < best[0]:
            best = (cost, splits)
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


def _best_split(window_class: WindowClass, block_bytes: int) -> ClassSplit:
    """Return the split of one class that costs least, given the bytes of a block."""
    largest_layer = max(window_class.layer_bytes.values())
    splits = [
        ClassSplit(_pack(window_class.layer_bytes, block_bytes // parts), parts)
        for parts in PARTS
        if largest_layer <= block_bytes // parts
    ]
    return min(splits, key=lambda s: s.held_bytes(block_bytes) / window_class.total_bytes + s.price)


def _pack(layer_bytes: Mapping[int, int], room_bytes: int) -> tuple[tuple[int, ...], ...]:
    """First fit, largest first; layers of one size stay in the model's order."""
    groups: list[list[int]] = []
    rooms: list[int] = []
    for layer, size in sorted(layer_bytes.items(), key=lambda item: -item[1]):
        index = next((i for i, room in enumerate(rooms) if size <= room), len(groups))
        if index == len(groups):
            groups.append([])
            rooms.append(room_bytes)
        groups[index].append(layer)
        rooms[index] -= size
    return tuple(map(tuple, groups))


def _unused_share(
    classes: Sequence[WindowClass],
    splits: Sequence[ClassSplit],
    block_bytes: int,
    token_shares: Sequence[float],
) -> float:
    """Return the unused share of the memory of sequences that hold these shares of their tokens."""
    pairs = list(zip(token_shares, classes, splits, strict=True))
    held = sum(share * split.held_bytes(block_bytes) for share, _, split in pairs)
    return 1 - sum(share * c.total_bytes for share, c, _ in pairs) / held
