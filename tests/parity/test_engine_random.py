"""Random crowds through random engines: each request gets what it would get alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines import run, start_engine, teacher_forced, tokens
from tests.tiny_models import prompt_ids

from kv8.cache.capacity import decode_blocks, peak_blocks
from kv8.sampling_params import SamplingParams

COMMON = prompt_ids(24, seed=50)
LONGEST = 60
FLOAT_ROUNDING = 1e-4  # see test_engine_equivalence


class Alone:
    """What a prompt gets on its own."""

    def __init__(self, folder) -> None:
        self._engine = start_engine(folder, enable_prefix_caching=False)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt, max_tokens) -> list[int]:
        known = self._known.get(tuple(prompt), [])
        if len(known) < max_tokens:
            outputs = run(self._engine, [prompt], max_tokens=max_tokens, ignore_eos=True)
            known = self._known[tuple(prompt)] = tokens(outputs)[0]
        return known[:max_tokens]

    def agrees(self, prompt, answer) -> bool:
        """Whether ``answer`` is the greedy one, up to a tie within float rounding."""
        right = self.tokens(prompt, len(answer))
        if answer == right:
            return True
        fork = next(i for i, token in enumerate(answer) if token != right[i])
        before = [*prompt, *right[:fork]]
        logprobs = teacher_forced(self._engine, before, chunks=[len(before)])[-1]
        return bool((logprobs[answer[fork]] - logprobs[right[fork]]).abs() < 2 * FLOAT_ROUNDING)


@pytest.fixture(scope="module")
def alone(tiny_model):
    return Alone(tiny_model("gemma3"))


requests = st.lists(
    st.tuples(
        st.integers(0, 24),  # tokens of the common beginning
        st.integers(1, 16),  # tokens of its own
        st.integers(0, 3),  # which ones
        st.integers(1, 16),  # tokens to generate
        st.integers(0, 12),  # step of arrival
        st.one_of(st.none(), st.integers(0, 20)),  # step of abort
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=15)
@given(
    crowd=requests,
    block_size=st.sampled_from([1, 4, 16]),
    budget=st.integers(1, 40),
    seats=st.integers(1, 8),
    prefix_caching=st.booleans(),
    spare=st.integers(0, 30),
)
def test_each_request_gets_what_it_would_get_alone(
    crowd, block_size, budget, seats, prefix_caching, spare, tiny_model, alone
) -> None:
    options = {
        "block_size": block_size,
        "max_num_batched_tokens": budget,
        "max_num_seqs": seats,
        "enable_prefix_caching": prefix_caching,
        "max_model_len": LONGEST,
    }
    folder = tiny_model("gemma3")  # three window layers and a full one: every kind of block
    layout = start_engine(folder, **options).config.layout
    num_blocks = peak_blocks(layout, LONGEST) + spare * decode_blocks(layout, block_size)
    engine = start_engine(folder, **options, kv_cache_memory=num_blocks * layout.block_bytes)
    prompts = [COMMON[:shared] + prompt_ids(own, seed=which) for shared, own, which, *_ in crowd]
    outputs, aborted = {}, set()
    step = 0
    while engine.has_unfinished or len(outputs) < len(crowd):
        for number, (*_, max_tokens, arrival, abort) in enumerate(crowd):
            if arrival == step:
                params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
                engine.add_request(str(number), prompts[number], params)
            if abort is not None and abort == step >= arrival:
                output = engine.abort(str(number))
                if output is not None:
                    outputs[number] = output
                    aborted.add(number)
        outputs |= {int(o.request_id): o for o in engine.step() if o.finished}
        step += 1
        assert step < 2000
    for number, (*_, max_tokens, _, _) in enumerate(crowd):
        completion = outputs[number].outputs[0]
        assert completion.finish_reason == ("abort" if number in aborted else "length")
        assert alone.agrees(prompts[number], completion.token_ids)
        assert number in aborted or len(completion.token_ids) == max_tokens
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
