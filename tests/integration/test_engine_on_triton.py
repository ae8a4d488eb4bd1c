"""The engine over the GPU kernels, interpreted: its tokens are those of the reference backend."""

from tests.attention_backends import triton_backend
from tests.engines import run, start_engine, tokens
from tests.tiny_models import prompt_ids

TYPES = ["sliding_attention", "full_attention"]


def test_tokens_are_those_of_the_reference(tiny_model) -> None:
    """Prompts in chunks beside decoding sequences, and a prefix that is found again; layers with a
    window and without.
    """
    triton_backend()  # or skip
    first = prompt_ids(10)
    prompts = [first, [*first[:8], 7], prompt_ids(2, seed=2)]
    folder = tiny_model("gemma3", num_hidden_layers=2, layer_types=TYPES)
    found = []
    for backend in ("triton", "reference"):
        engine = start_engine(
            folder,
            attention_backend=backend,
            kv_cache_dtype="fp8",
            block_size=4,
            max_model_len=16,
            max_num_batched_tokens=8,
        )
        found.append(tokens(run(engine, prompts, max_tokens=3, ignore_eos=True)))
        assert engine.runner.backend.name == backend
    assert found[0] == found[1]
