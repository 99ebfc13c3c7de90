"""Generate loads: with a given imbalance between ranks, and the families of the planner's table.

bench/METRICS.md describes the families.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.options import IMBALANCE, PUBLISHED, ZIPF
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.plan.topology import contiguous_home

_STEPS = 80
_MAX_EXPERTS, _MAX_ENTRIES = 1 << 16, 1 << 24  # of a load [G, E], generated in seconds
_MAX_SPREAD = 1e6  # all tokens go to one expert


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
    each rank, so that hot experts gather on hot ranks as in recorded traces. Bisection finds the
    spread. All source ranks have the same distribution. Equal arguments give equal loads.

    Args:
        num_ranks: G.
        num_experts: E, with contiguous homes.
        imbalance: from 1 (as even as the homes allow) to ``num_ranks`` (all tokens to one rank).
        num_tokens: sum of the load.
        seed: of the popularity and of the split over sources.

    Raises:
        InvalidArgumentError: the imbalance is impossible, there are too many tokens, more than
            2**16 experts or more than 2**24 experts times ranks, or the seed is negative.
    """
    if not 1.0 <= imbalance <= num_ranks:
        raise InvalidArgumentError(
            f"imbalance is {imbalance}; expected 1 to {num_ranks}, the number of ranks"
        )
    if not 0 <= num_tokens < 2**31:
        raise InvalidArgumentError(f"the load has {num_tokens} tokens; expected fewer than 2**31")
    if num_experts > _MAX_EXPERTS or num_ranks * num_experts > _MAX_ENTRIES:
        raise InvalidArgumentError(
            f"the load has {num_ranks} ranks and {num_experts} experts; expected at most"
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

    around = _bisect(spread_out, num_ranks, imbalance, _MAX_SPREAD, _STEPS)
    expert_load = min(around, key=lambda load: abs(rank_imbalance(load, num_ranks) - imbalance))
    sources = rng.multinomial(expert_load, np.full(num_ranks, 1 / num_ranks))
    load: NDArray[np.int32] = np.ascontiguousarray(sources.T, dtype=np.int32)
    return load


def _bisect(
    make_load: Callable[[float], NDArray[np.int64]],
    num_ranks: int,
    imbalance: float,
    high: float,
    steps: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the loads just below the imbalance, and at or above it, by bisection from 0 to high.

    ``make_load`` returns a load whose imbalance grows with its argument.
    """
    low = 0.0
    for _ in range(steps):
        middle = (low + high) / 2
        if rank_imbalance(make_load(middle), num_ranks) < imbalance:
            low = middle
        else:
            high = middle
    return make_load(low), make_load(high)


def apportion(weights: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Return integers in proportion to ``weights`` that sum to ``total``, by largest remainder."""
    exact = weights * (total / weights.sum())
    parts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    left = total - int(parts.sum())
    parts[np.argsort(parts - exact, kind="stable")[:left]] += 1
    return parts


# ---- families -----------------------------------------------------------------------------------

Loads = list[NDArray[np.int64]]

_TABLE_SIZE = 1 << 20  # popularity in millionths
_BLOCK = 8192  # tokens; their draws fit in a cache
_MOST_DRAWS = 4  # times topk
_MAX_EXPONENT = 32.0  # all tokens go to one expert
_TUNING_STEPS = 60


def make_loads(
    family: str, *, num_ranks: int, num_experts: int, num_tokens: int, topk: int, seeds: int
) -> Loads:
    """Return loads ``[E]`` of one family, equal for equal arguments.

    Args:
        family: one of `options.FAMILIES`, or "imbalance" and a number.
        num_ranks: G, with contiguous homes.
        num_experts: E, at least ``topk``.
        num_tokens: of all ranks; a load sums to ``topk`` times this number.
        topk: experts of a token.
        seeds: number of loads; "adversarial" has a fixed number.

    Returns:
        The loads; none if G ranks cannot have the imbalance of the family.
    """
    if family == "adversarial":
        return adversarial_loads(num_ranks, num_experts, num_tokens * topk)
    if family in PUBLISHED or family.startswith(IMBALANCE):
        wanted = PUBLISHED.get(family) or float(family.removeprefix(IMBALANCE))
        if wanted >= num_ranks:
            return []
        return [
            tuned_load(num_ranks, num_experts, wanted, num_tokens * topk, seed)
            for seed in range(seeds)
        ]
    return [_drawn_load(family, num_experts, num_tokens, topk, seed) for seed in range(seeds)]


@lru_cache(maxsize=256)  # sizes that differ only in slots share loads
def _drawn_load(
    family: str, num_experts: int, num_tokens: int, topk: int, seed: int
) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    if family in ZIPF:
        popularity = rng.permutation(zipf(num_experts, ZIPF[family]))
    else:
        popularity = rng.lognormal(0.0, 1.0, num_experts)
    load = draw_topk(popularity, num_tokens, topk, rng)
    load.setflags(write=False)
    return load


def zipf(num_experts: int, exponent: float) -> NDArray[np.float64]:
    """Return popularity ``1 / (i + 1) ** exponent``."""
    ranks = np.arange(1, num_experts + 1, dtype=np.float64)
    popularity: NDArray[np.float64] = ranks**-exponent
    return popularity


def draw_topk(
    popularity: NDArray[np.float64], num_tokens: int, topk: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return how often each expert is drawn, if every token draws ``topk`` different ones.

    A token draws with replacement and skips repeats, which equals drawing without replacement in
    proportion to popularity. The few tokens that need many draws take the lowest of random keys,
    one per expert: the same distribution at a higher cost.
    """
    num_experts = len(popularity)
    shares = np.maximum(apportion(popularity, _TABLE_SIZE), 1)  # every expert can be drawn
    small = np.min_scalar_type(num_experts)  # the table should fit in a cache
    table = np.repeat(np.arange(num_experts, dtype=small), shares)
    load = np.zeros(num_experts, np.int64)
    for start in range(0, num_tokens, _BLOCK):
        draws = np.empty((0, min(_BLOCK, num_tokens - start)), small)
        while draws.shape[1] and len(draws) < _MOST_DRAWS * topk:
            more = rng.integers(0, len(table), (topk, draws.shape[1]), dtype=np.int32)
            draws = np.concatenate([draws, table[more]])
            new = np.zeros(draws.shape, np.bool_)
            count = np.zeros(draws.shape[1], np.int32)
            for i, draw in enumerate(draws):
                new[i] = (draws[:i] != draw).all(axis=0) & (count < topk)
                count += new[i]
            done = count == topk
            load += np.bincount(draws[new & done], minlength=num_experts)
            draws = draws[:, ~done]
        keys = rng.exponential(size=(draws.shape[1], num_experts)) / shares
        np.put_along_axis(keys, draws.T, -1.0, axis=1)  # a token keeps its experts
        chosen = np.argpartition(keys, topk - 1, axis=1)[:, :topk]
        load += np.bincount(chosen.ravel(), minlength=num_experts)
    return load


def tuned_load(
    num_ranks: int, num_experts: int, imbalance: float, total: int, seed: int
) -> NDArray[np.int64]:
    """Return a Zipf load whose busiest rank has ``imbalance`` times the mean.

    ``imbalance`` is below ``num_ranks``. Experts are shuffled, and bisection finds the exponent, as
    in the literature.
    """
    order = np.random.default_rng(seed).permutation(num_experts)

    def with_exponent(exponent: float) -> NDArray[np.int64]:
        return apportion(zipf(num_experts, exponent), total)[order]

    return _bisect(with_exponent, num_ranks, imbalance, _MAX_EXPONENT, _TUNING_STEPS)[1]


def adversarial_loads(num_ranks: int, num_experts: int, total: int) -> Loads:
    """Return loads that are hard for planners, each with the sum ``total``."""
    expert, home = np.arange(num_experts), contiguous_home(num_experts, num_ranks)
    middle = num_experts // 2
    near = home == home[middle]

    def focus(hot: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return weights that give nine tenths of the load to the hot experts."""
        weights: NDArray[np.float64] = np.where(
            hot, 9 / max(1, hot.sum()), 1 / max(1, (~hot).sum())
        )
        return weights

    popularity = [
        focus(expert == middle),
        focus(near),  # all hot experts on one rank
        np.where(near, 0.0 if num_ranks > 1 else 1.0, 1.0),  # all ranks but one are hot
        np.where(expert < max(1, num_experts // 4), 10.0, 1.0),  # two levels
        1.0 + expert,  # a ramp
    ]
    return [apportion(p, total) for p in popularity]
