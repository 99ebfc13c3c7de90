"""Ids for the benchmark of the critical path: fresh in every iteration, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.commands.critical_path import PathSettings
from ultraep_comm.bench.loads import generate_load

Ids = NDArray[np.int64]
POPULARITY_TOKENS = 1 << 24  # of a generated load; enough for smooth shares


def expert_shares(settings: PathSettings, iteration: int) -> NDArray[np.float64]:
    """Return the probabilities ``[G, E]`` of experts, by source.

    Without a trace all sources are alike, and each iteration has other hot experts. With a trace
    each iteration takes the next step, cyclically.
    """
    g, e = settings.num_ranks, settings.num_experts
    if settings.trace is None:
        load = generate_load(
            num_ranks=g,
            num_experts=e,
            imbalance=settings.imbalance or 1.0,
            num_tokens=POPULARITY_TOKENS,
            seed=settings.seed + iteration,
        )
        load = np.broadcast_to(load.sum(axis=0), (g, e))
    else:
        window = {"num_ranks": g, "tokens_per_rank": settings.tokens}
        step = iteration % settings.trace.num_steps(**window)
        load = settings.trace.load(step=step, layer=settings.layer, **window)
    shares = load.astype(np.float64)
    shares[shares.sum(axis=1) == 0] = 1.0  # a source without tokens
    normalised: NDArray[np.float64] = shares / shares.sum(axis=1, keepdims=True)
    return normalised


def draw_ids(settings: PathSettings, iteration: int) -> list[Ids]:
    """Return ids ``[T, k]`` for each rank, drawn independently."""
    shape = (settings.tokens, settings.topk)
    return [
        np.random.default_rng([settings.seed, iteration, rank]).choice(
            settings.num_experts, size=shape, p=row
        )
        for rank, row in enumerate(expert_shares(settings, iteration))
    ]


def count_ids(ids: Sequence[Ids], num_experts: int) -> NDArray[np.int32]:
    """Return the load ``[G, E]``."""
    rows = [np.bincount(own.ravel(), minlength=num_experts) for own in ids]
    return np.stack(rows).astype(np.int32)
