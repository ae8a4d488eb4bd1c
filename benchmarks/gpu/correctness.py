"""Every kernel x format x head layout against the reference, on fresh random inputs.

Most of the time goes to compiling kernels, on the CPU; so the cases are shared among processes,
each with its own context on the GPU: one that dies of a bad address takes only its share along.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gpu.cases import Check, all_checks, few_checks
from benchmarks.gpu.sections import Context
from tests import attention_cases as cases

from kv8.attention.backend import AttentionBackend
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerCounters
from kv8.attention.naive import naive_attention
from kv8.attention.reference import ReferenceBackend
from kv8.attention.select import select_backend
from kv8.formats.encode import bits
from kv8.kernels.clock import recorded

_ROOT: Final = Path(__file__).resolve().parents[2]
_MOST_PROCESSES: Final = 12
_MOST_SECONDS: Final = 100.0
_PROMPT_ROWS: Final = 24  # of a sequence, attended and compared; the tokens before are only stored


def body(context: Context) -> dict[str, Any]:
    """Run all cases, in processes; return every one that failed and the worst of each kind."""
    seed = int.from_bytes(os.urandom(4), "little")
    seconds = min(_MOST_SECONDS, context.seconds_left - 10)
    results, problems = _in_processes(context, seed, seconds)
    failed = [found for found in results if found["problems"]]
    expected = len(_checks(seed, few=context.dry))
    if len(results) != expected:
        problems.append(f"{expected - len(results)} of {expected} cases gave no result")
    return {
        "passed": not failed and not problems,
        "seed": seed,
        "cases": expected,
        "problems": problems,
        "failed": failed,
        "largest_share_of_bound": max((f["share_of_bound"] for f in results), default=None),
        "results": results,
    }


def _checks(seed: int, *, few: bool) -> list[Check]:
    return few_checks(seed) if few else all_checks(seed)


def _in_processes(
    context: Context, seed: int, seconds: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what the cases found, and what went wrong with the processes."""
    number = 1 if context.dry else max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) - 2))
    deadline = time.monotonic() + seconds
    problems, results = [], []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.json" for part in range(number)]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.correctness", f"--seed={seed}",
                 f"--part={part}", f"--parts={number}", f"--file={file}",
                 f"--device={context.device}", *["--few"] * context.dry],
                stdout=subprocess.DEVNULL, stderr=file.with_suffix(".err").open("w"),
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # there are as many as cores already
                cwd=_ROOT,
            )
            for part, file in enumerate(files)
        ]  # fmt: skip
        try:
            for part, (process, file) in enumerate(zip(started, files, strict=True)):
                try:
                    code = process.wait(timeout=max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    problems.append(f"process {part} was ended after {seconds:.0f} s")
                else:
                    words = file.with_suffix(".err").read_text()[-3000:]
                    problems += [f"process {part} ended with {code}: {words}"] if code else []
                results += _read(file)
        finally:
            for process in started:  # none may disturb what is measured later
                process.kill()
                process.wait()
    return results, problems


def _read(file: Path) -> list[dict[str, Any]]:
    """Return what a process wrote; not a line it was ended in."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_check(check: Check, device: torch.device, backend_name: str) -> dict[str, Any]:
    """Return how a case went: its problems, empty if all is right, and the errors over bounds."""
    cases.arithmetic = cases.TRITON_ARITHMETIC
    case = cases.make_case(check.lengths, seed=check.seed, **check.options)
    there = _to_device(case, device)
    backend = select_backend(backend_name, [there.layer])
    ends = [(max(0, n - 1 - _PROMPT_ROWS), n - 1, n) for n in check.lengths]
    steps = {
        "stored before": [(s, 0, a) for s, (a, _, _) in enumerate(ends) if a],
        "prefill": [(s, a, b) for s, (a, b, _) in enumerate(ends) if a < b],
        "decode": [(s, b, n) for s, (_, b, n) in enumerate(ends)],
    }
    problems: list[str] = []
    worst = 0.0
    for name, step in steps.items():
        if not step:
            continue
        batch = cases.make_batch(case, step)
        moved = _batch_to(batch, device)
        _store(ReferenceBackend(), case, step, batch, torch.device("cpu"))
        _store(backend, there, step, moved, device)
        problems += _compare_codes(name, case, there)
        if name == "stored before":
            continue
        query = cases.gather_rows(case.queries, step)
        found = _attend(backend, there, query.to(device), moved)
        expected = naive_attention(case.layer, query, batch, case.call)
        bound = cases.rounding_bound(case, step)
        bound = bound + cases.HALF_STEPS[found.dtype] * (expected.abs() + bound)
        share = ((found.cpu().double() - expected).abs() / bound).nan_to_num(torch.inf).max()
        worst = max(worst, float(share))
        if share > 1:
            problems.append(f"{name}: an error of {float(share):.3g} times its bound")
        if name == "decode":
            problems += _played_back(backend, there, query.to(device), moved, found)
    return {"name": check.name, "problems": problems, "share_of_bound": worst}


def _to_device(case: cases.Case, device: torch.device) -> cases.Case:
    """Return the case with its layer on ``device``: the same bytes at the same strides."""

    def move(codes: torch.Tensor) -> torch.Tensor:
        storage = torch.empty(0, dtype=torch.uint8).set_(codes.untyped_storage()).to(device)
        typed = storage[: storage.numel() // codes.element_size() * codes.element_size()]
        return typed.view(codes.dtype).as_strided(
            codes.shape, codes.stride(), codes.storage_offset()
        )

    layer = case.layer
    scales = {
        name: None if (scale := getattr(layer, name)) is None else scale.clone().to(device)
        for name in ("k_scale", "v_scale", "q_scale")
    }
    counters = layer.counters and LayerCounters(
        layer.counters.k.clone().to(device), layer.counters.v.clone().to(device)
    )
    moved = replace(
        layer,
        k_codes=move(layer.k_codes.clone() if device.type == "cpu" else layer.k_codes),
        v_codes=move(layer.v_codes.clone() if device.type == "cpu" else layer.v_codes),
        counters=counters,
        **scales,
    )
    sinks = None if case.call.sinks is None else case.call.sinks.to(device)
    return replace(case, layer=moved, call=replace(case.call, sinks=sinks))


def _batch_to(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
    return replace(
        batch,
        query_starts=batch.query_starts.to(device),
        context_lens=batch.context_lens.to(device),
        block_tables=tuple(table.to(device) for table in batch.block_tables),
        slots=tuple(slots.to(device) for slots in batch.slots),
    )


def _store(
    backend: AttentionBackend,
    case: cases.Case,
    step: list[tuple[int, int, int]],
    batch: AttentionBatch,
    device: torch.device,
) -> None:
    key, value = (cases.gather_rows(side, step).to(device) for side in (case.keys, case.values))
    backend.store(case.layer, key, value, batch)


def _compare_codes(name: str, case: cases.Case, there: cases.Case) -> list[str]:
    """Compare every byte of both caches, poison included, and the counts."""
    problems = []
    for side in ("k", "v"):
        mine, theirs = (getattr(c.layer, f"{side}_codes") for c in (case, there))
        wrong = int((bits(mine) != bits(theirs).cpu()).sum())
        if wrong:
            problems.append(f"{name}: {wrong} codes of {side} differ from the reference's")
        if case.layer.counters is not None and there.layer.counters is not None:
            counts = [getattr(c.layer.counters, side).tolist() for c in (case, there)]
            if counts[0] != counts[1]:
                problems.append(f"{name}: counts of {side} are {counts[1]}, not {counts[0]}")
    return problems


def _attend(
    backend: AttentionBackend, case: cases.Case, query: torch.Tensor, batch: AttentionBatch
) -> torch.Tensor:
    """Attend into memory that was full of NaN before: what is not written shows."""
    poison = [torch.full_like(query, torch.nan) for _ in range(3)]
    del poison
    return backend.attend(case.layer, query, batch, case.call)


def _played_back(
    backend: AttentionBackend,
    case: cases.Case,
    query: torch.Tensor,
    batch: AttentionBatch,
    eager: torch.Tensor,
) -> list[str]:
    """Record the decode step with rows of padding, and compare what it plays back."""
    num_seqs, size = len(query), len(query) + 2
    device, table = query.device, batch.block_tables[0]
    padded = replace(
        batch,
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=torch.cat([batch.context_lens, batch.context_lens.new_zeros(2)]),
        block_tables=(torch.cat([table, table.new_full((2, table.shape[1]), 10**6)]),),
        slots=(torch.cat([batch.slots[0], batch.slots[0].new_full((2,), -1)]),),
        query_lens_host=(1,) * size,
        context_lens_host=(table.shape[1] * batch.block_size,) * size,
        lengths_on_device=True,
    )
    rows = torch.cat([query, torch.full_like(query[:1], torch.nan).expand(2, -1, -1)])
    output = torch.full_like(rows, torch.nan)

    def compute() -> None:
        output.copy_(backend.attend(case.layer, rows, padded, case.call))

    replay = recorded(compute, device)
    output.fill_(torch.nan)
    replay()
    problems = []
    if not torch.equal(output[num_seqs:], torch.zeros_like(output[num_seqs:])):
        problems.append("played back: rows of padding are not zero")
    if not torch.equal(output[:num_seqs], eager):  # padding is no work: all is cut the same way
        largest = float((output[:num_seqs].double() - eager.double()).abs().max())
        problems.append(f"played back: differs from eager by {largest:.3g}")
    return problems


def main() -> None:
    """Run one process's share of the cases, a line of JSON each."""
    parser = argparse.ArgumentParser()
    for name in ("--seed", "--part", "--parts"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--few", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    with options.file.open("a") as file:
        checks = _checks(options.seed, few=options.few)
        for check in checks[options.part :: options.parts]:
            try:
                found = run_check(check, device, "triton")
            except Exception as error:  # noqa: BLE001 - the other cases go on
                problem = f"{type(error).__name__}: {error}"[-2000:]
                found = {"name": check.name, "problems": [problem], "share_of_bound": 0.0}
            file.write(json.dumps(found) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
