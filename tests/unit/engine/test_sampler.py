"""The sampler row by row: greedy, draws, penalties, bans, logprobs, and what it must refuse."""

import math
from collections.abc import Sequence

import pytest
import torch

from kv8.engine.sampler import SamplingState, sample, sequence_seed
from kv8.errors import EngineError, RequestError
from kv8.sampling_params import SamplingParams

VOCAB = 50


def state(
    params: SamplingParams, *, prompt=(), output=(), seed=0, ends=(), mask=None
) -> SamplingState:
    return SamplingState(
        params,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        vocab_size=VOCAB,
        seed=seed,
        end_token_ids=ends,
        mask=mask,
    )


def logits(rows: int = 1, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, [7, 31]] = 2.0
    assert sample(row, [state(SamplingParams(temperature=0))])[0].token_id == 7


def test_nothing_to_sample() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


def test_logits_are_left_as_they_are() -> None:
    given = logits(2)
    kept = given.clone()
    penalized = SamplingParams(
        temperature=0, presence_penalty=2.0, min_tokens=3, stop_token_ids=[4]
    )
    sample(given, [state(penalized, output=[1]), state(SamplingParams(top_k=3, top_p=0.5))])
    assert torch.equal(given, kept)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    given = logits(20)
    states = [state(SamplingParams(temperature=temperature), seed=i) for i in range(20)]
    assert [s.token_id for s in sample(given, states)] == given.argmax(dim=1).tolist()


def test_a_huge_temperature_is_uniform() -> None:
    given = logits().expand(4000, VOCAB)
    states = [state(SamplingParams(temperature=1e30), seed=i) for i in range(4000)]
    counts = torch.bincount(torch.tensor([s.token_id for s in sample(given, states)]))
    # 80 expected a token; six standard deviations of a binomial are 53.
    assert counts.min() > 27
    assert counts.max() < 133


def test_draws_follow_the_distribution() -> None:
    num_draws = 20_000
    given = logits()
    probs = torch.softmax(given[0].double() / 0.8, dim=0)
    states = [state(SamplingParams(temperature=0.8), seed=i) for i in range(num_draws)]
    drawn = sample(given.expand(num_draws, VOCAB), states)
    counts = torch.bincount(torch.tensor([s.token_id for s in drawn]), minlength=VOCAB)
    expected = probs * num_draws
    common = expected >= 5
    chi2 = ((counts - expected) ** 2 / expected)[common].sum()
    # The statistic has mean n and variance 2n; five standard deviations, and the seeds are fixed.
    freedom = int(common.sum())
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_draws_of_one_sequence_are_independent() -> None:
    given = torch.zeros(2000, VOCAB)
    tokens: list[int] = []
    one = SamplingState(
        SamplingParams(), token_ids=tokens, num_prompt_tokens=0, vocab_size=VOCAB, seed=3
    )
    for _ in range(2000):
        tokens.append(sample(given[:1], [one])[0].token_id)
    series = torch.tensor(tokens, dtype=torch.float64)
    series -= series.mean()
    lag_one = (series[1:] * series[:-1]).mean() / series.var()
    # An uncorrelated series has a lag correlation of standard deviation 1/sqrt(2000).
    assert abs(lag_one) < 5 / math.sqrt(2000)


def test_a_seeded_row_does_not_depend_on_its_neighbours() -> None:
    given = logits(5)
    params = [
        SamplingParams(seed=11, top_p=0.9),
        SamplingParams(temperature=0),
        SamplingParams(seed=12, top_k=4),
        SamplingParams(seed=13, min_p=0.1),
        SamplingParams(seed=14, repetition_penalty=1.5, logprobs=3),
    ]
    states = [state(p, prompt=[1, 2], output=[3], seed=p.seed or 0) for p in params]
    together = sample(given, states)
    alone = [sample(given[i : i + 1], [s])[0] for i, s in enumerate(states)]
    assert [s.token_id for s in together] == [s.token_id for s in alone]


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """A sequence restarted after a preemption draws what it would have drawn."""
    given = logits(3)
    first = state(SamplingParams(seed=5), output=[1, 2], seed=5)
    again = state(SamplingParams(seed=5), output=[1, 2], seed=5)
    sample(given, [first] * 3)
    assert sample(given[1:2], [first]) == sample(given[1:2], [again])
    assert first.uniform() != state(SamplingParams(), output=[1, 2, 3], seed=5).uniform()
    assert first.uniform() != state(SamplingParams(), output=[1, 2], seed=6).uniform()


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_every_allowed_seed_works(seed: int) -> None:
    params = SamplingParams(seed=seed, n=2)
    seeds = [sequence_seed(params, index, engine_seed=0, request=9) for index in range(2)]
    assert len({state(params, seed=s).uniform() for s in seeds}) == 2


