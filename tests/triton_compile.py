"""Compiles the Triton kernels for GPUs that need not be there: ``python -m tests.triton_compile``.

A program of its own, since Triton is either an interpreter or a compiler in one process. The
launches are the real ones of `kv8.kernels.triton_launch`, on tensors of the CPU; instead of being
launched, a kernel is compiled for exactly these arguments. Prints JSON: for each build what is
known of registers and spills, and which instructions were found.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kv8.formats.encode import torch_dtype
from kv8.formats.lookup import get_format
from kv8.kernels import triton_launch as launch
from kv8.kernels.triton_cache import Sequences, Settings, TritonCache
from kv8.kernels.triton_config import Device, PrefillConfig
from kv8.kernels.triton_decode import combine_kernel

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_KIB = 1024
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), Device("bits", False, 108, 163 * _KIB)),
    "sm_89": (GPUTarget("cuda", 89, 32), Device("hardware", True, 142, 99 * _KIB)),
    "sm_90": (GPUTarget("cuda", 90, 32), Device("hardware", True, 132, 227 * _KIB)),
    "sm_100": (GPUTarget("cuda", 100, 32), Device("hardware", True, 148, 227 * _KIB)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Device("bits", False, 304, 64 * _KIB, amd=True)),
}


@dataclass(frozen=True)
class Launch:
    """One recorded launch of a kernel."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class _Recorder:
    """Stands in for a kernel: ``recorder[grid](...)`` notes the call."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(n > 0 for n in grid)

        def call(*arguments: Any, **options: Any) -> None:
            self._launches.append(Launch(self._kernel, arguments, options))

        return call


def record(work: Callable[[], None]) -> list[Launch]:
    """Return the launches that ``work`` would make."""
    launches: list[Launch] = []
    names = ("store_kernel", "decode_kernel", "combine_kernel", "prefill_kernel")
    patches = {name: _Recorder(getattr(launch, name), launches) for name in names}
    with patch.multiple(launch, **patches):
        work()
    return launches


def compile_launch(recorded: Launch, target: GPUTarget) -> Any:
    """Return Triton's compiled kernel for the launch's arguments."""
    names = recorded.kernel.arg_names
    options = dict(recorded.options)
    settings = {k: options.pop(k) for k in ("num_warps", "num_stages") if k in options}
    values = dict(zip(names, recorded.arguments, strict=False)) | options
    no_specialization = {p.name for p in recorded.kernel.params if p.do_not_specialize}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name.isupper() or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and name not in no_specialization:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(recorded.kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=settings)


def make_launches(
    device: Device,
    kind: str,
    stored_as: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    block_size: int = 64,
    fp8_queries: bool = False,
    fp8_values: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    sequences: int = 8,
) -> list[Launch]:
    """Return the launches of one ``kind`` of work, store, decode or prefill, on small tensors."""
    kv_format = get_format(stored_as)
    num_heads, num_kv_heads = heads
    codes = torch.empty(4, num_kv_heads, block_size, head_dim, dtype=torch_dtype(kv_format))
    per_head = torch.ones(num_kv_heads) if kv_format.quantized else None
    counts = torch.zeros(4, dtype=torch.int64) if kv_format.quantized else None
    cache = TritonCache(
        device=device,
        format=kv_format.name,
        largest=kv_format.finite_max,
        smallest=kv_format.smallest,
        k_codes=codes,
        v_codes=codes.clone(),
        k_scale=per_head,
        v_scale=per_head,
        q_scale=torch.ones(num_heads) if fp8_queries else None,
        k_counts=counts,
        v_counts=counts,
        num_heads=num_heads,
    )
    rows = sequences if kind == "decode" else 4096
    query = torch.empty(rows, num_heads, head_dim, dtype=dtype)
    batch = Sequences(
        query_starts=torch.zeros(sequences + 1, dtype=torch.int32),
        context_lens=torch.zeros(sequences, dtype=torch.int32),
        block_table=torch.zeros(sequences, 512, dtype=torch.int32),
        num_sequences=sequences,
        num_tokens=rows,
        max_context=32768,
    )
    settings = Settings(0.1, softcap, torch.ones(num_heads) if sinks else None, window)
    if kind == "store":
        new = query[:, :num_kv_heads]
        slots = torch.zeros(rows, dtype=torch.int64)
        return record(lambda: launch.run_store(cache, new, new, slots))
    if kind == "decode":
        workspace = torch.empty(launch.workspace_values(cache, dtype, sequences, 32768))
        return record(lambda: launch.run_decode(cache, query, query, batch, settings, workspace))
    choose = launch.prefill_config

    def configure(*arguments: Any, fp8_products: bool) -> PrefillConfig:
        return replace(choose(*arguments, fp8_products=fp8_products), fp8_values=fp8_values)

    with patch.object(launch, "prefill_config", configure):
        return record(
            lambda: launch.run_prefill(cache, query, query, batch, settings, skip_single=True)
        )


def examine(compiled: Any, target: GPUTarget) -> dict[str, Any]:
    """Return what can be read off a compiled kernel."""
    found: dict[str, Any] = {
        "shared": compiled.metadata.shared,
        "narrow_strides": narrow_strides(compiled.asm["ttir"]),
        "fp8_sums_go_on": fp8_sums_that_go_on(compiled.asm["ttir"]),
    }
    if target.backend != "cuda":
        return found
    ptx = compiled.asm["ptx"]
    counts = {
        "wide_copies": r"cp\.async\.c[ga]\.shared\.global [^;]*, 0x10,|cp\.async\.c[ga][^;]*, 16",
        "pair_widenings": r"cvt\.rn\.f16x2\.e[45]m[32]x2",
        "wgmma": r"wgmma\.mma_async",
        "fp8_products": r"(?:wgmma\.mma_async|mma\.sync)\S*\.e[45]m[32]\.e[45]m[32]",
        "mma": r"mma\.sync",
    }
    found |= {name: len(re.findall(pattern, ptx)) for name, pattern in counts.items()}
    return found | resources(compiled.asm["cubin"])


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers and spilled bytes of a kernel, by the tool that Triton brings."""
    tool = next(Path(triton.__file__).parent.rglob("cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (registers,) = re.findall(r"REG:(\d+)", text)
    (stack,) = re.findall(r"STACK:(\d+)", text)
    return {"registers": int(registers), "spilled_bytes": int(stack)}


def narrow_strides(ttir: str) -> list[str]:
    """Return the strides of blocks and tokens that are multiplied in fewer than 64 bits."""
    names = set(re.findall(r"%(\w*(?:block|token|table)_stride): i32", ttir))
    assert names, "Triton no longer prints the arguments' names"
    return sorted(
        name
        for name in names
        for line in ttir.splitlines()
        if re.search(rf"%{name}\b", line) and "tt.func" not in line and "arith.extsi" not in line
    )


def fp8_sums_that_go_on(ttir: str) -> list[str]:
    """Return the products of FP8 matrices that are added to a sum inside the matrix unit."""
    dots = [line for line in ttir.splitlines() if "tt.dot" in line and "f8E4M3FN" in line]
    return [line.strip() for line in dots if not re.search(r"tt\.dot %\w+, %\w+, %cst", line)]


def main() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what was found of each build that standard input asks for.

    The merge of parts is plain arithmetic on float32, so once for a kind of device is enough.
    """
    merged = set()
    for job in json.loads(sys.stdin.read()):
        target, device = TARGETS[job["target"]]
        options = job["options"] | {
            "dtype": getattr(torch, job["options"].get("dtype", "bfloat16"))
        }
        for recorded in make_launches(device, job["kind"], job["stored_as"], **options):
            if recorded.kernel is combine_kernel:
                if target.backend in merged:
                    continue
                merged.add(target.backend)
            compiled = compile_launch(recorded, target)
            yield f"{job['name']}: {recorded.kernel.__name__}", examine(compiled, target)


if __name__ == "__main__":
    json.dump(dict(main()), sys.stdout)
