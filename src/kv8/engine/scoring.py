"""A text's next-token distributions, in full, as a given cache makes them."""

from collections.abc import Iterator, Sequence

import torch

from kv8.engine.engine import Engine
from kv8.engine.request import Request
from kv8.engine.scheduler import PROMPT_LOGITS_CHUNK, ScheduledChunk
from kv8.errors import CapacityError, RequestError

_SEQUENCE = "scoring"  # a name no request has: the engine numbers its own


def prompt_logits(engine: Engine, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield the logits after each token of a text, a few hundred rows at a time.

    Every token is computed through the cache, as in a request; nothing is taken from stored
    prefixes. The engine must have no requests meanwhile.

    Args:
        engine: an idle engine.
        token_ids: T tokens, at least one, at most ``max_model_len``.

    Yields:
        float32 [R, V], T rows in all, in the order of the tokens.

    Raises:
        RequestError: the engine is busy, or the text has no tokens or too many.
        CapacityError: the cache cannot hold the text.
    """
    longest = engine.config.max_model_len
    if engine.has_unfinished:
        raise RequestError("A text cannot be scored while the engine has requests to work on.")
    if not 1 <= len(token_ids) <= longest:
        raise RequestError(f"A text to score has 1 to {longest} tokens, got {len(token_ids)}.")
    request = Request(
        request_id=_SEQUENCE,
        sequence=-1,
        token_ids=[*token_ids, 0],  # one more, so that the text's last row is a prompt row too
        num_prompt_tokens=len(token_ids) + 1,
        max_tokens=1,
        wants_prompt_logits=True,
    )
    cache = engine.cache
    step = min(PROMPT_LOGITS_CHUNK, engine.config.options.max_num_batched_tokens)
    cache.start(request.sequence, request.token_ids, reuse_prefix=False)
    try:
        for start in range(0, len(token_ids), step):
            stop = min(start + step, len(token_ids))
            if not cache.reserve(request.sequence, stop):
                raise CapacityError(
                    f"The cache cannot hold the {len(token_ids)} tokens to score. Give it more "
                    f"with kv_cache_memory."
                )
            chunk = ScheduledChunk(request, start, stop - start)
            yield engine.runner.run(engine.builder.build([chunk], [request]))
            request.num_computed_tokens = stop
            request.num_prompt_logits = stop
            cache.commit(request.sequence, request.token_ids, stop)
    finally:
        cache.release(request.sequence)
