"""From what the user asked to what the engine does: one function, every decision with its reason.

Reads configuration files and scale tensors, no weights; so `kv8 plan` and `kv8 inspect` stand on
the same answers as the engine, and what cannot work is refused within a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kv8.attention.kernel_choice import KernelChoice
from kv8.attention.select import check_backend_name
from kv8.cache.capacity import Capacity, capacity, memory_for
from kv8.cache.gain import describe_gain
from kv8.cache.layout import CacheLayout, make_layout
from kv8.engine.devices import choose_block_size, describe_device, resolve_device
from kv8.engine.resolve_length import choose_max_model_len
from kv8.engine.resolve_memory import (
    check_gpu_options,
    default_cache_memory,
    gpu_cache_memory,
)
from kv8.engine.scale_choice import (
    SCALE_SETTINGS,
    choose_scales,
    describe_scales,
    explicit_scales,
)
from kv8.formats.base import KVFormat
from kv8.geometry import ModelGeometry
from kv8.layer_plan import LayerPlan, make_layer_plan, resolve_cache_format
from kv8.models.config import load_config
from kv8.models.geometry import read_geometry
from kv8.models.source import ModelSource, resolve_source
from kv8.models.weight_storage import loaded_bytes
from kv8.options import EngineOptions
from kv8.scales.checkpoint import CheckpointScales, read_checkpoint
from kv8.scales.resolve import ResolvedScales, resolve_scales
from kv8.scales.scale import ModelScales
from kv8.units import format_bytes


@dataclass(frozen=True)
class Decision:
    """One effective setting and why it is what it is."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({self.reason})"


@dataclass(frozen=True)
class ResolvedConfig:
    """Everything an engine needs to know before it reads weights.

    Attributes:
        options: what was asked.
        source: the model's files.
        model_config: the model's own config, as `kv8.models` reads it.
        geometry: the model as the cache sees it.
        dtype: name of the type of the weights in memory.
        device: where model and cache go.
        checkpoint: declaration and scales found with the weights.
        kv_format: format of the layers that are not skipped.
        plan: format of every layer.
        scales: complete for every quantized layer.
        fp8_queries: whether queries are quantized too (FP8 attention).
        layout: how the cache is laid out.
        capacity: what it holds.
        max_model_len: longest sequence, prompt and output together.
        decisions: effective settings with their reasons, for the log and for people.
        messages: what else was decided, and why.
        warnings: what a person should act on.
        kernel_choice: which kernels attend, where there is a choice and it was measured.
    """

    options: EngineOptions
    source: ModelSource
    model_config: Any
    geometry: ModelGeometry
    dtype: str
    device: torch.device
    checkpoint: CheckpointScales
    kv_format: KVFormat
    plan: LayerPlan
    scales: ModelScales
    fp8_queries: bool
    layout: CacheLayout
    capacity: Capacity
    max_model_len: int
    decisions: tuple[Decision, ...]
    messages: tuple[str, ...]
    warnings: tuple[str, ...]
    kernel_choice: KernelChoice | None = None

    def describe(self) -> str:
        """Return the effective settings, one a line."""
        return "\n".join(f"  {line}" for line in (*self.decisions, *self.messages))


def resolve_options(options: EngineOptions) -> ResolvedConfig:
    """Resolve ``options`` against the model's files; weights are not read.

    Raises:
        RequestError: an option does not fit this model (subclasses say more: `ModelError`,
            `ScaleError`, `LayerPlanError`, `CapacityError`).
        SourceError: the model's files cannot be fetched or converted.
    """
    check_backend_name(options.attention_backend)
    device, device_reason = resolve_device(options.device)
    check_gpu_options(options, device)
    source = resolve_source(options.model)
    model_config = load_config(source.folder)
    geometry = read_geometry(model_config)
    dtype = geometry.model_dtype if options.dtype == "auto" else options.dtype
    geometry = replace(geometry, model_dtype=dtype)
    checkpoint = read_checkpoint(source.folder, geometry)
    kv_format, format_reason = resolve_cache_format(
        options.kv_cache_dtype, checkpoint.declaration, dtype
    )
    plan = make_layer_plan(geometry, kv_format, options.skip_layers)
    resolved = choose_scales(options, geometry, plan, checkpoint, source.folder)
    block_size = choose_block_size(options.block_size, device)
    layout = make_layout(geometry, plan, block_size, max_chunk=options.max_num_batched_tokens)
    memory, memory_reason = _cache_memory(options, geometry, layout, source.folder, device)
    max_model_len, length_reason = choose_max_model_len(options, geometry, layout, memory)
    return ResolvedConfig(
        options=options,
        source=source,
        model_config=model_config,
        geometry=geometry,
        dtype=dtype,
        device=device,
        checkpoint=checkpoint,
        kv_format=kv_format,
        plan=plan,
        scales=resolved.scales,
        fp8_queries=resolved.fp8_queries,
        layout=layout,
        capacity=capacity(layout, memory, max_model_len),
        max_model_len=max_model_len,
        decisions=(
            Decision("model", source.name, source.description),
            Decision(
                "dtype",
                dtype,
                "the checkpoint's" if options.dtype == "auto" else "as asked with dtype",
            ),
            Decision("device", describe_device(device), device_reason),
            Decision("kv_cache_dtype", kv_format.name, format_reason),
            *_skip_decision(options, plan),
            *scale_decisions(plan, resolved, options),
            Decision("kv_cache_memory", format_bytes(memory), memory_reason),
            Decision("max_model_len", f"{max_model_len:,} tokens", length_reason),
            Decision(
                "enable_prefix_caching", "on" if options.enable_prefix_caching else "off", "as set"
            ),
            Decision(
                "max_num_batched_tokens",
                f"{options.max_num_batched_tokens:,}",
                "longer prompts are computed in chunks",
            ),
        ),
        messages=(
            *plan.notes,
            *resolved.messages,
            *([describe_gain(geometry, layout, max_model_len)] if plan.quantized_layers else ()),
        ),
        warnings=resolved.warnings,
    )


