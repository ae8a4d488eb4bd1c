"""The engine: requests in, tokens out, one step at a time. Everything it owns hangs on the object.

A step: the scheduler picks the work, the batch builder makes tensors of it, the runner computes
logits over the quantized cache, the sampler chooses tokens, each completion takes its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kv8.cache.manager import CacheManager
from kv8.engine.announce import announce
from kv8.engine.attention_kernels import choose_kernels
from kv8.engine.batch_builder import BatchBuilder
from kv8.engine.completion import Completion, CompletionContext, CompletionGroup
from kv8.engine.counters import EngineCounters
from kv8.engine.detokenizer import TokenDecoder
from kv8.engine.end_tokens import find_end_tokens
from kv8.engine.failures import explain_failure
from kv8.engine.gpu_memory import open_budget
from kv8.engine.grammars import Grammars
from kv8.engine.health import CacheHealth
from kv8.engine.intake import Intake
from kv8.engine.measured_scales import ScaleMeasurement, measure_scales
from kv8.engine.recording import record_decoding
from kv8.engine.resolve import resolve_options
from kv8.engine.roster import Roster
from kv8.engine.runner import Runner, ScaleStatus
from kv8.engine.sampler import SampledToken, sample
from kv8.engine.scheduler import ScheduledChunk, Scheduler
from kv8.engine.upload import take_rows
from kv8.engine.warm_up import warm_up
from kv8.errors import RequestError
from kv8.models.load import load_model
from kv8.models.tokenizer import load_tokenizer
from kv8.options import EngineOptions
from kv8.outputs import FinishReason, RequestOutput
from kv8.sampling_params import SamplingParams

_HEALTH_INTERVAL = 32  # steps between looks at the counters, which cost a copy from the device


class Engine:
    """One model, one quantized cache, and the requests they serve.

    Args:
        options: what the user wants.
        measure: measures scales, for options that ask for it; see `kv8.calibration.start_up`.
        check_invariants: prove after every step that no block is lost or owned twice (slow).

    Attributes:
        config: what the options came to, with reasons.
        tokenizer: the model's.
        grammars: what structured output is compiled by.
        counters: what has been done so far.

    Raises:
        RequestError: the options do not fit the model; see `kv8.engine.resolve.resolve_options`.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        measure: ScaleMeasurement | None = None,
        check_invariants: bool = False,
    ) -> None:
        assert (measure is not None) is options.measures_scales, "use start_engine"
        config = resolve_options(options)
        self.tokenizer = load_tokenizer(config.source, options.tokenizer)
        budget = open_budget(config)
        model = load_model(
            config.source,
            config.model_config,
            config.geometry,
            config.dtype,
            device=config.device,
            fuse=options.attention_backend != "reference",  # which is plain torch everywhere
        )
        if measure is not None:
            config = measure_scales(measure, model, config, self.tokenizer)
        config = choose_kernels(model, config)
        config = config if budget is None else budget.fit_cache(model, config)
        self.runner = Runner(model, config)
        self.config = config = record_decoding(self.runner, config)
        announce(config, self.runner)
        self.counters = EngineCounters()
        self.cache = CacheManager(
            config.layout,
            config.capacity.num_blocks,
            enable_prefix_caching=options.enable_prefix_caching,
            digest_key=self.runner.cache_key(),
        )
        longest = config.max_model_len
        self.builder = BatchBuilder(self.cache, longest, model.device)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
        self._health = CacheHealth(config.plan, config.scales, options.skip_layers)
        end_tokens, vocab_size = find_end_tokens(model, self.tokenizer), config.geometry.vocab_size
        self.grammars = Grammars(self.tokenizer, end_tokens, vocab_size)
        self._intake = Intake(
            CompletionContext(TokenDecoder(self.tokenizer), end_tokens, vocab_size, self.grammars),
            max_model_len=longest,
            share_prompts=options.enable_prefix_caching,
            seed=options.seed,
        )
        self._roster = Roster()
        self._check_invariants = check_invariants
        warm_up(self.runner, config, self._health)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return self.scheduler.has_unfinished

    @property
    def num_preemptions(self) -> int:
        """How often a running request had to give up its blocks and start over."""
        return self.scheduler.num_preemptions

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        arrived_at: float | None = None,
    ) -> None:
        """Queue a request under a name not in use; `step` works on it.

        ``prompt`` is the prompt's text, if there is one, handed back with the output;
        ``arrived_at`` is when it came, by `time.monotonic`, if that is not now.

        Raises:
            RequestError: the name is in use, or the prompt cannot be served; says what could.
        """
        if self._roster.group(request_id) is not None:
            raise RequestError(f"request_id={request_id!r} is in use. Give each request its own.")
        group = self._intake.open(
            request_id, prompt_token_ids, params, prompt=prompt, arrived_at=arrived_at
        )
        self._roster.add(group)
        for completion in group.completions:
            self.scheduler.add(completion.request)

    def step(self) -> list[RequestOutput]:
        """Compute one step; return the requests that gained tokens or ended, oldest first.

        Each request has one output object, brought up to date with every step. A failure ends the
        requests it concerns with reason ``error``; the others go on.
        """
        chunks: list[ScheduledChunk] = []
        try:
            chunks = self.scheduler.schedule()
            if not chunks:
                return []
            step = self.builder.build(chunks, self.scheduler.running)
            outputs = self._take(chunks, step.row_counts, self.runner.run(step))
        except Exception as error:  # noqa: BLE001 - whatever failed must not take the others along
            outputs = self._fail(chunks, error)
        except BaseException as error:  # an interrupt goes on, but leaves the engine in order
            self._fail(chunks, error)
            raise
        self.counters.steps += 1
        self.counters.computed_tokens += sum(chunk.num_tokens for chunk in chunks)
        if self.counters.steps % _HEALTH_INTERVAL == 0 or any(o.finished for o in outputs):
            self._health.check(self.runner.counters, during="so far")
        if self._check_invariants:
            self.check_invariants()
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, with reason ``abort``; return its output, `None` if there is none."""
        group = self._roster.group(request_id)
        if group is None:
            return None
        for completion in group.completions:
            if not completion.request.finished:
                self._end(completion, "abort")
        return self._roster.publish([group])[0]

    def set_scales(self, kv_scales: str | Path | Mapping[str, Any]) -> None:
        """Use other K and V scales from now on.

        Stored prefixes are dropped; running requests keep what they have generated, and recompute
        what they stored. ``kv_scales`` is what `EngineOptions.kv_scales` takes.

        Raises:
            ScaleError: a scale is missing, unbound or invalid; nothing is changed then.
        """
        self.runner.set_scales(kv_scales)
        self._drop_stored()

    def update_weights(
        self,
        weights: Mapping[str, torch.Tensor],
        kv_scales: str | Path | Mapping[str, Any] | None = None,
    ) -> None:
        """Replace weights by name; the cache forgets all it stored under the old ones.

        Calibrated scales belong to the weights they were measured with. Without ``kv_scales`` they
        stay in use, `scale_status` says ``stale``, and a warning is logged.

        Raises:
            RequestError: a name is not a weight of the model, or a shape differs; nothing is
                changed then.
            ScaleError: the scales are not valid; nothing is changed then.
        """
        self.runner.update_weights(weights, kv_scales)
        self._drop_stored()

    @property
    def scale_status(self) -> ScaleStatus:
        """Whether the cache's scales fit the weights in use."""
        return self.runner.scale_status

    def check_invariants(self) -> None:
        """Raise `AssertionError` if queues, block tables or reference counts contradict."""
        self.cache.check_invariants()
        self.scheduler.check_invariants()
        queued = {r.sequence for r in (*self.scheduler.running, *self.scheduler.waiting)}
        assert queued == self._roster.sequences, "a request is lost between engine and scheduler"

    def _take(
        self, chunks: Sequence[ScheduledChunk], row_counts: Sequence[int], logits: torch.Tensor
    ) -> list[RequestOutput]:
        """Record a computed step, choose the next tokens (``logits`` is float32 [R, V])."""
        sampled: list[tuple[CompletionGroup, Completion]] = []
        last_rows: list[int] = []
        row = 0
        for chunk, num_rows in zip(chunks, row_counts, strict=True):
            group, completion = self._roster.find(chunk.request)
            self.scheduler.commit(chunk)
            num_prompt_rows = num_rows - int(chunk.reaches_end)
            if num_prompt_rows:
                group.add_prompt_logits(logits[row : row + num_prompt_rows])
                chunk.request.num_prompt_logits += num_prompt_rows
            row += num_rows
            if chunk.reaches_end:
                sampled.append((group, completion))
                last_rows.append(row - 1)
        wanted = take_rows(logits, last_rows)
        states = [completion.sampling for _, completion in sampled]
        self.grammars.look_ahead([(s.mask, s.output_token_ids) for s in states if s.mask])
        outcomes = sample(wanted, states)
        for (_, completion), outcome in zip(sampled, outcomes, strict=True):
            self._accept(completion, outcome)
        return self._roster.publish(group for group, _ in sampled)

    def _accept(self, completion: Completion, outcome: SampledToken) -> None:
        if outcome.error is not None:
            refused = isinstance(outcome.error, RequestError)
            self._end(completion, "error", str(outcome.error), refused=refused)
            return
        try:
            reason = completion.accept(outcome)
        except Exception as error:  # noqa: BLE001 - only this completion's text is concerned
            self._end(completion, "error", explain_failure(error))
            return
        self.counters.count_token(completion.request)
        if reason is not None:
            self._end(completion, reason)

    def _end(
        self,
        completion: Completion,
        reason: FinishReason,
        error: str | None = None,
        *,
        refused: bool = False,
    ) -> None:
        self.scheduler.finish(completion.request, reason)
        self._roster.end(completion)
        self.counters.count_finished(completion.request, reason)
        completion.end(reason, error=error, refused=refused)

    def _fail(self, chunks: Sequence[ScheduledChunk], error: BaseException) -> list[RequestOutput]:
        """End the requests that ``error`` concerns: those of the step, or if none were picked
        yet, those whose turn it was.
        """
        explanation = explain_failure(error)
        self.counters.failed_steps += 1
        concerned = [chunk.request for chunk in chunks]
        if not concerned:
            concerned = [*self.scheduler.running, *self.scheduler.waiting[:1]]
        failed = self._roster.find_all(concerned)
        for _, completion in failed:
            self._end(completion, "error", explanation)
        return self._roster.publish(group for group, _ in failed)

    def _drop_stored(self) -> None:
        self.scheduler.preempt_all()
        self.cache.reset(self.runner.cache_key())
        self._health.scales_changed(self.runner.scales)
