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
from scipy.sparse import coo_array, vstack

UNIT = Fraction(1, 1 << 16)  # egress is counted in these; 1 is an expert's bytes
Entry = int | tuple[int, int]  # an expert or, in plans across domains, an expert and a domain


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A plan and how an expert is cut."""

    slot_expert: list[list[int]]  # [G][S], -1: empty
    home: list[int]  # [E]
    residents: list[list[int]] | None = None  # [G][S], what slots hold already; -1: nothing
    domain: list[int] | None = None  # [G], which plans cross; None: all ranks are in one
    segment_bytes: list[int] = field(default_factory=lambda: [37_748_736])
    tile_bytes: int = 32 << 10

    @property
    def num_ranks(self) -> int:
        return len(self.slot_expert)

    @property
    def num_bytes(self) -> int:
        return sum(self.segment_bytes)

    def kept(self, rank: int, slot: int) -> bool:
        """Whether the slot holds the plan's expert already."""
        expert = self.slot_expert[rank][slot]
        return self.residents is not None and 0 <= expert == self.residents[rank][slot]

    def replicas(self) -> dict[int, list[tuple[int, int]]]:
        """(rank, slot) of the replicas to be made of each expert that has any."""
        found = defaultdict(list)
        for rank, row in enumerate(self.slot_expert):
            for slot, expert in enumerate(row):
                if expert >= 0 and not self.kept(rank, slot):
                    found[expert].append((rank, slot))
        return dict(sorted(found.items()))

    def holders(self) -> dict[int, list[tuple[int, int]]]:
        """(rank, slot) where each such expert can be sent from: its home, with slot -1, first."""
        found = {e: [(self.home[e], -1)] for e in self.replicas()}
        for rank, row in enumerate(self.slot_expert):
            for slot, expert in enumerate(row):
                if expert in found and self.kept(rank, slot):
                    found[expert].append((rank, slot))
        return found

    def entries(self) -> dict[Entry, list[tuple[int, int]]]:
        """The replicas as they are scheduled: of an expert, or of an expert in one domain."""
        if self.domain is None:
            return dict(self.replicas())
        found = defaultdict(list)
        for expert, at in self.replicas().items():
            for rank, slot in at:
                found[expert, self.domain[rank]].append((rank, slot))
        return dict(sorted(found.items()))

    def senders(self) -> dict[Entry, list[tuple[int, int]]]:
        """Who may send each entry: holders in its domain, or all where there are none."""
        if self.domain is None:
            return dict(self.holders())
        found, holders = {}, self.holders()
        for expert, domain in self.entries():
            inside = [(rank, slot) for rank, slot in holders[expert] if self.domain[rank] == domain]
            found[expert, domain] = inside or holders[expert]
        return found

    def is_foreign(self, entry: Entry, source: int) -> bool:
        """Whether the source has to send it into another domain."""
        return self.domain is not None and self.domain[source] != entry[1]

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
    sources: dict[Entry, tuple[int, int]]  # (rank, slot), -1: its main weights
    replicas: dict[Entry, list[tuple[int, int]]]  # (rank, slot)s
    pieces: list[tuple[Entry, int, int, int]]  # (entry, hub, begin, end) in flag groups
    egress: list[int]  # [G] in UNITs

    def hubs(self, expert: Entry) -> list[int]:
        """The ranks that may hand it out, its source first."""
        return [self.sources[expert][0], *(rank for rank, _ in self.replicas[expert])]


def exports(problem: Problem, schedule: Schedule | None = None) -> list[int]:
    """Entries with replicas to be made that are sent from each rank: by default, of experts, from
    the homes.
    """
    ranks = [problem.home[e] for e in problem.replicas()]
    if schedule is not None:
        ranks = [rank for rank, _ in schedule.sources.values()]
    return [ranks.count(rank) for rank in range(problem.num_ranks)]


def imports(problem: Problem) -> list[int]:
    """Slots to be filled on each rank."""
    ranks = [rank for at in problem.replicas().values() for rank, _ in at]
    return [ranks.count(rank) for rank in range(problem.num_ranks)]


