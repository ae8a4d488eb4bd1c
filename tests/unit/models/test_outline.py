"""A checkpoint's tensors against its config, by headers alone: the verdict is that of loading."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import FAMILIES, TinyModel

from kv8.errors import ModelError
from kv8.models.config import load_config
from kv8.models.geometry import read_geometry
from kv8.models.load import load_model
from kv8.models.outline import check_tensors, read_outlines
from kv8.models.source import ModelSource

Tensors = dict[str, torch.Tensor]


def check(folder: Path) -> None:
    config = load_config(folder)
    check_tensors(folder, config, "float32")


def load(folder: Path) -> None:
    config = load_config(folder)
    load_model(ModelSource("m", folder, "test"), config, read_geometry(config), "float32")


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Note the log, where it stands that a model could not be checked."""
    caplog.set_level(logging.DEBUG, logger="kv8.models.outline")
    return caplog


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_every_family_passes(
    family: str, tiny_model: TinyModel, told: pytest.LogCaptureFixture
) -> None:
    """Stacked experts, tied embeddings and shared layers have other names in the checkpoint."""
    check(tiny_model(family))
    assert "cannot be checked" not in told.text


def lose(tensors: Tensors) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"]


def lose_an_expert(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]


def lose_all(tensors: Tensors) -> None:
    renamed = {f"other.{name}": tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors.update(renamed)


def reshape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.zeros(65)


def narrow_all(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor[..., :32].contiguous()


def add(tensors: Tensors) -> None:
    tensors["model.layers.7.self_attn.q_proj.weight"] = torch.zeros(64, 64)


@pytest.mark.parametrize(
    ("family", "damage"),
    [
        ("llama", lose),
        ("llama", lose_all),
        ("llama", reshape),
        ("llama", narrow_all),
        ("llama", add),
        ("qwen2", reshape),
        ("qwen3_moe", lose_an_expert),
    ],
)
def test_what_loading_refuses_is_refused_in_the_same_words(
    family: str, damage: Callable[[Tensors], None], tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model(family), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as loading:
        load(folder)
    with pytest.raises(ModelError) as checking:
        check(folder)
    assert str(checking.value) == str(loading.value)


def test_a_scale_that_fits_no_fp8_weight_is_found(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    for shape, fits in (((1,), True), ((96, 1), True), ((5,), False)):
        tensors[f"{name}_scale"] = torch.ones(shape)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        if fits:
            check(folder)
        else:
            with pytest.raises(ModelError, match=r"up_proj\.weight_scale has shape \(5,\)"):
                check(folder)


def test_outlines_hold_no_numbers_wherever_they_are_sent(tiny_model: TinyModel) -> None:
    file = tiny_model() / "model.safetensors"
    tensors = load_file(file)
    outlines = read_outlines(dict.fromkeys(tensors, file))
    assert outlines.keys() == tensors.keys()
    for name, outline in outlines.items():
        assert (outline.shape, outline.dtype) == (tensors[name].shape, torch.float32)
        moved = outline[...].to(device="cpu", dtype=torch.bfloat16)
        assert (moved.device.type, moved.dtype) == ("meta", torch.bfloat16)
        assert outline.to("cpu").device.type == "meta"


def test_what_cannot_be_built_without_numbers_is_left_to_loading(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object, **more: object) -> None:
        raise NotImplementedError("aten::_local_scalar_dense")

    monkeypatch.setattr("kv8.models.outline.build_model", fails)
    check(tiny_model())
    assert "cannot be checked by their headers" in told.text
