"""What a right schedule is, said without either implementation.

`violations` states the rules one by one, in exact fractions of an expert. `optimum` is the least
time that any schedule needs, as a linear program over who sends how much of what.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

UNIT = Fraction(1, 1 << 16)  # egress is counted in these; 1 is an expert's bytes


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A plan and how an expert is cut."""

    slot_expert: list[list[int]]  # [G][S], -1: empty
    home: list[int]  # [E]
    segment_bytes: list[int] = field(default_factory=lambda: [37_748_736])
    tile_bytes: int = 32 << 10

    @property
    def num_ranks(self) -> int:
        return len(self.slot_expert)

    @property
    def num_bytes(self) -> int:
        return sum(self.segment_bytes)

    def replicas(self) -> dict[int, list[tuple[int, int]]]:
        """(rank, slot) of the replicas of each replicated expert."""
        found = defaultdict(list)
        for rank, row in enumerate(self.slot_expert):
            for slot, expert in enumerate(row):
                if expert >= 0:
                    found[expert].append((rank, slot))
        return dict(sorted(found.items()))

    def members(self) -> dict[int, list[int]]:
        """The ranks with an instance of each replicated expert, its home first."""
        return {e: [self.home[e]] + [rank for rank, _ in at] for e, at in self.replicas().items()}

    def group_sizes(self, num_replicas: int) -> list[int]:
        """Bytes of each flag group, cut one by one."""
        tiles = []
        for size in self.segment_bytes:
            for offset in range(0, size, self.tile_bytes):
                tiles.append(min(size - offset, self.tile_bytes))
        step = 1
        while (step + 1) * self.tile_bytes <= 32 * 1024:
            step += 1
        return [sum(tiles[i : i + step]) for i in range(0, len(tiles), step)]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """An implementation's answer, in plain integers."""

    mode: str
    replicas: dict[int, list[tuple[int, int]]]  # expert -> (rank, slot)s
    pieces: list[tuple[int, int, int, int]]  # (expert, hub, begin, end) in flag groups
    egress: list[int]  # [G] in UNITs


def exports(problem: Problem) -> list[int]:
    """Replicated experts at home on each rank."""
    homes = [ranks[0] for ranks in problem.members().values()]
    return [homes.count(rank) for rank in range(problem.num_ranks)]


def imports(problem: Problem) -> list[int]:
    """Filled slots on each rank."""
    return [sum(expert >= 0 for expert in row) for row in problem.slot_expert]


def violations(problem: Problem, schedule: Schedule) -> list[str]:
    """The names of the rules that the schedule breaks."""
    broken = set()
    members, exported = problem.members(), exports(problem)
    if schedule.replicas != problem.replicas():
        broken.add("the replicas are the plan's, by expert and rank")

    handed_out = {e: [0] * len(problem.group_sizes(len(at) - 1)) for e, at in members.items()}
    share: dict[tuple[int, int], int] = defaultdict(int)
    for expert, hub, begin, end in schedule.pieces:
        if hub not in members.get(expert, []):
            broken.add("a hub has an instance of its expert")
            continue
        if not 0 <= begin <= end <= len(handed_out[expert]):
            broken.add("every group has exactly one hub")
            continue
        for group in range(begin, end):
            handed_out[expert][group] += 1
        share[expert, hub] += end - begin
    if any(count != 1 for counts in handed_out.values() for count in counts):
        broken.add("every group has exactly one hub")
    if schedule.mode == "direct" and any(
        share[e, hub] for e, ranks in members.items() for hub in ranks[1:]
    ):
        broken.add("in direct mode the home is the only hub")

    sent = [Fraction(k) for k in exported]
    rounding = [Fraction()] * problem.num_ranks
    for expert, ranks in members.items():
        for hub in ranks:
            if groups := len(handed_out[expert]):
                sent[hub] += Fraction((len(ranks) - 2) * share[expert, hub], groups)
            if schedule.mode != "direct":  # half a group at either end; all, if there are none
                rounding[hub] += Fraction(len(ranks) - 2, max(groups, 1))
    for egress, exact, error in zip(schedule.egress, sent, rounding, strict=True):
        if problem.num_bytes and abs(egress * UNIT - exact) > error:
            broken.add("egress is what the ranges say, but for their rounding")
    if sum(schedule.egress) * UNIT != sum(imports(problem)):
        broken.add("every replica is sent once")
    if any(egress * UNIT < k for egress, k in zip(schedule.egress, exported, strict=True)):
        broken.add("every replicated expert leaves its home")
    if schedule.mode != "direct" and any(
        gap(problem, schedule, expert) > UNIT for expert in _settled(members)
    ):
        broken.add("no hub is fuller than a rank that could take over from it")
    return sorted(broken)


