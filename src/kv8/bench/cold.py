"""A program of its own: ``python -m kv8.bench.cold JSON`` starts an engine and makes one token.

It times the parts of the start by putting stopwatches around the engine's own functions, and
prints one line of JSON when the token is there. `kv8.bench.startup` runs it.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

# What a start consists of, and where the engine looks it up. A name that is gone is an error.
_STOPWATCHES: Final = {
    "resolve options": ("kv8.engine.engine", "resolve_options"),
    "load tokenizer": ("kv8.engine.engine", "load_tokenizer"),
    "load weights": ("kv8.engine.engine", "load_model"),
    "verify model": ("kv8.models.load", "verify_model"),
    "fuse and pack weights": ("kv8.models.load", "fuse_model"),
    "allocate cache": ("kv8.engine.engine", "Runner"),
    "warm up": ("kv8.engine.engine", "warm_up"),
}
# Parts of another, whose time is without theirs.
_INSIDE: Final = {"verify model": "load weights", "fuse and pack weights": "load weights"}


def main() -> None:
    """Start, make a token, report."""
    request = json.loads(sys.argv[1])
    seconds = dict.fromkeys(_STOPWATCHES, 0.0)
    begin = time.perf_counter()
    LLM = import_module("kv8.llm").LLM  # noqa: N806 - a class
    imported = time.perf_counter()
    for phase, (module, name) in _STOPWATCHES.items():
        _put_stopwatch(import_module(module), name, phase, seconds)
    llm = LLM(**request["options"])
    loaded = time.perf_counter()
    device = llm.engine.config.device
    start_peak = peak_memory(device)
    measured = sum(seconds[p] for p in _STOPWATCHES if p not in _INSIDE)
    for part, whole in _INSIDE.items():
        seconds[whole] -= seconds[part]
    forget_peak(device)
    prefilled = time.perf_counter()
    prompt = _prompt(llm, request["prompt_tokens"])
    params = import_module("kv8.sampling_params").SamplingParams(temperature=0, max_tokens=1)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    phases = {
        "imports": imported - begin,
        **seconds,
        "other parts of the engine": loaded - imported - measured,
        "first token": time.perf_counter() - prefilled,
    }
    found = {
        "phases": phases,
        "token_ids": list(output.outputs[0].token_ids),
        "start_peak_bytes": start_peak,
        "prefill_peak_bytes": peak_memory(device),
    }
    print(json.dumps(found), flush=True)  # noqa: T201 - for the process that started this one


def peak_memory(device: Any) -> int:
    """Return the most memory this process has held, in bytes, since the last `forget_peak`: that
    of the GPU, if ``device`` is one.
    """
    if device.type == "cuda":
        return int(import_module("torch").cuda.max_memory_reserved(device))
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak(device: Any) -> None:
    """Start `peak_memory` anew, where the system can (Linux)."""
    if device.type == "cuda":
        import_module("torch").cuda.reset_peak_memory_stats(device)
        return
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def _put_stopwatch(module: Any, name: str, phase: str, seconds: dict[str, float]) -> None:
    original: Callable[..., Any] = getattr(module, name)

    def timed(*args: Any, **keywords: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(*args, **keywords)
        finally:
            seconds[phase] += time.perf_counter() - begin

    setattr(module, name, timed)


def _prompt(llm: Any, num_tokens: int) -> list[int]:
    vocab_size: int = llm.engine.config.geometry.vocab_size
    return [(7 * number + 11) % vocab_size for number in range(num_tokens)]


if __name__ == "__main__":
    main()
