"""The reference backend: attention over stored codes in plain torch, the specification of the rest.

A row of logits is computed whole and in float32, so nothing but float32 rounding depends on how
the work is cut up. It is cut so that temporaries stay small: into tiles of one sequence's
queries, or several sequences with one query each.
"""

from typing import Final

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.checks import check_attend, check_layer, check_store
from kv8.attention.layer import LayerAttention
from kv8.attention.paged import locate, write_tokens
from kv8.attention.passes import Pass, split_batch, split_pass
from kv8.attention.tile import TileSettings, attend_tile
from kv8.formats.base import FP8_E4M3
from kv8.formats.encode import decode, encode, encode_counting

# Logits held at once: 4 MiB of float32, about what a core's cache holds.
_MAX_LOGITS: Final = 2**20


class ReferenceBackend:
    """Plain torch on any device; see the module."""

    name = "reference"
    capturable = False

    def refuses(self, layer: LayerAttention) -> str | None:
        """Return why this backend cannot serve ``layer``, or `None` if it can."""
        check_layer(layer)
        if layer.q_scale is not None and not layer.format.quantized:
            return f"FP8 attention needs an FP8 cache, this layer's is {layer.format.name}"
        return None

    def store(
        self, layer: LayerAttention, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """Quantize ``key`` and ``value`` ([T, K, D]), count, and scatter them to the slots."""
        check_store(layer, key, value, batch)
        counters = layer.counters
        for values, scale, pool, counter in (
            (key, layer.k_scale, layer.k_codes, counters.k if counters else None),
            (value, layer.v_scale, layer.v_codes, counters.v if counters else None),
        ):
            per_head = None if scale is None else scale.unsqueeze(1)
            if counter is None:
                codes = encode(values, per_head, layer.format)
            else:
                codes, counts = encode_counting(values, per_head, layer.format)
                counter += counts
            write_tokens(pool, codes, batch.slots[layer.group])

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
    ) -> torch.Tensor:
        """Return attention of ``query`` ([T, H, D]) over the stored codes; same shape and dtype."""
        check_attend(layer, query, batch, call)
        scaled = _scale_query(layer, query, call.softmax_scale)
        output = torch.empty_like(scaled)
        for work in split_batch(layer.geometry, batch.query_lens_host, batch.context_lens_host):
            _attend_pass(work, layer, scaled, batch, call, output)
        if layer.v_scale is not None:
            output *= layer.v_scale[:, None, None]
        return output.flatten(1, 2).to(query.dtype)


def _scale_query(layer: LayerAttention, query: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Return float32 [T, K, J, D]: queries, or the values of their codes, times all scales of q·k.

    In FP8 attention a query is rounded to e4m3 before anything else is multiplied into it.
    """
    geometry = layer.geometry
    if layer.q_scale is not None:
        codes = encode(query, layer.q_scale.unsqueeze(1), FP8_E4M3)
        query = decode(codes, layer.q_scale.unsqueeze(1), FP8_E4M3)
    grouped = query.to(torch.float32).reshape(
        query.shape[0], geometry.num_kv_heads, -1, geometry.head_dim
    )
    if layer.k_scale is None:
        return grouped * softmax_scale
    return grouped * (layer.k_scale * softmax_scale)[:, None, None]


def _attend_pass(
    work: Pass,
    layer: LayerAttention,
    query: torch.Tensor,
    batch: AttentionBatch,
    call: AttentionCall,
    output: torch.Tensor,
) -> None:
    """Write the rows and heads of ``output`` [T, K, J, D] that ``work`` is about."""
    heads, sequences, device = work.kv_heads, list(work.sequences), query.device
    query, output = query[:, heads], output[:, heads]
    tables = batch.block_tables[layer.group][sequences]
    tokens = locate(tables, work.visible, batch.block_size)
    keys = decode(tokens.read(layer.k_codes[:, heads]), None, layer.format)  # [C, K, n, D]
    values = decode(tokens.read(layer.v_codes[:, heads]), None, layer.format)
    sinks = None if call.sinks is None else call.sinks.view(-1, query.shape[2])[heads]
    settings = TileSettings(call.softcap, sinks, quantize_weights=layer.q_scale is not None)

    first_row = batch.query_starts[sequences].unsqueeze(1)  # [C, 1]
    first_position = torch.tensor(work.first_positions, device=device).unsqueeze(1)
    max_rows = max(1, _MAX_LOGITS // (keys[..., 0].numel() * query.shape[2]))
    for tile in split_pass(work, call.window, batch.block_size, max_rows):
        offsets = torch.arange(tile.rows.start, tile.rows.stop, device=device)
        rows = (first_row + offsets).flatten()
        hidden = _hidden(tokens.positions[:, tile.keys], first_position + offsets, call.window)
        attended = attend_tile(
            query[rows].view(*hidden.shape[:2], *query.shape[1:]).permute(0, 2, 3, 1, 4),
            keys[:, :, tile.keys],
            values[:, :, tile.keys],
            hidden if hidden.shape[:2].numel() > 1 else None,
            settings,
        )
        output[rows] = attended.permute(0, 3, 1, 2, 4).flatten(0, 1)


def _hidden(
    key_positions: torch.Tensor, query_positions: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Return bool [C, r, n], keys [C, n] that queries [C, r] must not see."""
    distance = query_positions.unsqueeze(2) - key_positions.unsqueeze(1)
    return distance < 0 if window is None else (distance < 0) | (distance >= window)