def find_scales(
    config: ResolvedConfig, kv_scales: str | Path | Mapping[str, Any]
) -> ResolvedScales:
    """Return other scales for a running engine; whether queries are quantized stays as it is.

    Raises:
        ScaleError: a scale is missing, unbound or invalid.
    """
    return resolve_scales(
        config.geometry,
        config.plan,
        config.checkpoint,
        explicit_scales(kv_scales, config.geometry, config.source.folder),
        config.options.missing_scales,
        "fp8" if config.fp8_queries else "native",
    )


def with_cache_memory(config: ResolvedConfig, memory: int, reason: str) -> ResolvedConfig:
    """Return ``config`` with another amount of memory for the cache, and what follows from it.

    Raises:
        CapacityError: it is too little for what was asked.
    """
    geometry, layout = config.geometry, config.layout
    longest, length_reason = choose_max_model_len(config.options, geometry, layout, memory)
    decided = {
        "kv_cache_memory": Decision("kv_cache_memory", format_bytes(memory), reason),
        "max_model_len": Decision("max_model_len", f"{longest:,} tokens", length_reason),
    }
    old_gain = describe_gain(geometry, layout, config.max_model_len)
    return replace(
        config,
        capacity=capacity(layout, memory, longest),
        max_model_len=longest,
        decisions=tuple(decided.get(each.name, each) for each in config.decisions),
        messages=tuple(
            describe_gain(geometry, layout, longest) if message == old_gain else message
            for message in config.messages
        ),
    )


def useful_cache_memory(
    options: EngineOptions, geometry: ModelGeometry, layout: CacheLayout
) -> int:
    """Return the bytes that as many sequences as may run, each as long as can be, need."""
    longest = options.max_model_len or geometry.max_position
    return options.max_num_seqs * memory_for(layout, longest)


def _cache_memory(
    options: EngineOptions,
    geometry: ModelGeometry,
    layout: CacheLayout,
    folder: Path,
    device: torch.device,
) -> tuple[int, str]:
    if options.kv_cache_memory is not None:
        return int(options.kv_cache_memory), "as asked"
    weight_bytes = loaded_bytes(folder, geometry.model_dtype)
    useful_bytes = useful_cache_memory(options, geometry, layout)
    if device.type == "cuda":
        return gpu_cache_memory(
            device,
            share=options.gpu_memory_utilization,
            weight_bytes=weight_bytes,
            useful_bytes=useful_bytes,
        )
    return default_cache_memory(device, weight_bytes=weight_bytes, useful_bytes=useful_bytes)


def _skip_decision(options: EngineOptions, plan: LayerPlan) -> list[Decision]:
    skipped = [entry for entry in plan.layers if entry.skipped_by is not None]
    if not skipped:
        return []
    layers = ", ".join(str(entry.layer) for entry in skipped)
    entries = ", ".join(options.skip_layers)
    return [Decision(f"layers in {skipped[0].format.name}", layers, f"skip list: {entries}")]


def scale_decisions(
    plan: LayerPlan, resolved: ResolvedScales, options: EngineOptions
) -> list[Decision]:
    """Say granularity, origins and query mode of a quantized cache; nothing for a 16-bit one."""
    described = describe_scales(plan, resolved, options)
    return [Decision(name, *said) for name, said in zip(SCALE_SETTINGS, described, strict=False)]