def _settled(members: dict[int, list[int]]) -> set[int]:
    """Experts that were spread with all other egress final.

    The last one in order: fewest replicas, highest id. And those that share no rank with another
    expert that needs spreading.
    """
    shared = {e: set(ranks) for e, ranks in members.items() if len(ranks) > 2}
    alone = {e for e in shared if not any(shared[e] & shared[x] for x in shared if x != e)}
    return alone | {min(shared, key=lambda e: (len(shared[e]), -e))} if shared else set()


def gap(problem: Problem, schedule: Schedule, expert: int) -> Fraction:
    """How much fuller the fullest hub of an expert is than the emptiest rank that could help."""
    ranks = problem.members()[expert]
    busy = [hub for e, hub, begin, end in schedule.pieces if e == expert and begin < end]
    if len(ranks) == 2 or not busy:  # with one replica there is no copy but the home's
        return Fraction()
    return (max(schedule.egress[r] for r in busy) - min(schedule.egress[r] for r in ranks)) * UNIT


def sent_bytes(problem: Problem, schedule: Schedule) -> list[int]:
    """Bytes that each rank sends, counting every copy of every group."""
    sent = [0] * problem.num_ranks
    members = problem.members()
    for expert, hub, begin, end in schedule.pieces:
        home, *others = members[expert]
        size = sum(problem.group_sizes(len(others))[begin:end])
        if hub == home:
            sent[home] += size * len(others)
        else:
            sent[home] += size
            sent[hub] += size * (len(others) - 1)
    return sent


def slowest_link(problem: Problem, schedule: Schedule) -> Fraction:
    """What the busiest link carries, either way, in experts: the time of an ideal network."""
    return max(
        Fraction(max(sent_bytes(problem, schedule)), problem.num_bytes),
        Fraction(max(imports(problem))),
    )


def densest(problem: Problem) -> Fraction:
    """The same T*, by trying every set of ranks: what only they can send, evenly shared."""
    exported, best = exports(problem), Fraction(max(imports(problem)))
    for bits in range(1, 1 << problem.num_ranks):
        ranks = {rank for rank in range(problem.num_ranks) if bits >> rank & 1}
        must_send = sum(exported[rank] for rank in ranks)
        must_send += sum(len(at) - 2 for at in problem.members().values() if ranks >= set(at))
        best = max(best, Fraction(must_send, len(ranks)))
    return best


def optimum(problem: Problem) -> float:
    """T* in experts: no schedule, of whatever kind, has a less busy slowest link.

    Unknowns: what each rank sends of each expert it has, and the time T. Of an expert with n
    replicas the ranks send n in all, and the home at least 1.
    """
    members = problem.members()
    pairs = [
        (x, rank, rank == ranks[0]) for x, ranks in enumerate(members.values()) for rank in ranks
    ]
    if not pairs:
        return 0.0
    columns = np.arange(len(pairs))
    expert, rank, at_home = (np.array(column) for column in zip(*pairs, strict=True))
    in_all = coo_array((np.ones(len(pairs)), (expert, columns)), (len(members), len(pairs) + 1))
    ranks = np.arange(problem.num_ranks)
    by_rank = coo_array(
        (
            np.append(np.ones(len(pairs)), -np.ones(problem.num_ranks)),
            (np.append(rank, ranks), np.append(columns, np.full(problem.num_ranks, len(pairs)))),
        ),
        (problem.num_ranks, len(pairs) + 1),
    )
    solution = linprog(
        np.append(np.zeros(len(pairs)), 1.0),
        A_eq=in_all,
        b_eq=[len(at) - 1 for at in members.values()],
        A_ub=by_rank,
        b_ub=np.zeros(problem.num_ranks),
        bounds=[(float(home), None) for home in at_home] + [(max(imports(problem)), None)],
    )
    assert solution.success, solution.message
    return float(solution.fun)
