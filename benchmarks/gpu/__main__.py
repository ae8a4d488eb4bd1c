"""``python -m benchmarks.gpu --out FOLDER``: correctness, then figures, of kv8 on one GPU.

Sections run one after another within a limit of seconds. Each is judged on its own: what fails is
recorded with its traceback and hides nothing else. `results.json` is written anew after every
section, so it is there and whole whatever ends the program.
"""

import argparse
import os
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
    run = Run(options.out, limit=options.limit, dry=options.dry_run)
    for name, section in SECTIONS.items():
        if not options.only or name in options.only:
            run.section(name, section)
    print(run.summary())
    return 0 if run.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
