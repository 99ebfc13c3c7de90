"""Our reading of LPLB (github.com/deepseek-ai/LPLB), a linear program over a fixed topology.

Eight consecutive ranks form a cube with diagonals: the first replicated expert of every rank has
its only replica on the rank named by the first row of `CUBE`, the second one by the second row.
With 2 c slots a rank, c experts share such an edge. For each load a linear program moves tokens
over the edges, at most those of the replicated experts, so that the fullest rank of the cube has as
few as possible. Replicated are each rank's hottest experts of the load itself; LPLB chooses them,
and reorders mains, by past loads. Mains stay at home here. Fractions are rounded down, so an expert
keeps the rest at home.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from studies.peers.placement import Ints, Placed, at_home

CUBE = np.array([[1, 2, 3, 0, 5, 6, 7, 4], [4, 5, 6, 7, 2, 3, 0, 1]])
EDGES, SIZE = CUBE.shape


def tokens_lplb(load: Ints, home: NDArray[np.int32], num_ranks: int, slots: int) -> Placed | None:
    """Return the plan of a load ``[E]``; None without whole cubes, 2 slots and 2 experts a rank."""
    shared = min(slots, int(np.bincount(home, minlength=num_ranks).min())) // EDGES  # by an edge
    if num_ranks % SIZE or not shared:
        return None
    order = np.lexsort((-load, home))  # each rank's experts, the hottest first
    first = np.searchsorted(home[order], np.arange(num_ranks))
    hottest = order[first[:, None] + np.arange(shared * EDGES)]
    experts = hottest.reshape(num_ranks, shared, EDGES)  # on each rank's edges
    tokens = at_home(load, home, num_ranks)
    rank_load = tokens.sum(axis=1)
    holds = tokens > 0
    for start in range(0, num_ranks, SIZE):
        of_cube = experts[start : start + SIZE]
        most = load[of_cube].sum(axis=1)  # [SIZE, EDGES]
        flow = balance_cube(rank_load[start : start + SIZE], most)
        share = np.divide(flow, most, out=np.zeros_like(flow), where=most > 0)
        for rank, on_edge, edge in np.ndindex(of_cube.shape):
            expert, to = of_cube[rank, on_edge, edge], start + CUBE[edge, rank]
            moved = int(share[rank, edge] * load[expert] + 1e-9)
            tokens[to, expert] += moved
            tokens[start + rank, expert] -= moved
            holds[to, expert] = True
    return Placed(tokens, holds)


def balance_cube(rank_load: Ints, most: Ints) -> NDArray[np.float64]:
    """Return the flow ``[8, 2]`` out of each rank over each edge that levels a cube.

    Args:
        rank_load: ``[8]``.
        most: ``[8, 2]``, upper limits of the flow.
    """
    from scipy.optimize import linprog

    count = SIZE * EDGES
    rank, edge = np.divmod(np.arange(count), EDGES)
    less = np.zeros((SIZE, count + 1))  # a rank's tokens after the flow, less the fullest rank's
    less[rank, np.arange(count)] -= 1
    less[CUBE[edge, rank], np.arange(count)] += 1
    less[:, count] = -1
    found = linprog(
        np.append(np.zeros(count), 1.0),
        A_ub=less,
        b_ub=-rank_load,
        bounds=[*((0, limit) for limit in most.ravel()), (0, None)],
        method="highs",
    )
    flow: NDArray[np.float64] = found.x[:count].reshape(SIZE, EDGES)
    return flow
