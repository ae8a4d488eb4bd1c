"""`flash_attn_with_kvcache` for machines without it: what it documents, in plain torch."""

from itertools import pairwise

import pytest
import torch
from tests.attention_backends import triton_backend

from kv8.attention import select
from kv8.attention.reference import ReferenceBackend


def stand_in(
    q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q,
    q_descale, k_descale, v_descale, softmax_scale, causal, window_size, softcap,
):  # fmt: skip
    """What `flash_attn_with_kvcache` documents, in float64: it is given nothing but these."""
    num_sequences, (_, block_size, num_kv_heads, _) = len(cache_seqlens), k_cache.shape
    assert causal
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    assert page_table.shape[0] == num_sequences
    for descale in (q_descale, k_descale, v_descale):
        if descale is not None:
            assert descale.shape == (num_sequences, num_kv_heads)
            assert descale.dtype == torch.float32
    output = torch.empty(q.shape, dtype=torch.float64)
    starts = cu_seqlens_q.tolist()
    assert max_seqlen_q == max(b - a for a, b in pairwise(starts))
    for s in range(num_sequences):
        context, new = int(cache_seqlens[s]), starts[s + 1] - starts[s]
        first = 0 if window_size == (-1, -1) else max(0, context - new - window_size[0])
        at = torch.arange(first, context)  # the table says nothing of what is before the window
        blocks = page_table[s, at // block_size].long()
        k, v = (c[blocks, at % block_size].double() for c in (k_cache, v_cache))  # [n, K, D]
        rows = q[starts[s] : starts[s + 1]].double().unflatten(1, (num_kv_heads, -1))
        if q_descale is not None:
            rows = rows * q_descale[s].double()[:, None, None]
        if k_descale is not None:
            k, v = k * k_descale[s].double()[:, None], v * v_descale[s].double()[:, None]
        logits = torch.einsum("tkjd,nkd->kjtn", rows, k) * softmax_scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        distance = (torch.arange(new) + context - new)[:, None] - at
        hidden = distance < 0
        if window_size != (-1, -1):
            left, right = window_size
            hidden |= (distance > left) | (distance < -right)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        output[starts[s] : starts[s + 1]] = torch.einsum("kjtn,nkd->tkjd", weights, v).flatten(1, 2)
    return output.to(torch.bfloat16 if q.element_size() == 1 else q.dtype)


def install(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Let `auto` measure, as on a GPU with FlashAttention 3; return the list of its calls."""
    triton_backend()  # or skip
    from kv8.attention.flash3 import Flash3Backend
    from kv8.attention.measured import MeasuredBackend

    calls = []

    def attend(**arguments):
        calls.append(arguments)
        return stand_in(**arguments)

    entries = (
        select.BackendEntry("measured", lambda: MeasuredBackend(attend), ""),
        select.BackendEntry("triton", triton_backend, ""),
        select.BackendEntry("flash3", lambda: Flash3Backend(attend), ""),
        select.BackendEntry("reference", ReferenceBackend, ""),
    )
    monkeypatch.setattr(select.select_backend, "__defaults__", (entries,))
    return calls
