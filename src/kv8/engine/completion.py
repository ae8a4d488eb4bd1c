"""A prompt's completions while they grow: from sampled tokens to what the caller is given."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from kv8.engine.detokenizer import Detokenizer, TokenDecoder
from kv8.engine.grammars import Grammars
from kv8.engine.logprobs import token_logprobs
from kv8.engine.request import Request
from kv8.engine.sampler import SampledToken, SamplingState
from kv8.engine.stop import OutputText
from kv8.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from kv8.sampling_params import SamplingParams


@dataclass(frozen=True)
class CompletionContext:
    """What the completions of one engine share.

    Attributes:
        decoder: of the model's tokenizer.
        end_token_ids: the model's end tokens.
        vocab_size: V.
        grammars: opens the token masks of structured output.
    """

    decoder: TokenDecoder
    end_token_ids: Collection[int]
    vocab_size: int
    grammars: Grammars


class Completion:
    """One completion: the sequence the scheduler sees, and what becomes of its tokens.

    Attributes:
        request: the sequence.
        sampling: how its tokens are chosen.
        output: what the caller sees of it, brought up to date with each token.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        context: CompletionContext,
        *,
        index: int,
        seed: int,
    ) -> None:
        form = params.structured_outputs
        self.request = request
        self.sampling = SamplingState(
            params,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            vocab_size=context.vocab_size,
            seed=seed,
            end_token_ids=context.end_token_ids,
            mask=None if form is None else context.grammars.open(form),
        )
        wants_logprobs = params.logprobs is not None
        self.output = CompletionOutput(
            index=index,
            text="",
            token_ids=[],
            cumulative_logprob=0.0 if wants_logprobs else None,
            logprobs=[] if wants_logprobs else None,
        )
        self._decoder = context.decoder
        detokenizer = Detokenizer(
            context.decoder, request.token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._text = OutputText(detokenizer, params, context.end_token_ids)

    def accept(self, sampled: SampledToken) -> FinishReason | None:
        """Take the next token; return why the completion ends with it, or `None`."""
        token = sampled.token_id
        assert token is not None, "a row without a token ends its completion and is not accepted"
        self.request.token_ids.append(token)
        self.output.token_ids.append(token)
        if self.output.logprobs is not None and sampled.logprobs is not None:
            self.output.logprobs.append(with_texts(sampled.logprobs, self._decoder))
            total = self.output.cumulative_logprob or 0.0
            self.output.cumulative_logprob = total + sampled.logprobs[token].logprob
        stop = self._text.append(token)
        self.output.text = self._text.text
        if stop is not None:
            self.output.stop_reason = stop.reason
            return "stop"
        return "length" if self.request.reached_max_tokens else None

    def end(self, reason: FinishReason, *, error: str | None = None, refused: bool = False) -> None:
        """Close the output; ``error`` says what failed, ``refused`` whether by the user's fault."""
        if reason != "error" and not isinstance(self.output.stop_reason, str):
            self._text.finish()
        self.output.text = self._text.text
        self.output.finish_reason = reason
        self.output.error = error
        self.output.refused = refused


class CompletionGroup:
    """A prompt and its ``n`` completions.

    Attributes:
        completions: one a sequence, in the order of their index.
        output: what `kv8.engine.engine.Engine.step` returns, the same object every time.
    """

    def __init__(
        self,
        request_id: str,
        completions: Sequence[Completion],
        params: SamplingParams,
        *,
        prompt: str | None,
        decoder: TokenDecoder,
    ) -> None:
        self.completions = tuple(completions)
        self._decoder = decoder
        self._num_prompt_logprobs = params.prompt_logprobs
        first = completions[0].request
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            outputs=[completion.output for completion in completions],
        )

    def add_prompt_logits(self, logits: torch.Tensor) -> None:
        """Take the logits (float32 [R, V]) of the next R prompt positions."""
        reports = self.output.prompt_logprobs
        assert reports is not None
        assert self._num_prompt_logprobs is not None
        tokens = self.output.prompt_token_ids[len(reports) : len(reports) + logits.shape[0]]
        counts = [self._num_prompt_logprobs] * len(tokens)
        reports += [
            with_texts(entry, self._decoder) for entry in token_logprobs(logits, tokens, counts)
        ]

    def refresh(self) -> RequestOutput:
        """Bring ``output`` up to date and return it."""
        self.output.finished = all(c.request.finished for c in self.completions)
        self.output.num_cached_tokens = self.completions[0].request.num_cached_tokens or 0
        return self.output


def with_texts(entries: dict[int, Logprob], decoder: TokenDecoder) -> dict[int, Logprob]:
    """Return ``entries`` with each token's own text filled in (empty if it has none)."""
    return {
        token: replace(
            entry, decoded_token=decoder.decode([token]) if decoder.has_text(token) else ""
        )
        for token, entry in entries.items()
    }
