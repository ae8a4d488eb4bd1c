"""The kernels' figures: decode, prefill and store, each against a roof measured in the same run."""

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from benchmarks.gpu.against_flash3 import against_flash3
from benchmarks.gpu.environment import roof_of
from benchmarks.gpu.measuring import measure, values_as_codes, with_queries
from benchmarks.gpu.sections import Context, row

from kv8.attention.backend import AttentionBackend
from kv8.attention.kernel_choice import ChoosesKernels, KindChoice, MadeUpWork
from kv8.attention.layer import LayerAttention
from kv8.attention.made_up import made_up_batch
from kv8.attention.select import select_backend
from kv8.bench.attention_work import Shape
from kv8.bench.timing import Samples
from kv8.formats.base import BFLOAT16, FP8_E4M3, FP8_E5M2
from kv8.kernels.clock import recorded

_DECODE: Final = ((64, 8192), (8, 32_768))
_GOALS: Final = {
    "share": 0.88,
    "bf16": 1.7,
    "prefill": 400,
    "fp8": 500,
    "store": 0.7,
    "chosen": 0.97,  # no slower, but for what two medians of the same thing differ by
}
_RAGGED: Final = (131_072, *(1024,) * 63)
_PREFILL: Final = 8192
_NEW_TOKENS: Final = 8192
_STORE_LAYERS: Final = 12  # so that what one call wrote has left the L2 cache when its turn comes


def body(context: Context) -> dict[str, Any]:
    """Return the rows; every goal that is not met is said, and none makes the section fail."""
    torch.manual_seed(3)
    rows = context.rows
    for sequences, tokens in ((2, 96),) if context.dry else _DECODE:
        for block_size in (64,) if context.dry else (64, 16):
            rows += _decode(context, sequences, tokens, block_size)
    rows += _ragged(context, (96, 8) if context.dry else _RAGGED)
    rows += _prefill(context, 48 if context.dry else _PREFILL)
    rows += _store(context, 32 if context.dry else _NEW_TOKENS)
    return {"passed": True, "rows": rows}


def _shape(context: Context, num_layers: int = 1, block_size: int = 64) -> Shape:
    heads = (4, 1, 64) if context.dry else (32, 8, 128)
    return Shape(*heads, num_layers, block_size, str(context.device))


def _decode(context: Context, sequences: int, tokens: int, block_size: int) -> list[dict[str, Any]]:
    # Two layers in turn, many calls in one graph: what starting a graph takes does not count, and
    # neither does what the L2 cache may still hold of the layer before.
    layers, rounds = (1, 1) if context.dry else (2, 5)
    shape, roof = _shape(context, layers, block_size), roof_of(context)
    batch = shape.batch(sequences, 1, tokens, recorded=True)
    query = shape.queries(sequences)
    values = sequences * tokens * 2 * shape.num_kv_heads * shape.head_dim
    seconds: dict[str, Samples] = {}
    rows = []
    for name, kv_format, fp8_queries in (
        ("bf16", BFLOAT16, False), ("e4m3", FP8_E4M3, False), ("e5m2", FP8_E5M2, False),
        ("e4m3, FP8 attention", FP8_E4M3, True),
    ):  # fmt: skip
        cached = shape.layers(kv_format, (sequences + 1) * tokens)
        cached = [with_queries(layer) for layer in cached] if fp8_queries else cached
        backend = select_backend("triton", cached)

        def attend(
            backend: AttentionBackend = backend, cached: Sequence[LayerAttention] = cached
        ) -> None:
            for layer in [*cached] * rounds:
                backend.attend(layer, query, batch, shape.call)

        total = measure(context, recorded(attend, context.device))
        taken = seconds[name] = Samples(tuple(t / (layers * rounds) for t in total.values))
        speed = values * kv_format.bytes_per_value / taken.median
        what = f"decode {sequences} x {tokens:,}, blocks of {block_size}, {name}"
        rows.append(
            row(
                f"{what}: of copy bandwidth",
                speed / roof.bytes_per_second,
                unit=f"({speed / 1e12:.2f} TB/s, {taken.median * 1e6:.0f} µs)",
                goal=_GOALS["share"] if name == "e4m3" and block_size == 64 else None,
                spread_us=[taken.least * 1e6, taken.most * 1e6],
            )
        )
        del cached, backend, attend
    if block_size != 64:  # the default is what the goals are about
        return rows
    what = f"decode {sequences} x {tokens:,}"
    gain = seconds["bf16"].median / seconds["e4m3"].median
    rows.append(row(f"{what}: e4m3 over own bf16", gain, unit="x", goal=_GOALS["bf16"]))
    return rows + against_flash3(context, shape, sequences, tokens, seconds["e4m3"])


