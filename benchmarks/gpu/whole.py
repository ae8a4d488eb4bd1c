"""A whole engine at work: a model of Llama-3.1-8B's shape with random weights, decoding.

Long contexts are not computed but put there: random codes in the cache, requests that say they are
computed. What decoding takes does not depend on how its context came about.
"""

import gc
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from benchmarks.gpu import peer
from benchmarks.gpu.environment import roof_of
from benchmarks.gpu.random_model import LLAMA_8B, TINY, random_weights, write_folder
from benchmarks.gpu.sections import Context, row

from kv8.bench.traffic import decode_bytes
from kv8.bench.workload import Workload
from kv8.engine.engine import Engine
from kv8.engine.recording import record_decoding
from kv8.engine.resolve_memory import GPU_SHARE
from kv8.engine.step_input import StepInput
from kv8.formats.encode import bits
from kv8.models.step_work import read_step_work
from kv8.options import EngineOptions
from kv8.sampling_params import SamplingParams

_SHORT, _LONG = peer.WORK, Workload(32, 16_384, 24)
_WARM_UP: Final = 8  # steps that do not count
_DRY: Final = Workload(1, 4, 1)
_GOALS: Final = {"roof": 0.6, "fp8": 1.4}


def body(context: Context) -> dict[str, Any]:
    """Return decode speed of both dtypes and workloads, and the shares of the roof."""
    rows = context.rows
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_folder(Path(folder), TINY if context.dry else LLAMA_8B)
        speeds: dict[tuple[str, str], float] = {}
        for dtype in ("fp8", "bfloat16"):
            if context.seconds_left < 25 and not context.dry:
                found["left_out"] = f"{dtype} and what follows: {context.seconds_left:.0f} s left"
                break
            free = _free(context)
            begin = time.monotonic()
            engine = _engine(context, model, dtype)
            started = time.monotonic() - begin
            settings = [str(decision) for decision in engine.config.decisions]
            found[dtype] = {"start_seconds": started, "settings": settings}
            found[dtype]["capacity"] = str(engine.config.capacity)
            for name, work in _workloads(context).items():
                more, speeds[name, dtype] = _decode(context, engine, work, dtype, name)
                rows += more
            if dtype == "fp8":
                work = _workloads(context)["short"]
                for new in peer.new_tokens(context):
                    context.end_to_end[new] = _end_to_end(engine, work, new)
            found[dtype]["memory"] = _memory(engine, free)
            del engine
            gc.collect()
        if ("long", "bfloat16") in speeds:
            gain = speeds["long", "fp8"] / speeds["long", "bfloat16"]
            what = f"whole engine, decode {_LONG.sequences} x {_LONG.context:,}: fp8 over bf16"
            rows.append(row(what, gain, unit="x", goal=_GOALS["fp8"]))
    return {"passed": True, "rows": rows, **found}


def _free(context: Context) -> int:
    if context.device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(context.device)[0])


def _memory(engine: Engine, free: int) -> dict[str, float]:
    """Return what the engine took of what was free, which must be no more than its share."""
    device = engine.config.device
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    return {"share_taken": 1 - torch.cuda.mem_get_info(device)[0] / free, "share_asked": GPU_SHARE}


def _workloads(context: Context) -> dict[str, Workload]:
    return {"short": _DRY, "long": _DRY} if context.dry else {"short": _SHORT, "long": _LONG}


def _engine(context: Context, model: Path, dtype: str) -> Engine:
    works = _workloads(context).values()
    options: dict[str, Any] = {
        "model": str(model),
        "kv_cache_dtype": dtype,
        "attention_backend": "triton" if context.dry else "auto",
        "device": str(context.device),
        "max_num_seqs": max(work.sequences for work in works),
        "max_num_batched_tokens": 8 if context.dry else 8192,
        "enable_prefix_caching": False,
    }
    longest = max(work.longest(options["max_num_batched_tokens"]) for work in works)
    options["max_model_len"] = longest + _WARM_UP
    if context.dry:
        options["kv_cache_memory"] = "1MiB"
    with random_weights(seed=1, verify=False):
        engine = Engine(EngineOptions(**options))
    if context.dry:
        engine.config = record_decoding(engine.runner, engine.config, lambda _: lambda work: work)
    _fill(engine)
    return engine


def _fill(engine: Engine) -> None:
    """Fill the cache with random finite codes: zeros are read with less power than data."""
    for layer in engine.runner.layers.values():
        for codes in (layer.k_codes, layer.v_codes):
            for block in bits(codes).split(4096):
                drawn = torch.randn(block.shape, device=block.device, dtype=torch.bfloat16)
                block.copy_(bits(drawn.to(codes.dtype)))


def _decode(
    context: Context, engine: Engine, work: Workload, dtype: str, name: str
) -> tuple[list[dict[str, Any]], float]:
    """Return rows on decoding ``work``, and its tokens a second."""
    vocab_size = engine.config.geometry.vocab_size
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    computed = name == "short"
    for number, prompt in enumerate(work.prompts(vocab_size, seed=5)):
        engine.add_request(f"{name} {number}", prompt, params)
    begin = time.perf_counter()
    with nullcontext() if computed else _skipping(engine):
        while engine.scheduler.waiting or any(
            request.num_output_tokens == 0 for request in engine.scheduler.running
        ):
            _step(engine)
    prefilled = time.perf_counter() - begin
    for _ in range(1 if context.dry else _WARM_UP):
        _step(engine)
    steps = []
    for _ in range(work.steps):
        begin = time.perf_counter()
        _step(engine)
        steps.append(time.perf_counter() - begin)
    step = sorted(steps)[len(steps) // 2]
    lengths = [request.num_tokens for request in engine.scheduler.running]
    for number in range(work.sequences):
        engine.abort(f"{name} {number}")
    speed = work.sequences / step
    traffic = read_step_work(engine.config.model_config)
    assert traffic is not None, "the traffic of a plain decoder is known"
    num_bytes = decode_bytes(engine.config, traffic, lengths)
    share = num_bytes / step / roof_of(context).bytes_per_second
    what = f"whole engine, decode {work.sequences} x {work.context:,}, {dtype}"
    goal = _GOALS["roof"] if computed else None
    unit = f"({speed:,.0f} tok/s, {step * 1e3:.2f} ms a step)"
    rows = [
        row(
            f"{what}: of the roof of weights and cache",
            share,
            unit=unit,
            goal=goal,
            spread_ms=[min(steps) * 1e3, max(steps) * 1e3],
        )
    ]
    if computed:
        tokens = work.sequences * work.context
        rows.append(row(f"{what}: prefill before it", tokens / prefilled, unit="tok/s"))
    return rows, speed


def _step(engine: Engine) -> None:
    for output in engine.step():
        completion = output.outputs[0]
        assert completion.finish_reason is None, completion.error or completion.finish_reason


def _skipping(engine: Engine) -> AbstractContextManager[Any]:
    """Let the model's part of steps be left out: their logits are random."""
    vocab_size, device = engine.config.geometry.vocab_size, engine.config.device

    def run(step: StepInput) -> torch.Tensor:
        return torch.randn(len(step.arrays.rows), vocab_size, device=device)

    return mock.patch.object(engine.runner, "run", run)


def _end_to_end(engine: Engine, work: Workload, new: int) -> float:
    """Return generated tokens a second, prompts included in the time."""
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    for number, prompt in enumerate(work.prompts(engine.config.geometry.vocab_size, seed=6)):
        engine.add_request(str(number), prompt, params)
    begin = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    return work.sequences * new / (time.perf_counter() - begin)
