"""Prefill and decode apart, for each cache dtype and context length: one sum would hide that the
two move in opposite directions.

    python benchmarks/phases.py smollm2 --contexts 128 1024 --json

Each figure is a median over repeats, with its spread, after a warm-up that is not counted. The
dtypes take turns, so that a machine whose speed drifts does not favour one. Absolute times hold for
the machine and the day; compare the ratios.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import torch

from kv8 import LLM, SamplingParams, __version__


def measure(llm: LLM, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """Return tokens per second of (prefill, decode) for one prompt."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    engine.add_request("bench", prompt, params)
    begin = first = time.perf_counter()
    while engine.has_unfinished:
        outputs = engine.step()
        if outputs and len(outputs[0].outputs[0].token_ids) == 1:
            first = time.perf_counter()
    end = time.perf_counter()
    return len(prompt) / (first - begin), (new_tokens - 1) / (end - first)


def summarize(samples: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the whole measurement as plain data."""
    engines = {
        dtype: LLM(args.model, kv_cache_dtype=dtype, enable_prefix_caching=False)
        for dtype in args.dtypes
    }
    rows = []
    for context in args.contexts:
        samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        for repeat in range(args.repeats + 1):
            for dtype, llm in engines.items():
                vocabulary = llm.engine.config.geometry.vocab_size
                prompt = torch.randint(
                    vocabulary, (context,), generator=torch.Generator().manual_seed(repeat)
                ).tolist()
                prefill, decode = measure(llm, prompt, args.new_tokens)
                if repeat:  # the first round is the warm-up
                    samples[dtype, "prefill"].append(prefill)
                    samples[dtype, "decode"].append(decode)
        for (dtype, phase), values in samples.items():
            row = {"context": context, "kv_cache_dtype": dtype, "phase": phase}
            base = statistics.median(samples[args.dtypes[0], phase])
            rows.append(
                row
                | {"tokens_per_second": summarize(values)}
                | {f"over_{args.dtypes[0]}": statistics.median(values) / base}
            )
    return {
        "rows": rows,
        "model": args.model,
        "attention_backend": next(iter(engines.values())).engine.runner.backend.name,
        "repeats": args.repeats,
        "new_tokens": args.new_tokens,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "versions": {"kv8": __version__, "torch": torch.__version__},
        "command": ["python", "benchmarks/phases.py", *sys.argv[1:]],
    }


def main() -> None:
    """Measure and print, as a table or as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--dtypes", nargs="+", default=["auto", "fp8"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = run(args)
    if args.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{args.model}, {result['attention_backend']} backend, {result['threads']} threads")
    for row in result["rows"]:
        speed = row["tokens_per_second"]
        print(
            f"{row['phase']:8} context {row['context']:6} {row['kv_cache_dtype']:10} "
            f"{speed['median']:9.1f} tok/s ({speed['min']:.1f} to {speed['max']:.1f}), "
            f"{row[f'over_{args.dtypes[0]}']:.2f}x {args.dtypes[0]}"
        )


if __name__ == "__main__":
    main()
