"""Prefill and decode, apart, by context length and cache dtype: `latency` and `throughput`.

One sum over both phases would hide that they move in opposite directions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kv8.bench.conditions import Conditions
from kv8.bench.report import Report
from kv8.bench.roof import Roof
from kv8.bench.timing import Samples
from kv8.bench.traffic import decode_bytes, prefill_flop
from kv8.bench.workload import Workload, run_workload
from kv8.cache.capacity import peak_blocks
from kv8.engine.resolve import resolve_options
from kv8.llm import LLM
from kv8.models.step_work import StepWork, read_step_work
from kv8.options import EngineOptions

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "fp8_e4m3": "fp8"}


def short_name(dtype: str) -> str:
    """Return a cache dtype as the names of figures spell it."""
    return _SHORT.get(dtype, dtype)


def bench_phases(
    report: Report,
    model: str,
    dtypes: Sequence[str],
    workloads: Sequence[Workload],
    *,
    options: Mapping[str, Any],
    repeats: int,
    seed: int,
    command: Sequence[str],
) -> None:
    """Fill ``report``: every workload on an engine for each dtype, in turns.

    Args:
        report: where the results go.
        model: as the user names it.
        dtypes: of the KV cache; the first is what the others are compared with.
        workloads: what to run.
        options: further engine options, by name.
        repeats: rounds that count; one more is the warm-up.
        seed: of the prompts.
        command: for the conditions.

    Raises:
        KV8Error: the model or a workload cannot be served, or a request fails.
    """
    engines = {dtype: _engine(model, dtype, workloads, options) for dtype in dtypes}
    first = next(iter(engines.values())).engine
    choices = {name: each.engine.config.kernel_choice for name, each in engines.items()}
    chosen = {name: choice.described() for name, choice in choices.items() if choice is not None}
    more: dict[str, Any] = {
        "model": model,
        "dtype": first.config.dtype,
        "attention_backend": first.runner.backend.name,
        "max_num_batched_tokens": first.config.options.max_num_batched_tokens,
        "repeats": repeats,
    }
    if chosen:
        more["attention_kernels"] = chosen
    work = read_step_work(first.config.model_config)
    device = first.config.device
    with Conditions(command, seed=seed, more=more, device=device) as conditions:
        roof = Roof(getattr(torch, first.config.dtype), device)
        for workload in workloads:
            _bench_workload(report, engines, workload, work, roof, repeats=repeats, seed=seed)
        report.add_roof(roof)
    report.conditions = conditions.facts
    report.warnings += conditions.warnings
    _add_figures(report, dtypes, f"{roof.way}_bandwidth_share")


def cache_memory(options: EngineOptions, sequences: int, tokens: int) -> int:
    """Return the bytes of a cache for ``sequences`` sequences of ``tokens`` tokens at once."""
    layout = resolve_options(options).layout
    return sequences * peak_blocks(layout, tokens) * layout.block_bytes


def _engine(
    model: str, dtype: str, workloads: Sequence[Workload], options: Mapping[str, Any]
) -> LLM:
    """Return an engine whose cache holds the largest of the workloads."""
    asked = {**options, "kv_cache_dtype": dtype, "enable_prefix_caching": False}
    asked["max_num_seqs"] = max(work.sequences for work in workloads)
    plain = EngineOptions(model=model, **asked)
    lengths = [work.longest(plain.max_num_batched_tokens) for work in workloads]
    asked["max_model_len"] = max(lengths)
    options_of_all = EngineOptions(model=model, **asked)
    asked["kv_cache_memory"] = max(
        cache_memory(options_of_all, work.sequences, length)
        for work, length in zip(workloads, lengths, strict=True)
    )
    return LLM(model, **asked)


def _bench_workload(
    report: Report,
    engines: Mapping[str, LLM],
    workload: Workload,
    work: StepWork | None,
    roof: Roof,
    *,
    repeats: int,
    seed: int,
) -> None:
    seconds: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in engines}
    for round_number in range(repeats + 1):
        for dtype, llm in engines.items():
            measured = run_workload(llm.engine, workload, seed + round_number)
            if round_number > 0:  # the first round is the warm-up
                seconds[dtype].append(measured)
        roof.sample()
    samples = {dtype: [Samples(v) for v in zip(*seconds[dtype], strict=True)] for dtype in engines}
    base = next(iter(engines))
    for phase, name in enumerate(("prefill", "decode")):
        for dtype, llm in engines.items():
            config, measured_seconds = llm.engine.config, samples[dtype][phase]
            amounts: dict[str, float | None] = {}
            if work is not None and name == "prefill":
                flop = prefill_flop(config, work, workload.context)
                amounts["flop"] = workload.sequences * flop
            elif work is not None:
                middle = workload.context + (workload.steps + 1) // 2
                contexts = [middle] * workload.sequences
                amounts["num_bytes"] = workload.steps * decode_bytes(config, work, contexts)
            tokens_each = workload.context if name == "prefill" else workload.steps
            report.add(
                {
                    "phase": name,
                    "sequences": workload.sequences,
                    "context": workload.context,
                    "kv_cache_dtype": dtype,
                },
                measured_seconds,
                tokens=workload.sequences * tokens_each,
                over=(short_name(base), samples[base][phase].median / measured_seconds.median),
                **amounts,
            )


def _add_figures(report: Report, dtypes: Sequence[str], memory_share: str) -> None:
    """Add the worst ratio and the worst share of each phase and dtype over all workloads."""
    base = short_name(dtypes[0])
    for phase, share in (("prefill", "matmul_share"), ("decode", memory_share)):
        for dtype in dtypes:
            rows = [
                row
                for row in report.rows
                if row["phase"] == phase and row.get("kv_cache_dtype") == dtype
            ]
            name = short_name(dtype)
            if dtype != dtypes[0]:
                ratio = min(row[f"over_{base}"] for row in rows)
                report.figures[f"{phase}_{name}_over_{base}"] = ratio
            if all(share in row for row in rows):
                report.figures[f"{phase}_{name}_{share}"] = min(row[share] for row in rows)
