"""What a right plan is, said without either planner.

`violations` states the rules one by one, in Python integers. `optimum` finds the best threshold
that any plan reaches, as a mixed-integer program, on problems small enough for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One planning problem, in plain integers."""

    load: list[int]  # [E]
    home: list[int]  # [E]
    domain: list[int]  # [G]
    slots_per_rank: int
    allow_cross_domain: bool
    target: float

    @property
    def num_ranks(self) -> int:
        return len(self.domain)

    def may_hold(self, expert: int, rank: int) -> bool:
        home = self.home[expert]
        same_domain = self.domain[home] == self.domain[rank]
        return rank != home and (self.allow_cross_domain or same_domain)


@dataclass(frozen=True)
class Plan:
    """A planner's answer, in plain integers: `[G][S]`, `[G][S]`, `[E]`."""

    slot_expert: list[list[int]]
    slot_quota: list[list[int]]
    home_quota: list[int]

    @staticmethod
    def of(arrays: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Plan:
        assert all(array.dtype == np.int32 for array in arrays)
        return Plan(*(array.tolist() for array in arrays))


def tokens_before(problem: Problem) -> list[int]:
    """Tokens of every rank without any replica."""
    return [
        sum(load for load, home in zip(problem.load, problem.home, strict=True) if home == rank)
        for rank in range(problem.num_ranks)
    ]


def worst_rank_before(problem: Problem) -> int:
    """Tokens of the fullest rank without any replica."""
    return max(tokens_before(problem))


def worst_rank_after(problem: Problem, plan: Plan) -> int:
    """Tokens of the fullest rank under the plan."""
    return max(
        sum(plan.slot_quota[rank])
        + sum(q for q, home in zip(plan.home_quota, problem.home, strict=True) if home == rank)
        for rank in range(problem.num_ranks)
    )


def lower_bound(problem: Problem) -> int:
    """No plan brings every rank below the mean of its domain (of all ranks, if plans may cross)."""
    if problem.allow_cross_domain:
        return -(-sum(problem.load) // problem.num_ranks)
    bound = 0
    for domain in set(problem.domain):
        size = problem.domain.count(domain)
        tokens = sum(
            load
            for load, home in zip(problem.load, problem.home, strict=True)
            if problem.domain[home] == domain
        )
        bound = max(bound, -(-tokens // size))
    return bound


def target_tokens(problem: Problem) -> int:
    """The most tokens on a rank that still count as balanced."""
    target = Fraction(round(problem.target * 10**6), 10**6)
    return Fraction(sum(problem.load), problem.num_ranks) * target // 1


def fewest_replicas(problem: Problem, threshold: int) -> int:
    """No plan gets every rank to the threshold with fewer replicas than this.

    A rank above it exports: its largest experts, even if all of each left, make up the excess. And
    replicas bring at most one expert's tokens each, at most a rank's room in all: the widest rooms,
    cut into slots, make up the excess of all. Without exports by ranks below the threshold, which
    open no room that a replica did not fill before.
    """
    before = tokens_before(problem)
    exports, excess = 0, 0
    for rank, tokens in enumerate(before):
        left = tokens - threshold
        excess += max(left, 0)
        local_experts = [e for e, h in zip(problem.load, problem.home, strict=True) if h == rank]
        for load in sorted(local_experts, reverse=True):
            if left <= 0:
                break
            left -= load
            exports += 1
    rooms = []
    largest = max(problem.load, default=0)
    for tokens in before:
        room = threshold - tokens
        for _ in range(problem.slots_per_rank):
            if room > 0:
                rooms.append(min(room, largest))
                room -= largest
    imports = 0
    for room in sorted(rooms, reverse=True):
        if excess <= 0:
            break
        excess -= room
        imports += 1
    return max(exports, imports)


def placement_optimum(problem: Problem, plan: Plan) -> int:
    """Fewest tokens on the fullest rank for the plan's placement, whatever the quotas.

    Bisection; a threshold is reachable if all tokens flow from experts through their instances'
    ranks, each of which lets that many pass.
    """
    num_experts, num_ranks = len(problem.load), problem.num_ranks
    source, sink = num_experts + num_ranks, num_experts + num_ranks + 1
    edges = [(source, e, load) for e, load in enumerate(problem.load)]
    edges += [(e, num_experts + home, problem.load[e]) for e, home in enumerate(problem.home)]
    edges += [
        (e, num_experts + rank, problem.load[e])
        for rank, row in enumerate(plan.slot_expert)
        for e in row
        if e != -1
    ]
    total = sum(problem.load)
    low, high = -(-total // num_ranks), worst_rank_before(problem)
    while low < high:
        threshold = (low + high) // 2
        capped = edges + [(num_experts + r, sink, threshold) for r in range(num_ranks)]
        tails, heads, room = zip(*capped, strict=True)
        graph = csr_array((room, (tails, heads)), shape=(sink + 1, sink + 1), dtype=np.int32)
        if maximum_flow(graph, source, sink).flow_value == total:
            high = threshold
        else:
            low = threshold + 1
    return high


def violations(problem: Problem, plan: Plan) -> list[str]:
    """The names of the rules that the plan breaks."""
    broken = set()
    served = list(plan.home_quota)
    exporters = set()
    if any(quota < 0 for quota in plan.home_quota):
        broken.add("no quota is negative")
    for rank in range(problem.num_ranks):
        slots = list(zip(plan.slot_expert[rank], plan.slot_quota[rank], strict=True))
        if len(slots) != problem.slots_per_rank:
            broken.add("every rank has its slots, no more")
        filled = [expert for expert, _ in slots if expert != -1]
        if [expert for expert, _ in slots[: len(filled)]] != filled:
            broken.add("slots are filled from 0")
        if len(set(filled)) != len(filled):
            broken.add("one instance of an expert on a rank")
        for expert, quota in slots:
            if expert == -1:
                if quota != 0:
                    broken.add("an empty slot has no quota")
                continue
            if quota <= 0:
                broken.add("every replica carries tokens")
            if not problem.may_hold(expert, rank):
                broken.add("replicas stay in the domain and off the home")
            served[expert] += quota
            exporters.add(problem.home[expert])
    if served != problem.load:
        broken.add("quotas sum to the load")
    before = tokens_before(problem)
    one_pool = problem.allow_cross_domain or len(set(problem.domain)) == 1
    is_exact = problem.target == 1.0 and one_pool  # then ceilings may be too many
    least = sum(before) // problem.num_ranks if is_exact else lower_bound(problem)
    if any(before[rank] <= least for rank in exporters):
        broken.add("only ranks above the mean export")
    if worst_rank_after(problem, plan) > worst_rank_before(problem):
        broken.add("never worse than no replication")
    is_level = max(before) <= target_tokens(problem)
    if exporters and is_level and not (is_exact and min(before) < max(before) - 1):
        broken.add("no replica where the load is balanced already")
    return sorted(broken)


def optimum(problem: Problem) -> int:
    """Fewest tokens on the fullest rank that any plan reaches, by branch and bound.

    Unknowns: tokens `q[e, r]`, instances `x[e, r]` in {0, 1}, and the threshold z, to be made
    small. Also counts plans in which ranks both export and import. For a few dozen (e, r) pairs.
    """
    num_experts, num_ranks = len(problem.load), problem.num_ranks
    pairs = num_experts * num_ranks
    rows, lower, upper = [], [], []

    def constrain(coefficients: dict[int, float], low: float, high: float) -> None:
        row = np.zeros(2 * pairs + 1)
        for column, value in coefficients.items():
            row[column] = value
        rows.append(row)
        lower.append(low)
        upper.append(high)

    def q(expert: int, rank: int) -> int:
        return expert * num_ranks + rank

    def x(expert: int, rank: int) -> int:
        return pairs + q(expert, rank)

    z = 2 * pairs
    most_instances = np.ones(2 * pairs + 1)
    for expert, load in enumerate(problem.load):
        constrain({q(expert, rank): 1 for rank in range(num_ranks)}, load, load)
        for rank in range(num_ranks):
            constrain({q(expert, rank): 1, x(expert, rank): -load}, -np.inf, 0)
            if rank != problem.home[expert] and not problem.may_hold(expert, rank):
                most_instances[x(expert, rank)] = 0
    for rank in range(num_ranks):
        experts = range(num_experts)
        constrain({q(expert, rank): 1 for expert in experts} | {z: -1}, -np.inf, 0)
        replicas = {x(expert, rank): 1 for expert in experts if problem.home[expert] != rank}
        constrain(replicas, 0, problem.slots_per_rank)

    largest = most_instances
    largest[:pairs] = largest[z] = sum(problem.load)
    cost = np.zeros(2 * pairs + 1)
    cost[z] = 1
    solution = milp(
        cost,
        integrality=np.ones_like(cost),
        bounds=Bounds(0, largest),
        constraints=LinearConstraint(np.array(rows), lower, upper),
    )
    assert solution.success, solution.message
    return round(solution.fun)


def least_moves(
    problem: Problem, residents: list[list[int]], threshold: int
) -> tuple[int, int] | None:
    """Least (transfer, moves) of a plan that keeps every rank to the threshold; None: no plan does.

    A mixed-integer program over replicas (e, r): tokens, whether it is there, whether the expert
    moves at all. Whoever is not a resident moves, and a rank has its slots. For a few dozen pairs.
    """
    num_experts, num_ranks = len(problem.load), problem.num_ranks
    pairs = [
        (expert, rank)
        for expert in range(num_experts)
        for rank in range(num_ranks)
        if problem.may_hold(expert, rank)
    ]
    num_pairs = len(pairs)
    moving = [i for i, (expert, rank) in enumerate(pairs) if expert not in residents[rank]]
    transfer = 2 * num_pairs + num_experts
    rows, upper = [], []

    def at_most(coefficients: dict[int, float], limit: float) -> None:
        row = np.zeros(transfer + 1)
        for column, value in coefficients.items():
            row[column] = value
        rows.append(row)
        upper.append(limit)

    for i, (expert, _) in enumerate(pairs):
        at_most({i: 1, num_pairs + i: -problem.load[expert]}, 0)
    for i in moving:
        at_most({num_pairs + i: 1, 2 * num_pairs + pairs[i][0]: -1}, 0)
    for expert, load in enumerate(problem.load):
        at_most({i: 1 for i, (e, _) in enumerate(pairs) if e == expert}, load)
    for rank, before in enumerate(tokens_before(problem)):
        here = [i for i, (_, r) in enumerate(pairs) if r == rank]
        local_experts = [e for e, home in enumerate(problem.home) if home == rank]
        at_most({num_pairs + i: 1 for i in here}, problem.slots_per_rank)
        at_most({num_pairs + i: 1 for i in here if i in moving} | {transfer: -1}, 0)
        at_most({2 * num_pairs + e: 1 for e in local_experts} | {transfer: -1}, 0)
        leaving = {i: -1.0 for i, (e, _) in enumerate(pairs) if e in local_experts}
        at_most(dict.fromkeys(here, 1.0) | leaving, threshold - before)
    largest = np.ones(transfer + 1)
    largest[:num_pairs] = [problem.load[expert] for expert, _ in pairs]
    largest[transfer] = num_experts + problem.slots_per_rank
    cost = np.zeros(transfer + 1)
    cost[[num_pairs + i for i in moving]] = 1
    cost[transfer] = num_pairs + 1  # one less is worth any number of moves
    solution = milp(
        cost,
        integrality=np.ones_like(cost),
        bounds=Bounds(0, largest),
        constraints=LinearConstraint(np.array(rows), -np.inf, upper),
    )
    if solution.x is None:
        return None
    present = solution.x[num_pairs : 2 * num_pairs].round()
    return round(solution.x[transfer]), round(sum(present[i] for i in moving))
