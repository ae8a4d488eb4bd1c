"""The contract between a model and a backend, checked: shapes, dtypes, devices, aliases.

A failure here is a bug of kv8, never of its user; hence assertions. Every backend calls these
before it touches memory, so that none of them reads or writes where it should not.
"""

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention
from kv8.formats.encode import torch_dtype

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_layer(layer: LayerAttention) -> None:
    """Assert that a layer's codes and scales fit its geometry and its format."""
    geometry, name = layer.geometry, f"layer {layer.geometry.layer}"
    heads, head_dim = geometry.num_kv_heads, geometry.head_dim
    assert geometry.num_heads % heads == 0, f"{name}: {geometry.num_heads} heads over {heads}"
    k_codes, v_codes = layer.k_codes, layer.v_codes
    assert k_codes.shape == v_codes.shape, f"{name}: K {k_codes.shape}, V {v_codes.shape}"
    for side, codes in (("K", k_codes), ("V", v_codes)):
        shape = (codes.shape[0], heads, codes.shape[2], head_dim)
        assert codes.shape == shape, f"{name}: {side} codes {tuple(codes.shape)}, not {shape}"
        assert codes.dtype == torch_dtype(layer.format), f"{name}: {side} codes are {codes.dtype}"
        assert codes[0].is_contiguous(), f"{name}: {side} blocks are not contiguous"
    assert k_codes.data_ptr() != v_codes.data_ptr(), f"{name}: V lies where K lies"
    for side, scale, count in (
        ("k", layer.k_scale, heads if layer.format.quantized else None),
        ("v", layer.v_scale, heads if layer.format.quantized else None),
        ("q", layer.q_scale, geometry.num_heads if layer.q_scale is not None else None),
    ):
        found = None if scale is None else (tuple(scale.shape), scale.dtype, scale.device)
        wanted = None if count is None else ((count,), torch.float32, k_codes.device)
        assert found == wanted, f"{name}: {side}_scale is {found}, not {wanted}"


def check_store(
    layer: LayerAttention, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
) -> None:
    """Assert that ``key`` and ``value`` are [T, K, D] and the batch has a slot for each token."""
    check_batch(layer, batch)
    check_new_tensors(layer, key, value, batch)


def check_new_tensors(
    layer: LayerAttention, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
) -> None:
    """Assert what `check_store` does, for a batch that was checked already."""
    geometry = layer.geometry
    assert geometry.owns_kv, f"layer {geometry.layer} stores nothing: it reads another layer's KV"
    shape = (batch.num_tokens, geometry.num_kv_heads, geometry.head_dim)
    for name, tensor in (("key", key), ("value", value)):
        _check_tensor(name, tensor, shape, layer)


def check_attend(
    layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
) -> None:
    """Assert that ``query`` is [T, H, D] and the call asks for the window the cache keeps."""
    check_batch(layer, batch)
    check_query(layer, query, batch, call)


def check_query(
    layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
) -> None:
    """Assert what `check_attend` does, for a batch that was checked already."""
    geometry = layer.geometry
    _check_tensor("query", query, (batch.num_tokens, geometry.num_heads, geometry.head_dim), layer)
    assert call.window == geometry.window, (
        f"layer {geometry.layer} is called with window {call.window} "
        f"but its cache keeps window {geometry.window}"
    )
    if call.sinks is not None:
        found = (tuple(call.sinks.shape), call.sinks.dtype)
        assert found == ((geometry.num_heads,), torch.float32), f"sinks are {found}"


def check_cached_heads(
    layer: LayerAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
) -> None:
    """Assert that workspace tensors of any number of rows have the layer's heads and window."""
    geometry, num_rows = layer.geometry, len(query)
    assert geometry.owns_kv, f"layer {geometry.layer} stores nothing: it reads another layer's KV"
    stored = (num_rows, geometry.num_kv_heads, geometry.head_dim)
    _check_tensor("query", query, (num_rows, geometry.num_heads, geometry.head_dim), layer)
    _check_tensor("key", key, stored, layer)
    _check_tensor("value", value, stored, layer)
    assert call.window == geometry.window, f"window {call.window}, not {geometry.window}"


def check_batch(layer: LayerAttention, batch: AttentionBatch) -> None:
    """Assert that the batch's tables and slots fit its lengths and the layer's cache."""
    block_size = layer.k_codes.shape[2]
    assert batch.block_size == block_size, f"block size {batch.block_size}, cache {block_size}"
    assert len(batch.context_lens_host) == batch.num_sequences, "lengths of different batches"
    table, slots = batch.block_tables[layer.group], batch.slots[layer.group]
    longest = max(batch.context_lens_host, default=0)
    assert table.shape[0] == batch.num_sequences, f"block table {tuple(table.shape)}"
    assert table.shape[1] * block_size >= longest, f"{table.shape[1]} blocks for {longest} tokens"
    assert slots.shape == (batch.num_tokens,), f"slots {tuple(slots.shape)}"
    for new, context in zip(batch.query_lens_host, batch.context_lens_host, strict=True):
        assert 1 <= new <= context, f"{new} new tokens in a context of {context}"


def _check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], layer: LayerAttention
) -> None:
    assert tensor.shape == shape, f"{name} is {tuple(tensor.shape)}, not {shape}"
    assert tensor.dtype in FLOAT_DTYPES, f"{name} is {tensor.dtype}"
    assert tensor.device == layer.k_codes.device, f"{name} is on {tensor.device}"
