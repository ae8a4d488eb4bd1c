"""The mathematics of attention over code values, one tile of queries; see docs/numerics.md.

Letters: C sequences, K kv heads, J query heads for each, r query rows, n keys, D head size.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch

from kv8.formats.base import FP8_E4M3
from kv8.formats.encode import decode, encode

LOG2_E: Final = math.log2(math.e)

# In FP8 attention softmax weights, at most 1, are stored divided by this, at most 256 of e4m3's
# 448. A power of two rounds nothing itself.
WEIGHT_SCALE: Final = 2.0**-8


@dataclass(frozen=True)
class TileSettings:
    """What one layer's call fixes for all of its tiles.

    Attributes:
        softcap: see `AttentionCall`.
        sinks: float32 [K, J], see `AttentionCall`.
        quantize_weights: whether softmax weights are rounded to e4m3 before they meet V.
    """

    softcap: float | None
    sinks: torch.Tensor | None
    quantize_weights: bool


def attend_tile(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    settings: TileSettings,
) -> torch.Tensor:
    """Return float32 [C, K, J, r, D]: softmax-weighted sums of ``values``, v scale not applied.

    Args:
        query: float32 [C, K, J, r, D], every scale included: ``query · key`` is the logit.
        keys: float32 [C, K, n, D], values of the stored codes.
        values: likewise.
        hidden: bool [C, r, n], keys a row must not see; `None` if each row sees all.
        settings: the rest.
    """
    logits = query.flatten(2, 3) @ keys.transpose(-1, -2)
    if settings.softcap is not None:
        logits = logits.div_(settings.softcap).tanh_().mul_(settings.softcap)
    logits = logits.mul_(LOG2_E).view(*query.shape[:4], -1)  # [C, K, J, r, n]
    if hidden is not None:
        logits = logits.masked_fill_(hidden[:, None, None], -torch.inf)

    # Any number near the maximum would do. A whole one makes a change of it an exact power of two,
    # so that kernels which meet their maximum step by step round as this does.
    largest = logits.amax(-1, keepdim=True).ceil_()
    weights = logits.sub_(largest).exp2_()
    total = weights.sum(-1, keepdim=True)
    if settings.sinks is not None:
        total = total + (settings.sinks[..., None, None] * LOG2_E - largest).exp2()

    if settings.quantize_weights:
        weights = decode(encode(weights, WEIGHT_SCALE, FP8_E4M3), None, FP8_E4M3)
        total = total / WEIGHT_SCALE
    weighted = weights.flatten(2, 3) @ values
    if hidden is not None and not weighted.isfinite().all():
        weighted = _weigh_visible(weights, values, hidden)
    return weighted.view(query.shape) / total


def _weigh_visible(
    weights: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Return ``weights · values`` where a value that is no number reaches only rows that see it.

    A hidden key has weight zero, and zero times NaN is NaN: one broken token would take every
    earlier one in its tile along.
    """
    finite = values.isfinite()
    weighted = weights.flatten(2, 3) @ values.where(finite, 0.0)
    visible = (~hidden)[:, None, None].expand(weights.shape).flatten(2, 3)
    reached = visible.to(torch.float32) @ (~finite).to(torch.float32) > 0
    return weighted.masked_fill(reached, torch.nan)
