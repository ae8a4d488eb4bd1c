"""A tiny workload to check a model with: two packed sequences, a throw-away cache, a recorder.

The recorder is a second attention function: transformers' own eager attention, computed in
float32 whatever the model's dtype, that notes what each layer was asked.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention
from kv8.errors import UnsupportedModelError
from kv8.formats.base import FLOAT32, KVFormat
from kv8.geometry import LayerGeometry, ModelGeometry
from kv8.models.interface import BINDING

RECORDER_NAME: Final = "kv8_recorder"
BLOCK_SIZE: Final = 16
_LENGTHS: Final = (24, 17)
_LONGEST_WINDOW_TRIED: Final = 64
_PAST_WINDOW: Final = 8


@dataclass(frozen=True)
class ProbeSequence:
    """One sequence of the probe.

    Attributes:
        token_ids: int64 [n].
        first_position: the position of its first token. The second sequence stands at the end of
            what the model was made for, so that anything in the model that depends on the longest
            position of a batch shows.
        chunk: how many of its tokens the first of two steps computes.
    """

    token_ids: torch.Tensor
    first_position: int
    chunk: int

    @property
    def length(self) -> int:
        """Number of tokens, n."""
        return len(self.token_ids)

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token, int64 [n]."""
        start = self.first_position
        return torch.arange(start, start + self.length, device=self.token_ids.device)


@dataclass
class RecordedCall:
    """What one layer was asked for one sequence: the arguments of the attention function."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    keywords: dict[str, Any]

    def expected(self) -> torch.Tensor:
        """Return transformers' eager attention in float32, [1, n, H, D]."""
        output: torch.Tensor = eager_attention(self.module)(
            self.module,
            self.query.float(),
            self.key.float(),
            self.value.float(),
            None if self.mask is None else self.mask.float(),
            **self.keywords,
        )[0]
        return output


def record_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Note the call where `HookedModel.recording` asked for it, and attend as eager does."""
    binding = getattr(module, BINDING, None)
    if binding is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends but belongs to no layer of the decoder. The model "
            f"has attention that kv8 does not know of."
        )
    call = RecordedCall(module, query, key, value, attention_mask, keywords)
    binding.scope.recorded.append((binding.geometry.layer, call))
    return call.expected().to(query.dtype), None


ALL_ATTENTION_FUNCTIONS.register(RECORDER_NAME, record_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(RECORDER_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def eager_attention(module: torch.nn.Module) -> Any:
    """Return the plain attention function of the module's own model code."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedModelError(
        f"{type(module).__name__} has no eager attention to check kv8's against."
    )


def probe_sequences(geometry: ModelGeometry, device: torch.device) -> tuple[ProbeSequence, ...]:
    """Return the sequences: pseudo-random tokens, the first longer than any small window."""
    windows = [layer.window for layer in geometry.layers if layer.window is not None]
    small = [window for window in windows if window <= _LONGEST_WINDOW_TRIED]
    longest = max(_LENGTHS[0], *(window + _PAST_WINDOW for window in small), 0)
    lengths = [min(length, geometry.max_position) for length in (longest, _LENGTHS[1])]
    if min(lengths) < 2:
        raise UnsupportedModelError("A model made for sequences of one token cannot be checked.")
    generator = torch.Generator().manual_seed(8)
    sequences = []
    for index, length in enumerate(lengths):
        ids = torch.randint(0, geometry.vocab_size, (length,), generator=generator).to(device)
        first = 0 if index == 0 else geometry.max_position - length
        # The last chunk is one token, as in decoding, or leaves the first block half full.
        chunk = length - 1 if index else length - BLOCK_SIZE // 2 - 1
        sequences.append(ProbeSequence(ids, first, max(chunk, 1)))
    return tuple(sequences)


def probe_batch(
    lengths: Sequence[int], contexts: Sequence[int], capacities: Sequence[int], device: torch.device
) -> AttentionBatch:
    """Return a batch of one cache group whose sequences own blocks one after another.

    Args:
        lengths: new tokens of each sequence.
        contexts: tokens of each sequence in the cache after the step.
        capacities: tokens each sequence has room for over all steps; the same in every step.
        device: of the tensors.
    """
    num_blocks = [-(-capacity // BLOCK_SIZE) for capacity in capacities]
    first_blocks = [0, *accumulate(num_blocks)]
    width = max(num_blocks)
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    slots = []
    for s, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        table[s, : num_blocks[s]] = torch.arange(num_blocks[s]) + first_blocks[s]
        slots.append(torch.arange(context - length, context) + first_blocks[s] * BLOCK_SIZE)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return AttentionBatch(
        query_starts=starts.to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=(table.to(device),),
        slots=(torch.cat(slots).to(device),),
        block_size=BLOCK_SIZE,
        query_lens_host=tuple(lengths),
        context_lens_host=tuple(contexts),
    )


def probe_layer(
    geometry: LayerGeometry,
    num_tokens: int,
    device: torch.device,
    *,
    kv_format: KVFormat = FLOAT32,
    owner: LayerAttention | None = None,
) -> LayerAttention:
    """Return a layer with an unquantized cache of its own, or with that of ``owner``.

    ``num_tokens`` is room for that many tokens, plus a part block for each sequence.
    """
    if owner is not None:
        return replace(owner, geometry=geometry)
    num_blocks = -(-num_tokens // BLOCK_SIZE) + len(_LENGTHS)
    shape = (num_blocks, geometry.num_kv_heads, BLOCK_SIZE, geometry.head_dim)
    dtype = getattr(torch, kv_format.torch_dtype)
    # Poison: whatever is read without having been stored spoils the result.
    k_codes, v_codes = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv")
    return LayerAttention(geometry, 0, kv_format, k_codes, v_codes, None, None, None, None)
