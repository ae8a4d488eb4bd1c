"""Offline generation: one object that owns an engine and answers prompts in order."""

import difflib
import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from kv8.calibration.start_up import start_engine
from kv8.engine.engine import Engine
from kv8.engine.prompts import Conversation, Prompt, TokenizedPrompt, conversations, prompts_of
from kv8.engine.report import KVCacheReport, live_report
from kv8.errors import RequestError
from kv8.options import OPTION_FIELDS, EngineOptions
from kv8.outputs import RequestOutput
from kv8.sampling_params import SamplingParams


class LLM:
    """A model with a quantized KV cache, for use from Python.

    ``LLM("smollm2", kv_cache_dtype="fp8").generate("London is the capital of")``

    Args:
        model: folder, ``.gguf`` file, hub id or built-in name.
        options: fields of `kv8.options.EngineOptions`.

    Attributes:
        engine: the engine underneath; one request at a time may drive it.

    Raises:
        RequestError: an option is unknown, or does not fit the model.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        for name in options:
            if name not in OPTION_FIELDS:
                raise RequestError(_unknown_option(name))
        name = str(model) if isinstance(model, Path) else model
        self._engine: Engine | None = start_engine(EngineOptions(model=name, **options))
        self._num_requests = 0

    @property
    def engine(self) -> Engine:
        """The engine underneath.

        Raises:
            RequestError: the `LLM` was closed.
        """
        if self._engine is None:
            raise RequestError("This LLM was closed; its model and cache are gone. Make a new one.")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs come in the order of the prompts.

        Args:
            prompts: one or a list of: text, token numbers, ``{"prompt": text}``,
                ``{"prompt_token_ids": numbers}``. A flat list of numbers is one prompt.
            sampling_params: for all prompts, or one for each. By default `SamplingParams()`: the
                same for every model; a model's own generation config is not looked at.
            use_tqdm: whether to show a progress bar on stderr.

        Raises:
            RequestError: a prompt is empty, too long, or not a prompt, or the parameters do not
                fit; nothing is generated then.
        """
        engine = self.engine
        tokenized = prompts_of(prompts, engine.tokenizer)
        return self._run(tokenized, sampling_params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations: lists of ``{"role": ..., "content": ...}``.

        Args:
            messages: one conversation, or a list of them.
            sampling_params: as for `generate`.
            use_tqdm: as for `generate`.
            chat_template: a Jinja template in place of the tokenizer's.
            add_generation_prompt: whether to add what begins an answer.

        Raises:
            RequestError: no template, or the template refuses the messages; else as `generate`.
        """
        tokenized = conversations(
            messages,
            self.engine.tokenizer,
            template=chat_template,
            add_generation_prompt=add_generation_prompt,
        )
        return self._run(tokenized, sampling_params, use_tqdm=use_tqdm)

    def stream_chat(
        self, messages: Conversation, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Answer one conversation, step by step.

        Yields:
            The same output object after every step, its text grown; close the generator to abort.

        Raises:
            RequestError: as `chat`, at the first step.
        """
        prompts = conversations(messages, self.engine.tokenizer)
        if len(prompts) != 1:
            raise RequestError(f"stream_chat answers one conversation, got {len(prompts)}.")
        with self._requests() as add:
            name = add(prompts[0], sampling_params or SamplingParams())
            while self.engine.has_unfinished:
                yield from (out for out in self.engine.step() if out.request_id == name)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, a transformers object."""
        return self.engine.tokenizer

    def kv_cache_report(self) -> KVCacheReport:
        """Return the layer table with what was stored so far; ``str()`` of it is a table."""
        return live_report(self.engine.config, self.engine.runner)

    def close(self) -> None:
        """Free the model and the cache; the object cannot be used afterwards."""
        self._engine = None
        gc.collect()  # a hooked model refers to itself; its memory should not wait for chance

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(prompts))
        with self._requests() as add:
            names = [add(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
            finished: dict[str, RequestOutput] = {}
            with _Progress(len(names), shown=use_tqdm) as progress:
                while self.engine.has_unfinished:
                    outputs = self.engine.step()
                    progress.update(outputs)
                    finished.update((out.request_id, out) for out in outputs if out.finished)
        return [finished[name] for name in names]

    @contextmanager
    def _requests(self) -> Iterator[Callable[[TokenizedPrompt, SamplingParams], str]]:
        """Give a function that queues requests; abort all of them if the work is broken off."""
        engine = self.engine
        names: list[str] = []

        def add(prompt: TokenizedPrompt, params: SamplingParams) -> str:
            name = str(self._num_requests)
            text, token_ids = prompt
            try:
                engine.add_request(name, token_ids, params, prompt=text)
            except RequestError as error:
                raise type(error)(f"Prompt {len(names)}: {error}") from error
            self._num_requests += 1
            names.append(name)
            return name

        try:
            yield add
        except BaseException:  # ctrl-C too: the blocks must not stay taken
            for name in names:
                engine.abort(name)
            raise


class _Progress:
    """A progress bar over requests that shows the tokens generated so far."""

    def __init__(self, num_requests: int, *, shown: bool) -> None:
        self._bar = tqdm(
            total=num_requests, desc="Processed prompts", unit="prompt", disable=not shown
        )
        self._num_tokens: dict[str, int] = {}

    def update(self, outputs: Sequence[RequestOutput]) -> None:
        """Take what a step gave back."""
        if self._bar.disable:
            return
        for output in outputs:
            self._num_tokens[output.request_id] = sum(len(o.token_ids) for o in output.outputs)
        total = sum(self._num_tokens.values())
        self._bar.set_postfix_str(f"{total} tokens", refresh=False)
        self._bar.update(sum(output.finished for output in outputs))

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    listed = isinstance(params, Sequence)
    if not listed or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(
            f"sampling_params must be a SamplingParams, or a list of them, got {params!r:.80}."
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"There are {len(params)} sampling_params for {num_prompts} prompts. Give one for all, "
            f"or one for each."
        )
    return params


def _unknown_option(name: str) -> str:
    close = difflib.get_close_matches(name, OPTION_FIELDS, n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"LLM has no option {name!r}.{hint} Options: {', '.join(OPTION_FIELDS)}."
