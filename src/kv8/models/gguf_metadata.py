"""The metadata that belongs to a GGUF file's architecture, read entry by entry.

An entry nobody asked for is refused, not skipped: it may change what the model computes.
"""

from typing import Any

import numpy as np

from kv8.errors import ModelError, UnsupportedModelError
from kv8.models.gguf_file import GGUFFile


class ArchitectureMetadata:
    """The entries ``<architecture>.*`` of one file; remembers which were asked for."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return entry ``<architecture>.key``, or ``default``."""
        self._asked.add(key)
        return self.file.metadata.get(f"{self.file.architecture}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        """Return entry ``key``, which must be one whole number of at least 1."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(self._wrong(key, "one whole number of at least 1", value))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return entry ``key``, which must be a positive finite number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < np.inf:
            raise ModelError(self._wrong(key, "a positive number", value))
        # float32 in the file: 1e-5 is meant, not 9.999999747378752e-06.
        return float(str(np.float32(value)))

    def require(self, key: str, allowed: Any, meaning: str) -> None:
        """Refuse the file unless entry ``key`` is absent or equals ``allowed``."""
        value = self.get(key, allowed)
        if value != allowed:
            raise UnsupportedModelError(
                f"{self.file.path.name}: {self.file.architecture}.{key}={value!r} ({meaning}) "
                f"cannot be converted; only {allowed!r} can."
            )

    def refuse_unread(self) -> None:
        """Refuse entries of the architecture that nobody asked for."""
        prefix = f"{self.file.architecture}."
        keys = (k.removeprefix(prefix) for k in self.file.metadata if k.startswith(prefix))
        unread = sorted(set(keys) - self._asked)
        if unread:
            raise UnsupportedModelError(
                f"{self.file.path.name}: conversion does not know the metadata "
                f"{', '.join(prefix + key for key in unread)}, which may change the result."
            )

    def _wrong(self, key: str, allowed: str, value: Any) -> str:
        name = f"{self.file.path.name}: {self.file.architecture}.{key}"
        return (
            f"{name} is missing." if value is None else f"{name} must be {allowed}, got {value!r}."
        )
