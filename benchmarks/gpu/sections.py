"""Sections of a run: each within its time, each failure recorded, JSON after each."""

import gc
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kv8.bench.roof import Roof

# Returns what it found: plain data, with "passed" (true or false) and "rows" for the table.
Body = Callable[["Context"], dict[str, Any]]


class OutOfTimeError(BaseException):
    """A section's time is over. No `Exception`: what recovers from those must not go on."""


@dataclass(frozen=True)
class Section:
    """A part of the run.

    Attributes:
        body: does the work.
        needs: seconds it takes, as far as is known; it is skipped if fewer are left.
        title: what it is about, for people.
        most: seconds after which it is ended, as an error.
    """

    body: Body
    needs: float
    title: str
    most: float = 110


@dataclass
class Context:
    """What sections share.

    Attributes:
        device: where to run.
        dry: whether to run tiny shapes on the CPU.
        deadline: when everything has to end, by `time.monotonic`.
        roof: of `benchmarks.gpu.environment.roof_of`.
        rows: of the section at work; what it has put here is kept if it then fails.
        end_to_end: by number of new tokens, what the whole engine made of them in a second.
    """

    device: torch.device
    dry: bool
    deadline: float
    roof: Roof | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    end_to_end: dict[int, float] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


class Run:
    """One run of the script.

    Args:
        folder: where results.json goes.
        limit: seconds for everything.
        dry: see `Context`.
        goes_on: keep the sections that the folder's results.json has.
    """

    def __init__(self, folder: Path, *, limit: float, dry: bool, goes_on: bool = False) -> None:
        if not dry and not torch.cuda.is_available():
            raise SystemExit("torch sees no GPU here. --dry-run runs everything tiny on the CPU.")
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.json"
        self._begin = time.monotonic()
        device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
        self._context = Context(device, dry, self._begin + limit)
        self._sections: dict[str, dict[str, Any]] = {}
        if goes_on:
            self._sections = json.loads(self._file.read_text())["sections"]
        self._write()

    @property
    def passed(self) -> bool:
        """Whether every section ran and passed."""
        return all(found["status"] == "passed" for found in self._sections.values())

    @property
    def seconds_left(self) -> float:
        """Seconds until the limit."""
        return self._context.seconds_left

    def gpu_answers(self) -> bool:
        """Whether the GPU can still be used: after a bad address it cannot, in this process."""
        if self._context.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self._context.device)
        except RuntimeError:
            return False
        return True

    def section(self, name: str, section: Section) -> None:
        """Run one section and write what it found, or how it failed."""
        left = self._context.seconds_left
        begin = time.monotonic()
        if left < section.needs:
            found: dict[str, Any] = {
                "status": "skipped",
                "reason": f"it needs {section.needs:.0f} s and {left:.0f} s are left",
            }
        else:
            found = self._run(section)
        self._sections[name] = {
            "title": section.title,
            **found,
            "seconds": time.monotonic() - begin,
        }
        self._write()
        print(f"{name}: {found['status']} ({self._sections[name]['seconds']:.1f} s)", flush=True)
        if found["status"] == "error":
            print(found["traceback"], flush=True)

    def _run(self, section: Section) -> dict[str, Any]:
        self._context.rows = []
        try:
            with within(min(section.most, self._context.seconds_left)):
                found = section.body(self._context)
        except (Exception, OutOfTimeError) as error:  # noqa: BLE001 - recorded; others go on
            found = {
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
                "rows": self._context.rows,
            }
        finally:
            gc.collect()
            if self.gpu_answers() and self._context.device.type == "cuda":
                torch.cuda.empty_cache()
        if self._context.dry:  # figures of an interpreter are held to no goal
            for each in found.get("rows", ()):
                each.pop("goal", None)
                each.pop("met", None)
        status = "passed" if found.pop("passed", False) else "failed"
        return {"status": "error" if "error" in found else status, **found}

    def summary(self) -> str:
        """Return every section in a line, and the table of figures with their goals."""
        lines = [""]
        for name, found in self._sections.items():
            reason = found.get("reason") or found.get("error") or ""
            lines.append(f"{found['status']:8} {name}  {reason}")
        for found in self._sections.values():
            lines += [_row_text(row) for row in found.get("rows", ())]
        goals = self._goals()
        if goals["met"] or goals["missed"]:
            number = len(goals["met"]) + len(goals["missed"])
            lines += ["", f"{len(goals['missed'])} of {number} goals missed"]
            lines += [f"  MISSED {what}" for what in goals["missed"]]
        lines.append(f"{self._file} ({time.monotonic() - self._begin:.0f} s)")
        return "\n".join(lines)

    def _goals(self) -> dict[str, list[str]]:
        """Return which figures met their goals and which did not; a run fails for none of them."""
        rows = [row for found in self._sections.values() for row in found.get("rows", ())]
        return {
            name: [row["what"] for row in rows if row.get("met") is met]
            for name, met in (("met", True), ("missed", False))
        }

    def _write(self) -> None:
        content = {
            "dry_run": self._context.dry,
            "seconds": time.monotonic() - self._begin,
            "passed": self.passed,
            "goals": self._goals(),
            "sections": self._sections,
        }
        self._file.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise `OutOfTimeError` in the block after so long; a wait for the GPU has to end first."""

    def end(*_: object) -> None:
        raise OutOfTimeError(f"ended after {seconds:.0f} s, the most it may take")

    begin, before = time.monotonic(), signal.signal(signal.SIGALRM, end)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        left = max(outer - (time.monotonic() - begin), 0.001) if outer else 0
        signal.setitimer(signal.ITIMER_REAL, left)


def row(
    what: str, value: float, *, unit: str, goal: float | None = None, **more: Any
) -> dict[str, Any]:
    """Return a row of the table; with a goal, at least which is wanted."""
    made: dict[str, Any] = {"what": what, "value": value, "unit": unit}
    if goal is not None:
        made |= {"goal": goal, "met": value >= goal}
    return made | more


def _row_text(found: Mapping[str, Any]) -> str:
    text = f"{found['what']}: {found['value']:,.4g} {found['unit']}"
    if "goal" in found:
        text += f"  (goal {found['goal']:g}: {'met' if found['met'] else 'MISSED'})"
    if "note" in found:
        text += f"  [{found['note']}]"
    return text
