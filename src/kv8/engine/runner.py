"""Runs forward passes: owns the model, the cache's tensors, the scales and the backend.

Letters as in docs/architecture.md: T new tokens, R rows of logits, H query heads, K kv heads,
V vocabulary.
"""

import enum
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kv8.attention.kernel_choice import ChoosesKernels
from kv8.attention.select import select_backend
from kv8.cache.pool import KVPool
from kv8.engine.decode_graphs import DecodeGraphs
from kv8.engine.devices import on_device
from kv8.engine.layers import expand_scale, make_counters, make_layers
from kv8.engine.resolve import ResolvedConfig, find_scales
from kv8.engine.step_input import StepInput
from kv8.errors import RequestError, ScaleError
from kv8.models.hook import HookedModel
from kv8.scales.resolve import ResolvedScales
from kv8.scales.scale import OriginKind

logger = logging.getLogger(__name__)


class ScaleStatus(enum.Enum):
    """How the cache's scales stand to the weights in use."""

    NOT_NEEDED = "not needed"
    CALIBRATED = "calibrated"
    UNCALIBRATED = "uncalibrated"
    STALE = "stale"


class Runner:
    """One model with its own cache; two of them in one process share nothing.

    Args:
        model: the loaded model.
        config: what to serve it with.

    Attributes:
        pool: the cache's tensors.
        layers: by layer number, what the backend needs to know of it.
        counters: what the stores did to the values.
        scales: the scales in use, with their origins.
        backend: stores and attends.
        graphs: recorded decode steps; `None` if every step is computed op by op.

    Raises:
        CapacityError: the memory for the cache cannot be allocated.
        RequestError: the backend cannot serve a layer; the message says which and why.
    """

    def __init__(self, model: HookedModel, config: ResolvedConfig) -> None:
        self.model = model
        self.scales = config.scales
        self._config = config
        self._stale = False
        self._num_weight_updates = 0
        self.pool = KVPool(
            config.layout, config.geometry, config.plan, config.capacity.num_blocks, model.device
        )
        self.counters = make_counters(config, model.device)
        self.layers = make_layers(config, self.pool, self.counters, model.device)
        self.backend = select_backend(config.options.attention_backend, list(self.layers.values()))
        if isinstance(self.backend, ChoosesKernels) and config.kernel_choice is not None:
            self.backend.use(config.kernel_choice)
        self.graphs: DecodeGraphs | None = None

    @property
    def scale_status(self) -> ScaleStatus:
        """How the cache's scales stand to the weights in use."""
        origins = [s.origin.kind for _, layer in self.scales for s in (layer.k, layer.v) if s]
        if not origins:
            return ScaleStatus.NOT_NEEDED
        if OriginKind.DEFAULT in origins:
            return ScaleStatus.UNCALIBRATED
        return ScaleStatus.STALE if self._stale else ScaleStatus.CALIBRATED

    def cache_key(self) -> bytes:
        """Return what stored bytes depend on besides tokens, as a digest."""
        parts = [
            self._config.source.name,
            self._config.plan.fingerprint().hex(),
            self.scales.fingerprint().hex(),
            str(self._num_weight_updates),
        ]
        return hashlib.blake2b("\n".join(parts).encode()).digest()

    @torch.inference_mode()
    def run(self, step: StepInput) -> torch.Tensor:
        """Store the step's keys and values; return its logits, float32 [R, V].

        They hold until the next step is run.
        """
        with on_device(self.model.device):
            logits = None if self.graphs is None else self.graphs.run(step)
            if logits is not None:
                return logits
            with self.model.bound(step.attention, self.layers, self.backend):
                return self.model.forward(step.input_ids, step.positions, step.rows)

    def set_scales(self, kv_scales: str | Path | Mapping[str, Any]) -> None:
        """Use other scales; what is stored under the old ones must be dropped.

        They are written over the old ones: compiled code may hold the tensors' addresses.

        Raises:
            ScaleError: a scale is missing, unbound or invalid, or the backend cannot use it;
                nothing is changed then.
        """
        self._use_scales(self._find_scales(kv_scales))

    def update_weights(
        self,
        weights: Mapping[str, torch.Tensor],
        kv_scales: str | Path | Mapping[str, Any] | None,
    ) -> None:
        """Replace weights by name, and the scales if given; all that is stored must be dropped.

        Raises:
            RequestError: a name is no weight of the model, or a shape differs; nothing is changed.
            ScaleError: the scales are not valid, or the backend cannot use them; nothing is
                changed.
        """
        targets = self.model.module.state_dict()
        for name, values in weights.items():
            if name not in targets:
                raise RequestError(f"{name} is not a weight of this model.")
            if values.shape != targets[name].shape:
                raise RequestError(
                    f"{name} has shape {list(values.shape)}, the model's has "
                    f"{list(targets[name].shape)}."
                )
        scales = None if kv_scales is None else self._find_scales(kv_scales)
        with torch.no_grad():
            for name, values in weights.items():
                targets[name].copy_(values)
        self._num_weight_updates += 1
        if scales is not None:
            self._use_scales(scales)
        elif self.scale_status is ScaleStatus.CALIBRATED:
            self._stale = True
            logger.warning(
                "The weights were replaced, but the KV cache keeps the scales calibrated for the "
                "old ones: they are stale. Give scales for the new weights with kv_scales."
            )

    def _find_scales(self, kv_scales: str | Path | Mapping[str, Any]) -> ResolvedScales:
        found = find_scales(self._config, kv_scales)
        for number, layer in self.layers.items():
            if layer.q_scale is None:
                continue
            q_scale = expand_scale(found.scales.layer(number).q, len(layer.q_scale))
            reason = self.backend.refuses(replace(layer, q_scale=q_scale.to(layer.q_scale.device)))
            if reason is not None:
                raise ScaleError(f"layer {number} cannot be served with these scales: {reason}.")
        return found

    def _use_scales(self, found: ResolvedScales) -> None:
        for warning in found.warnings:
            logger.warning("%s", warning)
        for number, layer in self.layers.items():
            fresh = found.scales.layer(number)
            for target, scale in (
                (layer.q_scale, fresh.q),
                (layer.k_scale, fresh.k),
                (layer.v_scale, fresh.v),
            ):
                if target is not None:
                    target.copy_(expand_scale(scale, target.numel()))
        self.scales = found.scales
        self._stale = False
        if isinstance(self.backend, ChoosesKernels):
            self.backend.scales_changed()
