"""The tensors: one arena of bytes, and a typed view of it for each layer. No policy in here.

Stored codes are bits with a type. Nothing here or elsewhere may move them by converting numbers
(``to``, ``copy_`` between dtypes): copies go through ``view(torch.uint8)``.
"""

import mmap
from collections import Counter

import torch

from kv8.cache.layout import CacheLayout
from kv8.errors import CapacityError
from kv8.geometry import ModelGeometry
from kv8.layer_plan import LayerPlan
from kv8.units import format_bytes


class KVPool:
    """The memory of a cache of ``num_blocks`` blocks, filled once, at allocation.

    Args:
        layout: where each layer's codes lie.
        geometry: heads and head sizes.
        plan: the format of every layer.
        num_blocks: N.
        device: where the arena lives.
        fill: the value of every byte at first. Tests poison it (255 is NaN in every format) to
            prove that nothing is read before it is written.

    Raises:
        CapacityError: the memory cannot be had.
    """

    def __init__(
        self,
        layout: CacheLayout,
        geometry: ModelGeometry,
        plan: LayerPlan,
        num_blocks: int,
        device: torch.device | str,
        *,
        fill: int = 0,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._arena = allocate(num_blocks * layout.block_bytes, torch.device(device), fill)
        self._codes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in geometry.kv_layers:
            dtype = getattr(torch, plan.format(layer.layer).torch_dtype)
            place = layout.placement(layer.layer, num_blocks)
            shape = (place.num_parts, layer.num_kv_heads, layout.block_size, layer.head_dim)
            self._codes[layer.layer] = (
                _view(self._arena, place.k_offset, place.stride, shape, dtype),
                _view(self._arena, place.v_offset, place.stride, shape, dtype),
            )
        for layer in geometry.layers:
            self._codes.setdefault(layer.layer, self._codes[layer.kv_source])

    @property
    def storage_bytes(self) -> int:
        """Bytes of the allocated arena, asked of the tensor."""
        return self._arena.untyped_storage().nbytes()

    def codes(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(k_codes, v_codes)`` of ``layer``, each [N, K, B, D] in the format's dtype.

        Dimension 0 is strided, the others are contiguous. N counts the parts of the layer's group
        (see `kv8.cache.layout`), `num_blocks` of them or a multiple. A layer that reads another's
        keys and values gets that layer's tensors.
        """
        return self._codes[layer]

    def bytes_per_token(self, layer: int) -> int:
        """Return the bytes one token takes in ``layer``'s tensors, keys and values together."""
        return sum(
            codes.shape[1] * codes.shape[3] * codes.element_size() for codes in self._codes[layer]
        )

    def __str__(self) -> str:
        """Say what was allocated, as the tensors have it and not as it was asked for."""
        owners = [n for n in self._codes if n in self.layout.slots]
        dtypes = Counter(str(self._codes[n][0].dtype).removeprefix("torch.") for n in owners)
        layers = ", ".join(f"{count} layers in {dtype}" for dtype, count in dtypes.items())
        return (
            f"{format_bytes(self.storage_bytes)} on {self._arena.device} in {self.num_blocks:,} "
            f"blocks: {layers}, {sum(map(self.bytes_per_token, owners)):,} bytes a token"
        )


def allocate(num_bytes: int, device: torch.device, fill: int = 0) -> torch.Tensor:
    """Return ``num_bytes`` bytes of value ``fill``, uint8 [num_bytes], as a cache has them.

    Raises:
        CapacityError: the memory cannot be had.
    """
    try:
        if fill == 0 and device.type == "cpu" and num_bytes > 0:
            return _fresh_pages(num_bytes)
        if fill == 0:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return torch.full((num_bytes,), fill, dtype=torch.uint8, device=device)
    # torch has no narrower class than RuntimeError for an allocation on the CPU
    except (RuntimeError, OSError, OverflowError) as error:
        raise CapacityError(
            f"The KV cache's {format_bytes(num_bytes)} could not be allocated on {device}. Give "
            "the cache less with kv_cache_memory, or free memory."
        ) from error


def _fresh_pages(num_bytes: int) -> torch.Tensor:
    """Return zeros whose pages the system makes when they are first written to.

    A cache of gigabytes is ready at once that way, and takes no memory before it is used.
    """
    # Private: a forked process gets a copy of what it writes to, as of all other memory. A shared
    # mapping would let two processes store into one cache, and has no huge pages by default.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer of them, for reads all over the cache
    return torch.frombuffer(memory, dtype=torch.uint8)


def _view(
    arena: torch.Tensor, offset: int, stride: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return [N, K, B, D] over the arena; entry n starts at byte ``offset + n * stride``."""
    num_parts, num_heads, block_size, head_dim = shape
    side_bytes = num_heads * block_size * head_dim * dtype.itemsize
    extent = (num_parts - 1) * stride + side_bytes
    # Narrow first and reinterpret then: the typed view keeps its own offset into the storage,
    # where an offset given to as_strided would count from the storage's beginning.
    codes = arena.narrow(0, offset, extent).view(dtype)
    strides = (stride // dtype.itemsize, block_size * head_dim, head_dim, 1)
    return codes.as_strided(shape, strides)
