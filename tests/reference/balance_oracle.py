"""The best balance of every load by every placement, said without planners or bounds.

An instance without tokens changes nothing, so only placements without a slot to spare are tried.
Of one placement the fewest tokens of the fullest rank are known exactly: experts whose instances
all lie in a set of ranks are served there, and by the theorem of maximum flow and minimum cut no
set of ranks is short of more than that, in whole tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def every_load(num_experts: int, total: int) -> Ints:
    """Every load ``[N, E]`` of so many tokens."""
    bars = combinations(range(total + num_experts - 1), num_experts - 1)
    ends = [(-1, *bar, total + num_experts - 1) for bar in bars]
    return np.diff(np.array(ends)) - 1


def placements(home: list[int], domain: list[int], slots: int) -> Iterator[list[set[int]]]:
    """Every set of ranks of each expert, in which no slot is left empty that could be filled."""
    of_rank = []
    for rank, name in enumerate(domain):
        others = [e for e, h in enumerate(home) if domain[h] == name and h != rank]
        of_rank.append(list(combinations(others, min(slots, len(others)))))
    for chosen in product(*of_rank):
        yield [{h, *(r for r, row in enumerate(chosen) if e in row)} for e, h in enumerate(home)]


def best_balance(loads: Ints, home: list[int], domain: list[int], slots: int) -> Ints:
    """Fewest tokens of the fullest rank, for each load ``[N, E]``."""
    ranks = range(len(domain))
    subsets = [set(s) for size in ranks for s in combinations(ranks, size + 1)]
    size = np.array([len(s) for s in subsets])
    best = np.full(len(loads), loads.sum(axis=1).max())
    for instances in placements(home, domain, slots):
        served = np.array([[at <= s for s in subsets] for at in instances], dtype=np.int64)
        fullest = (-(-(loads @ served) // size)).max(axis=1)
        best = np.minimum(best, fullest)
    return best
