"""Log-probabilities of tokens, as the model gave them: before temperature, penalties and bans."""

from collections.abc import Sequence

import torch

from kv8.outputs import Logprob


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[dict[int, Logprob]]:
    """Return, row by row, the logprob of one token and of the most likely ones.

    Args:
        logits: float32 [R, V], the model's own.
        token_ids: R tokens (chosen, or next in the prompt).
        num_top: how many of the most likely tokens to report in each row; may be 0.

    Returns:
        For each row a dictionary that starts with the row's own token, followed by the most likely
        ones in falling order. Equally likely tokens share a rank. Texts are left empty.
    """
    if not token_ids:
        return []
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    own = logprobs.gather(1, tokens[:, None])
    own_ranks = (1 + (logprobs > own).sum(dim=1)).tolist()
    own_values = own[:, 0].tolist()
    width = min(max(num_top), logits.shape[1])
    top = logprobs.topk(width, dim=1) if width else None
    rows = []
    for row, token in enumerate(token_ids):
        entries = {token: Logprob(own_values[row], own_ranks[row])}
        if top is not None:
            values = top.values[row, : num_top[row]].tolist()
            for value, candidate in zip(values, top.indices[row].tolist(), strict=False):
                entries.setdefault(candidate, Logprob(value, 1 + sum(v > value for v in values)))
        rows.append(entries)
    return rows
