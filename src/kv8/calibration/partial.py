"""What an interrupted calibration has seen so far, kept beside its output to go on from.

A file with all observations, the samples, and the facts that decide a result. It is only gone on
from if every fact is the same, so that the outcome is that of an uninterrupted calibration.
"""

import json
import logging
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from kv8.calibration.interrupts import held_interrupts
from kv8.calibration.observations import Observations
from kv8.calibration.partial_facts import Facts
from kv8.errors import RequestError
from kv8.scales.storage import temporary_prefix

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_SAVES: Final = 30.0

Samples = tuple[tuple[int, ...], ...]


class PartialResult:
    """The file of one calibration's progress.

    Args:
        output: the folder that the calibration will write.
        facts: everything that its observations depend on.

    Attributes:
        path: the file.
        num_done: samples that ``observations`` holds.
        samples: the samples, if a file with the same facts was found; else `None`.
        observations: what was seen so far, likewise.

    Raises:
        RequestError: there is a file of other facts, or a damaged one; says what differs.
    """

    def __init__(self, output: Path, facts: Facts) -> None:
        self.path = output.with_name(f".{output.name}.partial")
        self._output = output
        self.num_done = 0
        self.samples: Samples | None = None
        self.observations: Observations | None = None
        self._facts = facts
        self._last_save = time.monotonic()
        self._remove_leftovers()
        if self.path.exists():
            self._load()

    def save(self, samples: Samples, observations: Observations, num_done: int) -> bool:
        """Write the state after ``num_done`` samples, whole or not at all; say whether it worked.

        A full disk is a warning: what was computed is still in memory.
        """
        lengths = torch.tensor([len(sample) for sample in samples], dtype=torch.int64)
        tokens = torch.tensor([token for sample in samples for token in sample], dtype=torch.int32)
        facts = json.dumps({"facts": self._facts.as_dict(), "num_done": num_done})
        try:
            with held_interrupts():  # whoever presses ctrl-C twice means no less to keep it
                observations.save(
                    self.path,
                    extra={"lengths": lengths, "tokens": tokens},
                    facts={"partial": facts},
                )
        except Exception as error:  # noqa: BLE001 - whatever it is, the work is worth more
            why = error.strerror if isinstance(error, OSError) else repr(error)
            logger.warning(
                "The progress could not be saved beside %s: %s. What an interruption now would "
                "lose must be measured again.",
                self._output,
                why,
            )
            return False
        finally:
            self._last_save = time.monotonic()
        return True

    def save_now_and_then(
        self, samples: Samples, observations: Observations, num_done: int
    ) -> None:
        """Save if that was last done some time ago."""
        if time.monotonic() - self._last_save > _SECONDS_BETWEEN_SAVES:
            self.save(samples, observations, num_done)

    def remove(self) -> None:
        """Delete the file, if there is one."""
        self.path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Remove what a process left that was killed while it saved; the output is locked by us."""
        for path in self.path.absolute().parent.iterdir():
            if path.name.startswith(temporary_prefix(self.path)):
                path.unlink(missing_ok=True)

    def _load(self) -> None:
        way_out = f"Remove {self.path} to start over, or give another output folder."
        try:
            observations = Observations.load(self.path)  # first, since it looks for damage
            with safe_open(self.path, "pt") as file:
                found: dict[str, Any] = json.loads(file.metadata()["partial"])
                lengths = file.get_tensor("lengths").tolist()
                tokens = file.get_tensor("tokens").tolist()
            num_done = int(found["num_done"])
            differing = self._facts.differences(Facts(**found["facts"]))
        except Exception as error:  # whatever is wrong with it: it is no such file
            raise RequestError(
                f"{self.path} is not the progress of a calibration, or damaged ({error}). {way_out}"
            ) from error
        if differing:
            raise RequestError(
                f"{self.path} is the progress of another calibration: {'; '.join(differing)}. "
                f"Repeat that one's command to finish it. {way_out}"
            )
        self.observations = observations
        self.samples = _cut(tokens, lengths)
        self.num_done = num_done


def _cut(tokens: Sequence[int], lengths: Sequence[int]) -> Samples:
    ends = accumulate(lengths)
    return tuple(
        tuple(tokens[end - length : end]) for length, end in zip(lengths, ends, strict=True)
    )