def test_an_own_seed_hides_the_engine() -> None:
    own = SamplingParams(seed=4)
    assert sequence_seed(own, 1, engine_seed=0, request=0) == sequence_seed(
        own, 1, engine_seed=7, request=3
    )
    none = SamplingParams()
    seeds = {
        sequence_seed(none, index, engine_seed=seed, request=request)
        for index in range(3)
        for seed in range(3)
        for request in range(3)
    }
    assert len(seeds) == 27


def test_min_tokens_bans_what_would_end_the_output() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 9], row[0, 8], row[0, 7] = 5.0, 4.0, 3.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[9])
    assert sample(row, [state(params, output=[1], ends=[8])])[0].token_id == 7
    assert sample(row, [state(params, output=[1, 1], ends=[8])])[0].token_id == 9
    ignoring = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert sample(row, [state(ignoring, output=[1], ends=[9])])[0].token_id == 9


def test_repetition_penalty_covers_prompt_and_output() -> None:
    row = torch.full((1, VOCAB), -5.0)
    row[0, 3], row[0, 4], row[0, 5] = 3.0, 2.5, 2.0
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert sample(row, [state(params, prompt=[3], output=[4])])[0].token_id == 5
    negative = torch.full((1, VOCAB), -5.0)
    negative[0, 3], negative[0, 4] = -1.0, -1.5
    assert sample(negative, [state(params, prompt=[3])])[0].token_id == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e40, 1.7e308])
def test_a_penalty_that_overflows_still_leaves_a_choice(penalty: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    given = logits(2)
    given[:, 3] = 0.0  # times an infinite factor it would be NaN
    seen = range(VOCAB)  # logits of both signs, and none that is not penalized
    rows = [state(params, prompt=seen), state(SamplingParams(seed=1), seed=1)]
    outcomes = sample(given, rows)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[1].token_id == sample(given[1:], rows[1:])[0].token_id
    positive = given[0] > 0
    assert bool(positive[outcomes[0].token_id]), "a penalty never changes a logit's sign"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_tokens_are_all_banned_is_an_error(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, min_tokens=2, stop_token_ids=list(range(VOCAB))
    )
    banned, other = sample(logits(2), [state(params), state(SamplingParams(temperature=0))])
    assert banned.token_id is None
    assert "min_tokens" in str(banned.error)
    assert other.token_id == int(logits(2)[1].argmax())


def test_presence_and_frequency_count_the_output_only() -> None:
    row = torch.full((1, VOCAB), -5.0)
    row[0, 3], row[0, 4] = 2.0, 1.0
    presence = SamplingParams(temperature=0, presence_penalty=1.5)
    assert sample(row, [state(presence, prompt=[3, 3])])[0].token_id == 3
    assert sample(row, [state(presence, output=[3])])[0].token_id == 4
    frequency = SamplingParams(temperature=0, frequency_penalty=0.4)
    assert sample(row, [state(frequency, output=[3, 3])])[0].token_id == 3
    assert sample(row, [state(frequency, output=[3, 3, 3])])[0].token_id == 4


def test_penalties_count_each_output_token_once() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=0.5, logprobs=0)
    row = torch.full((1, VOCAB), -5.0)
    row[0, 3], row[0, 4] = 2.0, 0.7
    growing = [3, 3, 3, 3]
    one = SamplingState(params, token_ids=growing, num_prompt_tokens=3, vocab_size=VOCAB, seed=0)
    assert [sample(row, [one])[0].token_id for _ in range(5)] == [3] * 5
    growing += [3, 3]
    assert sample(row, [one])[0].token_id == 4


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_end_the_row_and_no_other(poison: float, temperature: float) -> None:
    given = logits(3)
    given[1, 17] = poison
    params = SamplingParams(temperature=temperature, logprobs=2)
    outcome = sample(given, [state(params, seed=i) for i in range(3)])
    assert outcome[1].token_id is None
    assert outcome[1].logprobs is None
    assert isinstance(outcome[1].error, EngineError)
    assert "no finite maximum" in str(outcome[1].error)
    for row in (0, 2):
        assert outcome[row].error is None
        assert outcome[row] == sample(given[row : row + 1], [state(params, seed=row)])[0]


