"""Loads for the benchmark of the planner, by family; bench/METRICS.md describes them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.skew import apportion, rank_imbalance
from ultraep_comm.topology import contiguous_home

ZIPF = {f"zipf{s:.1f}": s for s in (0.6, 1.0, 1.4)}
PUBLISHED = {f"published{x:g}": x for x in (1.5, 2.0, 3.0, 4.0)}
FAMILIES = (*ZIPF, "lognormal", *PUBLISHED, "adversarial")

Loads = list[NDArray[np.int64]]

_TABLE_SIZE = 1 << 20  # popularity in millionths
_BLOCK = 8192  # tokens, so that their draws stay in a cache
_MOST_DRAWS = 4  # times topk
_MAX_EXPONENT = 32.0  # everything goes to one expert
_STEPS = 60


def make_loads(
    family: str, *, num_ranks: int, num_experts: int, num_tokens: int, topk: int, seeds: int
) -> Loads:
    """Return loads ``[E]`` of one family, equal for equal arguments.

    Args:
        family: one of FAMILIES.
        num_ranks: G, with contiguous homes.
        num_experts: E, at least ``topk``.
        num_tokens: of all ranks; a load sums to ``topk`` times as many.
        topk: experts of a token.
        seeds: how many loads; "adversarial" has a number of its own.

    Returns:
        The loads; none where G ranks cannot have the imbalance of a published family.
    """
    if family == "adversarial":
        return adversarial_loads(num_ranks, num_experts, num_tokens * topk)
    if family in PUBLISHED:
        wanted = PUBLISHED[family]
        if wanted >= num_ranks:
            return []
        return [
            tuned_load(num_ranks, num_experts, wanted, num_tokens * topk, seed)
            for seed in range(seeds)
        ]
    return [_drawn_load(family, num_experts, num_tokens, topk, seed) for seed in range(seeds)]


@lru_cache(maxsize=256)  # sizes that differ only in slots have equal loads
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

    A token draws with replacement and skips what it has already: that is drawing without
    replacement in proportion to popularity. The few that need many draws are finished with a random
    key for every expert, the lowest keys winning, which is the same and costs more.
    """
    num_experts = len(popularity)
    shares = np.maximum(apportion(popularity, _TABLE_SIZE), 1)  # each expert can be drawn
    small = np.min_scalar_type(num_experts)  # the table should stay in a cache
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
        np.put_along_axis(keys, draws.T, -1.0, axis=1)  # what a token has, it keeps
        chosen = np.argpartition(keys, topk - 1, axis=1)[:, :topk]
        load += np.bincount(chosen.ravel(), minlength=num_experts)
    return load


def tuned_load(
    num_ranks: int, num_experts: int, imbalance: float, total: int, seed: int
) -> NDArray[np.int64]:
    """Return a Zipf load whose busiest rank has ``imbalance`` times the mean, below ``num_ranks``.

    Experts are shuffled, and the exponent is found by bisection: as papers generate load.
    """
    order = np.random.default_rng(seed).permutation(num_experts)

    def with_exponent(exponent: float) -> NDArray[np.int64]:
        return apportion(zipf(num_experts, exponent), total)[order]

    low, high = 0.0, _MAX_EXPONENT
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if rank_imbalance(with_exponent(middle), num_ranks) < imbalance:
            low = middle
        else:
            high = middle
    return with_exponent(high)


def adversarial_loads(num_ranks: int, num_experts: int, total: int) -> Loads:
    """Return loads that are hard on planners, each with the sum ``total``."""
    expert, home = np.arange(num_experts), contiguous_home(num_experts, num_ranks)
    middle = num_experts // 2
    near = home == home[middle]

    def focus(hot: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Give nine tenths of the load to some experts."""
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
