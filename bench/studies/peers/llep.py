"""Our reading of LLEP, least-loaded experts (github.com/SalesforceAIResearch/LeastLoadedEP).

A rank may have alpha times the mean. Experts are taken by descending load. A rank's load is what it
was given so far plus its own experts that are still to come. An expert stays at home as far as that
has room; the rest spills to the least loaded ranks that have room, in chunks as large as that. A
chunk below the minimum is passed over, unless it is all that is left; if no rank can take one, the
least loaded gets all of it. Where the home keeps nothing, the order of the ranks stays that of the
start. There is no limit of slots. The released system plans only from some imbalance on; here it
always does. Ties go to the lower id.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from studies.peers.placement import Ints, Placed

ALPHA = 1.1
MIN_TOKENS = 1024


def tokens_llep(load: Ints, home: NDArray[np.int32], num_ranks: int, slots: int) -> Placed:
    """Return the plan of a load ``[E]`` with the published settings."""
    del slots
    return Placed(spill(load, home, num_ranks, ALPHA, MIN_TOKENS))


def spill(
    load: Ints, home: NDArray[np.int32], num_ranks: int, alpha: float, min_tokens: int
) -> Ints:
    """Return tokens ``[G, E]``; see the module."""
    tokens = np.zeros((num_ranks, len(load)), np.int64)
    busy = np.bincount(home, weights=load, minlength=num_ranks).astype(np.int64)
    mean = int(load.sum()) // num_ranks
    most = max(1, int(alpha * mean) if mean else int(load.sum()))
    for expert in np.argsort(-load, kind="stable"):
        left, at = int(load[expert]), int(home[expert])
        busy[at] -= left
        kept = min(left, max(0, most - int(busy[at]))) if num_ranks > 1 else left
        tokens[at, expert] = kept
        busy[at] += kept
        left -= kept
        others = _by_load(busy, at)
        least = others[:1]
        while left:
            if kept:
                others = _by_load(busy, at)
                least = others[:1]
            chunks = np.minimum(left, most - busy[others])
            fits = np.flatnonzero((chunks > 0) & ((chunks >= min_tokens) | (chunks == left)))
            if len(fits):
                rank, chunk = others[fits[0]], int(chunks[fits[0]])
                others = others[fits[0] + 1 :]
            else:
                rank, chunk = least[0], left
            tokens[rank, expert] += chunk
            busy[rank] += chunk
            left -= chunk
    return tokens


def _by_load(busy: Ints, at: int) -> NDArray[np.intp]:
    """Return all ranks but one, by ascending load."""
    order: NDArray[np.intp] = np.argsort(busy, kind="stable")
    others: NDArray[np.intp] = order[order != at]
    return others