def test_a_row_of_minus_infinity_is_an_error() -> None:
    outcome = sample(torch.full((1, VOCAB), -math.inf), [state(SamplingParams())])
    assert outcome[0].token_id is None
    assert outcome[0].error


def test_masked_tokens_are_never_drawn() -> None:
    row = torch.full((1, VOCAB), -math.inf)
    row[0, [10, 20]] = 0.0
    states = [state(SamplingParams(), seed=i) for i in range(200)]
    drawn = {s.token_id for s in sample(row.expand(200, VOCAB), states)}
    assert drawn == {10, 20}


def test_logprobs_are_the_models_own() -> None:
    given = logits()
    params = SamplingParams(
        temperature=0.3, top_k=2, presence_penalty=2.0, repetition_penalty=1.8, logprobs=5
    )
    report = sample(given, [state(params, prompt=[1], output=[2, 3])])[0]
    raw = torch.log_softmax(given[0], dim=0)
    assert report.logprobs is not None
    assert next(iter(report.logprobs)) == report.token_id
    for token, entry in report.logprobs.items():
        assert entry.logprob == pytest.approx(raw[token].item(), abs=1e-6)
        assert entry.rank == 1 + int((raw > raw[token]).sum())
    best = set(raw.topk(5).indices.tolist())
    assert set(report.logprobs) == best | {report.token_id}


def test_zero_logprobs_reports_the_chosen_token_alone() -> None:
    given = logits(2)
    outcome = sample(given, [state(SamplingParams(logprobs=0)), state(SamplingParams())])
    assert list(outcome[0].logprobs or {}) == [outcome[0].token_id]
    assert outcome[1].logprobs is None


class Only:
    """A mask that lets the same tokens through whatever came before, and remembers what it saw."""

    def __init__(self, *allowed: int) -> None:
        self.seen: list[list[int]] = []
        self._allowed = torch.zeros(VOCAB, dtype=torch.bool)
        self._allowed[list(allowed)] = True

    def allowed(self, output_token_ids: Sequence[int]) -> torch.Tensor:
        self.seen.append(list(output_token_ids))
        return self._allowed


class Broken:
    def allowed(self, output_token_ids: Sequence[int]) -> torch.Tensor:
        raise RequestError("too complex")


def test_a_mask_leaves_only_what_it_allows() -> None:
    given = logits(40)
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=1)]
    params += [SamplingParams(temperature=5.0, top_p=0.5), SamplingParams(min_p=1.0)]
    states = [state(params[i % 5], seed=i, mask=Only(3, 8, 21)) for i in range(40)]
    chosen = [s.token_id for s in sample(given, states)]
    assert set(chosen) == {3, 8, 21}
    best = [[3, 8, 21][row[[3, 8, 21]].argmax()] for row in given]
    assert chosen[::5] == best[::5]  # greedy rows
    assert chosen[2::5] == best[2::5]  # the best one kept


def test_a_mask_sees_the_output_alone() -> None:
    mask = Only(1)
    sample(logits(), [state(SamplingParams(), prompt=[4, 5], output=[6, 7], mask=mask)])
    assert mask.seen == [[6, 7]]


def test_a_mask_changes_neither_neighbours_nor_logprobs() -> None:
    given = logits(3)
    params = SamplingParams(seed=2, logprobs=2)
    masked = sample(given, [state(params), state(params, mask=Only(9)), state(params)])
    free = sample(given, [state(params)] * 3)
    assert masked[::2] == free[::2]
    assert masked[1].token_id == 9
    own = torch.log_softmax(given[1], dim=0)[9]
    assert masked[1].logprobs[9].logprob == pytest.approx(float(own))
    assert masked[1].logprobs.keys() - {9} == set(given[1].topk(2).indices.tolist()) - {9}


def test_a_mask_that_fails_fails_its_row_alone() -> None:
    given = logits(3)
    plain = state(SamplingParams(temperature=0))
    outcomes = sample(given, [plain, state(SamplingParams(), mask=Broken()), plain])
    assert outcomes[1].token_id is None
    assert isinstance(outcomes[1].error, RequestError)
    assert str(outcomes[1].error) == "too complex"
    assert [outcomes[i].token_id for i in (0, 2)] == given[[0, 2]].argmax(dim=1).tolist()


def test_a_mask_that_allows_nothing_is_an_error() -> None:
    [outcome] = sample(logits(), [state(SamplingParams(), mask=Only())])
    assert outcome.token_id is None
    assert "no token is left" in str(outcome.error)
