"""Sampling on a device: the same tokens as on the host, which waits for it once."""

import pytest
import torch

from kv8.engine import truncation
from kv8.engine.host_reads import host_reads
from kv8.engine.sampler import SamplingState, sample
from kv8.errors import EngineError
from kv8.sampling_params import SamplingParams

VOCAB = 3000  # more than the sampler looks at before it sorts whole rows on a CPU
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=20),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.02),
    SamplingParams(temperature=2.0),
]


def states(num_rows: int) -> list[SamplingState]:
    return [
        SamplingState(
            PARAMS[row % len(PARAMS)],
            token_ids=[1, 2],
            num_prompt_tokens=1,
            vocab_size=VOCAB,
            seed=row,
        )
        for row in range(num_rows)
    ]


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU count as a device whose tensors the host must not look at."""
    monkeypatch.setattr(truncation, "is_near", lambda _: False)


def draw_logits(num_rows: int, *, ties: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    values = torch.randn(num_rows, VOCAB, generator=generator) * 3
    return (values * 2).round() / 2 if ties else values  # many equal logits at every threshold


@pytest.mark.parametrize("ties", [False, True])
def test_the_same_tokens_as_on_a_cpu(ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = draw_logits(60, ties=ties)
    expected = [outcome.token_id for outcome in sample(logits, states(60))]
    monkeypatch.setattr(truncation, "is_near", lambda _: False)
    assert [outcome.token_id for outcome in sample(logits, states(60))] == expected
    only_top_k = [state for state in states(60) if state.params.top_k > 0]
    part = logits[: len(only_top_k)]
    there = [outcome.token_id for outcome in sample(part, only_top_k)]
    monkeypatch.undo()
    assert [outcome.token_id for outcome in sample(part, only_top_k)] == there


@pytest.mark.usefixtures("far")
def test_the_host_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, waits = draw_logits(12, ties=True), []
    original = torch.Tensor.tolist

    def counted(self):
        waits.append(self.shape)
        return original(self)

    for name in ("item", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host waited"))
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    assert host_reads(lambda: sample(logits, states(12))) == []
    assert waits == [(3, 12)]


@pytest.mark.usefixtures("far")
def test_a_spoilt_row_spoils_no_other() -> None:
    logits = draw_logits(12, ties=False)
    expected = [outcome.token_id for outcome in sample(logits, states(12))]
    for row, value in ((1, torch.nan), (3, torch.inf), (8, -torch.inf)):
        logits[row] = value
    outcomes = sample(logits, states(12))
    for row, (outcome, token) in enumerate(zip(outcomes, expected, strict=True)):
        if row in (1, 3, 8):
            assert isinstance(outcome.error, EngineError)
        else:
            assert outcome.token_id == token
