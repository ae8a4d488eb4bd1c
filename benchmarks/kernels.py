"""Measures the CPU attention kernels: FP8 against bfloat16, and both against what the memory gives.

    python benchmarks/kernels.py [--json out.json] [--threads 2] [--heads 9,3] [--head-dim 64]

Everything is measured in turns within one run, so that whatever else the machine does touches all
alike; figures are ratios of medians. The layers of a cache are visited one after the other, as a
model does, so that no layer's codes wait in a CPU cache. Each kernel is checked against the
reference backend before it is timed.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.cpu import CpuBackend
from kv8.attention.layer import LayerAttention, LayerCounters
from kv8.attention.reference import ReferenceBackend
from kv8.formats.base import BFLOAT16, FP8_E4M3, KVFormat
from kv8.formats.encode import bits, encode, torch_dtype
from kv8.geometry import LayerGeometry
from kv8.kernels.cpu import ISA_NAMES, load_kernels
from kv8.kernels.openmp import openmp_runtimes

BLOCK_SIZE = 16
FORMATS = (BFLOAT16, FP8_E4M3)


@dataclass(frozen=True)
class Shape:
    """The attention of one model: H, K, D, and how many layers take turns."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int

    @property
    def call(self) -> AttentionCall:
        """What a plain model passes."""
        return AttentionCall(self.head_dim**-0.5, softcap=None, sinks=None, window=None)

    def queries(self, num_tokens: int) -> torch.Tensor:
        """Return random queries [T, H, D]."""
        return torch.randn(num_tokens, self.num_heads, self.head_dim).bfloat16()