def violations(problem: Problem, schedule: Schedule) -> list[str]:
    """The names of the rules that the schedule breaks."""
    broken = set()
    if schedule.replicas != problem.entries():
        return ["the replicas are the plan's, by expert and rank"]
    holders = problem.senders()
    if list(schedule.sources) != list(holders) or any(
        at not in holders[e] for e, at in schedule.sources.items()
    ):
        return ["a source holds its expert"]
    members, exported = {e: schedule.hubs(e) for e in holders}, exports(problem, schedule)

    handed_out = {e: [0] * len(problem.group_sizes(len(at) - 1)) for e, at in members.items()}
    crossed = {e: [0] * len(counts) for e, counts in handed_out.items()}
    share: dict[tuple[Entry, int], int] = defaultdict(int)
    for expert, hub, begin, end in schedule.pieces:
        if hub not in members.get(expert, []):
            broken.add("a hub has an instance of its expert")
            continue
        if not 0 <= begin <= end <= len(handed_out[expert]):
            broken.add("every group has exactly one hub")
            continue
        for group in range(begin, end):
            handed_out[expert][group] += 1
            crossed[expert][group] += _crossings(problem, schedule, expert, hub)
        share[expert, hub] += end - begin
    if any(count != 1 for counts in handed_out.values() for count in counts):
        broken.add("every group has exactly one hub")
    for e, (source, _) in schedule.sources.items():
        copies = len(members[e]) - 1 if schedule.mode == "direct" else 1
        if set(crossed[e]) - {copies if problem.is_foreign(e, source) else 0}:
            broken.add("an expert crosses once to a domain that lacks it")
    if schedule.mode == "direct" and any(
        share[e, hub] for e, ranks in members.items() for hub in ranks[1:]
    ):
        broken.add("in direct mode the source is the only hub")

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
        broken.add("every replicated expert leaves its source")
    if schedule.mode != "direct" and any(
        gap(problem, schedule, expert) > UNIT for expert in _settled(members)
    ):
        broken.add("no hub is fuller than a rank that could take over from it")
    return sorted(broken)


def _crossings(problem: Problem, schedule: Schedule, entry: Entry, hub: int) -> int:
    """How often a group of this hub goes from one domain into another."""
    if problem.domain is None:
        return 0
    ways = [(hub, rank) for rank, _ in schedule.replicas[entry]]
    ways.append((schedule.sources[entry][0], hub))
    return sum(problem.domain[a] != problem.domain[b] for a, b in ways)


def _settled(members: dict[Entry, list[int]]) -> set[Entry]:
    """Entries that were spread with all other egress final.

    The last one in order: fewest replicas, highest id. And those that share no rank with another
    expert that needs spreading.
    """
    shared = {e: set(ranks) for e, ranks in members.items() if len(ranks) > 2}
    alone = {e for e in shared if not any(shared[e] & shared[x] for x in shared if x != e)}
    backwards = sorted(shared, reverse=True)
    return alone | {min(backwards, key=lambda e: len(shared[e]))} if shared else set()


def gap(problem: Problem, schedule: Schedule, expert: Entry) -> Fraction:
    """How much fuller the fullest hub of an entry is than the emptiest rank that could help."""
    source, *able = schedule.hubs(expert)
    busy = [hub for e, hub, begin, end in schedule.pieces if e == expert and begin < end]
    if len(able) == 1 or not busy:  # with one replica there is no copy but the source's
        return Fraction()
    if not problem.is_foreign(expert, source):
        able.append(source)
    return (max(schedule.egress[r] for r in busy) - min(schedule.egress[r] for r in able)) * UNIT


def sent_bytes(problem: Problem, schedule: Schedule) -> list[int]:
    """Bytes that each rank sends, counting every copy of every group."""
    sent = [0] * problem.num_ranks
    for expert, hub, begin, end in schedule.pieces:
        source, *others = schedule.hubs(expert)
        size = sum(problem.group_sizes(len(others))[begin:end])
        if hub == source:
            sent[source] += size * len(others)
        else:
            sent[source] += size
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
    return max(Fraction(max(imports(problem))), most_sent(problem))


def most_sent(problem: Problem) -> Fraction:
    """What the ranks of some set have to send, on average at most."""
    best = Fraction(0)
    replicas = {e: {rank for rank, _ in at} for e, at in problem.replicas().items()}
    holders = {e: {rank for rank, _ in at} for e, at in problem.holders().items()}
    for bits in range(1, 1 << problem.num_ranks):
        ranks = {rank for rank in range(problem.num_ranks) if bits >> rank & 1}
        must_send = sum(ranks >= at for at in holders.values())
        must_send += sum(len(at) - 1 for e, at in replicas.items() if ranks >= at | holders[e])
        best = max(best, Fraction(must_send, len(ranks)))
    return best


def optimum(problem: Problem) -> float:
    """T* in experts: no schedule, of whatever kind, has a less busy slowest link.

    Unknowns: what each rank sends of each expert it has, and the time T. Of an expert with n
    replicas the ranks send n in all, and its holders at least 1.
    """
    replicas, holders = problem.replicas(), problem.holders()
    pairs = [
        (x, rank, at is holders)
        for at in (replicas, holders)
        for x, where in enumerate(at.values())
        for rank, _ in where
    ]
    if not pairs:
        return 0.0
    columns = np.arange(len(pairs))
    expert, rank, first = (np.array(column) for column in zip(*pairs, strict=True))
    shape = (len(replicas), len(pairs) + 1)
    in_all = coo_array((np.ones(len(pairs)), (expert, columns)), shape)
    leaving = coo_array((-np.ones(first.sum()), (expert[first], columns[first])), shape)
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
        b_eq=[len(at) for at in replicas.values()],
        A_ub=vstack([by_rank, leaving]),
        b_ub=np.append(np.zeros(problem.num_ranks), -np.ones(len(replicas))),
        bounds=[(0, None)] * len(pairs) + [(max(imports(problem)), None)],
    )
    assert solution.success, solution.message
    return float(solution.fun)
