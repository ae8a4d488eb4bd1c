"""Token masks: what narrows the choice of the next token to those that keep an output in form.

The engine knows this protocol only; `kv8.engine.grammars` is what implements it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class TokenMask(Protocol):
    """Which tokens may come next in one sequence.

    That follows from the tokens before and from nothing else, so a sequence that is preempted and
    computed again goes on as if nothing had happened.
    """

    def allowed(self, output_token_ids: Sequence[int]) -> torch.Tensor:
        """Return the tokens that may follow ``output_token_ids``: bool [V], on the CPU.

        Once the output is complete these are the model's end tokens alone. Between calls the
        output may only have grown, by tokens that were allowed.

        Raises:
            RequestError: what was asked for cannot be followed any further.
        """
        ...
