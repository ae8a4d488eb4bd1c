"""Loading: every tensor is accounted for, scales and FP8 weights included; damage is named."""

import importlib.machinery
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.packed import packed_logits
from tests.tiny_models import LAYERS, TinyModel, make_config, make_model, prompt_ids
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kv8.errors import ModelError
from kv8.models.config import load_config
from kv8.models.geometry import read_geometry
from kv8.models.hook import HookedModel
from kv8.models.load import load_model
from kv8.models.source import ModelSource

Edit = Callable[[dict[str, torch.Tensor]], None]

KV_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}
KV_ONLY = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": KV_SCHEME,
    },
    "compressed-tensors attention": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["LlamaAttention"], "weights": None}},
        "kv_cache_scheme": KV_SCHEME,
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    "quark": {"quant_method": "quark", "global_quant_config": {"weight": None}},
}


def copy_model(folder: Path, target: Path, *, edit: Edit | None = None, **fields: Any) -> Path:
    """Copy a model with its tensors edited and config fields replaced (removed if `None`)."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    if edit is not None:
        tensors = load_file(target / "model.safetensors")
        edit(tensors)
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def load(folder: Path, dtype: str = "float32") -> HookedModel:
    config = load_config(folder)
    return load_model(ModelSource("m", folder, "test"), config, read_geometry(config), dtype)


def logits(model: HookedModel) -> torch.Tensor:
    return packed_logits(model, [prompt_ids(20)])[0]


def add_kv_scales(tensors: dict[str, torch.Tensor]) -> None:
    for layer in range(LAYERS):
        for side in "qkv":
            tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = torch.tensor([0.05])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_dtype_asked_for_and_no_gradients(
    dtype: str, tiny_model: TinyModel
) -> None:
    model = load(tiny_model("llama"), dtype)
    assert model.dtype == getattr(torch, dtype)
    assert not model.module.training
    assert not any(p.requires_grad for p in model.module.parameters())
    assert logits(model).dtype == torch.float32


@pytest.mark.parametrize("section", KV_ONLY)
def test_a_section_for_the_kv_cache_alone_changes_nothing_about_the_weights(
    section: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Pitfalls 1, 3: KV scales are no weights to transformers; the scale reader takes them."""
    plain = tiny_model("llama")
    folder = copy_model(plain, tmp_path, edit=add_kv_scales, quantization_config=KV_ONLY[section])
    assert torch.equal(logits(load(folder)), logits(load(plain)))


class ModelClass:
    """Stands in for transformers' class: notes where its weights are to be read to, and ends."""

    config_class = type(None)

    def __init__(self) -> None:
        self.device_map: Any = None

    def from_pretrained(self, _: Path, *, device_map: Any = None, **__: Any) -> None:
        self.device_map = device_map
        raise OSError("noted")


