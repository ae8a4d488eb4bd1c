"""The same work in what a user has without kv8: transformers' own batched generation.

A section of its own, after kv8's: it starts threads of its own and may hang or run out of memory,
which must take nothing of ours along.
"""

import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gpu.random_model import LLAMA_8B, TINY, make_weights, write_folder
from benchmarks.gpu.sections import Context, OutOfTimeError, row, within

from kv8.bench.workload import Workload

WORK: Final = Workload(64, 1024, 48)
_DRY: Final = Workload(1, 4, 1)
_GOAL: Final = 10.0
_RECORDED: Final = 278.0  # tok/s; transformers' generate_batch, 29 November 2026, one H200
_NEEDS: Final = 60.0  # seconds, for its own model and its warm-up


def new_tokens(context: Context) -> tuple[int, int]:
    """Return how many tokens are generated end to end: if the peer is measured the fewer, since it
    is slow; else as many as it was recorded with.
    """
    return (1, 2) if context.dry else (16, 128)


def body(context: Context) -> dict[str, Any]:
    """Compare end to end with transformers: measured if time is left."""
    if not context.end_to_end:
        return {"passed": False, "left_out": "the section whole_engine has to be run before"}
    found: dict[str, Any] = {}
    work = _DRY if context.dry else WORK
    few, many = new_tokens(context)
    new, theirs, note = many, _RECORDED, "its speed as recorded on another day"
    if context.seconds_left > _NEEDS:
        try:
            with within(context.seconds_left - 5):
                theirs = _generate_batch(context, work, few)
            new, note = few, "measured in this run"
        except OutOfTimeError as error:
            found["peer_error"] = str(error)
        except Exception as error:  # noqa: BLE001 - the recorded figure stands in
            found["peer_error"] = f"{type(error).__name__}: {error}"
    what = (
        f"whole engine, {work.sequences} x {work.context:,} and {new} new: end to end over "
        f"generate_batch"
    )
    ours = context.end_to_end[new]
    rows = [row(what, ours / theirs, unit="x", goal=_GOAL, note=note, ours=ours, theirs=theirs)]
    return {"passed": True, "rows": rows, **found}


def _generate_batch(context: Context, work: Workload, new: int) -> float:
    """Return what transformers' continuous batching makes of the work, tokens a second.

    Other prompts go before, by the same manager, so that what it does once is not counted.
    """
    from transformers import AutoConfig, ContinuousBatchingConfig, GenerationConfig

    with tempfile.TemporaryDirectory() as folder:
        model = write_folder(Path(folder), TINY if context.dry else LLAMA_8B)
        config = AutoConfig.from_pretrained(model)
    module = make_weights(config, torch.bfloat16, context.device, seed=1)
    module.set_attn_implementation("sdpa")
    asked = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By itself it takes most of the memory there is, which on a CPU takes a minute.
    sizes = ContinuousBatchingConfig(num_blocks=64) if context.dry else None
    seconds, outputs = 0.0, {}
    for seed in (7, 6):
        prompts = work.prompts(config.vocab_size, seed=seed)
        begin = time.perf_counter()
        outputs = module.generate_batch(
            inputs=prompts,
            generation_config=asked,
            continuous_batching_config=sizes,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - begin
    made = sum(len(output.generated_tokens) for output in outputs.values())
    assert made == work.sequences * new, f"generate_batch returned {made} tokens"
    return made / seconds
