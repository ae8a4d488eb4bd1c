"""Penalties on tokens already seen: repetition, frequency and presence, for one sequence."""

from collections.abc import Sequence

import torch

from kv8.sampling_params import SamplingParams

_LARGEST = torch.finfo(torch.float32).max


class Penalties:
    """Counts of one sequence's tokens, kept only for sequences that asked for a penalty.

    Attributes:
        params: the sequence's sampling parameters.
    """

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, vocab_size: int) -> None:
        self.params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._seen = torch.zeros(vocab_size, dtype=torch.bool)
        self._counts = torch.zeros(vocab_size, dtype=torch.float32)
        self._num_counted = 0

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Whether ``params`` asks for any penalty at all."""
        return (
            params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or params.repetition_penalty != 1.0
        )

    def apply(self, logits: torch.Tensor, token_ids: Sequence[int]) -> None:
        """Penalize ``logits`` (float32 [V]) in place for the prompt and the output so far.

        Tokens must only ever be appended between calls: each is counted once.
        """
        fresh = torch.tensor(token_ids[self._num_counted :], dtype=torch.int64)
        output = fresh[max(0, self._num_prompt_tokens - self._num_counted) :]
        self._num_counted = len(token_ids)
        self._seen[fresh] = True
        self._counts.scatter_add_(0, output, torch.ones(len(output)))
        params = self.params
        if params.repetition_penalty != 1.0:
            factor = min(params.repetition_penalty, _LARGEST)
            weaker = torch.where(logits > 0, logits / factor, logits * factor)
            # A factor far from 1 overflows. An infinite logit would be one the model never gave,
            # and two of them have no order.
            weaker.clamp_(-_LARGEST, _LARGEST)
            logits.copy_(torch.where(self._seen.to(logits.device), weaker, logits))
        counts = self._counts.to(logits.device)
        logits.sub_(counts, alpha=params.frequency_penalty)
        logits.sub_((counts > 0).to(logits.dtype), alpha=params.presence_penalty)
