"""Masks of sequences that follow a grammar, computed for a whole step at once, in parallel."""

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from kv8.errors import RequestError


class GrammarMask:
    """A `TokenMask` made of a llguidance matcher, which it advances as the output grows.

    Args:
        matcher: of this sequence alone, before the first token.
        computer: computes the mask if nobody did so ahead.
    """

    def __init__(self, matcher: Any, computer: "MaskComputer") -> None:
        self.matcher = matcher
        self._computer = computer
        self._num_taken = 0
        self._allowed: torch.Tensor | None = None

    def allowed(self, output_token_ids: Sequence[int]) -> torch.Tensor:
        """See `TokenMask.allowed`."""
        self.advance(output_token_ids)
        if self._allowed is None:
            self._computer.compute([self])
        if self.matcher.is_error():
            raise RequestError(
                f"the form could not be followed beyond token {self._num_taken} of the output: "
                f"{one_line(self.matcher.get_error())}."
            )
        assert self._allowed is not None
        return self._allowed

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """Take the tokens that are new in an output."""
        if len(output_token_ids) > self._num_taken:
            self.matcher.consume_tokens(list(output_token_ids[self._num_taken :]))
            self._num_taken = len(output_token_ids)
            self._allowed = None

    def keep(self, allowed: torch.Tensor) -> None:
        """Take the mask (bool [V]) that belongs to the output as it is now."""
        self._allowed = allowed


class MaskComputer:
    """Computes masks, each on a thread of its own if there is one.

    Args:
        vocab_size: V.
        num_threads: most threads at work.
    """

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        import llguidance

        self._vocab_size = vocab_size
        self._executor = llguidance.LLExecutor(num_threads)

    def compute(self, masks: Sequence[GrammarMask]) -> None:
        """Have each of ``masks`` keep which tokens may come next."""
        bits = numpy.zeros((len(masks), -(-self._vocab_size // 32)), numpy.uint32)
        self._executor.unsafe_compute_mask_ptr(
            [(mask.matcher, row) for row, mask in enumerate(masks)],
            bits.ctypes.data,
            bits.strides[0],
            len(masks),
        )
        rows = numpy.unpackbits(
            bits.view(numpy.uint8), axis=1, count=self._vocab_size, bitorder="little"
        )
        for mask, row in zip(masks, torch.from_numpy(rows).view(torch.bool), strict=True):
            mask.keep(row)


def one_line(failure: str) -> str:
    """Return what llguidance says of a failure in a line; some draw an arrow under the place."""
    return " ".join(failure.removesuffix("<non-verbose/>").split()).rstrip(".")
