"""Fuzzes a server from its own OpenAPI document, with schemathesis.

    python -m tests.fuzzing [--seconds 300] [MODEL]

Anything but a 5xx, a hang, an answer unlike the document, or a lost block will do. Without a model
a tiny one is made on the spot. All time goes to what takes a body; what is only asked for would
else get most of it, being answered so fast, and is fuzzed in tests/integration/server.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.served import Served, serving
from tests.tiny_models import save_model
from tests.tool_templates import WRAPPED

# A value may be of the right type and still be refused: a prompt that is too long, a schema that
# cannot be followed. The document cannot say so, and this check takes it for a mistake.
LEFT_OUT = "positive_data_acceptance"
REQUEST_SECONDS = 60
ROOT = Path(__file__).parents[1]


def fuzz(
    served: Served, *words: object, most_tokens: int = 12
) -> "subprocess.CompletedProcess[str]":
    """Run schemathesis against ``served`` with more ``words``; its exit code 0 is a clean run.

    No answer is longer than ``most_tokens``, unless a request is left as it was made up.
    """
    command = [
        "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", "--no-color",
        "--exclude-checks", LEFT_OUT, "--request-timeout", str(REQUEST_SECONDS),
        "--suppress-health-check", "all", *map(str, words),
    ]  # fmt: skip
    hooks = {
        "SCHEMATHESIS_HOOKS": "tests.fuzzing_hooks",
        "KV8_FUZZ_TOKENS": str(most_tokens),
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryDirectory() as scratch:  # it leaves a cache where it runs
        return subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False,
            cwd=scratch, env=os.environ | hooks,
        )  # fmt: skip


def main() -> int:
    """Fuzz for some time; the exit code is schemathesis's, or 1 if something was left behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or save_model(Path(scratch) / "tiny")
        template = Path(scratch) / "template.jinja"
        template.write_text(WRAPPED, encoding="utf-8")
        options = {"max_model_len": 512, "kv_cache_memory": "64MiB"}
        with serving(folder, chat_template=str(template), **options) as served:
            run = fuzz(
                served, "--phases", "examples,coverage,fuzzing", "--max-time", args.seconds,
                "--seed", args.seed, "--workers", 4,
                "--max-examples", 1_000_000, "--continue-on-failure",
                "--generation-database", "none", "--include-method", "POST",
            )  # fmt: skip
            print(run.stdout, run.stderr, sep="\n")
            served.until(lambda: served.state.engine.is_idle)
            left = served.blocks_in_use()
            counters = served.on_engine(lambda engine: engine.counters)
    ended = ", ".join(f"{number} by {reason}" for reason, number in counters.finished.items())
    print(f"sequences ended: {ended}; blocks in use: {left}; failed steps: {counters.failed_steps}")
    return run.returncode or int(bool(left or counters.failed_steps))


if __name__ == "__main__":
    sys.exit(main())
