"""Cold starts: from no process at all until the first token is there, and the memory that takes.

"Cold" means a fresh process; the model's files were read before and lie in the system's memory.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kv8.bench.conditions import Conditions
from kv8.bench.phases import cache_memory, short_name
from kv8.bench.report import Report
from kv8.bench.timing import Samples
from kv8.engine.resolve import resolve_options
from kv8.errors import EngineError
from kv8.kernels.clock import seconds_of
from kv8.options import EngineOptions

_PROMPT_TOKENS = 8


@dataclass(frozen=True)
class ColdRun:
    """One start of `kv8.bench.cold`.

    Attributes:
        seconds: from the start of the process until its first token was reported.
        phases: seconds by part of the start; what the interpreter takes is a part, too.
        start_peak_bytes: most memory held until the engine was ready.
        prefill_peak_bytes: most memory held while the prompt was computed.
    """

    seconds: float
    phases: dict[str, float]
    start_peak_bytes: int
    prefill_peak_bytes: int


def run_cold(options: Mapping[str, Any], prompt_tokens: int) -> ColdRun:
    """Start a process with an engine of ``options`` that computes a prompt and makes one token.

    Raises:
        EngineError: it ended otherwise; has its last words.
    """
    request = json.dumps({"options": dict(options), "prompt_tokens": prompt_tokens})
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "kv8.bench.cold", request],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
        _, stderr = process.communicate()
    if process.returncode or not line:
        words = stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        raise EngineError(f"A cold start of {options['model']} failed: {words[-1]}")
    found = json.loads(line)
    phases = {"start the interpreter": seconds - sum(found["phases"].values()), **found["phases"]}
    return ColdRun(seconds, phases, found["start_peak_bytes"], found["prefill_peak_bytes"])


def bench_startup(
    model: str, options: Mapping[str, Any], *, repeats: int, command: Sequence[str]
) -> Report:
    """Return how long cold starts take, part by part, and how long ``kv8 --help`` does.

    Raises:
        KV8Error: the model cannot be served, or a start failed.
    """
    resolve_options(EngineOptions(model=model, **options))  # at once rather than in every process
    report = Report("startup", f"Cold start of {model}: a new process until its first token.")
    asked = {**options, "model": model}
    more = {"model": model, "options": dict(options), "repeats": repeats}
    with Conditions(command, seed=0, more=more) as conditions:
        runs = [run_cold(asked, _PROMPT_TOKENS) for _ in range(repeats + 1)][1:]
        show_help = [sys.executable, "-m", "kv8", "--help"]
        helps = [
            seconds_of(lambda: subprocess.run(show_help, check=True, capture_output=True))
            for _ in range(repeats + 1)
        ][1:]
    for phase in runs[0].phases:
        report.add({"phase": phase}, Samples(tuple(run.phases[phase] for run in runs)))
    totals = Samples(tuple(run.seconds for run in runs))
    report.add({"phase": "all: ready, with a first token"}, totals)
    help_samples = Samples(tuple(helps))
    report.add({"phase": "kv8 --help"}, help_samples)
    report.figures = {
        "startup_seconds": totals.median,
        "help_seconds": help_samples.median,
        "start_peak_bytes": Samples(tuple(run.start_peak_bytes for run in runs)).median,
    }
    report.conditions = conditions.facts
    report.warnings = conditions.warnings
    return report


def bench_prefill_memory(
    report: Report,
    model: str,
    dtypes: Sequence[str],
    context: int,
    *,
    options: Mapping[str, Any],
    repeats: int,
) -> None:
    """Add to ``report`` the peak memory of processes that prefill ``context`` tokens, in turns.

    Each has a cache sized for the prompt; the peak counts from when the engine is ready.

    Raises:
        KV8Error: the context cannot be served, or a process failed.
    """
    asked: dict[str, dict[str, Any]] = {}
    for dtype in dtypes:
        chosen = {**options, "model": model, "kv_cache_dtype": dtype, "max_model_len": context + 1}
        memory = cache_memory(EngineOptions(**chosen), 1, context + 1)
        asked[dtype] = {**chosen, "kv_cache_memory": memory, "enable_prefix_caching": False}
    peaks: dict[str, list[int]] = {dtype: [] for dtype in dtypes}
    for _ in range(repeats):
        for dtype in dtypes:
            peaks[dtype].append(run_cold(asked[dtype], context).prefill_peak_bytes)
    medians = {dtype: Samples(tuple(values)).median for dtype, values in peaks.items()}
    base = dtypes[0]
    for dtype in dtypes:
        report.rows.append(
            {
                "phase": "memory of prefill",
                "sequences": 1,
                "context": context,
                "kv_cache_dtype": dtype,
                "repeats": repeats,
                "peak_bytes": medians[dtype],
            }
        )
        if dtype != base:
            name = f"prefill_peak_memory_{short_name(dtype)}_over_{short_name(base)}"
            report.figures[name] = medians[dtype] / medians[base]
