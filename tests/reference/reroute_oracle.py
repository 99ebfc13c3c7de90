"""What a right reroute is, said token by token, in exact rationals.

Knows nothing of cumulative floors: where the rest of a source goes is stated as points on a line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.optimize import linprog


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan in plain integers; quotas of empty slots are ignored."""

    load: list[list[int]]  # [G][E] by source
    slot_expert: list[list[int]]  # [G][S], -1 empty
    slot_quota: list[list[int]]  # [G][S]
    home_quota: list[int]  # [E]
    home: list[int]  # [E]


@dataclass(frozen=True)
class Instance:
    """One instance of an expert."""

    expert: int
    rank: int
    quota: int


def instances_by_physical_id(plan: Plan) -> dict[int, Instance]:
    """The numbering: `rank * P + index`, local experts first in expert order, then slots."""
    by_rank = [
        sorted(expert for expert, home in enumerate(plan.home) if home == rank)
        for rank in range(len(plan.load))
    ]
    stride = max(map(len, by_rank)) + len(plan.slot_expert[0])
    table = {}
    for rank, local_experts in enumerate(by_rank):
        for index, expert in enumerate(local_experts):
            table[rank * stride + index] = Instance(expert, rank, plan.home_quota[expert])
        for slot, expert in enumerate(plan.slot_expert[rank]):
            if expert != -1:
                quota = plan.slot_quota[rank][slot]
                table[rank * stride + len(local_experts) + slot] = Instance(expert, rank, quota)
    return table


def expected_shares(plan: Plan, expert: int) -> list[dict[int, int]]:
    """Tokens from each source to each rank with an instance of the expert: `[source][rank]`.

    Every source first keeps what it can on its own rank. Then, source by source, lay the
    remaining quotas on a line of length R, by rank. The source's L remaining tokens are the points
    R/L, 2R/L, ..., R of it; each belongs to the quota that covers it (left end open, right end
    closed).
    """
    quota = {
        instance.rank: instance.quota
        for instance in instances_by_physical_id(plan).values()
        if instance.expert == expert
    }
    shares: list[dict[int, int]] = []
    rest = []
    for source, row in enumerate(plan.load):
        kept = min(row[expert], quota.get(source, 0))
        shares.append(dict.fromkeys(quota, 0))
        if source in quota:
            quota[source] -= kept
            shares[source][source] = kept
        rest.append(row[expert] - kept)
    for source, tokens in enumerate(rest):
        line = [rank for rank in sorted(quota) for _ in range(quota[rank])]
        for token in range(1, tokens + 1):
            point = Fraction(token * len(line), tokens)
            rank = line[-(-point // 1) - 1]
            shares[source][rank] += 1
            quota[rank] -= 1
    return shares


def most_local_tokens(plan: Plan) -> int:
    """The most tokens that any split into sources and instances leaves on their rank.

    A linear program for each expert: x[source, instance] tokens, every source sends its load, every
    instance receives its quota, and what stays on a rank is maximised.
    """
    kept = 0
    for expert in range(len(plan.home)):
        load = [row[expert] for row in plan.load]
        instances = [i for i in instances_by_physical_id(plan).values() if i.expert == expert]
        stays = [[float(i.rank == source) for i in instances] for source in range(len(load))]
        x = np.arange(len(load) * len(instances)).reshape(len(load), len(instances))
        sums = np.array([np.isin(x.ravel(), part) for part in (*x, *x.T)], float)
        solved = linprog(-np.ravel(stays), A_eq=sums, b_eq=[*load, *(i.quota for i in instances)])
        assert solved.status == 0, solved.message
        kept += round(-solved.fun)
    return kept


def violations(plan: Plan, topk_ids: list[list[int]], physical: list[list[int]]) -> list[str]:
    """The names of the rules that a reroute of all ranks breaks; both lists are `[G][tokens]`."""
    table = instances_by_physical_id(plan)
    broken = set()
    received: Counter[int] = Counter()
    for source, (ids, outs) in enumerate(zip(topk_ids, physical, strict=True)):
        sent: Counter[tuple[int, int]] = Counter()
        last_rank: dict[int, int] = {}
        for expert, out in zip(ids, outs, strict=True):
            if expert == -1 or out == -1:
                if expert != out:
                    broken.add("padding stays padding, and nothing else becomes it")
                continue
            instance = table.get(out)
            if instance is None or instance.expert != expert:
                broken.add("a token goes to an instance of its expert")
                continue
            if instance.rank < last_rank.get(expert, 0):
                broken.add("an expert's tokens visit its instances by rank")
            last_rank[expert] = instance.rank
            received[out] += 1
            sent[expert, instance.rank] += 1
        for instance in table.values():
            load = plan.load[source][instance.expert]
            if instance.rank == source and sent[instance.expert, source] != min(
                load, instance.quota
            ):
                broken.add("a source uses its own instance first, and no more than its quota")
    if any(received[number] != instance.quota for number, instance in table.items()):
        broken.add("every instance receives its quota")
    return sorted(broken)
