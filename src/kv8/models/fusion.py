"""The modules of a model that native kernels stand in for.

Replacing means that a module's ``forward`` is shadowed: weights, names and hooks stay, and
`Fusion.disable` brings transformers' own code back, which is what `verify_model` compares with.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from kv8.kernels.step import UNLIMITED
from kv8.models.interface import BoundStep


class ComputesSteps(Protocol):
    """Computes a model's whole step; `kv8.models.whole_step`."""

    def run(
        self, step: BoundStep, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Return logits [R, V], or `None` if the model has to compute for itself."""


class Fusion:
    """The replaced modules of one model.

    Attributes:
        most_native: rows of a step up to which native kernels make the products of every replaced
            module: so long, a row's results do not depend on the rows beside it.
        whole: computes whole steps, of as many rows as native products are made of; `None` if the
            model's own code is needed.
    """

    def __init__(self) -> None:
        self.most_native = UNLIMITED
        self.whole: ComputesSteps | None = None
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}
        self._on = False

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Let ``module`` compute through ``forward`` while the fusion is enabled."""
        self._forwards[module] = forward
        if self._on:
            module.forward = forward

    def enable(self) -> None:
        """Compute through the replacements."""
        self._on = True
        for module, forward in self._forwards.items():
            module.forward = forward

    def disable(self) -> None:
        """Compute through transformers' own code."""
        self._on = False
        for module in self._forwards:
            vars(module).pop("forward", None)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute through transformers' own code inside the ``with`` block."""
        was_on = self._on
        self.disable()
        try:
            yield
        finally:
            if was_on:
                self.enable()

    def compute(
        self, step: BoundStep, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Return logits [R, V], or `None` if the model has to be called for them."""
        if not self._on or self.whole is None:
            return None
        return self.whole.run(step, input_ids, positions, rows)
