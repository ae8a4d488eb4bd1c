"""Made-up attention work for the kernel benchmark: layers full of codes, batches, queries."""

from dataclasses import dataclass

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention, LayerCounters
from kv8.cache.pool import allocate
from kv8.formats.base import KVFormat
from kv8.formats.encode import bits, encode, torch_dtype
from kv8.geometry import LayerGeometry

_SCALE = 1 / 64
_DISTINCT_BLOCKS = 64  # as many are random; the rest are copies, at other addresses


@dataclass(frozen=True)
class Shape:
    """The attention of one model: H, K, D, how many layers take turns, tokens a block holds, and
    where it is computed.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    block_size: int = 16
    device: str = "cpu"

    @property
    def call(self) -> AttentionCall:
        """What a plain model passes."""
        return AttentionCall(self.head_dim**-0.5, softcap=None, sinks=None, window=None)

    def queries(self, num_tokens: int) -> torch.Tensor:
        """Return random queries, bfloat16 [T, H, D]."""
        return self._normal(num_tokens, self.num_heads)

    def keys(self, num_tokens: int) -> torch.Tensor:
        """Return random keys (or values), bfloat16 [T, K, D]."""
        return self._normal(num_tokens, self.num_kv_heads)

    def _normal(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        shape = (num_tokens, num_heads, self.head_dim)
        return torch.randn(shape, device=self.device).bfloat16()

    def layers(self, kv_format: KVFormat, num_tokens: int) -> list[LayerAttention]:
        """Return layers whose caches hold ``num_tokens`` random tokens."""
        return [self._layer(kv_format, num_tokens) for _ in range(self.num_layers)]

    def _layer(self, kv_format: KVFormat, num_tokens: int) -> LayerAttention:
        quantized = kv_format.quantized
        scales = torch.full((self.num_kv_heads,), _SCALE, device=self.device)
        scale = scales if quantized else None
        k_codes, v_codes = self._codes(kv_format, num_tokens).unbind(1)
        counts = [torch.zeros(4, dtype=torch.int64, device=self.device) for _ in range(2)]
        return LayerAttention(
            geometry=LayerGeometry(
                0, "full_attention", self.num_heads, self.num_kv_heads, self.head_dim, None, 0
            ),
            group=0,
            format=kv_format,
            k_codes=k_codes,
            v_codes=v_codes,
            k_scale=scale,
            v_scale=scale,
            q_scale=None,
            counters=LayerCounters(*counts) if quantized else None,
        )

    def _codes(self, kv_format: KVFormat, num_tokens: int) -> torch.Tensor:
        num_blocks = -(-num_tokens // self.block_size)
        shape = (_DISTINCT_BLOCKS, 2, self.num_kv_heads, self.block_size, self.head_dim)
        values = torch.randn(shape, device=self.device)
        some = (
            encode(values, _SCALE, kv_format)
            if kv_format.quantized
            else values.to(torch_dtype(kv_format))
        )
        repeated = bits(some).repeat(-(-num_blocks // _DISTINCT_BLOCKS), 1, 1, 1, 1)[:num_blocks]
        codes = allocate(repeated.nbytes, torch.device(self.device)).view(repeated.dtype)
        return codes.view(repeated.shape).copy_(repeated).view(torch_dtype(kv_format))

    def batch(
        self, num_sequences: int, new: int, context: int, *, recorded: bool = False
    ) -> AttentionBatch:
        """Return a batch of ``new`` tokens a sequence, whose blocks lie in random order.

        ``recorded``: as a step that is to be played back has it.
        """
        size, device = self.block_size, self.device
        width = -(-context // size)
        table = torch.randperm(num_sequences * width).view(num_sequences, width).to(torch.int32)
        at = torch.arange(context - new, context)
        slots = (table[:, at // size].long() * size + at % size).flatten()
        return AttentionBatch(
            query_starts=(torch.arange(num_sequences + 1, dtype=torch.int32) * new).to(device),
            context_lens=torch.full((num_sequences,), context, dtype=torch.int32).to(device),
            block_tables=(table.to(device),),
            slots=(slots.to(device),),
            block_size=size,
            query_lens_host=(new,) * num_sequences,
            context_lens_host=(context,) * num_sequences,
            lengths_on_device=recorded,
        )
