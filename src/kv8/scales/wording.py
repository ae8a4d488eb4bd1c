"""Layer lists as people write them, for messages: ``[0, 1, 2, 5]`` is ``"layers 0-2, 5"``."""

from collections.abc import Iterable


def layer_list(layers: Iterable[int]) -> str:
    """Return the numbers in order, runs of three and more as a range, with "layer(s)" before."""
    numbers = sorted(set(layers))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    if not parts:
        return "no layer"
    return ("layer " if len(numbers) == 1 else "layers ") + ", ".join(parts)
