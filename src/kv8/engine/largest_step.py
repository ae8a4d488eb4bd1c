"""The largest step an engine ever computes, made up: what it takes is what must be left free."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kv8.cache.capacity import capacity, peak_blocks
from kv8.cache.manager import CacheManager
from kv8.engine.batch_builder import BatchBuilder
from kv8.engine.logprobs import token_logprobs
from kv8.engine.request import Request
from kv8.engine.resolve import ResolvedConfig
from kv8.engine.runner import Runner
from kv8.engine.sampler import SamplingState, sample
from kv8.engine.scheduler import PROMPT_LOGITS_CHUNK, ScheduledChunk
from kv8.engine.step_input import StepInput
from kv8.sampling_params import SamplingParams


def lengths_of_largest_step(config: ResolvedConfig) -> list[int]:
    """Return how many tokens each sequence has in a prefill of as many as a step may compute."""
    left, longest = config.options.max_num_batched_tokens, config.max_model_len
    lengths: list[int] = []
    while left > 0 and len(lengths) < config.options.max_num_seqs:
        lengths.append(min(left, longest))
        left -= lengths[-1]
    return lengths


def with_room_for(config: ResolvedConfig, lengths: Sequence[int]) -> ResolvedConfig:
    """Return ``config`` with a cache of no more than prompts of these lengths fill."""
    layout = config.layout
    num_blocks = sum(peak_blocks(layout, length) for length in lengths)
    memory = num_blocks * layout.block_bytes
    return replace(config, capacity=capacity(layout, memory, config.max_model_len))


def with_room_for_largest_step(config: ResolvedConfig) -> ResolvedConfig:
    """Return ``config`` with a cache of no more than the largest step fills."""
    return with_room_for(config, lengths_of_largest_step(config))


def build_prompts(
    config: ResolvedConfig, lengths: Sequence[int], device: torch.device
) -> StepInput:
    """Return a step that computes made-up prompts, over the first blocks of a cache."""
    layout, vocab_size = config.layout, config.geometry.vocab_size
    cache = CacheManager(
        layout,
        sum(peak_blocks(layout, length) for length in lengths),
        enable_prefix_caching=False,
        digest_key=b"",
    )
    builder = BatchBuilder(cache, max(lengths), device)
    requests = [
        Request(
            request_id=f"made up {number}",
            sequence=number,
            token_ids=[(7 * i + number) % vocab_size for i in range(length)],
            num_prompt_tokens=length,
            max_tokens=1,
        )
        for number, length in enumerate(lengths)
    ]
    for request in requests:
        cache.start(request.sequence, request.token_ids)
        fits = cache.reserve(request.sequence, request.num_tokens)
        assert fits, "there is room for all prompts"
    chunks = [ScheduledChunk(request, 0, request.num_tokens) for request in requests]
    return builder.build(chunks, requests)


def run_largest_step(runner: Runner, config: ResolvedConfig) -> None:
    """Compute prompts of as many tokens as a step may have, and choose tokens the costliest way.

    ``runner`` has a cache from `with_room_for_largest_step`. The logits are those of as many
    sequences as may run, and of one chunk of a prompt whose log probabilities were asked for.
    """
    options, vocab_size = config.options, config.geometry.vocab_size
    lengths = lengths_of_largest_step(config)
    built = build_prompts(config, lengths, runner.model.device)
    num_tokens = sum(lengths)
    num_logits = min(num_tokens, options.max_num_seqs + PROMPT_LOGITS_CHUNK)
    logits = runner.run(built.with_rows(range(num_tokens - num_logits, num_tokens)))
    reported = logits[:PROMPT_LOGITS_CHUNK]
    token_logprobs(reported, [0] * len(reported), [1] * len(reported))
    chosen = logits[: options.max_num_seqs]
    params = SamplingParams(temperature=1.0, top_p=0.9)
    sample(
        chosen,
        [
            SamplingState(
                params, token_ids=[0], num_prompt_tokens=1, vocab_size=vocab_size, seed=number
            )
            for number in range(len(chosen))
        ],
    )
