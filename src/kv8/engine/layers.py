"""What the attention backend is told of each layer, made from the plan and the cache's tensors."""

import torch

from kv8.attention.layer import LayerAttention
from kv8.attention.select import select_backend
from kv8.cache.pool import KVPool
from kv8.engine.counters import CacheCounters
from kv8.engine.resolve import ResolvedConfig
from kv8.scales.scale import Scale


def make_counters(config: ResolvedConfig, device: torch.device) -> CacheCounters:
    """Return counters for every layer that stores quantized values."""
    kv_layers, plan = config.geometry.kv_layers, config.plan
    return CacheCounters((e.layer for e in kv_layers if plan.format(e.layer).quantized), device)


def make_layers(
    config: ResolvedConfig, pool: KVPool, counters: CacheCounters, device: torch.device
) -> dict[int, LayerAttention]:
    """Return what the backend needs to know of each layer, by its number."""
    return {
        layer.layer: _make_layer(config, pool, counters, device, layer.layer)
        for layer in config.geometry.layers
    }


def check_backend(config: ResolvedConfig) -> None:
    """Refuse early what no attention backend can serve here: a cache of one block shows it.

    Scales that are measured at start-up are not known yet; the engine itself checks those.

    Raises:
        RequestError: the backend cannot serve a layer; the message says which and why.
    """
    if config.options.measures_scales:
        return
    pool = KVPool(config.layout, config.geometry, config.plan, 1, config.device)
    layers = make_layers(config, pool, make_counters(config, config.device), config.device)
    select_backend(config.options.attention_backend, list(layers.values()))


def _make_layer(
    config: ResolvedConfig,
    pool: KVPool,
    counters: CacheCounters,
    device: torch.device,
    number: int,
) -> LayerAttention:
    layer = config.geometry.layer(number)
    source = layer.kv_source  # whose keys and values this layer reads
    stored_format = config.plan.format(source)
    quantized = stored_format.quantized
    scales = config.scales.layer(number)

    def scale(wanted: bool, given: Scale | None, num_heads: int) -> torch.Tensor | None:
        return expand_scale(given, num_heads).to(device) if wanted else None

    k_codes, v_codes = pool.codes(number)
    return LayerAttention(
        geometry=layer,
        group=config.layout.group_of(number),
        format=stored_format,
        k_codes=k_codes,
        v_codes=v_codes,
        k_scale=scale(quantized, scales.k, layer.num_kv_heads),
        v_scale=scale(quantized, scales.v, layer.num_kv_heads),
        q_scale=scale(quantized and config.fp8_queries, scales.q, layer.num_heads),
        counters=counters.layer(source) if quantized else None,
    )


def expand_scale(scale: Scale | None, num_heads: int) -> torch.Tensor:
    """Return ``scale`` as float32 [num_heads], one value a head whatever its granularity."""
    assert scale is not None, "resolve_scales gives every quantized layer all of its scales"
    values = torch.tensor(scale.values, dtype=torch.float32)
    return values.expand(num_heads).clone() if len(scale.values) == 1 else values