def _ragged(context: Context, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Decode one long context beside short ones, which an equal cut would leave to a few programs.

    Of the bandwidth that all contexts together make of it.
    """
    shape, roof = _shape(context), roof_of(context)
    batch = made_up_batch([(1, n) for n in lengths], 64, context.device, recorded=True)
    query = shape.queries(len(lengths))
    (layer,) = shape.layers(FP8_E4M3, sum(-(-n // 64) * 64 for n in lengths))
    backend = select_backend("triton", [layer])
    rounds = 1 if context.dry else 10

    def attend() -> None:
        for _ in range(rounds):
            backend.attend(layer, query, batch, shape.call)

    taken = measure(context, recorded(attend, context.device)).median / rounds
    speed = 2 * sum(lengths) * shape.num_kv_heads * shape.head_dim / taken
    what = f"decode {lengths[0]:,} beside {len(lengths) - 1} x {lengths[1]:,}, e4m3"
    unit = f"({speed / 1e12:.2f} TB/s, {taken * 1e6:.0f} µs)"
    return [row(f"{what}: of copy bandwidth", speed / roof.bytes_per_second, unit=unit)]


def _prefill(context: Context, tokens: int) -> list[dict[str, Any]]:
    shape, rows = _shape(context), []
    batch, query = shape.batch(1, tokens, tokens), shape.queries(tokens)
    flop = 2 * shape.num_heads * shape.head_dim * tokens * (tokens + 1)
    for name, kv_format, fp8_queries, goal in (
        ("bf16", BFLOAT16, False, _GOALS["prefill"]), ("e4m3", FP8_E4M3, False, None),
        ("e4m3, FP8 attention", FP8_E4M3, True, _GOALS["fp8"]),
    ):  # fmt: skip
        (layer,) = shape.layers(kv_format, tokens)
        layer = with_queries(layer) if fp8_queries else layer
        raced = _race(context, layer, shape, tokens)
        chosen = "triton" if raced is None else raced.kernels(decodes=False)
        seconds: dict[str, float] = {}
        for backend_name in _prefill_backends(raced):
            backend = select_backend(backend_name, [layer])

            def attend(
                backend: AttentionBackend = backend, layer: LayerAttention = layer
            ) -> torch.Tensor:
                return backend.attend(layer, query, batch, shape.call)

            taken = seconds[backend_name] = measure(context, attend).median
            is_chosen = backend_name == chosen
            rows.append(
                row(
                    f"prefill {tokens:,} causal, {name}, {backend_name}",
                    flop / taken / 1e12,
                    unit=f"TFLOP/s ({taken * 1e6:.0f} µs)",
                    goal=goal if is_chosen else None,
                    **({"note": f"as auto chooses: {raced}"} if is_chosen and raced else {}),
                )
            )
        if fp8_queries:
            triton = select_backend("triton", [layer])
            with values_as_codes():
                work = partial(triton.attend, layer, query, batch, shape.call)
                taken = measure(context, work).median
            what = f"prefill {tokens:,} causal, {name}, triton, values as codes"
            unit = f"TFLOP/s ({taken * 1e6:.0f} µs)"
            rows.append(row(what, flop / taken / 1e12, unit=unit))
        if "flash3" in seconds:
            what = f"prefill {tokens:,} causal, {name}: what auto chose over FlashAttention 3"
            ratio = seconds["flash3"] / seconds[chosen]
            rows.append(row(what, ratio, unit="x", goal=_GOALS["chosen"]))
    return rows


def _race(context: Context, layer: LayerAttention, shape: Shape, tokens: int) -> KindChoice | None:
    """Return what an engine with ``auto`` measures for such layers; `None` if it has no choice."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return None
    backend = select_backend("measured", [layer])
    assert isinstance(backend, ChoosesKernels)
    few = {"sequences": 2, "context": 16} if context.dry else {}
    work = MadeUpWork(prompt=tokens, **few)
    choice = backend.measure([(layer, shape.call)], work, torch.bfloat16)
    (found,) = choice.by_kind.values()
    return found


def _prefill_backends(raced: KindChoice | None) -> Sequence[str]:
    """Return what can be timed: FlashAttention 3 too, if it serves such layers and is right."""
    return ("triton", "flash3") if raced and raced.prefill else ("triton",)


def _store(context: Context, tokens: int) -> list[dict[str, Any]]:
    layers = 2 if context.dry else _STORE_LAYERS
    shape, roof, rows = _shape(context, layers), roof_of(context), []
    batch = shape.batch(1, tokens, tokens)
    sides = [(shape.keys(tokens), shape.keys(tokens)) for _ in range(layers)]
    for name, kv_format, goal in (
        ("bf16", BFLOAT16, None), ("e4m3", FP8_E4M3, _GOALS["store"]), ("e5m2", FP8_E5M2, None),
    ):  # fmt: skip
        cached = shape.layers(kv_format, tokens)
        backend = select_backend("triton", cached)

        def store(
            backend: AttentionBackend = backend, cached: Sequence[LayerAttention] = cached
        ) -> None:
            for layer, (key, value) in zip(cached, sides, strict=True):
                backend.store(layer, key, value, batch)

        taken = measure(context, recorded(store, context.device))
        values = 2 * tokens * shape.num_kv_heads * shape.head_dim * layers
        speed = values * (2 + kv_format.bytes_per_value) / taken.median
        rows.append(
            row(
                f"store {tokens:,} tokens, {name}: of copy bandwidth",
                speed / roof.bytes_per_second,
                unit=f"({speed / 1e12:.2f} TB/s, {taken.median / layers * 1e6:.1f} µs)",
                goal=goal,
            )
        )
    return rows
