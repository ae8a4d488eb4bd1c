"""The unquantized engine is transformers.generate, token for token, for every proven family."""

import pytest
import torch
from tests.engines import run, start_engine, tokens
from tests.tiny_models import FAMILIES, prompt_ids
from transformers import AutoModelForCausalLM

NUM_TOKENS = 24
LENGTHS = (1, 7, 16, 33)  # one token, inside a block, a whole block, over two windows


def generate(model, prompt) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=-1,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("family", "options"),
    [*((family, {}) for family in FAMILIES), ("qwen2", {"key_bias_layers": (0, 3)})],
)
def test_greedy_tokens_equal_transformers(family, options, tiny_model) -> None:
    folder = tiny_model(family, **options)
    prompts = [prompt_ids(length, seed=length) for length in LENGTHS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = [generate(model, prompt) for prompt in prompts]
    whole = start_engine(folder)
    alone = [tokens(run(whole, [p], max_tokens=NUM_TOKENS, ignore_eos=True))[0] for p in prompts]
    assert alone == expected
    # The second time the prompts come from the prefix cache, and run side by side in chunks.
    chunked = start_engine(folder, max_num_batched_tokens=9, block_size=4)
    for repeat in range(2):
        outputs = run(chunked, prompts, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert tokens(outputs) == expected
        if repeat:
            assert outputs[-1].num_cached_tokens == 32
