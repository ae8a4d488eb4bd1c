"""``python -m benchmarks.gpu --out FOLDER``: correctness, then figures, of kv8 on one GPU.

Sections run one after another within a limit of seconds. Each is judged on its own: what fails is
recorded with its traceback and hides nothing else. `results.json` is written anew after every
section, so it is there and whole whatever ends the program.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path


def parse(words: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json")
    parser.add_argument("--limit", type=float, default=225, help="seconds for everything")
    parser.add_argument("--only", nargs="*", default=[], help="sections to run; default: all")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run every section on the CPU, tiny, kernels in Triton's interpreter; figures mean "
        "nothing then",
    )
    parser.add_argument(
        "--goes-on", action="store_true", help="keep the sections that results.json has already"
    )
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Run; return 0 if every section passed, 1 if one did not."""
    options = parse(words)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    from benchmarks.gpu.plan import SECTIONS
    from benchmarks.gpu.sections import Run

    unknown = set(options.only) - SECTIONS.keys()
    if unknown:
        sys.exit(f"--only: no section {sorted(unknown)}. Sections: {', '.join(SECTIONS)}.")
    run = Run(options.out, limit=options.limit, dry=options.dry_run, goes_on=options.goes_on)
    names = [name for name in SECTIONS if not options.only or name in options.only]
    for number, name in enumerate(names):
        run.section(name, SECTIONS[name])
        if number + 1 < len(names) and not run.gpu_answers():
            return _go_on(options, names[number + 1 :], run.seconds_left)
    print(run.summary())
    return 0 if run.passed else 1


def _go_on(options: argparse.Namespace, names: list[str], seconds: float) -> int:
    """Run the other sections in a new process: this one's GPU context is lost to an error."""
    print(
        "The GPU no longer answers this process; the other sections run in a new one.", flush=True
    )
    words = ["--out", str(options.out), "--limit", f"{seconds:.0f}", "--goes-on", "--only", *names]
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    return subprocess.run(command + ["--dry-run"] * options.dry_run, check=False).returncode


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads of the peer may still wait for something
