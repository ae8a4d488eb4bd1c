"""The attention kernels alone: FP8 against bfloat16, and both against this machine's roof.

The layers of a cache are visited one after the other, as a model does, so that no layer's codes
wait in a CPU cache. The kernels are checked against the reference backend before they are timed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import torch

from kv8.attention.backend import AttentionBackend
from kv8.attention.batch import AttentionBatch
from kv8.attention.kernel_choice import ChoosesKernels, MadeUpWork
from kv8.attention.layer import LayerAttention
from kv8.attention.reference import ReferenceBackend
from kv8.attention.select import select_backend
from kv8.bench.attention_work import Shape
from kv8.bench.conditions import Conditions, l2_bytes
from kv8.bench.phases import short_name
from kv8.bench.report import Report
from kv8.bench.roof import Roof
from kv8.bench.timing import Samples, in_turns, joined, speedup
from kv8.errors import EngineError
from kv8.formats.base import BFLOAT16, FP8_E4M3, KVFormat
from kv8.kernels.clock import recorded
from kv8.kernels.openmp import openmp_runtimes
from kv8.units import format_bytes

FORMATS: Final = (BFLOAT16, FP8_E4M3)
_NAMES: Final = tuple(f.name for f in FORMATS)
_SPLITS: Final = (1, 8, 64)  # sequences that share the cached tokens
_TIMES_L2: Final = 4
_CALLS: Final = 50  # of a small kernel, to have something to time


class KernelBench:
    """Measures one backend on one shape of attention.

    Args:
        shape: heads, head size, block size, layers.
        backend: its name, or ``auto``.
        repeats: rounds that count; one more is the warm-up.

    Raises:
        RequestError: the backend cannot serve this shape here.
        EngineError: the backend's results are wrong; nothing is timed then.
    """

    def __init__(self, shape: Shape, backend: str, repeats: int) -> None:
        self.shape, self.repeats = shape, repeats
        samples = [layer for f in FORMATS for layer in shape.layers(f, shape.block_size)]
        self.backend: AttentionBackend = select_backend(backend, samples)
        self.kernels: dict[str, str] = {}
        if isinstance(self.backend, ChoosesKernels):
            subjects = [(layer, shape.call) for layer in samples]
            choice = self.backend.measure(subjects, MadeUpWork(), torch.bfloat16)
            self.backend.use(choice)
            self.kernels = choice.described()
        self.device = torch.device(shape.device)
        self._records = self.device.type == "cuda" and self.backend.capturable
        on_gpu = self.device.type == "cuda"
        # What attention multiplies in: float32 on a CPU, 16 bits in a GPU's matrix units.
        self.roof = Roof(torch.bfloat16 if on_gpu else torch.float32, self.device)
        self.report = Report(
            "kernels",
            f"Attention of {shape.num_heads} query heads and {shape.num_kv_heads} KV heads of size "
            f"{shape.head_dim}, {self.backend.name} backend, {shape.num_layers} layers in turn.",
        )
        self._check()

    def decode(self, tokens: int) -> None:
        """Attend over ``tokens`` cached tokens in all, as one, eight and 64 sequences."""
        shape = self.shape
        room = tokens + max(_SPLITS) * shape.block_size  # each sequence begins a block of its own
        layers = {f.name: shape.layers(f, room) for f in FORMATS}
        values_per_token = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers
        ratios = []
        for num_sequences in _SPLITS:
            context = tokens // num_sequences
            batch = shape.batch(num_sequences, 1, context, recorded=self._records)
            query = shape.queries(num_sequences)
            seconds = self._time(
                {name: partial(self._attend_all, of, query, batch) for name, of in layers.items()},
                recording=layers.keys(),
            )
            for kv_format in FORMATS:
                ratio = speedup(seconds, BFLOAT16.name, kv_format.name)
                self.report.add(
                    _labels("decode attention", num_sequences, context, kv_format),
                    seconds[kv_format.name],
                    num_bytes=num_sequences
                    * context
                    * values_per_token
                    * kv_format.bytes_per_value,
                    over=(short_name(BFLOAT16.name), ratio),
                )
            ratios.append(speedup(seconds, *_NAMES))
        self.report.figures["decode_attention_fp8_over_bf16"] = min(ratios)
        self._check_size(tokens * values_per_token)

    def prefill(self, contexts: Sequence[int]) -> None:
        """Store whole prompts and attend over them: all that the cache's dtype has a part in."""
        shape, ratios, attention_ratios = self.shape, [], []
        for context in contexts:
            batch, query, key = shape.batch(1, context, context), *self._new_tokens(context)
            work: dict[str, Callable[[], object]] = {}
            for kv_format in FORMATS:
                (layer,) = replace(shape, num_layers=1).layers(kv_format, context)
                store, attend = self.backend.store, self.backend.attend
                work[f"store {kv_format.name}"] = partial(store, layer, key, key, batch)
                work[kv_format.name] = partial(attend, layer, query, batch, shape.call)
            stores = {name for name in work if name.startswith("store")}
            seconds = self._time(work, recording=stores)
            flop = 2 * shape.num_heads * shape.head_dim * context * (context + 1)
            values = 2 * context * shape.num_kv_heads * shape.head_dim
            for kv_format in FORMATS:
                name, base = kv_format.name, short_name(BFLOAT16.name)
                ratio = speedup(seconds, BFLOAT16.name, name)
                store_ratio = speedup(seconds, f"store {BFLOAT16.name}", f"store {name}")
                self.report.add(
                    _labels("prefill attention", 1, context, kv_format),
                    seconds[name],
                    flop=flop,
                    over=(base, ratio),
                )
                self.report.add(
                    _labels("store", 1, context, kv_format),
                    seconds[f"store {name}"],
                    num_bytes=values * (2 + kv_format.bytes_per_value),
                    over=(base, store_ratio),
                )
                seconds[f"both {name}"] = joined([seconds[name], seconds[f"store {name}"]])
            attention_ratios.append(speedup(seconds, *_NAMES))
            ratios.append(speedup(seconds, *(f"both {name}" for name in _NAMES)))
        self.report.figures["prefill_fp8_over_bf16"] = min(ratios)
        self.report.figures["prefill_attention_fp8_over_bf16"] = min(attention_ratios)

    def turns(self, context: int) -> None:
        """Whether torch's threads and the kernels' get in each other's way when they take turns."""
        shape = replace(self.shape, num_layers=1)
        (layer,) = shape.layers(FP8_E4M3, context)
        batch, query = shape.batch(1, 1, context), shape.queries(1)
        left, right = torch.randn(64, 512), torch.randn(512, 512)

        def multiply(times: int = _CALLS) -> None:
            for _ in range(times):
                left @ right

        def attend(times: int = _CALLS) -> None:
            for _ in range(times):
                self.backend.attend(layer, query, batch, shape.call)

        def alternate() -> None:
            for _ in range(_CALLS):
                multiply(1)
                attend(1)

        work = {"matmul alone": multiply, "attention alone": attend, "in turns": alternate}
        seconds = in_turns(work, self.repeats)
        for name, samples in seconds.items():
            self.report.add({"kernel": f"{_CALLS} small calls, {name}"}, samples)
        apart = seconds["matmul alone"].median + seconds["attention alone"].median
        self.report.figures["in_turns_over_apart"] = seconds["in turns"].median / apart
        self.report.figures["openmp_runtimes"] = len(openmp_runtimes())

    def finish(self) -> None:
        """Add the roof, and the shares of it."""
        self.report.add_roof(self.roof)
        for kv_format in FORMATS:
            labels = {"kernel": "decode attention", "format": kv_format.name}
            name = f"decode_attention_{short_name(kv_format.name)}_bandwidth_share"
            share = self.report.worst_share(f"{self.roof.way}_bandwidth_share", **labels)
            assert share is not None
            self.report.figures[name] = share

    def _attend_all(
        self, layers: Sequence[LayerAttention], query: torch.Tensor, batch: AttentionBatch
    ) -> None:
        for layer in layers:
            self.backend.attend(layer, query, batch, self.shape.call)

    def _time(
        self, work: Mapping[str, Callable[[], object]], *, recording: Collection[str]
    ) -> dict[str, Samples]:
        """Return seconds of each piece of work, in turns; of ``recording``, on a GPU, without what
        it takes to start its kernels.
        """
        runs = {
            name: recorded(run, self.device) if self._records and name in recording else run
            for name, run in work.items()
        }
        return in_turns(runs, self.repeats, each_round=self.roof.sample, device=self.device)

    def _check_size(self, fp8_bytes: int) -> None:
        """Warn where codes may wait in a GPU's L2 cache from one round to the next."""
        if self.device.type != "cuda":
            return
        cache = l2_bytes(self.device)
        if fp8_bytes < _TIMES_L2 * cache:
            self.report.warnings.append(
                f"The FP8 codes of all layers are {format_bytes(fp8_bytes)}, less than {_TIMES_L2} "
                f"times the GPU's L2 cache ({format_bytes(cache)}): decoding may read them from "
                f"there. Give more --tokens or --layers."
            )

    def _new_tokens(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.shape.queries(num_tokens), self.shape.keys(num_tokens)

    def _check(self) -> None:
        """Compare both phases with the reference on a small batch of this shape."""
        for kv_format in FORMATS:
            (layer,) = replace(self.shape, num_layers=1).layers(kv_format, 700)
            for batch in (self.shape.batch(1, 700, 700), self.shape.batch(1, 1, 700)):
                query = self.shape.queries(batch.num_tokens)
                exact = query.to(torch.float32)
                expected = ReferenceBackend().attend(layer, exact, batch, self.shape.call)
                # Float32 sums over 700 keys of values up to about 5; on a GPU, whose matrix units
                # take 16 bits, a weight and the output are rounded by 2^-9 each.
                tolerance = 700 * 2.0**-24 * 5
                if self.device.type == "cuda":
                    tolerance = 2.0**-7
                else:
                    query = exact
                found = self.backend.attend(layer, query, batch, self.shape.call)
                if not (found - expected).abs().max() < tolerance:
                    raise EngineError(
                        f"The {self.backend.name} backend is wrong for {kv_format.name}; nothing "
                        f"was timed."
                    )


def bench_kernels(
    shape: Shape,
    *,
    backend: str,
    tokens: int,
    contexts: Sequence[int],
    repeats: int,
    seed: int,
    command: Sequence[str],
) -> Report:
    """Return decode, prefill, and whether kernels and matrix products alternate without stalls.

    Raises:
        KV8Error: as `KernelBench`.
    """
    torch.manual_seed(seed)
    bench = KernelBench(shape, backend, repeats)
    more: dict[str, Any] = {
        "attention_backend": bench.backend.name,
        "shape": asdict(shape),
        "cached_tokens": tokens,
        "repeats": repeats,
    }
    if bench.kernels:
        more["attention_kernels"] = bench.kernels
    with Conditions(command, seed=seed, more=more, device=bench.device) as conditions:
        bench.decode(tokens)
        bench.prefill(contexts)
        if bench.device.type == "cpu":
            bench.turns(min(tokens, 4096))
    bench.finish()
    bench.report.conditions = conditions.facts
    bench.report.warnings += conditions.warnings
    return bench.report


def _labels(kernel: str, sequences: int, context: int, kv_format: KVFormat) -> dict[str, str | int]:
    return {
        "kernel": kernel,
        "sequences": sequences,
        "context": context,
        "format": kv_format.name,
    }
