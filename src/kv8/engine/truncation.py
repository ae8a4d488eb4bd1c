"""Which tokens stay in the draw: min-p, top-k and top-p. Each sets the others to -inf, in place.

Ties are broken by token number, lower first, so that exactly k tokens stay and the outcome is the
same on every device and beside any other rows.

On a CPU it pays to look at the best tokens first, and at all of them only if they do not suffice.
On a GPU the host would have to wait for the answer; there every row is sorted.
"""

import math
from collections.abc import Sequence

import torch

from kv8.engine.upload import is_near, take_rows, to_device

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
    floors = [math.log(p) if p > 0 else -math.inf for p in min_p]
    floor = to_device(floors, torch.float32, scaled.device)
    scaled.masked_fill_(scaled < floor[:, None], -math.inf)


def keep_top_k(scaled: torch.Tensor, top_k: Sequence[int]) -> None:
    """Keep the ``top_k`` most likely tokens of each row ([R, V]); 0, -1 and V or more keep all."""
    rows = [i for i, k in enumerate(top_k) if 0 < k < scaled.shape[1]]
    if not rows:
        return
    part, wanted = take_rows(scaled, rows), [top_k[i] for i in rows]
    counts = to_device(wanted, torch.int64, scaled.device)[:, None]
    ranked = part.topk(max(wanted) + 1, dim=1).values
    _keep_first(part, ranked, counts)
    _put_back(scaled, rows, part)


def keep_top_p(scaled: torch.Tensor, top_p: Sequence[float], *, most: int | None = None) -> None:
    """Keep the fewest most likely tokens of each row ([R, V]) that reach ``top_p`` together.

    ``most`` is how many tokens of a row are in the draw at most, if the caller knows.
    """
    rows = [i for i, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return
    part = take_rows(scaled, rows)
    shares = to_device([top_p[i] for i in rows], torch.float64, scaled.device)
    log_total = part.logsumexp(dim=1, keepdim=True)
    num_values = part.shape[1] if most is None else min(most + 1, part.shape[1])
    looks = _LOOKS if is_near(scaled) else ()
    for width in (*(look for look in looks if look < num_values), num_values):
        ranked = part.topk(width, dim=1).values
        probs = (ranked - log_total).double().exp()
        bounds = probs.cumsum(dim=1)
        # One more than needed is looked at, to see whether it ties with the last.
        if width == num_values or bool((bounds[:, -2] >= shares).all()):
            break
    # A token is in while those before it have not reached the share; the first always is.
    counts = (bounds - probs < shares[:, None]).sum(dim=1, keepdim=True).clamp_min_(1)
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
    if not is_near(scores):
        at_threshold = scores == threshold
        num_wanted = counts - (scores > threshold).sum(dim=1, keepdim=True)
        late = at_threshold & (at_threshold.cumsum(dim=1, dtype=torch.int32) > num_wanted)
        scores.masked_fill_(late & tied, -math.inf)
        return
    for row in tied[:, 0].nonzero()[:, 0].tolist():
        above = int((scores[row] > threshold[row]).sum())
        level = (scores[row] == threshold[row]).nonzero()[:, 0]
        scores[row, level[int(counts[row]) - above :]] = -math.inf


def _put_back(scaled: torch.Tensor, rows: Sequence[int], part: torch.Tensor) -> None:
    if part is not scaled:
        scaled.index_copy_(0, to_device(rows, torch.int64, scaled.device), part)
