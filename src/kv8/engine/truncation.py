"""Which tokens stay in the draw: min-p, top-k and top-p. Each sets the others to -inf, in place.

Ties are broken by token number, lower first, so that exactly k tokens stay and the outcome is the
same on every device and beside any other rows.
"""

import math
from collections.abc import Sequence

import torch

# Candidates looked at before a whole row is sorted; enough for almost every top-p in practice.
_FIRST_LOOK = 1024


def keep_min_p(scaled: torch.Tensor, min_p: Sequence[float]) -> None:
    """Drop tokens less likely than ``min_p`` times the most likely one.

    Args:
        scaled: float32 [R, V], logits over temperature, each row's maximum being 0.
        min_p: R shares in [0, 1].
    """
    if not any(min_p):
        return
    # exp(scaled) is the likelihood relative to the best token's.
    floor = torch.tensor([math.log(p) if p > 0 else -math.inf for p in min_p], device=scaled.device)
    scaled.masked_fill_(scaled < floor[:, None], -math.inf)


def keep_top_k(scaled: torch.Tensor, top_k: Sequence[int]) -> None:
    """Keep the ``top_k`` most likely tokens of each row ([R, V]); 0, -1 and V or more keep all."""
    rows = [i for i, k in enumerate(top_k) if 0 < k < scaled.shape[1]]
    if not rows:
        return
    counts = torch.tensor([top_k[i] for i in rows], device=scaled.device)[:, None]
    part = scaled[rows]
    ranked = part.topk(int(counts.max()), dim=1).values
    scaled[rows] = _keep_first(part, ranked, counts)


def keep_top_p(scaled: torch.Tensor, top_p: Sequence[float]) -> None:
    """Keep the fewest most likely tokens of each row ([R, V]) that reach ``top_p`` together."""
    rows = [i for i, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return
    part = scaled[rows]
    shares = torch.tensor([top_p[i] for i in rows], dtype=torch.float64, device=scaled.device)
    probs = torch.softmax(part, dim=1)
    num_values = probs.shape[1]
    width = min(_FIRST_LOOK, num_values)
    while True:
        ranked = probs.topk(width, dim=1).values
        bounds = ranked.cumsum(dim=1, dtype=torch.float64)
        if width == num_values or bool((bounds[:, -1] >= shares).all()):
            break
        width = num_values
    # A token is in while those before it have not reached the share; the first always is.
    before = bounds - ranked
    counts = (before < shares[:, None]).sum(dim=1, keepdim=True)
    scaled[rows] = part.masked_fill(_keep_first(probs, ranked, counts) == -math.inf, -math.inf)


def _keep_first(scores: torch.Tensor, ranked: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return ``scores`` ([R, V]) with all but the ``counts`` ([R, 1]) best of each row at -inf.

    ``ranked`` holds the best scores of each row in falling order, at least ``counts`` of them.
    """
    threshold = ranked.gather(1, counts - 1)
    above = scores > threshold
    ties = scores == threshold
    room = counts - above.sum(dim=1, keepdim=True)
    kept = above | (ties & (ties.cumsum(dim=1) <= room))
    return scores.masked_fill(~kept, -math.inf)
