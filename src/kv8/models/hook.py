"""A transformers model whose attention goes through kv8: packed tokens in, logits out.

Letters as in docs/architecture.md: T new tokens of a step, R rows whose logits are wanted,
V vocabulary.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from kv8.attention.backend import AttentionBackend
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention
from kv8.errors import EngineError, UnsupportedModelError
from kv8.geometry import ModelGeometry
from kv8.models.config import text_config
from kv8.models.interface import BINDING, INTERFACE_NAME, BoundStep, LayerBinding, Scope


class Replacements(Protocol):
    """Parts of a model that something else computes for now; see `kv8.models.fuse`."""

    @property
    def most_native(self) -> int:
        """Rows of a step up to which a row's results do not depend on the rows beside it."""

    def compute(
        self, step: BoundStep, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Return logits [R, V], or `None` if the model has to be called for them."""

    def disabled(self) -> AbstractContextManager[None]:
        """Let transformers' own code compute inside the ``with`` block."""

    def disable(self) -> None:
        """Let transformers' own code compute from now on."""


class HookedModel:
    """A loaded model bound to its geometry; hooking the same model again changes nothing.

    Args:
        module: a causal language model of transformers.
        geometry: its geometry, from `read_geometry`.

    Attributes:
        fusion: what native kernels compute; `None` if transformers' own code computes everything.

    Raises:
        UnsupportedModelError: its attention modules are not those the geometry speaks of.
    """

    def __init__(self, module: Any, geometry: ModelGeometry) -> None:
        self.module = module
        self.geometry = geometry
        self.fusion: Replacements | None = None
        self.attention_modules = find_attention_modules(module, geometry)
        existing = [getattr(found, BINDING, None) for found in self.attention_modules.values()]
        scopes = {id(binding.scope): binding.scope for binding in existing if binding is not None}
        self._scope = scopes.popitem()[1] if scopes else Scope(geometry.architecture)
        for number, found in self.attention_modules.items():
            setattr(found, BINDING, LayerBinding(geometry.layer(number), self._scope))
        self.use_implementation(INTERFACE_NAME)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.module.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the weights."""
        dtype: torch.dtype = self.module.dtype
        return dtype

    def use_implementation(self, name: str) -> None:
        """Make every attention module call the attention function registered as ``name``."""
        configs = [self.module.config, text_config(self.module.config)]
        configs += [getattr(found, "config", None) for found in self.attention_modules.values()]
        for config in {id(config): config for config in configs if config is not None}.values():
            config._attn_implementation = name

    @contextmanager
    def bound(
        self,
        batch: AttentionBatch,
        layers: Mapping[int, LayerAttention],
        backend: AttentionBackend,
    ) -> Iterator[None]:
        """Let forward passes inside the ``with`` block work on ``batch``.

        Args:
            batch: the sequences and where their tokens go.
            layers: by layer number, every layer of the geometry.
            backend: stores and attends.

        Raises:
            EngineError: a batch is bound already.
        """
        if self._scope.step is not None:
            raise EngineError("A batch is already bound to this model; steps cannot be nested.")
        self._scope.step = BoundStep(batch, layers, backend)
        try:
            yield
        finally:
            self._scope.step = None

    @contextmanager
    def recording(self, implementation: str) -> Iterator[list[tuple[int, Any]]]:
        """Let the model attend through another function, one that records; see `kv8.models.probe`.

        Everything else in it is transformers' own code meanwhile.

        Yields the list of layer numbers and calls that it will have noted.

        Raises:
            EngineError: a batch is bound.
        """
        if self._scope.step is not None:
            raise EngineError("The model cannot be recorded while a batch is bound to it.")
        recorded: list[tuple[int, Any]] = []
        self._scope.recorded = recorded
        self.use_implementation(implementation)
        own_code = nullcontext() if self.fusion is None else self.fusion.disabled()
        try:
            with own_code:
                yield recorded
        finally:
            self.use_implementation(INTERFACE_NAME)
            self._scope.recorded = []

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Run the model once over the bound batch and return logits, float32 [R, V].

        Args:
            input_ids: int64 [T], the new tokens of all sequences one after another.
            positions: int64 [T], position of each token in its sequence.
            rows: int64 [R], which of the T tokens to return logits for.

        Raises:
            EngineError: no batch is bound, or it was used already.
            UnsupportedModelError: the model asks for attention kv8 cannot do.
        """
        step = self._scope.step
        if step is None:
            raise EngineError("The model was called outside of `with model.bound(...)`.")
        if step.attended:
            raise EngineError("A bound batch serves one forward pass; bind the next one anew.")
        logits = None
        if self.fusion is not None:
            logits = self.fusion.compute(step, input_ids, positions, rows)
        if logits is None:
            logits = self.module(
                input_ids=input_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=rows,
            ).logits[0]
        missing = sorted(self.attention_modules.keys() - step.attended)
        if missing:
            raise UnsupportedModelError(
                f"kv8 cannot serve {self.geometry.architecture} correctly: layers {missing} never "
                f"called the attention interface, so their keys and values were not stored."
            )
        if len(logits) != len(rows):
            raise UnsupportedModelError(
                f"kv8 cannot serve {self.geometry.architecture}: asked for the logits of "
                f"{len(rows)} tokens it returned {len(logits)} (no logits_to_keep)."
            )
        return logits.float()


def find_attention_modules(module: Any, geometry: ModelGeometry) -> dict[int, Any]:
    """Return the decoder's attention modules by layer number.

    They are told by what they do, not by their names: they carry a layer number, and their class
    looks up an attention function.

    Raises:
        UnsupportedModelError: a layer has none, or more than one.
    """
    decoder = text_config(module.config)
    found: dict[int, list[Any]] = {layer.layer: [] for layer in geometry.layers}
    for part in module.modules():
        number = getattr(part, "layer_idx", None)
        ours = getattr(part, "config", decoder) is decoder
        if isinstance(number, int) and ours and _looks_up_attention(type(part)):
            found.setdefault(number, []).append(part)
    known = {layer.layer for layer in geometry.layers}
    for number, parts in found.items():
        wanted = 1 if number in known else 0
        if len(parts) != wanted:
            raise UnsupportedModelError(
                f"kv8 cannot serve {geometry.architecture} correctly: layer {number} has "
                f"{len(parts)} attention modules that use the attention interface, but its config "
                f"speaks of {wanted}."
            )
    return {number: parts[0] for number, parts in found.items()}


def _looks_up_attention(kind: type) -> bool:
    for base in kind.__mro__:
        for function in vars(base).values():
            if inspect.isfunction(function):
                code = inspect.unwrap(function).__code__
                if "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                    return True
    return False
