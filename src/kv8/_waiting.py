"""How long a thread waits in a loop for the others before it sleeps.

The OpenMP runtime in torch's wheels lets an idle thread loop for milliseconds. Where another
program runs on the machine, that keeps a core from the very thread that is waited for: with one
busy neighbour on two cores, attention over a cache was four times slower so. A short loop costs
nothing that can be measured on a quiet machine.
"""

import os
from collections.abc import MutableMapping
from typing import Final

_SPINS: Final = "2000"  # some tens of microseconds: longer than from one parallel loop to the next
_SETTINGS: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have threads sleep soon, unless the user has set how they wait.

    The runtime reads this when it is loaded: it has no effect if torch was imported before.
    """
    if not any(name in environment for name in _SETTINGS):
        environment["GOMP_SPINCOUNT"] = _SPINS
