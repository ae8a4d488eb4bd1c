"""The start-up probe: a short made-up prompt through the real cache, before the first request.

It takes every path a request takes (a first chunk, a chunk over stored tokens, a decode), so a
layer, format or device that fails does so here and not with the first user; and it measures how
much the quantized cache clips. It leaves nothing behind: no block, no prefix, no count.
"""

import logging
import random

import torch

from kv8.cache.capacity import peak_blocks
from kv8.cache.manager import CacheManager
from kv8.engine.batch_builder import BatchBuilder
from kv8.engine.health import CacheHealth
from kv8.engine.request import Request
from kv8.engine.resolve import ResolvedConfig
from kv8.engine.runner import Runner
from kv8.engine.scheduler import ScheduledChunk

logger = logging.getLogger(__name__)

_NUM_TOKENS = 64
_SEED = 8


def warm_up(runner: Runner, config: ResolvedConfig, health: CacheHealth) -> None:
    """Run the probe and let ``health`` judge it.

    It has block bookkeeping of its own, over the first blocks of the cache.
    """
    draw = random.Random(_SEED)
    layout, num_tokens = config.layout, min(_NUM_TOKENS, config.max_model_len)
    cache = CacheManager(
        layout, peak_blocks(layout, num_tokens), enable_prefix_caching=False, digest_key=b""
    )
    builder = BatchBuilder(cache, num_tokens, runner.model.device)
    request = Request(
        request_id="warm-up",
        sequence=0,
        token_ids=[draw.randrange(config.geometry.vocab_size) for _ in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        max_tokens=1,
    )
    length = max(1, min(layout.max_chunk, num_tokens // 2))
    stops = [*range(length, num_tokens - 1, length), num_tokens - 1, num_tokens]
    finite = True
    cache.start(request.sequence, request.token_ids)
    for stop in stops:
        start = request.num_computed_tokens
        fits = cache.reserve(request.sequence, stop)
        assert fits, "a sequence of max_model_len tokens fits"
        logits = runner.run(
            builder.build([ScheduledChunk(request, start, stop - start)], [request])
        )
        finite = finite and bool(torch.isfinite(logits).all())
        request.num_computed_tokens = stop
        cache.commit(request.sequence, request.token_ids, stop)
    if not finite:
        logger.warning(
            "The model's logits are not finite for a random prompt. Its output may be noise; "
            "another dtype (bfloat16 or float32) may help."
        )
    health.check(runner.counters, during="in the start-up probe")
    runner.counters.reset()
