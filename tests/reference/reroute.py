"""The readable definition of the quota-exact reroute: from experts to physical instances.

`src/core/reroute/reroute.hpp` is the fast one; the two agree in every integer. A plan fixes how
many tokens each instance receives. Every source rank computes its own shares from the load and the
plan alone; over all ranks they add up to the quotas, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


def instance_stride(home: Int32Array, slots_per_rank: int) -> int:
    """Return P, the stride of ranks in physical ids: the most local experts, plus the slots."""
    return int(np.bincount(home).max()) + slots_per_rank


def list_instances(home: Int32Array, slot_expert: Int32Array) -> list[list[tuple[int, int, int]]]:
    """Return each expert's instances by ascending rank: `(rank, physical id, slot or -1)`.

    A physical id is `rank * P + index`: local experts first, ascending, then slots.

    Args:
        home: `[E]`, rank of each main instance.
        slot_expert: `[G, S]`, expert in the slot, -1 empty.
    """
    num_ranks, slots_per_rank = slot_expert.shape
    stride = instance_stride(home, slots_per_rank)
    instances: list[list[tuple[int, int, int]]] = [[] for _ in home]
    for rank in range(num_ranks):
        local_experts = np.flatnonzero(home == rank).tolist()
        for index, expert in enumerate(local_experts):
            instances[expert].append((rank, rank * stride + index, -1))
        for slot, expert in enumerate(slot_expert[rank].tolist()):
            if expert != -1:
                physical_id = rank * stride + len(local_experts) + slot
                instances[expert].append((rank, physical_id, slot))
    return instances


def source_shares(
    load: Sequence[int], ranks: Sequence[int], quotas: Sequence[int], source: int
) -> list[int]:
    """Return how many tokens of one expert rank `source` sends to each instance.

    First every rank uses the quota of its own instance. Then, in rank order, a source
    with L tokens left, over the remaining quotas with prefix sums C and total R, sends instance i
    `floor(L * C[i + 1] / R) - floor(L * C[i] / R)`, which is then taken off the quotas. No share is
    negative or above its quota; over the instances they sum to the source's load, over all sources
    to the quotas.

    Args:
        load: `[G]` tokens of the expert at each source rank.
        ranks: ranks of the expert's instances, ascending.
        quotas: quota of each instance; they sum to the load.
        source: the source rank.
    """
    left = list(load)
    quota = list(quotas)
    share = [0] * len(quota)
    for i, rank in enumerate(ranks):
        kept = min(left[rank], quota[i])
        left[rank] -= kept
        quota[i] -= kept
        if rank == source:
            share[i] = kept
    for rank in range(source + 1):
        if left[rank] == 0:
            continue
        upto = [left[rank] * int(c) // sum(quota) for c in np.cumsum(quota, dtype=np.int64)]
        given = np.diff(upto, prepend=0).tolist()
        quota = [q - g for q, g in zip(quota, given, strict=True)]
        if rank == source:
            share = [s + g for s, g in zip(share, given, strict=True)]
    return share


def reroute_ids(
    topk_ids: NDArray[np.int32] | NDArray[np.int64],
    *,
    load: Int32Array,
    slot_expert: Int32Array,
    slot_quota: Int32Array,
    home_quota: Int32Array,
    home: Int32Array,
    rank: int,
) -> NDArray[np.int32] | NDArray[np.int64]:
    """Replace each expert id by the id of the instance that serves the token.

    Token j of an expert, in row-major order, goes to the first instance (by rank) whose
    cumulative share from this rank exceeds j.

    Args:
        topk_ids: expert ids of this rank's tokens, any shape; -1 is padding and stays -1.
        load: `[G, E]` tokens by source rank and expert; row `rank` must count `topk_ids`.
        slot_expert: `[G, S]`, -1 empty.
        slot_quota: `[G, S]`.
        home_quota: `[E]`.
        home: `[E]`.
        rank: this source rank.

    Returns:
        Physical instance ids, with the shape and dtype of `topk_ids`.

    Raises:
        ValueError: an id is neither -1 nor an expert, the plan's quotas do not sum to the load, or
            `load[rank]` does not count the ids.
    """
    num_experts = len(home)
    ids = topk_ids.reshape(-1)
    if np.any((ids < -1) | (ids >= num_experts)):
        raise ValueError(f"an expert id is neither -1 nor between 0 and {num_experts - 1}")
    out = np.full_like(ids, -1)
    for expert, instances in enumerate(list_instances(home, slot_expert)):
        column = load[:, expert].tolist()
        quotas = [
            int(home_quota[expert]) if slot < 0 else int(slot_quota[r, slot])
            for r, _, slot in instances
        ]
        if sum(quotas) != sum(column):
            raise ValueError(
                f"quotas of expert {expert} sum to {sum(quotas)}; its load is {sum(column)}"
            )
        positions = np.flatnonzero(ids == expert)
        if len(positions) != column[rank]:
            raise ValueError(
                f"expert {expert} occurs {len(positions)} times; load[{rank}] has {column[rank]}"
            )
        share = source_shares(column, [r for r, _, _ in instances], quotas, rank)
        out[positions] = np.repeat([physical_id for _, physical_id, _ in instances], share)
    return out.reshape(topk_ids.shape)


def reroute_dense(
    routing_map: NDArray[np.bool_],
    probs: NDArray[np.floating],
    *,
    load: Int32Array,
    slot_expert: Int32Array,
    slot_quota: Int32Array,
    home_quota: Int32Array,
    home: Int32Array,
    rank: int,
) -> tuple[NDArray[np.bool_], NDArray[np.floating]]:
    """Reroute a routing map and its probabilities, the experts of each row in order.

    Args:
        routing_map: `[T, E]`.
        probs: `[T, E]`; those outside the map are dropped.
        load: as in :func:`reroute_ids`, like all arguments below.
        slot_expert: `[G, S]`.
        slot_quota: `[G, S]`.
        home_quota: `[E]`.
        home: `[E]`.
        rank: this source rank.

    Returns:
        Map and probabilities `[T, G * P]`, False and 0 where nothing is routed.

    Raises:
        ValueError: as in :func:`reroute_ids`.
    """
    tokens, experts = np.nonzero(routing_map)
    instances = reroute_ids(
        experts,
        load=load,
        slot_expert=slot_expert,
        slot_quota=slot_quota,
        home_quota=home_quota,
        home=home,
        rank=rank,
    )
    num_ranks, slots_per_rank = slot_expert.shape
    shape = (len(routing_map), num_ranks * instance_stride(home, slots_per_rank))
    physical_map = np.zeros(shape, np.bool_)
    physical_map[tokens, instances] = True
    physical_probs = np.zeros(shape, probs.dtype)
    physical_probs[tokens, instances] = probs[tokens, experts]
    return physical_map, physical_probs
