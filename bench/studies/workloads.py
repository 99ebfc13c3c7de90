"""The public balance workloads W0 to W7 (NVIDIA/Megatron-LM pull request 7488), written anew.

A workload's routing depends on its full name, the seed and the step alone, so all ranks and all
layouts have the same. The seed of a step is the first 8 hexadecimal digits of the SHA-256 of
``name|seed|step``. In order, every token takes the first ``topk`` of a random permutation of its
pool. The routing is equal to that of the published code, token by token, with any version of torch
whose `torch.randperm` is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from studies.options import WORKLOAD_SEED, WORKLOADS
from ultraep_comm.errors import InvalidArgumentError

_ROTATION = 3  # steps for which the hot experts of W6 stay
_PERIOD = 4  # steps of W7, the last of which is a burst; and tokens, of which one is cold


def check_pools(workloads: Iterable[str], num_experts: int, topk: int, given: str) -> None:
    """Check that every token can draw ``topk`` different experts.

    Args:
        workloads: of `options.WORKLOADS`.
        num_experts: E.
        topk: k, of ``--topk``.
        given: says where E comes from.

    Raises:
        InvalidArgumentError: a workload's smallest pool has fewer than k experts.
    """
    for workload in workloads:
        pool = num_experts - num_experts // 2 if workload == "W5" else num_experts
        if topk > pool:
            raise InvalidArgumentError(
                f"{given}, but workload {workload} draws --topk {topk} different experts of {pool};"
                f" expected --topk to be at most {pool}, more experts, or other workloads"
            )


def route_tokens(
    workload: str,
    *,
    num_experts: int,
    topk: int,
    num_tokens: int,
    step: int,
    seed: int = WORKLOAD_SEED,
) -> NDArray[np.int64]:
    """Return the experts ``[T, k]`` of one rank's tokens, which all ranks have alike.

    Args:
        workload: "W0" to "W7".
        num_experts: E.
        topk: k, at most the experts of the smallest pool.
        num_tokens: T, of a rank.
        step: from 0.
        seed: of all workloads.

    Raises:
        InvalidArgumentError: a pool has fewer than k experts.
    """
    check_pools([workload], num_experts, topk, f"num_experts is {num_experts}")
    everyone, token = np.arange(num_experts), np.arange(num_tokens)
    if workload == "W0":
        even: NDArray[np.int64] = (token[:, None] * topk + np.arange(topk)) % num_experts
        return even
    hot_count = max(topk, num_experts // 4)
    first = step // _ROTATION * hot_count if workload == "W6" else 0
    hot = (first + np.arange(hot_count)) % num_experts
    is_hot = token % _PERIOD != 0
    if workload == "W3":
        evens = np.unique(2 * np.arange(max(topk, num_experts // 2)) % num_experts)
        hot = evens if len(evens) >= topk else everyone
    elif workload == "W4":
        is_hot[:] = False
    elif workload == "W5":
        hot = everyone[num_experts // 2 :]
        is_hot[:] = True
    elif workload == "W7":
        is_hot = (token % 2 == 0) & (step % _PERIOD == _PERIOD - 1)
    key = hashlib.sha256(f"{WORKLOADS[workload]}|{seed}|{step}".encode()).hexdigest()[:8]
    generator = torch.Generator().manual_seed(int(key, 16))
    rows = []
    for is_from_hot in is_hot.tolist():
        pool = hot if is_from_hot else everyone
        rows.append(pool[torch.randperm(len(pool), generator=generator)[:topk].numpy()])
    return np.array(rows, np.int64).reshape(num_tokens, topk)


@lru_cache(maxsize=256)
def workload_load(
    workload: str,
    *,
    num_ranks: int,
    num_experts: int,
    topk: int,
    num_tokens: int,
    step: int,
    seed: int = WORKLOAD_SEED,
) -> NDArray[np.int64]:
    """Return the load ``[E]`` of all ranks; arguments as for `route_tokens`."""
    ids = route_tokens(
        workload,
        num_experts=num_experts,
        topk=topk,
        num_tokens=num_tokens,
        step=step,
        seed=seed,
    )
    load = np.bincount(ids.ravel(), minlength=num_experts).astype(np.int64) * num_ranks
    load.setflags(write=False)
    return load
