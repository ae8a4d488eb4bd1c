"""Runs forward passes: owns the model, the cache's tensors, the scales and the backend.

Letters as in docs/architecture.md: T new tokens, R rows of logits, H query heads, K kv heads,
V vocabulary.
"""

import torch

from kv8.attention.backend import AttentionBackend
from kv8.attention.layer import LayerAttention
from kv8.attention.select import select_backend
from kv8.cache.layout import CacheLayout
from kv8.cache.pool import KVPool
from kv8.engine.batch_builder import StepInput
from kv8.engine.counters import CacheCounters
from kv8.errors import ScaleError
from kv8.geometry import ModelGeometry
from kv8.layer_plan import LayerPlan
from kv8.models.hook import HookedModel
from kv8.scales.scale import ModelScales, Scale


class Runner:
    """One model with its own cache; two of them in one process share nothing.

    Args:
        model: the loaded model.
        plan: format of each layer.
        layout: how the cache is laid out.
        scales: complete for every quantized layer; with q scales if ``fp8_queries``.
        fp8_queries: whether queries are quantized too (FP8 attention).
        num_blocks: blocks to allocate.
        backend: name of the attention backend, or ``auto``.

    Raises:
        CapacityError: the memory for the cache cannot be allocated.
        RequestError: the backend cannot serve a layer; the message says which and why.
    """

    def __init__(
        self,
        model: HookedModel,
        *,
        plan: LayerPlan,
        layout: CacheLayout,
        scales: ModelScales,
        fp8_queries: bool,
        num_blocks: int,
        backend: str = "auto",
    ) -> None:
        self.model = model
        geometry = model.geometry
        self.pool = KVPool(layout, geometry, plan, num_blocks, model.device)
        self.counters = CacheCounters(
            (e.layer for e in geometry.kv_layers if plan.format(e.layer).quantized), model.device
        )
        self.layers = {
            entry.layer: self._layer(entry.layer, geometry, plan, layout, scales, fp8_queries)
            for entry in geometry.layers
        }
        self.backend: AttentionBackend = select_backend(backend, list(self.layers.values()))

    @torch.inference_mode()
    def run(self, step: StepInput) -> torch.Tensor:
        """Store the step's keys and values, and return its logits (float32 [R, V])."""
        with self.model.bound(step.attention, self.layers, self.backend):
            return self.model.forward(step.input_ids, step.positions, step.rows)

    def set_scales(self, scales: ModelScales) -> None:
        """Write new scales over those in use; what is stored under the old ones must be dropped.

        The tensors keep their addresses, since compiled code may hold them.

        Raises:
            ScaleError: a scale that is in use would go missing; nothing is changed then.
        """
        updates = []
        for number, layer in self.layers.items():
            stored = scales.layer(layer.geometry.kv_source)
            for target, scale, name in (
                (layer.q_scale, scales.layer(number).q, "q"),
                (layer.k_scale, stored.k, "k"),
                (layer.v_scale, stored.v, "v"),
            ):
                if target is None:
                    continue
                if scale is None:
                    raise ScaleError(
                        f"Layer {number} has no {name} scale among the new scales, and it is "
                        f"stored as {layer.format.name}. Give one for every quantized layer."
                    )
                updates.append((target, _expand(scale, target.numel(), target.device)))
        for target, values in updates:
            target.copy_(values)

    def _layer(
        self,
        number: int,
        geometry: ModelGeometry,
        plan: LayerPlan,
        layout: CacheLayout,
        scales: ModelScales,
        fp8_queries: bool,
    ) -> LayerAttention:
        layer = geometry.layer(number)
        source = layer.kv_source  # whose keys and values this layer reads
        stored_format = plan.format(source)
        quantized = stored_format.quantized
        stored = scales.layer(source)
        k_codes, v_codes = self.pool.codes(source)
        num_kv_heads, device = layer.num_kv_heads, self.model.device

        def scale(wanted: bool, value: Scale | None, heads: int) -> torch.Tensor | None:
            return _expand(value, heads, device) if wanted and value is not None else None

        return LayerAttention(
            geometry=layer,
            group=layout.group_of(source),
            format=stored_format,
            k_codes=k_codes,
            v_codes=v_codes,
            k_scale=scale(quantized, stored.k, num_kv_heads),
            v_scale=scale(quantized, stored.v, num_kv_heads),
            q_scale=scale(quantized and fp8_queries, scales.layer(number).q, layer.num_heads),
            counters=self.counters.layer(source) if quantized else None,
        )


def _expand(scale: Scale, num_heads: int, device: torch.device) -> torch.Tensor:
    """Return ``scale`` as float32 [num_heads], one value a head whatever its granularity."""
    values = torch.tensor(scale.values, dtype=torch.float32, device=device)
    return values.expand(num_heads).contiguous() if len(scale.values) == 1 else values