@pytest.mark.parametrize(
    ("device", "accelerate", "read_to"),
    [("cuda:1", True, {"": torch.device("cuda:1")}), ("cuda:1", False, None), ("cpu", True, None)],
)
def test_weights_are_read_straight_to_a_gpu(
    device: str,
    accelerate: bool,
    read_to: Any,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where accelerate is installed; without it a warning says what that would save."""
    noting, folder = ModelClass(), tiny_model("llama")
    monkeypatch.setattr("kv8.models.build.model_class", lambda _: noting)
    found = importlib.machinery.ModuleSpec("accelerate", None) if accelerate else None
    monkeypatch.setattr("kv8.models.load.importlib.util.find_spec", lambda _: found)
    config = load_config(folder)
    with pytest.raises(ModelError, match="noted"):
        load_model(
            ModelSource("m", folder, "test"), config, read_geometry(config), "float32",
            device=torch.device(device),
        )  # fmt: skip
    assert noting.device_map == read_to
    warned = "With the package accelerate installed" in caplog.text
    assert warned is (device != "cpu" and not accelerate)


def test_scales_of_a_mixture_of_experts_load(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Pitfall 1: nothing that renames experts' tensors gets to see the scales."""
    plain = tiny_model("qwen3_moe")
    folder = copy_model(plain, tmp_path, edit=add_kv_scales)
    assert torch.equal(logits(load(folder)), logits(load(plain)))


@pytest.mark.parametrize("name", ["qkv_proj.k_scale", "qkv_proj.v_scale", "k_proj.output_scale"])
def test_scales_in_a_model_with_a_fused_projection(
    name: str, tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pitfall 5: scale names never meet a mapping of weight names; no line about skipping."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.layers.1.self_attn.{name}"] = torch.tensor(0.1)

    load(copy_model(tiny_model("phi3"), tmp_path, edit=edit))
    assert "skip" not in caplog.text.lower()


def test_missing_weights_are_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    folder = copy_model(tiny_model("llama"), tmp_path, edit=edit)
    with pytest.raises(ModelError, match=rf"missing from the checkpoint: {name}"):
        load(folder)


def test_a_name_transformers_does_not_know_is_said(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copy_model(tiny_model(), tmp_path / "m", hidden_act="wat")
    with pytest.raises(ModelError, match=r"config\.json names 'wat', which transformers \d"):
        load(folder)


def test_a_tensor_that_belongs_to_nothing_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.mystery"] = torch.zeros(1)

    folder = copy_model(tiny_model("llama"), tmp_path, edit=edit)
    with pytest.raises(ModelError, match=r"belong to nothing.*self_attn\.mystery"):
        load(folder)


def test_buffers_that_old_versions_saved_do_not_matter(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    load(copy_model(tiny_model("llama"), tmp_path, edit=edit))


def test_a_weight_of_another_shape_is_an_error(tiny_model: TinyModel, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.zeros(65)

    folder = copy_model(tiny_model("llama"), tmp_path, edit=edit)
    with pytest.raises(ModelError, match=r"shape.*model\.norm\.weight \(\(65,\), not \(64,\)\)"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights(keep: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copy_model(tiny_model("llama"), tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors") as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_a_folder_without_weights(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copy_model(tiny_model("llama"), tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no safetensors weights"):
        load(folder)


def test_tied_embeddings_need_no_output_weights(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen2")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load(folder)
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight


def test_nothing_is_printed_and_transformers_log_settings_stay(
    tiny_model: TinyModel, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_model("gemma3")
    capfd.readouterr()
    before = transformers.logging.get_verbosity()
    load(folder)
    assert transformers.logging.get_verbosity() == before
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")


# FP8 weights.


def quantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def per_tensor(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().max().reshape(1) / 448


def per_channel(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax(dim=1, keepdim=True) / 448


FP8 = {
    "tensor": (per_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "channel": (
        per_channel,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
                    "input_activations": {"type": "float", "num_bits": 8, "dynamic": True},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
    "modelopt": (per_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
}


def store_as_fp8(
    scale_of: Callable[[torch.Tensor], torch.Tensor], expected: dict[str, torch.Tensor]
) -> Edit:
    """Store the linear layers as FP8 and note what they are then worth in ``expected``."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            scale = scale_of(tensors[name])
            tensors[name] = quantize(tensors[name], scale)
            expected[name] = tensors[name].float() * scale
            tensors[f"{name}_scale"] = scale
            tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)

    return edit


@pytest.mark.parametrize("scheme", FP8)
def test_fp8_weights_are_expanded(
    scheme: str, tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pitfalls 10, 12: FP8 weights say nothing about the KV cache, and no warning does either."""
    scale_of, section = FP8[scheme]
    expected: dict[str, torch.Tensor] = {}
    edit = store_as_fp8(scale_of, expected)
    folder = copy_model(tiny_model("llama"), tmp_path, edit=edit, quantization_config=section)
    model = load(folder)
    state = model.module.state_dict()
    assert len(expected) == 7 * LAYERS
    for name, weight in expected.items():
        assert torch.equal(state[name], weight)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert torch.isfinite(logits(model)).all()


def test_fp8_weights_in_blocks(tiny_model: TinyModel, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"  # [96, 64]: the last block is a part

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        scales = torch.rand(3, 2) + 0.5  # blocks of 40 by 32
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        expected["values"] = torch.stack(
            [
                torch.stack(
                    [tensors[name][r, c].float() * scales[r // 40, c // 32] for c in range(64)]
                )
                for r in range(96)
            ]
        )

    expected: dict[str, torch.Tensor] = {}
    section = {"quant_method": "fp8", "weight_block_size": [40, 32]}
    folder = copy_model(tiny_model("llama"), tmp_path, edit=edit, quantization_config=section)
    assert torch.equal(load(folder).module.state_dict()[name], expected["values"])


def test_fp8_weights_without_a_scale_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    folder = copy_model(
        tiny_model("llama"), tmp_path, edit=edit, quantization_config={"quant_method": "fp8"}
    )
    with pytest.raises(ModelError, match=rf"{name}.*without a scale"):
        load(folder)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}},
            },
            "compressed-tensors int 4 bits",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "compressed-tensors sparsity sparse-24-bitmask",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": KV_SCHEME,
                "transform_config": {"config_groups": {"u": {"apply": []}}},
            },
            "compressed-tensors transform_config",
        ),
    ],
)
def test_other_quantized_weights_are_refused_with_a_remedy(
    section: dict[str, Any], words: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = copy_model(tiny_model("llama"), tmp_path, quantization_config=section)
    with pytest.raises(ModelError, match=rf"{words}.*original checkpoint"):
        load_config(folder)


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "compressed-tensors", "config_groups": ["Linear"]},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": "int4"}}},
        {"quant_method": "compressed-tensors", "sparsity_config": "some"},
        {"quant_method": "quark", "global_quant_config": "fp8"},
        {"quant_method": "modelopt", "quantization": [], "quant_algo": []},
        ["fp8"],
    ],
)
def test_a_section_nobody_writes_is_refused_by_name(
    section: Any, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = copy_model(tiny_model("llama"), tmp_path, quantization_config=section)
    with pytest.raises(ModelError, match="quantization_config"):
        load_config(folder)


def test_a_modelopt_file_beside_the_config_counts(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copy_model(tiny_model("llama"), tmp_path)
    section = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_AWQ"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(section))
    with pytest.raises(ModelError, match=r"W4A16_AWQ.*hf_quant_config\.json"):
        load_config(folder)


def test_the_text_part_of_a_multimodal_wrapper_is_served(tmp_path: Path) -> None:
    text = make_config("gemma3").to_dict()
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = CONFIG_MAPPING["gemma3"](text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config.dtype = "float32"
    make_model(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert [layer.window for layer in model.geometry.layers] == [8, 8, 8, None]
    ids = prompt_ids(20)
    model.use_implementation("eager")
    with torch.no_grad():
        alone = model.module(torch.tensor([ids]), use_cache=False).logits[0]
    model.use_implementation("kv8")
    torch.testing.assert_close(packed_logits(model, [ids], chunk=6)[0], alone, rtol=1e-4, atol=1e-4)
