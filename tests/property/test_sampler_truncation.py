"""Truncation against a slow oracle that sorts Python lists, ties and all."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv8.engine.sampler import truncated_probs
from kv8.sampling_params import SamplingParams

# Multiples of 1/4 make exact ties common; -inf are masked tokens.
values = st.one_of(st.integers(-24, 24).map(lambda i: i / 4), st.just(-math.inf))
rows = st.lists(values, min_size=1, max_size=40).filter(lambda row: max(row) > -math.inf)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.1, 0.5, 1.0, 3.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, 39, 1000])),
        # Shares no sum of the probabilities meets by chance, so rounding cannot decide.
        top_p=draw(st.sampled_from([1e-9, 0.10317, 0.50713, 0.8919, 0.99003, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.013, 0.307, 1.0])),
    )


def oracle(logits: list[float], params: SamplingParams) -> list[float]:
    peak = max(logits)
    weights = [math.exp((x - peak) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept = [i for i in order if weights[i] >= params.min_p and weights[i] > 0]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total = sum(weights[i] for i in kept)
    nucleus, reached = [], 0.0
    for i in kept:
        if reached >= params.top_p and params.top_p < 1:
            break
        nucleus.append(i)
        reached += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


@settings(max_examples=400, deadline=None)
@given(rows, parameters())
def test_truncation_equals_the_oracle(row: list[float], params: SamplingParams) -> None:
    got = truncated_probs(torch.tensor([row]), [params])[0].tolist()
    for mine, true in zip(got, oracle(row, params), strict=True):
        # A token is in or out exactly; its probability is float32's, which may round one below
        # its smallest normal number to zero.
        assert (mine > 0) == (true > 0) or 0 < true < 2.0**-126
        assert abs(mine - true) < 1e-5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**31), parameters()), min_size=2, max_size=6))
def test_a_row_is_truncated_the_same_beside_any_others(cases: list) -> None:
    logits = torch.stack(
        [torch.randn(3000, generator=torch.Generator().manual_seed(seed)) for seed, _ in cases]
    )
    together = truncated_probs(logits, [params for _, params in cases])
    for i, (_, params) in enumerate(cases):
        assert torch.equal(together[i : i + 1], truncated_probs(logits[i : i + 1], [params]))


def test_a_flat_row_needs_more_than_the_first_look() -> None:
    probs = truncated_probs(torch.zeros(1, 5000), [SamplingParams(top_p=0.5)])
    # 2500 tokens of 1/5000 each; float32 shares may need one more to reach the half.
    assert int((probs > 0).sum()) in (2500, 2501)
    assert probs[0, :2500].min() > 0
