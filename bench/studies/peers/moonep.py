"""Our reading of MoonEP's exact policy (github.com/MoonshotAI/MoonEP, 2026).

All ranks get the same number of tokens. First between ranks: the fullest home gives to the emptiest
receiver exactly what that one lacks, until all are level; a home that gives more than its excess
becomes a receiver. Then within each home: its largest gift that is still open takes from its
hottest expert. So a rank receives from one home only, and up to E / G experts. Experts go straight
from their homes to all receivers. Ties go to the lower id. MoonEP has an equal number of tokens on
every rank; where the mean is not whole, the first ranks get one token more here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from studies.peers.placement import Ints, Placed, at_home


def tokens_moonep(load: Ints, home: NDArray[np.int32], num_ranks: int, slots: int) -> Placed:
    """Return the exact plan of a load ``[E]``; it takes the slots that it needs."""
    del slots
    tokens = at_home(load, home, num_ranks)
    gifts = _gifts(tokens.sum(axis=1))
    for giver in np.flatnonzero(gifts.any(axis=1)):
        mains, open_gifts = np.flatnonzero(home == giver), gifts[giver]
        left = load[mains].copy()
        while open_gifts.any():
            receiver, hottest = open_gifts.argmax(), left.argmax()
            moved = min(open_gifts[receiver], left[hottest])
            tokens[receiver, mains[hottest]] += moved
            tokens[giver, mains[hottest]] -= moved
            open_gifts[receiver] -= moved
            left[hottest] -= moved
    return Placed(tokens)


def _gifts(rank_load: Ints) -> Ints:
    """Return the tokens ``[G, G]`` that each rank gives to each other one."""
    num_ranks, total = len(rank_load), int(rank_load.sum())
    excess = rank_load - total // num_ranks - (np.arange(num_ranks) < total % num_ranks)
    gifts = np.zeros((num_ranks, num_ranks), np.int64)
    while excess.any():
        giver, receiver = excess.argmax(), excess.argmin()
        gifts[giver, receiver] = -excess[receiver]
        excess[giver] += excess[receiver]
        excess[receiver] = 0
    return gifts
