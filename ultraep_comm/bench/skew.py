"""Loads with a wanted imbalance between ranks, for benchmarks without a recorded trace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.topology import contiguous_home

_STEPS = 80
_MAX_EXPERTS, _MAX_ENTRIES = 1 << 16, 1 << 24  # of a load [G, E]: far beyond any, in seconds
_MAX_SPREAD = 1e6  # everything goes to one expert


def rank_imbalance(expert_load: NDArray[np.int64], num_ranks: int) -> float:
    """Return the busiest rank's load over the mean, with contiguous homes; 1.0 without load."""
    home = contiguous_home(len(expert_load), num_ranks)
    ranks = np.bincount(home, weights=expert_load, minlength=num_ranks)
    total = float(ranks.sum())
    return float(ranks.max()) * num_ranks / total if total else 1.0


def generate_load(
    *, num_ranks: int, num_experts: int, imbalance: float, num_tokens: int, seed: int
) -> NDArray[np.int32]:
    """Return a load ``[G, E]`` whose busiest rank has ``imbalance`` times the mean.

    An expert's share is exp(spread * (x + y)), with x uniform for each expert and y uniform for
    each rank, so that hot experts gather on hot ranks as they do in recorded traces. The spread is
    found by bisection. The source ranks are statistically alike. Equal arguments give equal loads.

    Args:
        num_ranks: G.
        num_experts: E, with contiguous homes.
        imbalance: from 1 (as even as the homes allow) to ``num_ranks`` (one rank gets everything).
        num_tokens: sum of the load.
        seed: of the popularity and of the split over sources.

    Raises:
        InvalidArgumentError: an imbalance that no load has, too many tokens, more than 2**16
            experts, more than 2**24 experts times ranks, or a seed below 0.
    """
    if not 1.0 <= imbalance <= num_ranks:
        raise InvalidArgumentError(
            f"imbalance is {imbalance}; expected 1 to {num_ranks}, the number of ranks"
        )
    if not 0 <= num_tokens < 2**31:
        raise InvalidArgumentError(f"the load has {num_tokens} tokens; expected fewer than 2**31")
    if num_experts > _MAX_EXPERTS or num_ranks * num_experts > _MAX_ENTRIES:
        raise InvalidArgumentError(
            f"the load is of {num_ranks} ranks and {num_experts} experts; expected at most"
            f" {_MAX_EXPERTS} experts, and {_MAX_ENTRIES} experts times ranks"
        )
    if seed < 0:
        raise InvalidArgumentError(f"seed is {seed}; expected at least 0")
    rng = np.random.default_rng(seed)
    popularity = rng.random(num_experts)
    popularity += rng.random(num_ranks)[contiguous_home(num_experts, num_ranks)]

    def spread_out(spread: float) -> NDArray[np.int64]:
        weights = np.exp(spread * (popularity - popularity.max()))
        return apportion(weights, num_tokens)

    low, high = 0.0, _MAX_SPREAD
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if rank_imbalance(spread_out(middle), num_ranks) < imbalance:
            low = middle
        else:
            high = middle
    expert_load = min(
        (spread_out(low), spread_out(high)),
        key=lambda load: abs(rank_imbalance(load, num_ranks) - imbalance),
    )
    sources = rng.multinomial(expert_load, np.full(num_ranks, 1 / num_ranks))
    load: NDArray[np.int32] = np.ascontiguousarray(sources.T, dtype=np.int32)
    return load


def apportion(weights: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Return integers that sum to ``total`` and follow ``weights``; remainders to the largest."""
    exact = weights * (total / weights.sum())
    parts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    left = total - int(parts.sum())
    parts[np.argsort(parts - exact, kind="stable")[:left]] += 1
    return parts
