"""What a calibration writes: complete, read back, compared; or nothing at all."""

import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.checkpoint_folders import SCHEME
from tests.written_scales import geometry_in, made_up_scales, metadata_for, write

from kv8.calibration import outputs
from kv8.calibration.checkpoint_config import check_declarable, declare_cache
from kv8.calibration.outputs import check_outputs
from kv8.errors import ModelError, OutputError, RequestError, ScaleError
from kv8.formats.base import FP8_E5M2
from kv8.models.source import resolve_source
from kv8.scales.checkpoint import read_checkpoint
from kv8.scales.scale import SIDES, ModelScales, Origin, OriginKind, Scale
from kv8.scales.scales_file import read_scales_file

P = "model.layers.{}.self_attn.{}_scale"
TinyModel = Callable[..., Path]


def shard_of(folder: Path) -> Path:
    """Return the shard with the scales: the last one."""
    return sorted(folder.glob("model-*.safetensors"))[-1]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def edit_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_the_scales_file_and_the_report(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model()
    scales = write(
        model,
        tmp_path / "out",
        checkpoint=False,
        report={"warnings": ["é"]},
        draw=lambda path: path.write_bytes(b"picture"),
    )
    assert set(contents(tmp_path / "out")) == {"kv_scales.safetensors", "report.json", "report.png"}
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == {"warnings": ["é"]}
    found = read_scales_file(tmp_path / "out" / "kv_scales.safetensors", geometry_in(model))
    assert found.fingerprint() == scales.fingerprint()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("sides", ["kv", "qkv"])
def test_the_checkpoint_is_the_model_with_scales(
    tiny_model: TinyModel, tmp_path: Path, strategy: str, sides: str
) -> None:
    model, folder = tiny_model(), tmp_path / "out"
    scales = write(model, folder, strategy=strategy, sides=sides)  # type: ignore[arg-type]
    tensors = load_file(shard_of(folder))
    for layer, of_layer in scales:
        for side in sides:
            scale = of_layer.side(side)  # type: ignore[arg-type]
            assert scale is not None
            stored = tensors.pop(P.format(layer, side))
            heads = 4 if side == "q" else 2
            assert stored.shape == ((heads, 1, 1) if strategy == "attn_head" else (1,))
            assert stored.dtype == torch.float32
            assert tuple(stored.flatten().tolist()) == scale.values
    assert tensors == {}

    original = load_file(model / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, tensor in original.items():
        with safe_open(folder / index["weight_map"][name], "pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensor)
    num_scales = sum(tensor.numel() for tensor in load_file(shard_of(folder)).values())
    size = (model / "model.safetensors").stat().st_size + 4 * num_scales
    assert index["metadata"] == {"total_size": size}

    before, after = (json.loads((f / "config.json").read_text()) for f in (model, folder))
    section = after.pop("quantization_config")
    assert after == before
    assert section["quant_method"] == "compressed-tensors"
    assert section["kv_cache_scheme"]["strategy"] == strategy
    if sides == "kv":
        assert section["config_groups"] == {}
    else:
        [group] = section["config_groups"].values()
        assert group["targets"] == ["LlamaAttention"]
        assert group["weights"] is None
        assert group["input_activations"] == section["kv_cache_scheme"]


def test_weights_are_links_and_small_files_are_copies(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    (model / "LICENSE").write_text("mine")
    (model / "pytorch_model.bin").write_bytes(b"the same again, in another format")
    (model / ".cache").mkdir()
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    write(model, tmp_path / "out")
    weights = tmp_path / "out" / "model-00001-of-00002.safetensors"
    assert weights.samefile(model / "model.safetensors")
    expected = set(contents(model)) - {"model.safetensors", "pytorch_model.bin"}
    expected |= {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    expected |= {"model.safetensors.index.json", "kv_scales.safetensors", "report.json"}
    assert set(contents(tmp_path / "out")) == expected
    for name in ("LICENSE", "tokenizer.json", "generation_config.json"):
        assert not (tmp_path / "out" / name).samefile(model / name)


def no_links(*_: object) -> None:
    raise OSError(18, "Invalid cross-device link")


def test_weights_are_copied_where_links_cannot_be_made(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.link", no_links)
    write(tiny_model(), tmp_path / "out")
    copied = tmp_path / "out" / "model-00001-of-00002.safetensors"
    assert copied.read_bytes() == (tiny_model() / "model.safetensors").read_bytes()
    assert copied.stat().st_nlink == 1

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(OutputError, match=r"model\.safetensors must be copied.*are free"):
        write(tiny_model(), tmp_path / "second")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_too_full_for_the_weights_is_found_before_calibrating(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    arguments = {
        "source": resolve_source(str(model)),
        "geometry": geometry_in(model),
        "checkpoint": True,
        "kv_cache_dtype": "fp8_e4m3",
    }
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    check_outputs(tmp_path / "out", **arguments)  # links need no room
    real = Path.stat

    def on_another_disk(self: Path, **named: Any) -> Any:
        found = real(self, **named)
        if self.suffix != ".safetensors":
            return found
        fields = {name: getattr(found, name) for name in ("st_mode", "st_size")}
        return SimpleNamespace(st_dev=found.st_dev + 1, **fields)

    monkeypatch.setattr("pathlib.Path.stat", on_another_disk)
    with pytest.raises(OutputError, match=r"another disk .* must be copied .* are free"):
        check_outputs(tmp_path / "out", **arguments)


def sharded(model: Path, folder: Path) -> Path:
    """Write ``model`` to ``folder`` in three shards of the usual names."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        part = dict(list(tensors.items())[number::3])
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 12345}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_stay_shards(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = sharded(tiny_model(), tmp_path / "model")
    scales = write(model, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").glob("model-*"))
    assert names == [f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)]
    found = read_checkpoint(tmp_path / "out", geometry_in(model)).scales
    assert found.fingerprint() == scales.fingerprint()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 12345 + 8 * 4
    # A checkpoint of ours can be calibrated again: its old scales, in a file of their own, go.
    again = made_up_scales(geometry_in(model), seed=9)
    write(tmp_path / "out", tmp_path / "again", scales=again)
    assert sorted(path.name for path in (tmp_path / "again").glob("model-*")) == names
    found = read_checkpoint(tmp_path / "again", geometry_in(model)).scales
    assert found.fingerprint() == again.fingerprint()


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_layers_of_shared_kv_repeat_the_scales_of_their_cache(
    tiny_model: TinyModel, tmp_path: Path, family: str
) -> None:
    """Pitfall 1: vLLM decodes with the reading layer's own scale, which is 1.0 if there is none."""
    model, folder = tiny_model(family), tmp_path / "out"
    geometry = geometry_in(model)
    scales = write(model, folder, strategy="attn_head", sides="qkv")
    tensors = load_file(shard_of(folder))
    shared = [layer for layer in geometry.layers if not layer.owns_kv]
    assert len(shared) == 2
    for layer in shared:
        for side in "kv":
            mine, source = (P.format(n, side) for n in (layer.layer, layer.kv_source))
            assert torch.equal(tensors[mine], tensors[source])
    assert read_checkpoint(folder, geometry).scales.fingerprint() == scales.fingerprint()
    file = load_file(folder / "kv_scales.safetensors")
    assert not any(f"layers.{layer.layer}.k_scale" in file for layer in shared)


ALL_FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "granite", "smollm3", "olmo2",
    "qwen3_moe", "mixtral", "gpt_oss",
)  # fmt: skip


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_can_be_written(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    scales = write(tiny_model(family), tmp_path / "out", strategy="attn_head", sides="qkv")
    found = read_checkpoint(tmp_path / "out", geometry_in(tiny_model(family)))
    assert found.scales.fingerprint() == scales.fingerprint()
    assert found.declaration is not None
    assert found.declaration.queries


def test_provenance_is_in_both_files(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Pitfall 18: the file says how the numbers were measured."""
    model, folder = tiny_model(), tmp_path / "out"
    write(model, folder)
    measured = "4,096 tokens, absmax"
    file = read_scales_file(folder / "kv_scales.safetensors", geometry_in(model)).layer(3).k
    checkpoint = read_checkpoint(folder, geometry_in(model)).scales.layer(3).k
    assert file is not None
    assert checkpoint is not None
    assert str(file.origin).startswith(f"calibration, {measured}")
    assert str(checkpoint.origin).startswith(f"checkpoint: {P.format(3, 'k')} in model-00002-of")
    assert str(checkpoint.origin).endswith(f"(calibration, {measured})")


def test_a_damaged_shard_of_scales_is_refused_by_name(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, folder = tiny_model(), tmp_path / "out"
    write(model, folder)
    content = shard_of(folder).read_bytes()
    shard_of(folder).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is damaged"):
        read_checkpoint(folder, geometry_in(model))


def test_a_constant_for_a_silent_head_is_told_from_a_measured_scale(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Pitfall 18: what was always zero has no range to measure, and the file says so."""
    model, folder = tiny_model(), tmp_path / "out"
    layers = dict(made_up_scales(geometry_in(model)).layers)
    measured = "4,096 tokens, absmax"
    silent = Scale((2.0**-7,), Origin(OriginKind.CALIBRATION, f"{measured}, 1 of 1 all zero"))
    layers[2] = replace(layers[2], v=silent)
    write(model, folder, scales=ModelScales(layers))
    for found, end in (
        (read_scales_file(folder / "kv_scales.safetensors", geometry_in(model)), " (layers.2."),
        (read_checkpoint(folder, geometry_in(model)).scales, ")"),
    ):
        silent_one, other = found.layer(2).v, found.layer(2).k
        assert silent_one is not None
        assert other is not None
        assert f"calibration, {measured}, 1 of 1 all zero{end}" in str(silent_one.origin)
        assert f"calibration, {measured}{end}" in str(other.origin).replace("k_scale", "v_scale")


def fp8_weights(model: Path, folder: Path) -> Path:
    """Write ``model`` with FP8 weights in compressed-tensors' layout to ``folder``."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    weights = SCHEME | {"strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    section = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    edit_config(folder, quantization_config=section)
    return folder


def test_fp8_weights_of_compressed_tensors_gain_a_cache_scheme(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = fp8_weights(tiny_model(), tmp_path / "model")
    scales = write(model, tmp_path / "out", sides="qkv")
    before, after = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (model, tmp_path / "out")
    )
    assert after["config_groups"].pop("group_1")["targets"] == ["LlamaAttention"]
    assert after.pop("kv_cache_scheme")["strategy"] == "tensor"
    assert after == before
    found = read_checkpoint(tmp_path / "out", geometry_in(model)).scales
    assert found.fingerprint() == scales.fingerprint()


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
    ],
)
def test_other_methods_are_refused_early_with_a_way_out(
    tiny_model: TinyModel, tmp_path: Path, section: dict[str, Any]
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    edit_config(model, quantization_config=section)
    source, geometry = resolve_source(str(model)), geometry_in(model)
    arguments = {"source": source, "geometry": geometry, "kv_cache_dtype": "fp8_e4m3"}
    with pytest.raises(RequestError, match=rf"{section['quant_method']}.*scales file.*kv_scales"):
        check_outputs(tmp_path / "out", checkpoint=True, **arguments)
    check_outputs(tmp_path / "out", checkpoint=False, **arguments)
    write(model, tmp_path / "out", checkpoint=False)


def test_modelopts_second_file_counts_as_a_declaration(tmp_path: Path) -> None:
    check_declarable(tmp_path, {})
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(RequestError, match=r"modelopt \(hf_quant_config\.json\)"):
        check_declarable(tmp_path, {})


@pytest.mark.parametrize(
    "place",
    [("compression_config",), ("quantization_config",), ("text_config", "compression_config")],
)
def test_the_declaration_stays_where_it_stood(place: tuple[str, ...]) -> None:
    old = {"quant_method": "compressed-tensors", "config_groups": {}, "version": "0.14"}
    config: dict[str, Any] = {"text_config": {"a": 1}}
    holder = config
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = old
    before = json.dumps(config)
    found: Any = declare_cache(config, "tensor", None)
    assert json.dumps(config) == before
    assert found.keys() == config.keys()
    for key in place:
        found = found[key]
    assert found.pop("kv_cache_scheme")["strategy"] == "tensor"
    assert found == old | {"quantization_status": "compressed"}


def test_scales_among_the_weights_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    tensors = load_file(model / "model.safetensors") | {P.format(0, "k"): torch.tensor([0.5])}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=r"layers\.0\.self_attn\.k_scale.*never rewritten"):
        write(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_that_do_not_tell_the_attention_module_are_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.other_attention.k_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ScaleError, match=r"layer 1 belong.*other_attention.*scales file"):
        write(model, tmp_path / "out")


def test_the_wider_format_makes_no_checkpoint(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model()
    metadata = metadata_for(model, kv_cache_dtype=FP8_E5M2.name)
    with pytest.raises(RequestError, match="fp8_e5m2 would clip"):
        write(model, tmp_path / "out", metadata=metadata)
    write(model, tmp_path / "out", metadata=metadata, checkpoint=False)


@pytest.mark.parametrize("side", SIDES)
def test_a_layer_without_a_scale_is_named_and_nothing_is_written(
    tiny_model: TinyModel, tmp_path: Path, side: str
) -> None:
    """Pitfall 16: an unobserved layer is an error naming it, nothing written."""
    model = tiny_model()
    layers = dict(made_up_scales(geometry_in(model), sides="qkv").layers)
    layers[2] = replace(layers[2], **{side: None})
    with pytest.raises(ScaleError, match=rf"no {side} scale for layer 2; nothing was written"):
        write(model, tmp_path / "out", scales=ModelScales(layers))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused_before_anything_else(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model()
    with pytest.raises(RequestError, match=r"exists, and nothing is ever overwritten"):
        check_outputs(
            tmp_path,
            source=resolve_source(str(model)),
            geometry=geometry_in(model),
            checkpoint=False,
            kv_cache_dtype="fp8_e4m3",
        )


@pytest.mark.parametrize("victim", ["kv_scales", "report", "model-00002", "config", "index"])
def test_a_full_disk_leaves_nothing(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """Whichever file the space runs out for, neither output nor leftovers remain."""
    real = Path.open

    def full(self: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
        if "w" in mode and victim in self.name:
            raise OSError(28, "No space left on device")
        return real(self, mode, *more, **named)

    model = tiny_model()
    before = contents(model)
    monkeypatch.setattr("pathlib.Path.open", full)
    with pytest.raises((OutputError, ScaleError), match="No space left"):
        write(model, tmp_path / "out")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert contents(model) == before


@pytest.mark.parametrize("most_bytes", [100, 4_000, 10_000])
def test_a_quota_leaves_nothing(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """The kernel itself refuses a file that large: the scales, the tokenizer, the weights."""
    model = tiny_model()
    monkeypatch.setattr("os.link", no_links)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        with pytest.raises((OutputError, ScaleError), match="File too large"):
            write(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_fails_leaves_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise RuntimeError("no fonts")

    with pytest.raises(RuntimeError, match="no fonts"):
        write(tiny_model(), tmp_path / "out", draw=fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        ("scales", r"Layer 1, k: .* was read back from the written checkpoint"),
        ("weights", "weights of the written checkpoint are not those"),
        ("config", "describes another model"),
        ("declaration", "declares no FP8 cache"),
    ],
)
def test_what_is_read_back_is_compared(
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
    match: str,
) -> None:
    """A disk that keeps other numbers than it was given is caught before the rename."""
    model = tiny_model()
    real = outputs.write_checkpoint

    def damaged(target: Path, *more: Any) -> None:
        real(target, *more)
        if damage == "scales":
            tensors = load_file(shard_of(target))
            tensors[P.format(1, "k")] *= 1 + 2**-20
            save_file(tensors, shard_of(target), {"format": "pt"})
        elif damage == "weights":
            file = target / "model-00001-of-00002.safetensors"
            tensors = load_file(file)
            file.unlink()  # it is a link
            tensors["model.norm.weight"] += 1
            save_file(tensors, file, {"format": "pt"})
        elif damage == "config":
            edit_config(target, num_key_value_heads=4)
        else:
            edit_config(target, quantization_config=None)

    monkeypatch.setattr(outputs, "write_checkpoint", damaged)
    with pytest.raises(OutputError, match=match):
        write(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
