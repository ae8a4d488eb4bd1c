"""Made-up attention work for the kernel benchmark: layers full of codes, batches, queries."""

from dataclasses import dataclass

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention, LayerCounters
from kv8.attention.made_up import CODE_SCALE, made_up_batch, random_codes
from kv8.formats.base import KVFormat
from kv8.geometry import LayerGeometry


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
        scales = torch.full((self.num_kv_heads,), CODE_SCALE, device=self.device)
        scale = scales if quantized else None
        blocks = (-(-num_tokens // self.block_size), self.num_kv_heads, self.block_size)
        k_codes, v_codes = random_codes(
            kv_format, (*blocks, self.head_dim), torch.device(self.device)
        )
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

    def batch(
        self, num_sequences: int, new: int, context: int, *, recorded: bool = False
    ) -> AttentionBatch:
        """Return a batch of ``new`` tokens a sequence, whose blocks lie in random order.

        ``recorded``: as a step that is to be played back has it.
        """
        lengths = [(new, context)] * num_sequences
        device = torch.device(self.device)
        return made_up_batch(lengths, self.block_size, device, recorded=recorded)
