"""Which tokens stay in the draw: min-p, top-k and top-p. Each sets the others to -inf, in place.

Ties are broken by token number, lower first, so that exactly k tokens stay and the outcome is the
same on every device and beside any other rows.
"""

import math
from collections.abc import Sequence

import torch

# How many of the best are looked at, in turn, before a whole row is sorted for a top-p.
_LOOKS = (64, 1024)


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
    part = _select(scaled, rows)
    counts = torch.tensor([top_k[i] for i in rows], device=scaled.device)[:, None]
    ranked = part.topk(int(counts.max()) + 1, dim=1).values
    _keep_first(part, ranked, counts)
    _put_back(scaled, rows, part)


def keep_top_p(scaled: torch.Tensor, top_p: Sequence[float]) -> None:
    """Keep the fewest most likely tokens of each row ([R, V]) that reach ``top_p`` together."""
    rows = [i for i, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return
    part = _select(scaled, rows)
    shares = torch.tensor([top_p[i] for i in rows], dtype=torch.float64, device=scaled.device)
    log_total = part.logsumexp(dim=1, keepdim=True)
    num_values = part.shape[1]
    for width in (*(look for look in _LOOKS if look < num_values), num_values):
        ranked = part.topk(width, dim=1).values
        probs = (ranked - log_total).double().exp()
        bounds = probs.cumsum(dim=1)
        # One more than needed is looked at, to see whether it ties with the last.
        if width == num_values or bool((bounds[:, -2] >= shares).all()):
            break
    # A token is in while those before it have not reached the share; the first always is.
    counts = (bounds - probs < shares[:, None]).sum(dim=1, keepdim=True)
    _keep_first(part, ranked, counts)
    _put_back(scaled, rows, part)


def _keep_first(scores: torch.Tensor, ranked: torch.Tensor, counts: torch.Tensor) -> None:
    """Set all but the ``counts`` ([R, 1]) best of each row of ``scores`` ([R, V]) to -inf.

    ``ranked`` holds the best scores of each row in falling order: ``counts`` of them and one more,
    unless there is no more.
    """
    threshold = ranked.gather(1, counts - 1)
    scores.masked_fill_(scores < threshold, -math.inf)
    following = ranked.gather(1, counts.clamp_max(ranked.shape[1] - 1))
    tied = (following == threshold) & (counts < ranked.shape[1]) & (threshold > -math.inf)
    # Rarely more tokens than wanted stand at the threshold; of those the first by number stay.
    for row in tied[:, 0].nonzero()[:, 0].tolist():
        above = int((scores[row] > threshold[row]).sum())
        level = (scores[row] == threshold[row]).nonzero()[:, 0]
        scores[row, level[int(counts[row]) - above :]] = -math.inf


def _select(scaled: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the given rows, without a copy if they are all there are."""
    return scaled if len(rows) == scaled.shape[0] else scaled[rows]


def _put_back(scaled: torch.Tensor, rows: Sequence[int], part: torch.Tensor) -> None:
    if part is not scaled:
        scaled[rows] = part
