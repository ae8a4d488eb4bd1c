"""kv8's loader beside vLLM 0.32.0's, case by case: where they agree, where they differ and why.

``vllm_loader_cases.json`` holds what vLLM's own code returned. kv8 differs on purpose wherever vLLM
goes on with a number that no producer can have meant, or stops without saying which layer.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint_folders import GOLDEN, compressed_tensors, geometry_of, write_folder

from kv8.errors import ScaleError
from kv8.formats.base import FP8_E4M3
from kv8.layer_plan import make_layer_plan
from kv8.scales.checkpoint import read_checkpoint
from kv8.scales.names import Role, resolve_name
from kv8.scales.resolve import ResolvedScales, resolve_scales

CASES = json.loads((GOLDEN / "vllm_loader_cases.json").read_text())
GEOMETRY = geometry_of(1, 9, 3)
P = "model.layers.0.self_attn."
STATIC = {"quant_method": "fp8", "kv_cache_scheme": "static"}


def number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def load(folder: Path, tensors: dict[str, Any], quantization: Any) -> ResolvedScales:
    stored = {
        f"{P}{side}_scale": torch.tensor(value, dtype=torch.float32)
        for side, value in tensors.items()
        if value is not None
    }
    checkpoint = read_checkpoint(write_folder(folder, stored, quantization), GEOMETRY)
    plan = make_layer_plan(GEOMETRY, FP8_E4M3, ())
    return resolve_scales(GEOMETRY, plan, checkpoint)


def usable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and 2.0**-50 <= value <= 2.0**50


@pytest.mark.parametrize(
    "case",
    CASES["base_method_fp8_modelopt_quark"]["cases"],
    ids=lambda c: f"{c['k']},{c['v']},{c['q']}",
)
def test_scalar_loader(tmp_path: Path, case: dict[str, Any]) -> None:
    """Pitfall 9: each combination has a documented outcome and none is a bare assertion.

    kv8 and vLLM agree where k and v are both usable. Where vLLM reads 1.0 or the other side's value
    for one that is missing, zero, negative or not a number, or asserts, kv8 refuses by name.
    """
    k, v, q = (number(case[side]) for side in "kvq")
    if not (usable(k) and usable(v)):
        with pytest.raises(ScaleError, match="layer 0"):
            load(tmp_path, {"k": k, "v": v, "q": q}, STATIC)
        return
    resolved = load(tmp_path, {"k": k, "v": v, "q": q}, STATIC)
    layer = resolved.scales.layer(0)
    assert layer.k is not None
    assert layer.v is not None
    assert layer.k.values == (case["result"]["k"],)
    assert layer.v.values == (case["result"]["v"],)
    # vLLM turns an unusable q scale into 1.0 and quantizes queries with it; kv8 does not quantize.
    assert resolved.fp8_queries is usable(q)
    assert bool(resolved.warnings) is (q is not None and not usable(q))
    if layer.q is not None:
        assert layer.q.values == (case["result"]["q"],)


K, V = [0.125, 0.25, 0.5], [0.5, 0.25, 0.125]
COLUMN: dict[str, Any] = {"k": [[[x]] for x in K], "v": [[[x]] for x in V]}
Q9 = [float(n) for n in range(1, 10)]
# For each of vLLM's cases: strategy, tensors, and the reason why kv8 refuses, if it does.
HEAD_CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "tensor: k(1,)=0.5 v=0.25 q=0.125": ("tensor", {"k": [0.5], "v": [0.25], "q": [0.125]}, None),
    "tensor: 0-dim k=0.5 v=0.25": ("tensor", {"k": 0.5, "v": 0.25}, None),
    "tensor: nothing": ("tensor", {}, "no k or v scale"),
    "tensor: k only 0.5": ("tensor", {"k": [0.5]}, "no v scale"),
    "tensor: k nan, v 0, q -2": (
        "tensor",
        {"k": [math.nan], "v": [0.0], "q": [-2.0]},
        "not a number",
    ),
    "tensor: k (3,1,1)": ("tensor", {**COLUMN, "v": [0.25]}, r"shape \[3, 1, 1\]"),
    "attn_head: k,v (3,1,1), q (9,1,1)=1..9": (
        "attn_head",
        {**COLUMN, "q": [[[x]] for x in Q9]},
        None,
    ),
    "attn_head: k,v (3,)": ("attn_head", {"k": K, "v": V}, None),
    "attn_head: k,v (1,)": ("attn_head", {"k": [0.125], "v": [0.5]}, r"shape \[1\]"),
    "attn_head: k (2,)": ("attn_head", {"k": [0.1, 0.2], "v": V}, r"shape \[2\]"),
    "attn_head: k (9,)=1..9": ("attn_head", {"k": Q9, "v": V}, r"shape \[9\]"),
    "attn_head: q (1,)": ("attn_head", {**COLUMN, "q": [1.0]}, None),
    "attn_head: q (3,)=1,2,3": ("attn_head", {**COLUMN, "q": [1.0, 2.0, 3.0]}, None),
    "attn_head: k has nan, v has 0 and negative": (
        "attn_head",
        {"k": [0.125, math.nan, 0.5], "v": [0.5, 0.0, -0.125]},
        "head 1 is not a number",
    ),
    "attn_head: nothing": ("attn_head", {}, "no k or v scale"),
}
# kv8 has no tensor parallelism: one process holds every head.
ELSEWHERE = {"attn_head: tp rank 1 of 3", "attn_head: tp rank 4 of 6"}


def test_every_case_of_vllm_is_compared() -> None:
    names = {case["case"] for case in CASES["compressed_tensors_method"]["cases"]}
    assert names == set(HEAD_CASES) | ELSEWHERE


@pytest.mark.parametrize(
    "case",
    [c for c in CASES["compressed_tensors_method"]["cases"] if c["case"] not in ELSEWHERE],
    ids=lambda c: c["case"],
)
def test_compressed_tensors_loader(tmp_path: Path, case: dict[str, Any]) -> None:
    strategy, tensors, refusal = HEAD_CASES[case["case"]]
    quantization = compressed_tensors(strategy=strategy)
    if refusal is not None:
        with pytest.raises(ScaleError, match=refusal):
            load(tmp_path, tensors, quantization)
        return
    resolved = load(tmp_path, tensors, quantization)
    layer = resolved.scales.layer(0)
    if isinstance(case["result"], dict):
        assert layer.k is not None
        assert layer.v is not None
        assert list(layer.k.values) == case["result"]["k"]
        assert list(layer.v.values) == case["result"]["v"]
    if tensors.get("q") == [[[x]] for x in Q9]:
        # vLLM keeps the largest of each group of query heads; kv8 keeps one scale a query head.
        assert layer.q is not None
        assert list(layer.q.values) == Q9
        assert case["result"]["q"] == [max(Q9[i : i + 3]) for i in (0, 3, 6)]
    elif strategy == "attn_head" and "q" in tensors:
        # One or three values for nine query heads: vLLM crashes or spreads them, kv8 leaves queries
        # unquantized and says why.
        assert not resolved.fp8_queries
        assert "shape" in resolved.warnings[0]


# vLLM leaves these names alone or sends them to a parameter that does not exist; kv8 binds them.
KV8_BINDS = {
    "self_attn.k_proj.output_scale",
    "self_attn.v_proj.output_scale",
    "self_attn.q_proj.output_scale",
    "self_attn.prob_output_scale",
    "self_attn.prob_scale",
    "self_attn.q_proj.q_scale",
    "self_attn.attn.kv_scale",
}


@pytest.mark.parametrize(("tail", "targets"), CASES["name_map"]["table"].items())
def test_names(tail: str, targets: dict[str, str | None]) -> None:
    """Pitfall 3: kv8 binds every name that vLLM's table binds, to the same layer and side."""
    name = CASES["name_map"]["prefix"] + tail
    if tail == "mlp.k_scale":  # vLLM: a parameter of that name does not exist
        with pytest.raises(ScaleError, match=r"mlp\.k_scale"):
            resolve_name(name)
        return
    bound = resolve_name(name)
    assert bound is not None
    assert bound.layer == 0
    target = targets["quark"] or ""
    if tail in KV8_BINDS:
        return
    side, kind = target.rsplit(".", 1)[1].split("_", 1)
    # kv_scale: vLLM fills k here and copies it to v in its first loader, not in the second.
    assert side in bound.sides
    assert (bound.spelling.role is Role.OFFSET) is (kind == "zero_point")
