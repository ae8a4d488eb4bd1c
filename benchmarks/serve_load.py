"""kv8 serve under load: is anything lost, does memory grow, and what does serving cost?

    python benchmarks/serve_load.py [--model smollm2] [--clients 64] [--seconds 60] > result

Two processes hold the same model with a cache that fits 8 of the longest sequences: a server, and
an `LLM` that is called directly. First they do the same rounds of work in turns, the server for as
many clients as are asked for: that compares throughput. Then the clients send requests of mixed
lengths one after the other, and a third of them hang up half-way at a random moment: afterwards
every block must be free and every invariant hold. The server's memory is looked at all the while.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
from serve_client import Outcomes, run_closed_loop, run_round
from serve_work import LONGEST, round_of_work

from kv8.bench.conditions import Conditions
from kv8.bench.report import Report
from kv8.bench.tables import text_table
from kv8.bench.timing import Samples
from kv8.cache.capacity import memory_for
from kv8.engine.resolve import resolve_options
from kv8.options import EngineOptions

LEAVING = 1 / 3
SEQUENCES_THAT_FIT = 8
SAMPLE_SECONDS = 0.25


class Child:
    """One process of serve_process.py."""

    def __init__(self, role: str, settings: dict[str, Any]) -> None:
        program = Path(__file__).with_name("serve_process.py")
        command = [sys.executable, str(program), role, json.dumps(settings)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def next(self, field: str) -> dict[str, Any]:
        """Return the next event that has ``field``; others before it are passed over."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if field in event:
                return event
        raise SystemExit(f"serve_load: a process ended early (exit code {self.process.wait()})")

    def send(self, line: object) -> None:
        """Write a line to the process."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def stop(self) -> int:
        """End the process in order; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


class Memory:
    """Resident memory of a process, looked at in regular intervals."""

    def __init__(self, pid: int) -> None:
        self.samples: list[int] = []
        self._process = psutil.Process(pid)
        self._done = Event()
        self._thread = Thread(target=self._watch)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def growth(self) -> int:
        """Return by how many bytes the last quarter's median is above the second quarter's."""
        quarter = max(1, len(self.samples) // 4)
        early = statistics.median(self.samples[quarter : 2 * quarter] or self.samples)
        return int(statistics.median(self.samples[-quarter:]) - early)

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.samples.append(self._process.memory_info().rss)


def measure(args: argparse.Namespace) -> Report:
    """Run all of it."""
    options: dict[str, Any] = {"kv_cache_dtype": args.kv_cache_dtype, "max_model_len": LONGEST + 1}
    planned = resolve_options(EngineOptions(model=args.model, **options))
    vocab_size = planned.geometry.vocab_size
    options["kv_cache_memory"] = SEQUENCES_THAT_FIT * memory_for(planned.layout, LONGEST + 1)
    settings = {
        "model": args.model, "options": options, "seed": args.seed, "count": args.requests,
        "server": {"max_queued": args.max_queued},
    }  # fmt: skip
    report = Report("serve_load", f"{args.model} behind kv8 serve, and called directly.")
    facts = {"model": args.model, "clients": args.clients, "loop_seconds": args.seconds,
             "requests_a_round": args.requests, **options}  # fmt: skip
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    # From before the processes begin until they have ended: only then is their time known as ours.
    with Conditions(command, seed=args.seed, more=facts) as at:
        offline, server = Child("offline", settings), Child("server", settings)
        try:
            offline.next("ready")
            port = int(server.next("said")["said"].split(",")[0].rpartition(":")[2])
            assert server.next("said")["said"] == "ready"
            compare(report, args, offline, port, vocab_size)
            with Memory(server.process.pid) as memory:
                loop = run_closed_loop(
                    port, clients=args.clients, seconds=args.seconds, leaving=LEAVING,
                    seed=args.seed, vocab_size=vocab_size,
                )  # fmt: skip
                outcomes = asyncio.run(loop)
            code = server.stop()
            end = server.next("used_blocks")
        finally:
            for child in (offline, server):
                child.process.kill()
                child.process.wait()
    report.conditions = at.facts
    describe(report, outcomes, memory, end | {"exit_code": code})
    report.warnings += at.warnings
    return report


def compare(
    report: Report, args: argparse.Namespace, offline: Child, port: int, vocab_size: int
) -> None:
    """Have both do the same rounds, in turns; the first is the warm-up."""
    seconds: dict[str, list[float]] = {"LLM.generate": [], "kv8 serve": []}
    tokens = 0
    for number in range(args.repeats + 1):
        say(f"round {number} of {args.repeats}")
        offline.send(number)
        done = offline.next("seconds")
        work = round_of_work(args.seed, number, args.requests, vocab_size)
        took, outcomes = asyncio.run(run_round(port, work, args.clients))
        tokens = outcomes.tokens
        if outcomes.errors or tokens != done["tokens"]:
            raise SystemExit(f"serve_load: {tokens} of {done['tokens']} tokens; {outcomes.errors}")
        if number:
            seconds["LLM.generate"].append(done["seconds"])
            seconds["kv8 serve"].append(took)
    for engine, values in seconds.items():
        report.add({"engine": engine, "clients": args.clients}, Samples(tuple(values)))
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    report.figures["serve_over_generate"] = statistics.median(ratios)
    report.figures["last_round_tokens"] = tokens


def describe(report: Report, outcomes: Outcomes, memory: Memory, end: dict[str, Any]) -> None:
    """Write down what the closed loop came to, and warn of what must not be."""
    waits = sorted(outcomes.first_token_seconds)
    figures = {
        "completed": outcomes.completed,
        "left_by_their_client": outcomes.left,
        "refused": sum(outcomes.refused.values()),
        "errors": len(outcomes.errors),
        "tokens": outcomes.tokens,
        "time_to_first_token_p50_seconds": quantile(waits, 0.50),
        "time_to_first_token_p99_seconds": quantile(waits, 0.99),
        "memory_bytes": memory.samples[-1],
        "memory_growth_bytes": memory.growth(),
        "blocks_used_at_the_end": end["used_blocks"],
        "preemptions": end["preemptions"],
        "failed_steps": end["failed_steps"],
    }
    report.figures |= figures
    report.conditions |= {"refused_by_status": outcomes.refused, "at_the_end": end}
    report.warnings += [f"An error: {error}" for error in outcomes.errors[:5]]
    if end["used_blocks"] or end["unfinished"] or end["failed_steps"] or end["exit_code"]:
        report.warnings.append(f"Something was left behind, or failed: {end}")


def quantile(ordered: list[float], share: float) -> float:
    """Return the value that ``share`` of them do not exceed."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def say(text: str) -> None:
    """Tell whoever waits what is going on."""
    print(f"serve_load: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Measure and print; the exit code is 1 if something went wrong under load."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as for kv8")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60, help="of the closed loop")
    parser.add_argument("--requests", type=int, default=192, help="in a round of the comparison")
    parser.add_argument("--repeats", type=int, default=3, help="rounds after the warm-up")
    parser.add_argument("--max-queued", type=int, default=256, help="as for kv8 serve")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    report = measure(args)
    found = report.as_json()
    print(json.dumps(found, indent=1) if args.json else text_table(found))
    return 1 if report.figures["errors"] or report.figures["blocks_used_at_the_end"] else 0


if __name__ == "__main__":
    sys.exit(main())
