"""Whatever stands in a configuration file, reading it gives an answer or a `ModelError`."""

import contextlib
import copy
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint_folders import ATTENTION_GROUP, SCHEME, compressed_tensors

from kv8.errors import ModelError
from kv8.models.weight_storage import WeightStorage, check_weight_storage
from kv8.scales.declaration import declared, modelopt_section, quantization_section

OUTPUT = {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor", "symmetric": True}
KNOWN: list[dict[str, Any]] = [
    {"quantization_config": compressed_tensors()},
    {"text_config": {"compression_config": compressed_tensors(strategy="attn_head")}},
    {"quantization_config": {**compressed_tensors(), "config_groups": {"g": ATTENTION_GROUP}}},
    {"quantization_config": {"config_groups": {"g": {**ATTENTION_GROUP, "weights": SCHEME}}}},
    {"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": "FP8"}},
    {"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}},
    {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}},
    {
        "quantization_config": {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
            "layer_quant_config": {"*k_proj": {"output_tensors": OUTPUT}},
            "export": {"kv_cache_group": ["*k_proj"]},
        }
    },
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    st.floats(allow_nan=False),
    st.sampled_from(["", "fp8", "static", "tensor", "float", "int", "NVFP4", "*k_proj"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every node below ``value``."""
    if not isinstance(value, dict | list):
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in items:
        found += [(*path, key), *places(inner, (*path, key))]
    return found


@given(data=st.data(), known=st.sampled_from(KNOWN), junk=JSON)
def test_one_damaged_node_never_escapes_as_another_error(
    data: st.DataObject, known: dict[str, Any], junk: Any
) -> None:
    """Pitfall 14: a scheme is served only if the file still says one that is served."""
    config = copy.deepcopy(known)
    *parents, key = data.draw(st.sampled_from(places(config)))
    node: Any = config
    for parent in parents:
        node = node[parent]
    node[key] = junk
    try:
        section = quantization_section(config)
        found = declared(section) if section else None
        storage = check_weight_storage(Path("nowhere"), config)
    except ModelError as error:
        assert "quantization" in str(error) or "compression" in str(error)  # noqa: PT017
        return
    assert storage in WeightStorage
    if found is not None and found.refusal is None:
        assert found.format == "fp8_e4m3"
        assert found.strategy in ("tensor", "attn_head")


@given(config=st.dictionaries(st.text(max_size=4), JSON, max_size=3), inner=JSON)
def test_modelopts_file_likewise(config: dict[str, Any], inner: Any) -> None:
    with contextlib.suppress(ModelError):
        declared(modelopt_section({**config, "quantization": inner}))
