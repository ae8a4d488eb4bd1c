"""Log-probabilities of prompt and output tokens: values, ranks, order, ties."""

import torch

from kv8.engine.logprobs import token_logprobs


def test_rows_may_ask_for_different_numbers() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    rows = token_logprobs(logits, [4, 5, 6], [0, 2, 30])
    assert len(rows[0]) == 1
    assert len(rows[1]) in (2, 3)
    assert len(rows[2]) == 30
    assert sorted(entry.rank for entry in rows[2].values()) == list(range(1, 31))


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    assert len(token_logprobs(torch.zeros(1, 4), [0], [20])[0]) == 4


def test_ties_share_a_rank() -> None:
    row = token_logprobs(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), [2], [4])[0]
    assert {token: entry.rank for token, entry in row.items()} == {2: 1, 1: 1, 0: 3, 3: 4}


def test_probabilities_sum_to_one() -> None:
    row = token_logprobs(torch.randn(1, 12), [0], [12])[0]
    total = sum(torch.tensor(entry.logprob, dtype=torch.float64).exp() for entry in row.values())
    assert abs(float(total) - 1) < 12 * 2**-20  # float32 log-probabilities near 0 to -10


def test_no_rows() -> None:
    assert token_logprobs(torch.empty(0, 5), [], []) == []
