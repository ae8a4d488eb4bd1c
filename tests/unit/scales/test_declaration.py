"""What config.json and hf_quant_config.json declare, whole scheme by whole scheme."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint_folders import (
    ATTENTION_GROUP,
    SCHEME,
    compressed_tensors,
    geometry_of,
    write_folder,
)

from kv8.errors import ModelError
from kv8.scales.checkpoint import read_checkpoint
from kv8.scales.declaration import CacheDeclaration, declared, quantization_section

LINEAR = {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": None}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
OUTPUT = {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor", "symmetric": True}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
    "layer_quant_config": {
        "*k_proj": {"output_tensors": OUTPUT},
        "*v_proj": {"output_tensors": OUTPUT},
    },
    "export": {"kv_cache_group": ["*k_proj", "*v_proj"]},
}


def declaration_of(quantization: Any) -> CacheDeclaration | None:
    section = quantization_section({"quantization_config": quantization})
    assert section is not None
    return declared(section)


@pytest.mark.parametrize(
    ("quantization", "producer", "strategy"),
    [
        (compressed_tensors(), "compressed-tensors", "tensor"),
        (compressed_tensors(strategy="attn_head"), "compressed-tensors", "attn_head"),
        (
            {**compressed_tensors(), "quant_method": "compressed_tensors"},
            "compressed-tensors",
            "tensor",
        ),
        ({"config_groups": {}, "kv_cache_scheme": SCHEME}, "compressed-tensors", "tensor"),
        (MODELOPT, "modelopt", "tensor"),
        ({**MODELOPT, "kv_cache_scheme": "FP8"}, "modelopt", "tensor"),
        (
            {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
            "modelopt",
            "tensor",
        ),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, "fp8", "tensor"),
        (QUARK, "quark", "tensor"),
    ],
)
def test_every_producers_static_fp8_cache_is_understood(
    quantization: Any, producer: str, strategy: str
) -> None:
    found = declaration_of(quantization)
    assert found is not None
    assert found.refusal is None
    assert (found.producer, found.format, found.strategy) == (producer, "fp8_e4m3", strategy)
    assert found.where.startswith("config.json: quantization_config.")


@pytest.mark.parametrize(
    "quantization",
    [
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": LINEAR},
            "kv_cache_scheme": None,
        },
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "gptq", "bits": 4},
        {**MODELOPT, "kv_cache_scheme": None},
        {**QUARK, "export": {"kv_cache_group": []}},
    ],
)
def test_quantized_weights_alone_declare_no_cache(quantization: Any) -> None:
    """Pitfall 68: "is quantized" is not "has an FP8 cache"."""
    assert declaration_of(quantization) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_bits", 4),
        ("num_bits", 16),
        ("type", "int"),
        ("strategy", "channel"),
        ("strategy", "token"),
        ("strategy", "group"),
        ("strategy", 1),
        ("dynamic", True),
        ("dynamic", "local"),
        ("symmetric", False),
        ("symmetric", 0),
        ("group_size", 128),
        ("block_structure", [128, 128]),
        ("actorder", "group"),
    ],
)
@pytest.mark.parametrize("place", ["kv_cache_scheme", "group"])
def test_one_wrong_field_is_refused_by_name(field: str, value: Any, place: str) -> None:
    """Pitfall 14: one wrong field at a time; field, value and what is supported are named."""
    wrong = {**SCHEME, field: value}
    quantization = compressed_tensors(wrong)
    if place == "group":
        group = {**ATTENTION_GROUP, "input_activations": wrong}
        quantization = {**compressed_tensors(), "config_groups": {"group_0": group}}
    found = declaration_of(quantization)
    assert found is not None
    assert found.refusal is not None
    assert f".{field} is {value!r}" in found.refusal
    assert "'attn_head'" in found.refusal
    assert "num_bits 8" in found.refusal


def test_a_missing_type_means_integers_and_is_refused() -> None:
    found = declaration_of(compressed_tensors({"num_bits": 8, "strategy": "tensor"}))
    assert found is not None
    assert ".type is 'int' (missing" in (found.refusal or "")


def test_missing_and_unknown_keys_of_older_and_newer_versions_are_tolerated() -> None:
    found = declaration_of(compressed_tensors({"num_bits": 8, "type": "float", "new_key": None}))
    assert found is not None
    assert found.refusal is None
    assert found.strategy == "tensor"


@pytest.mark.parametrize(
    "quantization",
    [
        {**MODELOPT, "kv_cache_scheme": "NVFP4"},
        {**MODELOPT, "kv_cache_scheme": {"dynamic": False, "num_bits": 4, "type": "float"}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4_AFFINE"},
        {"quant_method": "fp8", "kv_cache_scheme": "dynamic"},
        {**QUARK, "layer_quant_config": {}},
        {**QUARK, "layer_quant_config": {"*k_proj": {"output_tensors": OUTPUT}}},
        *(
            {
                **QUARK,
                "layer_quant_config": {
                    "*k_proj": {"output_tensors": {**OUTPUT, field: value}},
                    "*v_proj": {"output_tensors": OUTPUT},
                },
            }
            for field, value in (
                ("dtype", "int8"),
                ("qscheme", "per_channel"),
                ("is_dynamic", True),
                ("symmetric", False),
            )
        ),
    ],
)
def test_other_producers_other_schemes_are_refused(quantization: Any) -> None:
    found = declaration_of(quantization)
    assert found is not None
    assert found.refusal


def test_an_attention_group_declares_quantized_queries() -> None:
    with_group = {**compressed_tensors(), "config_groups": {"group_0": ATTENTION_GROUP}}
    found = declaration_of(with_group)
    assert found is not None
    assert found.queries
    assert not declaration_of(compressed_tensors()).queries  # type: ignore[union-attr]
    alone = declaration_of({"config_groups": {"group_0": ATTENTION_GROUP}})
    assert alone is not None
    assert alone.queries
    assert alone.where.endswith("config_groups.group_0.input_activations")


def test_a_group_that_contradicts_the_scheme_is_refused() -> None:
    group = {**ATTENTION_GROUP, "input_activations": {**SCHEME, "strategy": "attn_head"}}
    found = declaration_of({**compressed_tensors(), "config_groups": {"group_0": group}})
    assert found is not None
    assert "'tensor'" in (found.refusal or "")
    assert "'attn_head'" in (found.refusal or "")


def test_the_section_is_found_where_producers_put_it() -> None:
    for config in (
        {"quantization_config": compressed_tensors()},
        {"compression_config": compressed_tensors()},
        {"text_config": {"quantization_config": compressed_tensors()}},
        {"quantization_config": None, "text_config": {"compression_config": compressed_tensors()}},
    ):
        section = quantization_section(config)
        assert section is not None
        assert declared(section) is not None
    assert quantization_section({}) is None
    assert quantization_section({"quantization_config": {}}) is None
    with pytest.raises(ModelError, match="quantization_config"):
        quantization_section({"quantization_config": "fp8"})
    with pytest.raises(ModelError, match="kv_cache_scheme is 8"):
        declaration_of({"quant_method": "fp8", "kv_cache_scheme": 8})


def hf_quant_config(folder: Path, algorithm: str | None) -> None:
    fields = {"quant_algo": "FP8", "kv_cache_quant_algo": algorithm}
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": fields})
    (folder / "hf_quant_config.json").write_text(text)


def test_modelopts_own_file_declares_too(tmp_path: Path) -> None:
    """Pitfall 13: both configuration files are looked at."""
    write_folder(tmp_path)
    hf_quant_config(tmp_path, "FP8")
    found = read_checkpoint(tmp_path, geometry_of())
    assert found.declaration is not None
    assert found.declaration.where == "hf_quant_config.json: quantization.kv_cache_quant_algo"


def test_two_files_may_agree_but_not_contradict(tmp_path: Path) -> None:
    write_folder(tmp_path, quantization=MODELOPT)
    hf_quant_config(tmp_path, "FP8")
    assert read_checkpoint(tmp_path, geometry_of()).declaration is not None
    hf_quant_config(tmp_path, "NVFP4")
    with pytest.raises(ModelError, match=r"config\.json.*hf_quant_config\.json"):
        read_checkpoint(tmp_path, geometry_of())
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json"):
        read_checkpoint(tmp_path, geometry_of())
