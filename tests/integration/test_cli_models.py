"""The commands over the built-in models: the figures and words the README promises."""

import pytest
from tests.command_line import kv8
from tests.unit.engine.scheduling import finish_all, make_request

from kv8 import LLM, SamplingParams
from kv8.cache.manager import CacheManager
from kv8.engine.resolve import resolve_options
from kv8.engine.scheduler import Scheduler
from kv8.options import EngineOptions

pytestmark = pytest.mark.model


def test_generate_with_smollm2() -> None:
    words = "--kv-cache-dtype fp8 --temperature 0 --max-tokens 8 --kv-cache-memory 64MiB --json"
    result = kv8("generate", "smollm2", "London is the capital of", *words.split())
    assert result.code == 0, result.err
    assert result.json["text"].startswith(" the United Kingdom")
    assert result.json["kv_cache"]["dtypes"] == {"fp8_e4m3": 30}
    assert result.json["kv_cache"]["bytes_per_token"] == 11520


def test_plan_for_smollm2() -> None:
    result = kv8("plan", "smollm2", "--memory", "1GiB")
    assert result.code == 0
    assert "46,592" in result.out
    assert "93,200" in result.out
    rows = kv8("plan", "smollm2", "--memory", "1GiB", "--json").json["rows"]
    assert [(row["setting"], row["tokens"]) for row in rows] == [
        ("bfloat16", 46_592),
        ("fp8_e4m3", 93_200),
        ("fp8_e5m2", 93_200),
    ]


def preemptions(num_tokens: int, lengths: list[int], **options: object) -> int:
    """Return how often SmolLM2's scheduler, without the model, preempts sequences that fill it.

    All are admitted in one step, each with a block still to come, so that at their ends they hold
    ``lengths`` tokens together.
    """
    config = resolve_options(EngineOptions(model="smollm2", **options))
    assert config.capacity.tokens == num_tokens
    num_blocks = config.capacity.num_blocks
    cache = CacheManager(config.layout, num_blocks, enable_prefix_caching=False, digest_key=b"")
    scheduler = Scheduler(cache, max_num_seqs=64, max_num_batched_tokens=2**17)
    for sequence, length in enumerate(lengths):
        # The last token is never stored: nothing is computed after it.
        scheduler.add(make_request(str(sequence), sequence, length - 16, max_tokens=17))
    finish_all(scheduler)
    return scheduler.num_preemptions


@pytest.mark.parametrize(("kv_cache_dtype", "num_tokens"), [("auto", 46_592), ("fp8", 93_200)])
def test_a_gibibyte_holds_the_printed_number_and_not_a_block_more(
    kv_cache_dtype: str, num_tokens: int
) -> None:
    options = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_memory": "1GiB"}
    lengths = [8192] * (num_tokens // 8192) + [num_tokens % 8192]
    assert preemptions(num_tokens, lengths, **options) == 0
    assert preemptions(num_tokens, [*lengths[:-1], lengths[-1] + 16], **options) > 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_model_itself_fills_its_cache_to_the_printed_number(kv_cache_dtype: str) -> None:
    words = ("plan", "smollm2", "--memory", "4MiB", "--kv-cache-dtype", kv_cache_dtype, "--json")
    [num_tokens] = [row["tokens"] for row in kv8(*words).json["rows"] if row["chosen"]]
    lengths = [48] * (num_tokens // 48 - 1)
    lengths.append(num_tokens - sum(lengths))
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    options = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_memory": "4MiB"}
    with LLM("smollm2", enable_prefix_caching=False, **options) as llm:
        for last, preempted in ((lengths[-1], False), (lengths[-1] + 16, True)):
            before = llm.engine.num_preemptions
            prompts = [[7 + n] * (length - 16) for n, length in enumerate([*lengths[:-1], last])]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [17] * len(prompts)
            assert (llm.engine.num_preemptions > before) is preempted


def test_inspect_gemma3_with_its_window_layers_skipped() -> None:
    """Pitfall 58: 15 window layers stay in bfloat16, a typo is refused with a suggestion."""
    words = ("inspect", "gemma3-270m", "--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers")
    layers = kv8(*words, "sliding_window", "--json").json["layers"]
    dtypes = [layer["dtype"] for layer in layers]
    assert (dtypes.count("bfloat16"), dtypes.count("fp8_e4m3")) == (15, 3)
    assert [layer["layer"] for layer in layers if not layer["skipped"]] == [5, 11, 17]
    wrong = kv8(*words, "sliding_windows")
    assert wrong.code == 2
    assert "Did you mean 'sliding_window'" in wrong.err
