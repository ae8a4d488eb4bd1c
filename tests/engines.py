"""Engines over tiny models, for tests: start one, run prompts through it, look at its numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kv8.engine.engine import Engine
from kv8.engine.request import Request
from kv8.engine.scheduler import ScheduledChunk
from kv8.options import EngineOptions
from kv8.outputs import RequestOutput
from kv8.sampling_params import SamplingParams

GREEDY = {"temperature": 0.0}


def start_engine(folder: Path, **options: Any) -> Engine:
    """Return an engine that proves its bookkeeping after every step."""
    options = {"kv_cache_memory": "2MiB", **options}
    return Engine(EngineOptions(model=str(folder), **options), check_invariants=True)


def run(engine: Engine, prompts: Sequence[Sequence[int]], **params: Any) -> list[RequestOutput]:
    """Return the outputs of all prompts, sent at once, in their order."""
    sampling = SamplingParams(**{**GREEDY, **params})
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, sampling)
    return finish(engine)


def finish(engine: Engine, *, max_steps: int = 100_000) -> list[RequestOutput]:
    """Step until every request has ended; return outputs in the order of their (numeric) names."""
    outputs = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return [outputs[name] for name in sorted(outputs, key=int)]
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    raise AssertionError(f"requests unfinished after {max_steps} steps")


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return the first completion's tokens of each output."""
    return [output.outputs[0].token_ids for output in outputs]


def first_logprobs(outputs: Sequence[RequestOutput]) -> list[dict[int, float]]:
    """Return, for each output, the log probabilities reported for its first token."""
    reports = [output.outputs[0].logprobs for output in outputs]
    return [{token: p.logprob for token, p in report[0].items()} for report in reports]


def widest_gap(one: Sequence[dict[int, float]], other: Sequence[dict[int, float]]) -> float:
    """Return the largest difference in log probability over all tokens both report."""
    gaps = [
        abs(a[token] - b[token])
        for a, b in zip(one, other, strict=True)
        for token in a.keys() & b.keys()
    ]
    assert gaps
    return max(gaps)


def teacher_forced(engine: Engine, token_ids: Sequence[int], *, chunks: Sequence[int]) -> Any:
    """Return log probabilities (float32 [len(token_ids), V]) of feeding the tokens in ``chunks``.

    Chunk lengths repeat until the tokens are used up: ``[5, 1]`` is a prompt of five and then...
    the last length repeats, so ``[5, 1]`` is a prefill of 5 tokens and decodes after it.
    """
    request = Request(
        request_id="forced",
        sequence=-2,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        max_tokens=1,
        wants_prompt_logits=True,
    )
    lengths = list(chunks)
    rows = []
    engine.cache.start(request.sequence, request.token_ids, reuse_prefix=False)
    while (start := request.num_computed_tokens) < request.num_tokens:
        length = lengths.pop(0) if len(lengths) > 1 else lengths[0]
        chunk = ScheduledChunk(request, start, min(length, request.num_tokens - start))
        assert engine.cache.reserve(request.sequence, chunk.stop)
        logits = engine.runner.run(engine.builder.build([chunk], [request]))
        request.num_computed_tokens = request.num_prompt_logits = chunk.stop
        engine.cache.commit(request.sequence, request.token_ids, chunk.stop)
        rows.append(logits)
    engine.cache.release(request.sequence)
    return torch.log_softmax(torch.cat(rows), dim=-1)
