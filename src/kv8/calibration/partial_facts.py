"""What a calibration's observations depend on, and how two calibrations differ, in words."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Facts:
    """All that decides what will be observed.

    Attributes:
        decisive: by name; observations of the same facts are the same.
        options: for facts that mean nothing to a person, such as a digest, the options they came
            from. These decide nothing: two files of one content are the same data.
    """

    decisive: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, decisive: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]) -> "Facts":
        """Return facts of values of any type."""
        return cls(_texts(decisive), {name: _texts(given) for name, given in options.items()})

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain data, from which ``Facts(**data)`` makes them again."""
        return asdict(self)

    def differences(self, found: "Facts") -> list[str]:
        """Return how ``found``, which were then, differ from these, which are now."""
        told: list[str] = []
        for name in _differing(found.decisive, self.decisive):
            then, now = found.options.get(name, {}), self.options.get(name, {})
            causes = _differing(then, now)
            told += [_change(option, then, now) for option in causes]
            if now and not causes:
                told.append(f"the content of {name} ({now.get(name, 'not there')}) has changed")
            elif not now:
                told.append(_change(name, found.decisive, self.decisive))
        return told


def _differing(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [name for name in dict.fromkeys((*now, *then)) if then.get(name) != now.get(name)]


def _change(name: str, then: Mapping[str, str], now: Mapping[str, str]) -> str:
    return f"{name} was {then.get(name, 'not there')}, is {now.get(name, 'not there')}"


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}
