"""The start-up probe: a short made-up prompt through the real cache, before the first request.

It takes every path a request takes (a first chunk, a chunk over stored tokens, a decode), so a
layer, format or device that fails does so here and not with the first user; and it measures how
much the quantized cache clips. It leaves nothing behind: no block, no prefix, no count.
"""

import logging
import random

import torch

from kv8.cache.manager import CacheManager
from kv8.engine.batch_builder import BatchBuilder
from kv8.engine.health import CacheHealth
from kv8.engine.request import Request
from kv8.engine.runner import Runner
from kv8.engine.scheduler import ScheduledChunk

logger = logging.getLogger(__name__)

_NUM_TOKENS = 64
_SEED = 8


def warm_up(
    runner: Runner,
    cache: CacheManager,
    builder: BatchBuilder,
    health: CacheHealth,
    *,
    max_model_len: int,
) -> None:
    """Run the probe and let ``health`` judge it; cache and counters are as new afterwards."""
    draw = random.Random(_SEED)
    num_tokens = min(_NUM_TOKENS, max_model_len)
    vocab_size = runner.model.geometry.vocab_size
    request = Request(
        request_id="warm-up",
        sequence=-1,
        token_ids=[draw.randrange(vocab_size) for _ in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        max_tokens=1,
    )
    length = max(1, min(cache.layout.max_chunk, num_tokens // 2))
    stops = [*range(length, num_tokens - 1, length), num_tokens - 1, num_tokens]
    finite = True
    cache.start(request.sequence, request.token_ids, reuse_prefix=False)
    try:
        for stop in stops:
            start = request.num_computed_tokens
            if stop == start:
                continue
            fits = cache.reserve(request.sequence, stop)
            assert fits, "a sequence of max_model_len tokens fits an empty cache"
            chunk = ScheduledChunk(request, start, stop - start)
            logits = runner.run(builder.build([chunk], [request]))
            finite = finite and bool(torch.isfinite(logits).all())
            request.num_computed_tokens = stop
    finally:
        cache.release(request.sequence)
    if not finite:
        logger.warning(
            "The model's logits are not finite for a random prompt. Its output may be noise; "
            "another dtype (bfloat16 or float32) may help."
        )
    health.check(runner.counters, during="in the start-up probe")
    runner.counters.reset()
