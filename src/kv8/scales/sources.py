"""Where a layer's scale is looked for: explicit scales first, then the checkpoint's."""

from collections.abc import Iterable
from dataclasses import dataclass

from kv8.errors import ScaleError
from kv8.scales.checkpoint import CheckpointScales
from kv8.scales.scale import ModelScales, Scale, ScaleProblem, Side
from kv8.scales.wording import layer_list


@dataclass(frozen=True)
class ScaleSources:
    """All scales that are known, in order of precedence, by layer and side.

    Attributes:
        explicit: scales the user gave (a file, Python), or `None`.
        checkpoint: what the checkpoint brings.
    """

    explicit: ModelScales | None
    checkpoint: CheckpointScales

    @property
    def ordered(self) -> tuple[ModelScales, ...]:
        """The sources, the one that wins first."""
        given = () if self.explicit is None else (self.explicit,)
        return (*given, self.checkpoint.scales)

    def find(self, layer: int, side: Side) -> Scale | ScaleProblem | None:
        """Return what the first source that knows of this scale says; `None` if none does."""
        for source in self.ordered:
            found = source.layer(layer).side(side)
            if found is not None:
                return found
            for problem in source.problems:
                if (problem.layer, problem.side) == (layer, side):
                    return problem
        return None

    def knows(self, *sides: Side) -> bool:
        """Whether any source has, usable or not, a scale of one of ``sides`` for any layer."""
        return any(
            any(scales.side(side) for _, scales in source for side in sides)
            or any(problem.side in sides for problem in source.problems)
            for source in self.ordered
        )


def refuse_unusable(problems: Iterable[ScaleProblem], remedy: str) -> ScaleError:
    """Return the error that names every unusable scale's layer, and the first few in full."""
    listed = list(problems)
    sides = "/".join(sorted({problem.side for problem in listed}))
    shown = "; ".join(f"layer {p.layer}, {p.side}: {p.text}" for p in listed[:3])
    more = f"; and {len(listed) - 3} more" if len(listed) > 3 else ""
    where = layer_list(problem.layer for problem in listed)
    return ScaleError(f"Unusable {sides} scales in {where}: {shown}{more}. {remedy}")
