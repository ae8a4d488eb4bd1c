"""The commands over checkpoints that llm-compressor wrote: their scales shown as they are."""

import pytest
from tests.checkpoint_folders import golden_folder, golden_tensors
from tests.command_line import kv8

SETS = ["kvattn-tensor", "kvattn-attn_head", "kv-only-tensor", "kv-only-attn_head"]


@pytest.mark.parametrize("name", SETS)
def test_inspect_shows_exactly_the_checkpoints_numbers(name: str, tmp_path) -> None:
    result = kv8("inspect", golden_folder(tmp_path / "model", name), "--json")
    assert result.code == 0, result.err
    tensors = golden_tensors(name)
    sides = "qkv" if name.startswith("kvattn") else "kv"
    assert len(result.json["layers"]) == 30
    for layer in result.json["layers"]:
        assert layer["dtype"] == "fp8_e4m3"
        for side in sides:
            tensor = f"model.layers.{layer['layer']}.self_attn.{side}_scale"
            values = tensors[tensor].float().flatten().tolist()
            shown = layer[side]["scale"]
            assert (shown if isinstance(shown, list) else [shown]) == values
            assert tensor in layer[side]["origin"]
        if "q" not in sides:
            assert layer["q"] == {"scale": None, "origin": None}
    assert result.json["calibrated"] is True


@pytest.mark.parametrize("name", SETS[:2])
def test_inspect_names_every_tensor_as_text(name: str, tmp_path) -> None:
    text = kv8("inspect", golden_folder(tmp_path / "model", name)).out
    for layer in range(30):
        for side in "qkv":
            assert f"model.layers.{layer}.self_attn.{side}_scale" in text
    if name.endswith("attn_head"):
        assert "(9 heads)" in text
        assert "(3 heads)" in text


def test_missing_scales_are_refused_by_layer(tmp_path) -> None:
    """Pitfalls 2, 67: refused before weights are read, naming the layers and the way out."""
    name = "kv-only-tensor"
    kept = {
        tensor: value
        for tensor, value in golden_tensors(name).items()
        if int(tensor.split(".")[2]) % 2 == 0
    }
    folder = golden_folder(tmp_path / "model", name, kept)
    for command in (["inspect", folder], ["generate", folder, "a"]):
        result = kv8(*command)
        assert result.code == 2
        assert "1, 3, 5" in result.err
        assert "missing_scales" in result.err
    forgiven = kv8("inspect", folder, "--missing-scales", "default", "--json").json["layers"]
    assert [layer["k"]["origin"].startswith("default") for layer in forgiven[:2]] == [False, True]


@pytest.mark.parametrize(
    ("declares", "flag", "dtype", "reason"),
    [
        (True, None, "fp8_e4m3", "the checkpoint declares it"),
        (True, "fp8", "fp8_e4m3", "kv_cache_dtype=fp8 was given"),
        (True, "bfloat16", "bfloat16", "kv_cache_dtype=bfloat16 was given"),
        (False, None, "float32", "the model's dtype"),
        (False, "fp8", "fp8_e4m3", "fp8 is short for fp8_e4m3"),
        (False, "fp8_e5m2", "fp8_e5m2", "kv_cache_dtype=fp8_e5m2 was given"),
    ],
)
def test_who_decided_the_dtype_is_said(declares, flag, dtype, reason, tmp_path, tiny_model) -> None:
    """Pitfall 13: flag before checkpoint before model, and the reason stands beside the result."""
    folder = golden_folder(tmp_path / "m", "kv-only-tensor") if declares else tiny_model()
    words = () if flag is None else ("--kv-cache-dtype", flag)
    shown = kv8("inspect", folder, *words, "--json").json
    assert shown["settings"]["kv_cache_dtype"]["value"] == dtype
    assert reason in shown["settings"]["kv_cache_dtype"]["reason"]
    assert {layer["dtype"] for layer in shown["layers"]} == {dtype}
    if flag is None:
        rows = kv8("plan", folder, "--json").json["rows"]
        assert [row["dtype"] for row in rows if row["chosen"]] == [dtype]


def test_e5m2_over_e4m3_scales_names_a_scale(tmp_path) -> None:
    """Pitfall 68: what is said of e5m2 is about scales that are there, and names one."""
    folder = golden_folder(tmp_path / "model", "kv-only-tensor")
    shown = kv8("inspect", folder, "--kv-cache-dtype", "fp8_e5m2", "--json").json
    assert {layer["dtype"] for layer in shown["layers"]} == {"fp8_e5m2"}
    [said] = [line for line in shown["messages"] if line.startswith("Scales made for fp8_e4m3")]
    assert "model.layers.0.self_attn.k_scale" in said
    text = kv8("inspect", folder, "--kv-cache-dtype", "fp8_e5m2").out
    assert said in text
