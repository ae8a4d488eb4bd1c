"""Options and files to effective settings: who wins, why, and what is refused."""

import pytest
import torch
from tests.checkpoint_folders import compressed_tensors, write_folder

from kv8.engine import resolve_memory
from kv8.engine.planner import plan_rows
from kv8.engine.resolve import resolve_options
from kv8.engine.resolve_memory import default_cache_memory, free_memory
from kv8.errors import CapacityError, RequestError
from kv8.options import EngineOptions
from kv8.scales.scale import OriginKind

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512,
}  # fmt: skip
SCALES = {
    f"model.layers.{layer}.self_attn.{side}_scale": 0.05 for layer in range(4) for side in "kv"
}
DECLARED = {"quantization": compressed_tensors()}


@pytest.fixture
def resolve(tmp_path):
    """Return ``resolve(tensors, quantization, **options)`` over a folder without any weight."""

    def of(tensors=None, *, quantization=None, **options):
        folder = write_folder(tmp_path / "model", tensors or {}, quantization, **CONFIG)
        return resolve_options(
            EngineOptions(model=str(folder), **{"kv_cache_memory": "1MiB", **options})
        )

    return of


def reason(config, name) -> str:
    return next(decision.reason for decision in config.decisions if decision.name == name)


@pytest.mark.parametrize(
    ("flag", "tensors", "quantization", "expected", "why"),
    [
        ("auto", {}, None, "bfloat16", "the model's dtype"),
        ("auto", SCALES, DECLARED, "fp8_e4m3", "declares"),
        ("bfloat16", {}, None, "bfloat16", "was given"),
        ("bfloat16", SCALES, DECLARED, "bfloat16", "overrides"),
        ("bfloat16", {}, DECLARED, "bfloat16", "overrides"),
        ("fp8", {}, None, "fp8_e4m3", "was given"),
        ("fp8", SCALES, DECLARED, "fp8_e4m3", "was given"),
    ],
)
def test_who_decides_the_cache_format(flag, tensors, quantization, expected, why, resolve) -> None:
    """Pitfall 13: explicit flag > declaration > model dtype, with the reason in the settings."""
    quantization = quantization and quantization["quantization"]
    config = resolve(tensors, quantization=quantization, kv_cache_dtype=flag)
    assert config.kv_format.name == expected
    assert why in reason(config, "kv_cache_dtype")
    kinds = {scale.origin.kind for _, layer in config.scales for scale in (layer.k, layer.v)}
    if expected == "bfloat16":
        assert kinds == set()
    else:
        assert kinds == {OriginKind.CHECKPOINT if tensors else OriginKind.DEFAULT}


@pytest.mark.parametrize("flag", ["auto", "fp8"])
def test_declared_scales_that_are_not_there_are_refused(flag, resolve) -> None:
    """Pitfall 13: the third column of the table: declared, but without scales."""
    with pytest.raises(RequestError, match="missing_scales=default"):
        resolve(quantization=DECLARED["quantization"], kv_cache_dtype=flag)
    config = resolve(
        quantization=DECLARED["quantization"], kv_cache_dtype=flag, missing_scales="default"
    )
    assert config.kv_format.name == "fp8_e4m3"


def test_no_weights_are_needed(resolve, tmp_path) -> None:
    config = resolve(kv_cache_dtype="fp8")
    assert config.capacity.num_blocks == 2**20 // config.layout.block_bytes
    assert config.geometry.model_dtype == config.dtype == "bfloat16"


def test_the_dtype_of_the_weights_decides_the_rest(resolve) -> None:
    """Pitfall 32: layers that keep the model's dtype keep the one in memory."""
    config = resolve(dtype="float32")
    assert config.kv_format.name == config.geometry.model_dtype == "float32"
    skipping = resolve(dtype="float16", kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="0")
    assert skipping.plan.format(0).name == "float16"


def test_fp8_is_printed_as_what_it_is(resolve) -> None:
    """Pitfall 69: format, granularity, origin of scales and computation are in the settings."""
    text = resolve(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="0,-1").describe()
    assert "kv_cache_dtype = fp8_e4m3" in text
    assert "per tensor, static (4 from default)" in text
    assert "queries = native (decoded to float32 for attention)" in text
    assert "layers in bfloat16 = 0, 3 (skip list: 0, -1)" in text
    assert "enable_prefix_caching = on" in text


def test_the_longest_sequence_is_the_models_or_what_fits(resolve) -> None:
    roomy = resolve()
    assert roomy.max_model_len == 512
    assert reason(roomy, "max_model_len") == "the model's limit"
    tight = resolve(kv_cache_memory=64 * 1024)
    assert tight.max_model_len == 128  # 512 bytes a token
    assert "holds 128 tokens of one sequence" in reason(tight, "max_model_len")
    assert resolve(max_model_len=100).max_model_len == 100
    with pytest.raises(CapacityError, match="Give max_model_len=128 or less"):
        resolve(kv_cache_memory=64 * 1024, max_model_len=129)


@pytest.mark.parametrize("length", [1, 513])
def test_engine_and_plan_refuse_the_same_lengths(length, resolve, tmp_path) -> None:
    refusal = rf"max_model_len={length} cannot be served: give at least 2 .* at most 512"
    with pytest.raises(RequestError, match=refusal):
        resolve(max_model_len=length)
    with pytest.raises(RequestError, match=refusal):
        plan_rows(EngineOptions(model=str(tmp_path / "model"), max_model_len=length), 2**20)


def test_a_block_larger_than_the_memory_is_named(resolve) -> None:
    with pytest.raises(CapacityError, match=r"a block of 4096 tokens .* or a smaller block_size"):
        resolve(block_size=4096)


def test_scales_may_come_from_python(resolve) -> None:
    mapping = {layer: {"k": 0.1, "v": [0.1, 0.2]} for layer in range(4)}
    config = resolve(kv_cache_dtype="fp8", kv_scales=mapping)
    assert config.scales.layer(2).v.values == pytest.approx((0.1, 0.2))
    assert config.scales.layer(2).v.origin.kind is OriginKind.PYTHON


def test_default_memory_is_a_share_of_what_is_free(monkeypatch) -> None:
    free = 8 * 2**30
    monkeypatch.setattr(resolve_memory, "free_memory", lambda device: free)

    def default(*, weights=0, useful=10 * 2**30):
        return default_cache_memory(CPU, weight_bytes=weights, useful_bytes=useful)

    assert default() == (2 * 2**30, "a quarter of the 8.00 GiB free")
    assert default(weights=4 * 2**30)[0] == 2**30
    assert default(weights=9 * 2**30)[0] == 0
    assert default(useful=1000)[0] == 1000
    free = 64 * 2**30
    assert default()[0] == 4 * 2**30


def test_free_memory_respects_a_containers_limit(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(resolve_memory, "_CGROUP", tmp_path)
    unlimited = free_memory(CPU)
    assert unlimited > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert free_memory(CPU) > 0
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_memory(CPU) == 900
    (tmp_path / "memory.stat").write_text("anon 60\ninactive_file 30\n")
    assert free_memory(CPU) == 930  # cached files are given back at need
