"""Our reading of EPLB (github.com/deepseek-ai/EPLB), DeepSeek's balancer between steps.

Replication: one instance after the other goes to the expert with most load per instance. Packing:
weights in descending order, each to the lightest pack with room; all packs get equally many. The
global policy replicates over all ranks and packs instances onto ranks. The hierarchical one packs
groups of experts onto nodes first, and does the same within each node. Ties go to the lower id,
where the original leaves them to a sort that is not stable.

It gets the very load that is then judged, where a deployment has only past ones. It fills every
slot and moves mains: each instance that is not at its expert's home has to be sent. An expert's
load is split evenly over its instances. Nodes are of 8 ranks, or half of all up to 8; there are 8
groups, or one a node if 8 does not fit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from studies.peers.placement import Ints, Placed

GROUPS = 8
NODE_RANKS = 8


def tokens_eplb(load: Ints, home: NDArray[np.int32], num_ranks: int, slots: int) -> Placed | None:
    """Return the global policy's plan; None if E is not a multiple of G."""
    del home
    return _place(load, num_ranks, slots, num_groups=1, num_nodes=1)


def tokens_eplb_hierarchical(
    load: Ints, home: NDArray[np.int32], num_ranks: int, slots: int
) -> Placed | None:
    """Return the hierarchical policy's plan; None if groups and nodes do not divide the experts."""
    del home
    num_nodes = num_ranks // NODE_RANKS if num_ranks > NODE_RANKS else 2
    num_groups = GROUPS if GROUPS % num_nodes == 0 else num_nodes
    if num_ranks % num_nodes or len(load) % num_groups:
        return None
    return _place(load, num_ranks, slots, num_groups=num_groups, num_nodes=num_nodes)


def _place(
    load: Ints, num_ranks: int, slots: int, *, num_groups: int, num_nodes: int
) -> Placed | None:
    num_experts = len(load)
    if num_experts % num_ranks:
        return None
    ranks = rebalance(
        load.astype(np.float64),
        num_instances=num_experts + num_ranks * slots,
        num_ranks=num_ranks,
        num_groups=num_groups,
        num_nodes=num_nodes,
    )
    rank = np.repeat(np.arange(num_ranks), ranks.shape[1])
    expert = ranks.ravel()
    count = np.bincount(expert, minlength=num_experts)
    order = np.argsort(expert, kind="stable")
    index = np.empty_like(order)  # of an instance among its expert's
    index[order] = np.arange(len(order)) - (count.cumsum() - count)[expert[order]]
    tokens = np.zeros((num_ranks, num_experts), np.int64)
    share = load[expert] // count[expert] + (index < load[expert] % count[expert])
    np.add.at(tokens, (rank, expert), share)
    holds = np.zeros(tokens.shape, np.bool_)
    holds[rank, expert] = True
    return Placed(tokens, holds)


def rebalance(
    weights: NDArray[np.float64],
    *,
    num_instances: int,
    num_ranks: int,
    num_groups: int = 1,
    num_nodes: int = 1,
) -> Ints:
    """Return the experts ``[G, instances of a rank]`` on each rank.

    Args:
        weights: ``[E]``; E is a multiple of ``num_groups``, which is one of ``num_nodes``.
        num_instances: of all ranks, a multiple of ``num_ranks``.
        num_ranks: G, a multiple of ``num_nodes``.
        num_groups: of consecutive experts that stay on one node.
        num_nodes: of consecutive ranks.
    """
    groups = np.arange(len(weights)).reshape(num_groups, -1)
    ranks = []
    for of_node in pack(weights[groups].sum(axis=1), num_nodes):
        experts = groups[of_node].ravel()
        instances, count = replicate(weights[experts], num_instances // num_nodes)
        share = (weights[experts] / count)[instances]
        ranks += [experts[instances[of_rank]] for of_rank in pack(share, num_ranks // num_nodes)]
    return np.array(ranks, np.int64)


def replicate(weights: NDArray[np.float64], num_instances: int) -> tuple[Ints, Ints]:
    """Return the expert of each instance, and the instances of each expert."""
    count = np.ones(len(weights), np.int64)
    instances = list(range(len(weights)))
    while len(instances) < num_instances:
        heaviest = int((weights / count).argmax())
        instances.append(heaviest)
        count[heaviest] += 1
    return np.array(instances, np.int64), count


def pack(weights: NDArray[np.float64], num_packs: int) -> list[list[int]]:
    """Return the items of each pack, in the order in which they were packed."""
    size = len(weights) // num_packs
    if size == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    total = np.zeros(num_packs)
    for item in np.argsort(-weights, kind="stable").tolist():
        lightest = int(total.argmin())
        packs[lightest].append(item)
        full = len(packs[lightest]) == size
        total[lightest] = np.inf if full else total[lightest] + weights[item]
    return packs
