"""What every peer's planner returns: where the tokens of each expert go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.plan.plan import Plan

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Placed:
    """Tokens by rank and expert.

    Attributes:
        tokens: ``[G, E]``.
        holds: ``[G, E]``, the instances on each rank, some perhaps without tokens; None: those
            with tokens.
    """

    tokens: Ints
    holds: NDArray[np.bool_] | None = None

    def plan(self, home: NDArray[np.int32]) -> Plan:
        """Return this as a plan from homes ``[E]``, with as many slots as the fullest rank fills.

        An instance away from home takes a slot. A home that keeps no tokens of its expert has a
        quota of 0, as under policies that move mains.
        """
        num_ranks, num_experts = self.tokens.shape
        away = self.tokens > 0 if self.holds is None else self.holds.copy()
        expert = np.arange(num_experts)
        away[home, expert] = False
        filled = away.sum(axis=1)
        rank, slot_expert = np.nonzero(away)
        slot = np.arange(len(rank)) - (filled.cumsum() - filled)[rank]
        slots = np.full((num_ranks, max(1, int(filled.max()))), -1, np.int64)
        quota = np.zeros_like(slots)
        slots[rank, slot] = slot_expert
        quota[rank, slot] = self.tokens[rank, slot_expert]
        return Plan.from_slots(
            slots,
            num_experts=num_experts,
            home=home,
            slot_quota=torch.from_numpy(quota),
            home_quota=torch.from_numpy(self.tokens[home, expert]),
        )


def at_home(load: Ints, home: NDArray[np.int32], num_ranks: int) -> Ints:
    """Return tokens ``[G, E]`` of a load ``[E]`` that all go to the homes."""
    tokens = np.zeros((num_ranks, len(load)), np.int64)
    tokens[home, np.arange(len(load))] = load
    return tokens
