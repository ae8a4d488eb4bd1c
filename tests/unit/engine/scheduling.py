"""A scheduler over a real cache manager, driven without a model: each new token is a counter."""

from kv8.cache.layout import make_layout
from kv8.cache.manager import CacheManager
from kv8.engine.request import Request
from kv8.engine.scheduler import Scheduler
from kv8.formats.base import FP8_E4M3
from kv8.geometry import LayerGeometry, ModelGeometry
from kv8.layer_plan import LayerFormat, LayerPlan


def make_geometry(windows=(None,)):
    return ModelGeometry(
        architecture="Tiny",
        model_dtype="float32",
        max_position=4096,
        vocab_size=100,
        layers=tuple(
            LayerGeometry(i, "attention", 2, 1, 8, window, i) for i, window in enumerate(windows)
        ),
    )


def make_scheduler(
    *,
    num_blocks,
    block_size=4,
    max_num_batched_tokens=64,
    max_num_seqs=16,
    windows=(None,),
    prefix_caching=True,
):
    geometry = make_geometry(windows)
    plan = LayerPlan(tuple(LayerFormat(x.layer, FP8_E4M3) for x in geometry.layers))
    layout = make_layout(geometry, plan, block_size, max_num_batched_tokens)
    cache = CacheManager(
        layout, num_blocks, enable_prefix_caching=prefix_caching, digest_key=b"test"
    )
    scheduler = Scheduler(
        cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    return scheduler, cache


def make_request(name, sequence, num_prompt_tokens, *, max_tokens=1, prompt=None, **more):
    """Return a request whose prompt is like ``prompt``'s request, or else like no other's."""
    base = 1000 * (sequence if prompt is None else prompt)
    return Request(
        request_id=name,
        sequence=sequence,
        token_ids=[base + i for i in range(num_prompt_tokens)],
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        **more,
    )


def run_step(scheduler):
    """Schedule, pretend to compute, sample; return the chunks."""
    chunks = scheduler.schedule()
    scheduler._cache.check_invariants()
    finish_step(scheduler, chunks)
    scheduler._cache.check_invariants()
    scheduler.check_invariants()
    return chunks


def finish_step(scheduler, chunks):
    """Commit what was computed, sample where a chunk reaches its end."""
    for chunk in chunks:
        samples = chunk.reaches_end
        scheduler.commit(chunk)
        if samples:
            request = chunk.request
            # Each sequence goes its own way, so that outputs are never shared.
            request.token_ids.append(-1000 * (request.sequence + 1) - request.num_output_tokens)
            if request.reached_max_tokens:
                scheduler.finish(request, "length")


def finish_all(scheduler, *, max_steps=10_000):
    """Run until every request has ended; return them in the order they ended."""
    ended = []
    for _ in range(max_steps):
        if not scheduler.has_unfinished:
            return ended
        ended += [chunk.request for chunk in run_step(scheduler) if chunk.request.finished]
    raise AssertionError(f"requests still unfinished after {max_steps} steps")
