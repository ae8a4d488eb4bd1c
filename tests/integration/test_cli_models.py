"""The commands over the built-in models: the figures and words the README promises."""

import pytest
from tests.command_line import kv8

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
