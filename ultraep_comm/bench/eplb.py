"""DeepSeek's EPLB as one more planner, where its package is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PACKAGE = "eplb"

Rebalance = Callable[..., Any]


def find_eplb() -> Rebalance | None:
    """Return ``eplb.rebalance_experts``; None: there is no such package."""
    try:
        found = getattr(importlib.import_module(PACKAGE), "rebalance_experts", None)
    except ImportError:
        return None
    return found if callable(found) else None


def plan_eplb(
    rebalance: Rebalance, loads: NDArray[np.int64], *, num_ranks: int, slots_per_rank: int
) -> tuple[NDArray[np.float64], int] | None:
    """Return the imbalance of each load ``[n, E]``, and the number of replicas.

    EPLB fills every slot, moves mains as it likes, and cuts an expert's load evenly over its
    instances. It gets the exact load, as if the past told the future. None: E is no multiple of G,
    which it demands.
    """
    num_experts = loads.shape[1]
    if num_experts % num_ranks:
        return None
    num_instances = num_experts + num_ranks * slots_per_rank
    weight = torch.from_numpy(loads).float()
    instances, _, counts = rebalance(weight, num_instances, 1, 1, num_ranks)
    expert, count = np.asarray(instances), np.asarray(counts)
    quota = np.take_along_axis(loads / np.maximum(count, 1), expert, axis=1)
    ranks = quota.reshape(len(loads), num_ranks, -1).sum(axis=2)
    means = np.maximum(loads.sum(axis=1), 1) / num_ranks
    imbalance: NDArray[np.float64] = np.where(loads.any(axis=1), ranks.max(axis=1) / means, 1.0)
    return imbalance, num_instances - num_experts
