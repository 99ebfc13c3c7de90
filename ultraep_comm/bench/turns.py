"""Plans of one shape that take turns, so that no cache holds what is copied.

Weights of a layer have left the caches when they are copied again: the other layers lie between.
Calls in a row that copied the same experts would read them from a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ultraep_comm.plan import Plan

COLD_BYTES = 64 << 20  # more than the caches of a core hold
_MAX_EXPERTS = 256  # of a rank

# Of each rank: what its slots hold, as (home rank, number among that rank's); fewer than slots are.
Filling = Sequence[Sequence[tuple[int, int]]]


def count_experts(expert_bytes: int, in_a_turn: int) -> int:
    """Return the experts that a rank needs, a multiple of ``in_a_turn``, for its turns."""
    wanted = min(-(-COLD_BYTES // expert_bytes), _MAX_EXPERTS)
    return max(1, -(-wanted // in_a_turn)) * in_a_turn


def make_turns(filling: Filling, *, slots: int, experts: int, in_a_turn: int) -> list[Plan]:
    """Return plans that fill the same slots with other experts of the same homes.

    Args:
        filling: of the first plan, with numbers below ``in_a_turn``.
        slots: S.
        experts: of each rank, a multiple of ``in_a_turn``.
        in_a_turn: how far numbers move from a plan to the next.
    """
    num_ranks = len(filling)
    plans = []
    for first in range(0, experts, in_a_turn):
        table = torch.full((num_ranks, slots), -1, dtype=torch.int32)
        for rank, row in enumerate(filling):
            for slot, (home, number) in enumerate(row):
                table[rank, slot] = home * experts + first + number
        plans.append(Plan.from_slots(table, num_experts=num_ranks * experts))
    return plans