@dataclass
class Report:
    """What is printed and written: the ratios that matter, and every measurement behind them."""

    repeats: int
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, object]] = field(default_factory=list)

    def in_turns(self, work: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Return seconds of each piece of work, run in turns, the first round left out."""
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for round_number in range(self.repeats + 1):
            for name, run in work.items():
                start = time.perf_counter()
                run()
                if round_number > 0:
                    seconds[name].append(time.perf_counter() - start)
        return seconds

    def add(self, name: str, seconds: list[float], **amounts: float) -> None:
        """Add a row: median and spread, and amounts (bytes, operations) in billions a second."""
        median = statistics.median(seconds)
        row = {
            "median_us": median * 1e6,
            "min_us": min(seconds) * 1e6,
            "max_us": max(seconds) * 1e6,
        }
        rates = {key: amount / median / 1e9 for key, amount in amounts.items()}
        self.rows.append({"name": name, **row, **rates})


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """Return how many times as fast ``fast`` is."""
    return statistics.median(seconds[slow]) / statistics.median(seconds[fast])


def make_layers(shape: Shape, kv_format: KVFormat, num_tokens: int) -> list[LayerAttention]:
    """Return layers whose caches hold ``num_tokens`` random tokens."""
    geometry = LayerGeometry(
        0, "full_attention", shape.num_heads, shape.num_kv_heads, shape.head_dim, None, 0
    )
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    block = (shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    scale = torch.full((shape.num_kv_heads,), 1 / 64) if kv_format.quantized else None

    def pool() -> torch.Tensor:
        values = torch.randn(64, *block)
        if kv_format.quantized:
            some = encode(values, 1 / 64, kv_format)
        else:
            some = values.to(torch_dtype(kv_format))
        repeated = bits(some).repeat(-(-num_blocks // 64), 1, 1, 1)[:num_blocks]
        return repeated.contiguous().view(torch_dtype(kv_format))

    def counts() -> torch.Tensor:
        return torch.zeros(4, dtype=torch.int64)

    return [
        LayerAttention(
            geometry=geometry,
            group=0,
            format=kv_format,
            k_codes=pool(),
            v_codes=pool(),
            k_scale=scale,
            v_scale=scale,
            q_scale=None,
            counters=LayerCounters(counts(), counts()) if kv_format.quantized else None,
        )
        for _ in range(shape.num_layers)
    ]


def make_batch(num_sequences: int, new: int, context: int) -> AttentionBatch:
    """Return a batch whose sequences own blocks in random order."""
    width = -(-context // BLOCK_SIZE)
    table = torch.randperm(num_sequences * width).view(num_sequences, width).to(torch.int32)
    at = torch.arange(context - new, context)
    slots = (table[:, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE).flatten()
    return AttentionBatch(
        query_starts=torch.arange(num_sequences + 1, dtype=torch.int32) * new,
        context_lens=torch.full((num_sequences,), context, dtype=torch.int32),
        block_tables=(table,),
        slots=(slots,),
        block_size=BLOCK_SIZE,
        query_lens_host=(new,) * num_sequences,
        context_lens_host=(context,) * num_sequences,
    )


def check(backend: CpuBackend, shape: Shape) -> None:
    """Compare both kernels with the reference on a small batch of this shape."""
    for kv_format in FORMATS:
        (layer,) = make_layers(replace(shape, num_layers=1), kv_format, 700)
        for batch in (make_batch(1, 700, 700), make_batch(1, 1, 700)):
            query = shape.queries(batch.num_tokens).to(torch.float32)
            found = backend.attend(layer, query, batch, shape.call)
            expected = ReferenceBackend().attend(layer, query, batch, shape.call)
            # Float32 sums over 700 keys of values up to about 5.
            if not (found - expected).abs().max() < 700 * 2.0**-24 * 5:
                sys.exit(f"error: the kernels are wrong for {kv_format.name}; nothing was timed")


def bench_decode(backend: CpuBackend, shape: Shape, report: Report) -> None:
    """64k cached tokens in all, as one, eight and 64 sequences."""
    tokens = 65536
    layers = {f.name: make_layers(shape, f, tokens) for f in FORMATS}
    buffer = torch.ones(2**29, dtype=torch.uint8)
    readers = {
        "sum of int64": lambda: buffer.view(torch.int64).sum(),
        "sum of float32": lambda: buffer.view(torch.float32).sum(),
        "largest int32": lambda: buffer.view(torch.int32).max(),
    }
    values = 2 * tokens * shape.num_kv_heads * shape.head_dim * shape.num_layers
    moved = {f.name: values * f.bytes_per_value for f in FORMATS}
    ratios, shares = [], []
    for num_sequences in (1, 8, 64):
        batch = make_batch(num_sequences, 1, tokens // num_sequences)
        query = shape.queries(num_sequences)

        def attend(name: str, batch: AttentionBatch = batch, query: torch.Tensor = query) -> None:
            for layer in layers[name]:
                backend.attend(layer, query, batch, shape.call)

        work = {f.name: lambda name=f.name, attend=attend: attend(name) for f in FORMATS}
        seconds = report.in_turns({**work, **readers})
        for name in layers:
            report.add(
                f"decode {num_sequences} x {tokens // num_sequences}, {name}",
                seconds[name],
                gb_per_s=moved[name],
            )
        fastest = min(readers, key=lambda name: statistics.median(seconds[name]))
        report.add(f"  memory, {fastest}", seconds[fastest], gb_per_s=len(buffer))
        ratios.append(ratio(seconds, "bfloat16", "fp8_e4m3"))
        share = moved["fp8_e4m3"] / len(buffer) * ratio(seconds, fastest, "fp8_e4m3")
        shares.append(share)
    report.figures["decode_attention_fp8_over_bf16"] = min(ratios)
    report.figures["decode_attention_fp8_bandwidth_share"] = min(shares)


def bench_prefill(backend: CpuBackend, shape: Shape, report: Report) -> None:
    """Whole prompts: attention over them, and storing them."""
    matrix, ratios = torch.randn(1024, 1024), []
    for context in (1024, 3500):
        batch, query = make_batch(1, context, context), shape.queries(context)
        key = torch.randn(context, shape.num_kv_heads, shape.head_dim).bfloat16()
        work: dict[str, Callable[[], object]] = {"matmul": lambda: matrix @ matrix}
        for kv_format in FORMATS:
            (layer,) = make_layers(replace(shape, num_layers=1), kv_format, context)
            work[kv_format.name] = lambda layer=layer, query=query, batch=batch: backend.attend(
                layer, query, batch, shape.call
            )
            work[f"store {kv_format.name}"] = lambda layer=layer, key=key, batch=batch: (
                backend.store(layer, key, key, batch)
            )
        seconds = report.in_turns(work)
        flop = 2 * shape.num_heads * shape.head_dim * context * (context + 1)
        for name in (f.name for f in FORMATS):
            report.add(f"prefill {context}, {name}", seconds[name], gflop_per_s=flop)
            report.add(f"store {context}, {name}", seconds[f"store {name}"])
        report.add("  float32 matmul 1024", seconds["matmul"], gflop_per_s=2 * 1024**3)
        ratios.append(ratio(seconds, "bfloat16", "fp8_e4m3"))
    report.figures["prefill_fp8_over_bf16"] = min(ratios)


def bench_turns(backend: CpuBackend, shape: Shape, report: Report) -> None:
    """Whether torch's threads and the kernels' get in each other's way when they take turns."""
    (layer,) = make_layers(replace(shape, num_layers=1), FP8_E4M3, 4096)
    batch, query = make_batch(1, 1, 4096), shape.queries(1)
    a, b = torch.randn(64, 512), torch.randn(512, 512)

    def multiply(times: int = 50) -> None:
        for _ in range(times):
            a @ b

    def attend(times: int = 50) -> None:
        for _ in range(times):
            backend.attend(layer, query, batch, shape.call)

    def in_turns() -> None:
        for _ in range(50):
            multiply(1)
            attend(1)

    seconds = report.in_turns({"matmul": multiply, "attend": attend, "in turns": in_turns})
    for name, values in seconds.items():
        report.add(f"50 x {name}", values)
    apart = sum(statistics.median(seconds[name]) for name in ("matmul", "attend"))
    report.figures["in_turns_over_apart"] = statistics.median(seconds["in turns"]) / apart
    report.figures["openmp_runtimes"] = len(openmp_runtimes())


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--heads", default="9,3", help="query heads, kv heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    num_heads, num_kv_heads = map(int, arguments.heads.split(","))
    shape = Shape(num_heads, num_kv_heads, arguments.head_dim, arguments.layers)
    kernels = load_kernels()
    backend, report = CpuBackend(kernels), Report(arguments.repeats)
    load_before = os.getloadavg()[0]
    check(backend, shape)
    for bench in (bench_decode, bench_prefill, bench_turns):
        bench(backend, shape, report)
    conditions = {
        "command": " ".join(sys.argv),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "build": ISA_NAMES[kernels.isa],
        "threads": arguments.threads,
        "torch": torch.__version__,
        "shape": asdict(shape),
        "block_size": BLOCK_SIZE,
        "repeats": arguments.repeats,
        "seed": 0,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }
    for row in report.rows:
        numbers = (f"{key} {value:9.1f}" for key, value in row.items() if key != "name")
        print(f"{row['name']:36s}", "  ".join(numbers))
    for key, value in report.figures.items():
        print(f"{key:38s} {value:.2f}")
    print(f"load average {load_before:.1f} before, {conditions['load_after']:.1f} after")
    if arguments.json is not None:
        found = {"figures": report.figures, "rows": report.rows, "conditions": conditions}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
