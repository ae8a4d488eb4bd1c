"""What a launch of the Triton kernels is about: a layer's cache, a batch, what a call asks for."""

from dataclasses import dataclass

import torch

from kv8.kernels.triton_config import Device, Shape


@dataclass(frozen=True)
class TritonCache:
    """One layer's cache and scales; tensors as in `kv8.attention.layer.LayerAttention`.

    Attributes:
        format: name of the codes' format.
        largest: largest finite magnitude of a code.
        smallest: smallest positive one.
        k_counts: int64 [4], or `None` to count nothing.
        v_counts: likewise.
    """

    device: Device
    format: str
    largest: float
    smallest: float
    k_codes: torch.Tensor
    v_codes: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    q_scale: torch.Tensor | None
    k_counts: torch.Tensor | None
    v_counts: torch.Tensor | None
    num_heads: int

    @property
    def quantized(self) -> bool:
        """Whether codes are FP8."""
        return self.k_codes.element_size() == 1

    def codes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V codes as the device's casts want them."""
        if self.quantized and self.device.casts != "hardware":
            return self.k_codes.view(torch.uint8), self.v_codes.view(torch.uint8)
        return self.k_codes, self.v_codes

    def pairs(self) -> torch.Tensor | None:
        """Return V's FP8 codes as words of two, or `None` where they do not lie so."""
        codes = self.v_codes
        odd = codes.shape[3] % 2 or codes.stride(0) % 2 or codes.data_ptr() % 2
        if not self.quantized or odd:
            return None
        return codes.view(torch.uint16)

    def compute_dtype(self, query: torch.dtype) -> torch.dtype:
        """Return the type in which products are made: one that holds codes and queries.

        float16 holds all FP8 codes, and bfloat16 queries once they are brought into its range
        (`kv8.kernels.triton_tile.prepare_query`); float32 holds everything and is slow.
        """
        if self.q_scale is not None:  # the query is codes too
            return torch.float16
        codes = torch.float16 if self.quantized else self.k_codes.dtype
        if torch.float32 in (query, codes):
            return torch.float32
        if codes == torch.bfloat16 and query == torch.float16:
            return torch.float32
        return codes

    def shape(self, compute: torch.dtype) -> Shape:
        """Return what the configuration depends on."""
        _, num_kv_heads, _, head_dim = self.k_codes.shape
        return Shape(
            num_kv_heads,
            self.num_heads // num_kv_heads,
            head_dim,
            self.k_codes.element_size(),
            compute.itemsize,
        )


@dataclass(frozen=True)
class Sequences:
    """A batch on the device, as in `kv8.attention.batch.AttentionBatch`, and its numbers.

    Attributes:
        max_context: no context is longer.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    num_sequences: int
    num_tokens: int
    max_context: int


@dataclass(frozen=True)
class Settings:
    """What one call asks for; ``softcap`` 0 for none, ``window`` 0 for all tokens."""

    softmax_scale: float
    softcap: float
    sinks: torch.Tensor | None
    window: int
