"""The engine's front door: a prompt is checked, and becomes a group of completions."""

import time
from collections.abc import Sequence
from operator import index

from kv8.engine.completion import Completion, CompletionContext, CompletionGroup
from kv8.engine.request import Request
from kv8.engine.sampler import sequence_seed
from kv8.errors import CapacityError, RequestError
from kv8.sampling_params import SamplingParams


class Intake:
    """Numbers requests and sequences in order of arrival, and refuses what can never be served.

    Args:
        context: what all completions share.
        max_model_len: longest sequence, prompt and output together.
        share_prompts: whether the completions of one prompt can share what is stored of it.
        seed: of requests that bring none of their own.
    """

    def __init__(
        self, context: CompletionContext, *, max_model_len: int, share_prompts: bool, seed: int
    ) -> None:
        self._context = context
        self._max_model_len = max_model_len
        self._share_prompts = share_prompts
        self._seed = seed
        self._num_requests = 0
        self._num_sequences = 0

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None,
        arrived_at: float | None = None,
    ) -> CompletionGroup:
        """Return the completions of a prompt; the first computes it, the others wait and share it.

        ``arrived_at`` is when the prompt came, by `time.monotonic`; by default now.

        Raises:
            RequestError: the prompt is empty, or holds something that is no token of the model, or
                the output cannot be given the form asked for.
            CapacityError: it leaves no room for the output; the message says what would fit.
        """
        token_ids = self._checked(prompt_token_ids, params)
        room = self._max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        arrived_at = time.monotonic() if arrived_at is None else arrived_at
        completions: list[Completion] = []
        for number in range(params.n):
            leader = completions[0].request if completions and self._share_prompts else None
            request = Request(
                request_id=request_id,
                sequence=self._num_sequences,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                max_tokens=max_tokens,
                wants_prompt_logits=number == 0 and params.prompt_logprobs is not None,
                leader=leader,
                arrived_at=arrived_at,
            )
            seed = sequence_seed(params, number, engine_seed=self._seed, request=self._num_requests)
            completions.append(Completion(request, params, self._context, index=number, seed=seed))
            self._num_sequences += 1
        self._num_requests += 1
        return CompletionGroup(
            request_id, completions, params, prompt=prompt, decoder=self._context.decoder
        )

    def _checked(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        try:
            token_ids = [index(token) for token in prompt_token_ids]
        except TypeError as error:
            raise RequestError(f"A prompt's token numbers must be integers: {error}.") from None
        if not token_ids:
            raise RequestError("The prompt is empty: there is nothing to go on from. Give a token.")
        vocab_size = self._context.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise RequestError(
                f"The prompt holds token {wrong}; this model's tokens are 0 to {vocab_size - 1}."
            )
        least = max(1, params.min_tokens)
        longest = self._max_model_len
        if len(token_ids) + least > longest:
            raise CapacityError(
                f"The prompt has {len(token_ids)} tokens and the output at least {least}, and a "
                f"sequence has at most {longest} (max_model_len). A prompt of "
                f"{max(longest - least, 0)} tokens or less fits, or a larger max_model_len."
            )
        return token_ids
