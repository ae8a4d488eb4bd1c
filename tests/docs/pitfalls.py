"""Builds docs/pitfalls.md from the tests themselves: a test names the failure it guards against.

A test's docstring starts with ``Pitfall 38: ...`` (or ``Pitfalls 38, 39: ...``).
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
HEAD = re.compile(r"Pitfalls?\s+((?:\d+(?:\s*(?:,|and)\s*)?)+)")

FAILURES = {
    1: "scales of a mixture-of-experts checkpoint thrown away by the loader",
    2: "a declared static cache whose layer has no scale is served at 1.0",
    3: "scale names known for one architecture and one exporter only",
    5: "scale names mangled by the mapping of fused projections",
    7: "an external scales file is accepted and never used",
    9: "only one of a layer's two scales is present",
    10: "FP8 weights without KV scales fail with a message about something else",
    12: "warnings about KV scales when nothing is quantized",
    13: "no written precedence between flag, checkpoint and model dtype",
    14: "an unsupported cache scheme passes because another field is right",
    16: "layers that calibration never saw keep made-up scales",
    17: "calibration changes what it measures, or depends on order or on unfinished scales",
    18: "all scales come out as 1.0, and nobody can tell measured from constant",
    19: "scales calculated at start-up are silently not calculated",
    20: "warm-up and probe requests decide the scales",
    23: "scales polluted by another side or head",
    25: "queries cast to FP8 without a scale",
    26: "per-head scales dropped on one of several paths",
    27: "a scale argument that has no effect",
    28: "a scale missing in decode only: error grows with the answer's length",
    29: "writer and reader disagree on multiplying or dividing",
    30: "e5m2 asked for, e4m3 bytes written",
    31: "bytes of one e4m3 dialect read as the other",
    32: "a 16-bit cache of another type than the model's reinterprets bits",
    33: "values read from the key cache",
    34: "scale or code views with offsets from the wrong origin",
    35: "scale or cache memory initialized after real data was written",
    36: "stored codes converted as numbers when they are copied",
    38: "overflow becomes NaN or the largest value depending on the library's version",
    39: "a model with large key biases is served as noise at scale 1.0",
    40: "e5m2 treated as needing no scale",
    41: "an uncalibrated cache nobody can see from outside",
    42: "MLA latents stored under scales that do not fit them",
    43: "accumulation over long contexts loses precision",
    45: "a warm prefix cache changes the answer",
    47: "new weights under old scales",
    48: "new weights or scales over an old cache",
    49: "prefix hits and later chunks do not work with a quantized cache",
    50: "the first request works, its repetition fails",
    54: "a changed scale does not reach prepared code",
    55: "one feature silently switches another off",
    56: "start-up succeeds, the first request kills the process",
    58: "layer types cannot be left in 16 bits, or a typo is ignored",
    59: "block sizes of different layers do not divide",
    60: "a hybrid model gains less than promised and nobody says so",
    62: "the suggested length does not work",
    63: "the log says FP8, 16 bits are allocated",
    64: "a quantized cache needs more memory at its peak",
    65: "one figure hides that prefill and decode move apart",
    66: "an operation on the cache touches only part of it",
    67: "choices are offered that cannot run",
    68: "e5m2 refused for a reason that is not true",
    69: "nobody can tell what fp8 means",
    70: "one format silently replaced by another",
    71: "a message about a type the user never asked for",
    73: "per-head scales on one backend only",
}
ELSEWHERE = {
    "22": "scales of MLA latents, which kv8 does not serve (42)",
    "51, 52, 53": "disaggregation, saved blocks and draft models, which kv8 does not have",
}


def collect() -> dict[int, list[str]]:
    """Return the tests of each pitfall, as ``path::name``, in order."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        where = path.relative_to(TESTS.parent).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            match = HEAD.match(ast.get_docstring(node) or "")
            for number in re.findall(r"\d+", match.group(1)) if match else ():
                found[int(number)].append(f"{where}::{node.name}")
    return dict(found)


def page() -> str:
    """Return the text of docs/pitfalls.md."""
    found = collect()
    lines = [
        "# Pitfalls: how quantized KV caches fail, and the tests that guard kv8",
        "",
        "Each row is a failure seen in a real engine, and the tests here that would catch it.",
        "The page is made from the tests' docstrings (`pytest tests/docs --update-golden`).",
        "",
        "| # | the failure | tests |",
        "|---|---|---|",
    ]
    for number, failure in FAILURES.items():
        tests = "<br>".join(f"`{name}`" for name in sorted(found.get(number, ())))
        lines.append(f"| {number} | {failure} | {tests} |")
    lines += ["", "Not here:"]
    lines += [f"- {numbers}: {reason}." for numbers, reason in ELSEWHERE.items()]
    return "\n".join(lines) + "\n"
