"""The correctness cases: every format with every head layout and head size, and every feature.

Cases, their data, their poison and the bounds they are held to are those of the tests
(`tests/attention_cases.py`): the caches are full of NaN, table entries that must not be read point
outside of memory, and a bound follows from the roundings a kernel may make.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

FORMATS: Final = ("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "float32")
LAYOUTS: Final = {"MHA": (4, 4), "GQA 4:1": (8, 2), "GQA 8:1": (8, 1), "MQA": (4, 1)}
HEAD_DIMS: Final = (64, 128, 256)
FEATURES: Final = {
    "window": {"window": 24},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "window, softcap, sinks": {"window": 24, "softcap": 3.0, "sinks": True},
}
PER_HEAD, PER_TENSOR = 50.0, 1.0  # ratio of the largest scale to the smallest


@dataclass(frozen=True)
class Check:
    """One case.

    Attributes:
        name: what it is about.
        options: of `tests.attention_cases.make_case`.
        lengths: tokens of each sequence.
        seed: of the data.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (600, 33, 5)
    seed: int = 0


def all_checks(seed: int) -> list[Check]:
    """Return every case; another seed, other data."""
    return [
        Check(check.name, check.options, check.lengths, seed + number)
        for number, check in enumerate((*_layouts(), *_features(), *_fp8_attention(), *_ragged()))
    ]


def few_checks(seed: int) -> list[Check]:
    """Return one tiny case for each kind of kernel, for a run in Triton's interpreter."""
    tiny = {"heads": (4, 2), "head_dim": 64, "dtype": torch.bfloat16}
    return [
        Check("fp8_e4m3, GQA", {**tiny, "stored_as": "fp8_e4m3"}, (27, 2), seed),
        Check(
            "FP8 attention, window",
            {**tiny, "stored_as": "fp8_e4m3", "fp8_queries": True, "window": 9},
            (12, 2),
            seed,
        ),
    ]


def _layouts() -> Iterator[Check]:
    for number, stored_as in enumerate(FORMATS):
        for layout, heads in LAYOUTS.items():
            for head_dim in HEAD_DIMS:
                # Scales of both kinds meet every layout and head size over the formats.
                spread = (PER_HEAD, PER_TENSOR)[(number + head_dim // 64) % 2]
                yield Check(
                    f"{stored_as}, {layout}, D {head_dim}, {_scales(stored_as, spread)}",
                    {**_plain(stored_as), "heads": heads, "head_dim": head_dim, "spread": spread},
                )


def _features() -> Iterator[Check]:
    for stored_as in FORMATS:
        for name, feature in FEATURES.items():
            yield Check(
                f"{stored_as}, GQA 4:1, D 128, {name}",
                {**_plain(stored_as), "heads": (8, 2), "head_dim": 128, **feature},
            )


def _fp8_attention() -> Iterator[Check]:
    base = {**_plain("fp8_e4m3"), "fp8_queries": True}
    for layout, heads in LAYOUTS.items():
        for head_dim in HEAD_DIMS:
            yield Check(
                f"FP8 attention, {layout}, D {head_dim}",
                {**base, "heads": heads, "head_dim": head_dim, "spread": PER_HEAD},
            )
    for name, feature in FEATURES.items():
        yield Check(
            f"FP8 attention, GQA 4:1, D 128, {name}",
            {**base, "heads": (8, 2), "head_dim": 128, **feature},
        )
    yield Check(
        "FP8 attention over e5m2, GQA 4:1, D 128",
        {**base, "stored_as": "fp8_e5m2", "heads": (8, 2), "head_dim": 128},
    )


def _ragged() -> Iterator[Check]:
    """One context cut into many parts, beside more sequences than one build is made for."""
    lengths = (4000, *range(1, 71))
    for stored_as in ("bfloat16", "fp8_e4m3"):
        options = {**_plain(stored_as), "heads": (8, 2), "head_dim": 128}
        yield Check(f"{stored_as}, GQA 4:1, D 128, 4,000 beside 70 short", options, lengths)


def _plain(stored_as: str) -> dict[str, Any]:
    """Return the format, and the type of a model that would be served with it."""
    dtypes = {"float16": torch.float16, "float32": torch.float32}
    return {"stored_as": stored_as, "dtype": dtypes.get(stored_as, torch.bfloat16)}


def _scales(stored_as: str, spread: float) -> str:
    if not stored_as.startswith("fp8"):
        return "no scales"
    return "per-head scales" if spread == PER_HEAD else "per-tensor scales"
