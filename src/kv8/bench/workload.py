"""One workload on one engine: sequences of one length, prefill and decode timed apart."""

import time
from dataclasses import dataclass

import torch

from kv8.engine.engine import Engine
from kv8.errors import EngineError
from kv8.outputs import RequestOutput
from kv8.sampling_params import SamplingParams


@dataclass(frozen=True)
class Workload:
    """``sequences`` prompts of ``context`` tokens, then ``steps`` tokens for each."""

    sequences: int
    context: int
    steps: int

    def longest(self, step_tokens: int) -> int:
        """Return the most tokens one of its sequences gets.

        While the last prompts are computed, ``step_tokens`` at a time, the first sequences decode.
        """
        prompt_tokens = self.sequences * self.context
        prefill_steps = -(-prompt_tokens // max(1, step_tokens - self.sequences))
        return self.context + prefill_steps + self.steps + 1

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Return made-up prompts; another seed, other prompts."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.sequences, self.context)
        rows: list[list[int]] = torch.randint(vocab_size, shape, generator=generator).tolist()
        return rows


def run_workload(engine: Engine, work: Workload, seed: int) -> tuple[float, float]:
    """Return the seconds of (prefill, decode) of fresh prompts.

    Prefill ends when every sequence has its first token; decode is ``work.steps`` steps after that,
    in which every sequence gains a token each.

    Raises:
        EngineError: a request failed.
    """
    prompts = work.prompts(engine.config.geometry.vocab_size, seed)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    names = [f"bench-{number}" for number in range(len(prompts))]
    started: set[str] = set()
    begin = time.perf_counter()
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, params)
    while len(started) < len(names):
        started.update(output.request_id for output in _step(engine))
    middle = time.perf_counter()
    for _ in range(work.steps):
        _step(engine)
    end = time.perf_counter()
    for name in names:
        engine.abort(name)
    return middle - begin, end - middle


def _step(engine: Engine) -> list[RequestOutput]:
    outputs = engine.step()
    for output in outputs:
        if output.outputs[0].finish_reason is not None:
            reason = output.outputs[0].error or output.outputs[0].finish_reason
            raise EngineError(f"Nothing can be measured: a request ended early ({reason}).")
    return outputs
