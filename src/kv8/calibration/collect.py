"""Runs samples through a model with an unquantized cache and notes what its attention sees.

A second runner on the loaded model does it, with a cache of its own in the model's dtype, so
that nothing observed depends on any scale. Each sample is computed as a prompt is: packed with
others, without padding, in chunks, and from no stored prefix.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kv8.cache.capacity import capacity, peak_blocks
from kv8.cache.layout import make_layout
from kv8.cache.manager import CacheManager
from kv8.calibration.interrupts import held_interrupts, raise_noticed
from kv8.calibration.observations import PARTS, Observations, Part
from kv8.calibration.observer import ObservingBackend
from kv8.calibration.parts import split_samples
from kv8.engine.batch_builder import BatchBuilder
from kv8.engine.request import Request
from kv8.engine.resolve import ResolvedConfig
from kv8.engine.runner import Runner
from kv8.engine.scheduler import ScheduledChunk
from kv8.errors import RequestError
from kv8.formats.base import FORMATS
from kv8.layer_plan import make_layer_plan
from kv8.models.hook import HookedModel
from kv8.scales.scale import ModelScales

_FEW = 4  # rows from which on kv8's kernels multiply as they do for a full step


@dataclass(frozen=True)
class SampleBatch:
    """Samples that are computed together.

    Attributes:
        part: the part of the data they belong to.
        samples: their numbers.
        num_done: samples done once these are, in the order of the batches.
    """

    part: Part
    samples: tuple[int, ...]
    num_done: int


def sample_batches(parts: Sequence[Part], batch_size: int) -> Iterator[SampleBatch]:
    """Yield the batches of all samples, part by part; ``parts`` is the part of each sample."""
    num_done = 0
    for part in PARTS:
        members = [sample for sample, own in enumerate(parts) if own == part]
        for start in range(0, len(members), batch_size):
            batch = tuple(members[start : start + batch_size])
            num_done += len(batch)
            yield SampleBatch(part, batch, num_done)


def collect(
    model: HookedModel,
    config: ResolvedConfig,
    samples: Sequence[Sequence[int]],
    observations: Observations,
    *,
    parts: Sequence[Part] | None = None,
    batch_size: int = 8,
    start: int = 0,
    on_batch: Callable[[int], None] | None = None,
) -> None:
    """Observe the queries, keys and values of every token of ``samples`` in every layer.

    ``observations`` always holds whole batches: whatever ends this early, it stands as after the
    last ``on_batch``.

    Args:
        model: what to observe; it may serve an engine, whose cache and requests are not touched.
        config: what is known of it; it is observed with an unquantized cache, whatever this says.
        samples: token numbers of each, at least one and at most ``max_model_len``.
        observations: where to add what is seen.
        parts: the part of each sample; by default two halves and none held out.
        batch_size: samples that are computed together.
        start: samples done before, as ``on_batch`` was told.
        on_batch: called after every batch with the number of samples done.

    Raises:
        RequestError: a sample cannot be computed.
        CapacityError: there is no memory for a batch.
        ScaleError: a value was NaN or infinite; names layer and side.
    """
    check_samples(samples, config)
    if parts is None:
        parts = split_samples(samples, held_out=0.0)
    pending = [b for b in sample_batches(parts, batch_size) if b.num_done > start]
    if not pending:
        return
    most = max(len(batch.samples) for batch in pending)
    collector = _Collector(model, config, longest=max(map(len, samples)), batch_size=most)
    for batch in pending:
        raise_noticed()
        seen = collector.observe(batch, samples)
        seen.check_finite()
        with held_interrupts():
            observations.merge(seen)
            if on_batch is not None:
                on_batch(batch.num_done)


def check_samples(samples: Sequence[Sequence[int]], config: ResolvedConfig) -> None:
    """Raise `RequestError` unless each sample is a prompt the model can compute."""
    vocab_size, longest = config.geometry.vocab_size, config.max_model_len
    for number, sample in enumerate(samples):
        if not 1 <= len(sample) <= longest:
            raise RequestError(
                f"Sample {number} of the calibration data has {len(sample)} tokens; between 1 and "
                f"{longest} (max_model_len) can be computed."
            )
        if min(sample) < 0 or max(sample) >= vocab_size:
            raise RequestError(
                f"Sample {number} of the calibration data holds a token that is none of the "
                f"model's, 0 to {vocab_size - 1}. Is the tokenizer another model's?"
            )


class _Collector:
    """A runner with an unquantized cache for one batch of samples."""

    def __init__(
        self, model: HookedModel, config: ResolvedConfig, *, longest: int, batch_size: int
    ) -> None:
        self._config = config = _unquantized(config, longest, batch_size)
        self._runner = Runner(model, config)
        self._backend = self._runner.backend
        self._most_tokens = _most_tokens(model, config)
        self._cache = CacheManager(
            config.layout, config.capacity.num_blocks, enable_prefix_caching=False, digest_key=b""
        )
        self._builder = BatchBuilder(self._cache, longest, model.device)

    def observe(self, batch: SampleBatch, samples: Sequence[Sequence[int]]) -> Observations:
        """Return what a batch's tokens are in every layer, and nothing else."""
        seen = Observations(self._config.dtype)
        observer = ObservingBackend(self._backend, seen)
        observer.part = batch.part
        self._runner.backend = observer
        requests = [_request(number, samples[number]) for number in batch.samples]
        try:
            for request in requests:
                self._cache.start(request.sequence, request.token_ids, reuse_prefix=False)
            while chunks := self._next_chunks(requests):
                observer.samples = [chunk.request.sequence for chunk in chunks]
                self._runner.run(self._builder.build(chunks, requests))
                for chunk in chunks:
                    request = chunk.request
                    request.num_computed_tokens = chunk.stop
                    self._cache.commit(request.sequence, request.token_ids, chunk.stop)
        finally:
            for request in requests:
                self._cache.release(request.sequence)
        seen.count(batch.part, sum(r.num_tokens for r in requests), len(requests))
        return seen

    def _next_chunks(self, requests: Sequence[Request]) -> list[ScheduledChunk]:
        """Return the next step's work: what is left of the samples, in order, up to its size."""
        budget = self._step_size(sum(request.num_pending_tokens for request in requests))
        chunks = []
        for request in requests:
            length = min(budget, request.num_pending_tokens)
            if length > 0:
                start = request.num_computed_tokens
                fits = self._cache.reserve(request.sequence, start + length)
                assert fits, "the cache holds a batch of the longest samples"
                chunks.append(ScheduledChunk(request, start, length))
                budget -= length
        return chunks

    def _step_size(self, num_pending: int) -> int:
        """Return how many tokens the next step computes, of those pending."""
        most = self._most_tokens
        # A last step of very few tokens would multiply in another order than the others.
        return most - _FEW if 0 < num_pending - most < _FEW < most else most


def _request(number: int, sample: Sequence[int]) -> Request:
    return Request(
        request_id=f"sample {number}",
        sequence=number,
        token_ids=list(sample),
        num_prompt_tokens=len(sample),
        max_tokens=1,
    )


def _most_tokens(model: HookedModel, config: ResolvedConfig) -> int:
    """Return the most tokens of a step.

    Where kv8's own kernels make a model's products, they do so up to some number of rows; and then
    a token's result depends neither on the tokens beside it nor on the number of threads, which
    torch's products of more rows do not promise. Scales that anyone can measure again, to the last
    bit, are worth the speed it costs where there is no matrix unit.
    """
    most = config.options.max_num_batched_tokens
    return most if model.fusion is None else min(most, model.fusion.most_native)


def _unquantized(config: ResolvedConfig, longest: int, batch_size: int) -> ResolvedConfig:
    """Return ``config`` with a cache in the model's dtype for a batch of ``longest`` samples."""
    plain = FORMATS[config.dtype]
    plan = make_layer_plan(config.geometry, plain)
    layout = make_layout(
        config.geometry,
        plan,
        config.layout.block_size,
        max_chunk=config.options.max_num_batched_tokens,
    )
    num_blocks = batch_size * peak_blocks(layout, longest)
    return replace(
        config,
        kv_format=plain,
        plan=plan,
        scales=ModelScales(),
        fp8_queries=False,
        layout=layout,
        capacity=capacity(layout, num_blocks * layout.block_bytes, longest),
    )
