"""Both definitions of the schedule against each other, what is right, and what is best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import schedule
from reference.schedule_oracle import (
    Problem,
    Schedule,
    densest,
    exports,
    gap,
    imports,
    optimum,
    slowest_link,
    violations,
)
from tiers import cases

from ultraep_comm import _core
from ultraep_comm.plan.bounds import find_transfer_bound
from ultraep_comm.plan.schedule import MODES
from ultraep_comm.plan.topology import contiguous_home

NO_COST = [0, 0, 0, 0, 1]
FIELDS = (
    *("expert", "source_rank", "source_slot", "first"),
    *("replica_rank", "replica_slot", "boundary", "egress"),
)


def contiguous(num_experts: int, num_ranks: int) -> list[int]:
    return contiguous_home(num_experts, num_ranks).tolist()


def in_core(
    problem: Problem, mode: _core.Mode | None, *, may_pull: bool = False, cost: list[int] = NO_COST
) -> dict[str, object]:
    return _core.make_schedule(
        slot_expert=[expert for row in problem.slot_expert for expert in row],
        home=problem.home,
        domain=problem.domain or [0] * problem.num_ranks,
        slots_per_rank=len(problem.slot_expert[0]),
        allow_cross_domain=problem.domain is not None,
        segment_bytes=problem.segment_bytes,
        tile_bytes=problem.tile_bytes,
        mode=mode,
        may_pull=may_pull,
        cost=cost,
        resident=problem.residents and [expert for row in problem.residents for expert in row],
    )


def in_numpy(problem: Problem, mode: str) -> schedule.Schedule:
    return schedule.make_schedule(
        problem.slot_expert,
        home=problem.home,
        segment_bytes=problem.segment_bytes,
        tile_bytes=problem.tile_bytes,
        mode=mode,
        residents=problem.residents,
        domain=problem.domain,
    )


def plain(found: schedule.Schedule, domain: list[int] | None = None) -> Schedule:
    """The schedule as the oracle takes it."""
    entries = found.expert.tolist()
    if domain is not None:
        firsts = found.replica_rank[found.first[:-1]].tolist()
        entries = [(e, domain[rank]) for e, rank in zip(entries, firsts, strict=True)]
    sources = zip(found.source_rank.tolist(), found.source_slot.tolist(), strict=True)
    assert entries == sorted(set(entries))
    return Schedule(
        mode=found.mode,
        sources=dict(zip(entries, sources, strict=True)),
        replicas={entry: list(found.replicas(x)) for x, entry in enumerate(entries)},
        pieces=[(entry, *piece) for x, entry in enumerate(entries) for piece in found.hubs(x)],
        egress=found.egress.tolist(),
    )


def check(problem: Problem) -> Schedule:
    """Make the schedule in every mode and both languages; return the one with hubs."""
    by_mode = {}
    for mode, number in MODES.items():
        found, core = in_numpy(problem, mode), in_core(problem, number)
        assert core["mode"] is number
        for name in FIELDS:
            array = getattr(found, name)
            assert array.dtype == (np.int64 if name == "egress" else np.int32)
            assert core[name] == array.tolist(), (mode, name)
        by_mode[mode] = plain(found, problem.domain)
        assert violations(problem, by_mode[mode]) == []
        exported = exports(problem, by_mode[mode])
        assert core["max_exports"] == max(exported)
        assert core["max_imports"] == max(imports(problem))
        assert core["chained"] == any(map(min, exported, imports(problem)))
    assert by_mode["push"] == replace(by_mode["pull"], mode="push")
    return by_mode["push"]


def chained(problem: Problem) -> bool:
    """Whether a rank both imports and can be a source."""
    holders = {rank for at in problem.holders().values() for rank, _ in at}
    return any(imports(problem)[rank] for rank in holders)


def placed(home: list[int], chosen: list[list[int]], slots_per_rank: int, **cut: object) -> Problem:
    """A plan with the legal ones among the experts chosen for each rank, while slots last."""
    rows = []
    for rank, experts in enumerate(chosen):
        legal = [e for e in dict.fromkeys(experts) if e < 0 or home[e] != rank][:slots_per_rank]
        rows.append(legal + [-1] * (slots_per_rank - len(legal)))
    return Problem(slot_expert=rows, home=home, **cut)


@st.composite
def problems(draw: st.DrawFn, max_ranks: int = 10, max_experts: int = 24) -> Problem:
    num_ranks, num_experts = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_experts))
    slots_per_rank = draw(st.integers(0, 4))
    anywhere = st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts)
    few = draw(st.integers(1, num_experts))  # replicate only these: many hubs for each
    expert = st.integers(-1, few - 1)
    rows = st.lists(expert, min_size=slots_per_rank, max_size=2 * slots_per_rank)
    size = st.one_of(st.integers(0, 100), st.integers(0, 200_000), st.sampled_from([1 << 20]))
    problem = placed(
        draw(st.just(contiguous(num_experts, num_ranks)) | anywhere),
        draw(st.lists(rows, min_size=num_ranks, max_size=num_ranks)),
        slots_per_rank,
        segment_bytes=draw(st.lists(size, min_size=1, max_size=4)),
        tile_bytes=draw(st.sampled_from([1000, 1024, 4096, 32 << 10, 48_000, 64 << 10, 1 << 20])),
    )
    if draw(st.booleans()):
        return problem
    held = st.none() | st.integers(-1, num_experts)  # None: what the plan has there
    rows = st.lists(held, min_size=slots_per_rank, max_size=slots_per_rank)
    others = draw(st.lists(rows, min_size=num_ranks, max_size=num_ranks))
    residents = [
        [own if other is None else other for own, other in zip(*both, strict=True)]
        for both in zip(problem.slot_expert, others, strict=True)
    ]
    return replace(problem, residents=residents)


@st.composite
def crossing(draw: st.DrawFn, max_ranks: int = 10, max_experts: int = 24) -> Problem:
    """Plans across domains, runs of ranks or not, with any numbers."""
    problem = draw(problems(max_ranks, max_experts))
    ranks = problem.num_ranks
    number = st.sampled_from([0, 1, 7, -3, 2**31 - 1])
    runs = st.integers(1, ranks).map(lambda size: [rank // size for rank in range(ranks)])
    domain = draw(runs | st.lists(number, min_size=ranks, max_size=ranks))
    return replace(problem, domain=domain)


@given(problems() | problems(40, 4) | crossing() | crossing(40, 4))
@example(Problem(slot_expert=[[-1]], home=[0]))
@example(Problem(slot_expert=[[], []], home=[0, 1]))
@example(Problem(slot_expert=[[1], [0]], home=[0, 1]))
@example(Problem(slot_expert=[[-1], [0], [0]], home=[0], segment_bytes=[0]))
@example(Problem(slot_expert=[[-1], [0], [0]], home=[0], segment_bytes=[]))
@settings(max_examples=cases(140, 720))
def test_both_definitions_agree_and_obey_every_rule(problem: Problem) -> None:
    """Also with long rows of hubs."""
    found = check(problem)
    assert bound(problem) <= max(*found.egress, max(imports(problem)) * 65536) / 65536


@given(problems())
@settings(max_examples=cases(20, 100))
def test_plans_inside_a_domain_are_as_without_any(problem: Problem) -> None:
    """Wherever plans may go, what stays with its home is scheduled to the integer as before."""
    across = replace(problem, domain=[5] * problem.num_ranks)
    for mode, number in MODES.items():
        assert in_core(across, number) == in_core(problem, number)
        for name in FIELDS:
            inside, anywhere = (getattr(in_numpy(p, mode), name) for p in (problem, across))
            assert inside.tolist() == anywhere.tolist()


def halves(home: list[int], num_ranks: int, _: int) -> list[list[int]]:
    """Every rank is the home of one expert and imports those of the other half."""
    firsts = [home.index(rank) for rank in range(num_ranks)]
    others = firsts[num_ranks // 2 :], firsts[: num_ranks // 2]
    chosen = [others[2 * rank // num_ranks] for rank in range(num_ranks)]
    return [row[rank % len(row) :] + row for rank, row in enumerate(chosen) if row] or [[]]


def ring(home: list[int], num_ranks: int, slots: int) -> list[list[int]]:
    """Every rank exports to the next ones."""
    return [[home.index((r + i + 1) % num_ranks) for i in range(slots)] for r in range(num_ranks)]


def hot(home: list[int], num_ranks: int, slots: int) -> list[list[int]]:
    drawn = np.random.default_rng(len(home)).zipf(1.5, (num_ranks, slots)) - 1
    return np.where(drawn < len(home), drawn, -1).tolist()


ADVERSARIAL: dict[str, Callable[[list[int], int, int], list[list[int]]]] = {
    "nothing replicated": lambda home, ranks, slots: [[]] * ranks,
    "one expert everywhere": lambda home, ranks, slots: [[0]] * ranks,
    "the experts of one rank everywhere": lambda home, ranks, slots: [[*range(slots)]] * ranks,
    "a ring of chains": ring,
    "two halves swap": halves,
    "slots filled from the back": lambda home, ranks, slots: [
        [-1] * (rank % 2) + [rank % len(home)] for rank in range(ranks)
    ],
    "random": lambda home, ranks, slots: (
        np.random.default_rng(len(home)).integers(-1, len(home), (ranks, slots)).tolist()
    ),
    "random, a few hot": hot,
}
CUTS = {
    "large": {},
    "one group": {"segment_bytes": [5000]},
    "several odd segments": {"segment_bytes": [3_000_001, 1, 70_000, 0, 12_345]},
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "shape", [(1, 4, 2), (2, 2, 1), (8, 8, 1), (18, 18, 1), (64, 256, 2), (256, 1024, 2)]
)
@pytest.mark.parametrize("plan", ADVERSARIAL)
def test_adversarial_plans(plan: str, shape: tuple[int, int, int], cut: str) -> None:
    num_ranks, num_experts, slots_per_rank = shape
    home = contiguous(num_experts, num_ranks)
    chosen = ADVERSARIAL[plan](home, num_ranks, slots_per_rank)
    check(placed(home, chosen, slots_per_rank, **CUTS[cut]))


def test_one_expert_is_shared_by_its_replicas() -> None:
    """By hand: one copy leaves the home, and the three replicas make the other two evenly."""
    found = check(placed([0], [[], [0], [0], [0]], 1, segment_bytes=[12 << 15]))
    assert found.pieces == [(0, 0, 0, 0), (0, 1, 0, 4), (0, 2, 4, 8), (0, 3, 8, 12)]
    assert found.egress == [65536, 43691, 43691, 43690]


def test_a_busy_replica_is_spared() -> None:
    """By hand: rank 1 already sends an expert of its own, so rank 2 makes the second copy of 0."""
    problem = placed([0, 1], [[1], [0], [0], []], 1, segment_bytes=[12 << 15])
    found = check(problem)
    assert found.pieces == [
        (0, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 2, 0, 12),
        (1, 1, 0, 12),
        (1, 0, 12, 12),
    ]
    assert (max(found.egress), bound(problem), optimum(problem)) == (65536, 1, 1)


def test_a_resident_takes_load_off_a_home() -> None:
    """By hand: rank 1 keeps both experts, and sends one. Rank 2 is to lose the one it holds."""
    problem = placed([0, 0], [[], [0, 1], [0], [1]], 2)
    assert check(problem).sources == {0: (0, -1), 1: (0, -1)}
    problem = replace(problem, residents=[[-1, -1], [0, 1], [1, -1], [-1, -1]])
    found = check(problem)
    assert found.sources == {0: (1, 0), 1: (0, -1)}
    assert found.replicas == {0: [(2, 0)], 1: [(3, 0)]}
    assert found.egress == [65536, 65536, 0, 0]
    assert bound(problem) == optimum(problem) == 1
    assert check(replace(problem, residents=problem.slot_expert)).sources == {}


def test_an_expert_crosses_once_and_is_handed_on() -> None:
    """By hand: each replica in the other domain gets a third, and gives it to the others."""
    problem = placed([0], [[], [0], [0], [0], [0]], 1, segment_bytes=[12 << 15])
    found = check(replace(problem, domain=[3, 3, 2, 2, 2]))
    assert found.sources == {(0, 2): (0, -1), (0, 3): (0, -1)}
    assert found.pieces == [
        ((0, 2), 0, 0, 0),
        ((0, 2), 2, 0, 4),
        ((0, 2), 3, 4, 8),
        ((0, 2), 4, 8, 12),
        ((0, 3), 0, 0, 12),
        ((0, 3), 1, 12, 12),
    ]
    assert found.egress == [2 * 65536, 0, 43691, 43691, 43690]


def test_an_expert_does_not_cross_to_a_domain_that_has_it() -> None:
    """By hand: rank 2 sends what it keeps, though the home has less to do; 4 and 5 have nobody."""
    slots = [[-1, -1], [-1, -1], [0, -1], [0, 1], [0, -1], [0, -1]]
    residents = [[-1, -1], [-1, -1], [0, -1], [-1, -1], [-1, -1], [-1, -1]]
    home = [0, 2]
    problem = Problem(slot_expert=slots, home=home, residents=residents, domain=[0, 0, 1, 1, 2, 2])
    found = check(problem)
    assert found.sources == {(0, 1): (2, 0), (0, 2): (0, -1), (1, 1): (2, -1)}
    assert found.egress == [65536, 0, 2 * 65536, 0, 32768, 32768]


# ---- how close to the best ------------------------------------------------------------------


def skewed_loads(num_experts: int, num_ranks: int) -> Iterator[list[int]]:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        for load in (
            rng.pareto(1.2, num_experts),
            rng.lognormal(0, 1, num_experts),
            rng.permutation(1 / np.arange(1, num_experts + 1)),
            np.where(np.arange(num_experts) < 3 * num_experts // num_ranks, 6, 1)  # hot ranks
            * rng.lognormal(0, 0.3, num_experts),
        ):
            yield (load / load.sum() * num_ranks * 32_768).astype(int).tolist()


def planned(load: list[int], num_ranks: int, slots_per_rank: int) -> Problem:
    home = contiguous_home(len(load), num_ranks)
    slot_expert, _, _ = _core.plan_replicas(
        np.array(load, np.int64),
        home,
        np.zeros(num_ranks, np.int32),
        slots_per_rank,
        False,
        1_010_000,
    )
    return Problem(slot_expert=slot_expert.tolist(), home=home.tolist())


@pytest.mark.parametrize("shape", [(64, 256, 2), (64, 128, 1), (40, 160, 4)])
def test_plans_of_the_planner_are_sent_at_the_bound(shape: tuple[int, int, int]) -> None:
    """Egress and imports of 37.75 MB experts, counted in bytes, over the linear program's T*."""
    num_ranks, num_experts, slots_per_rank = shape
    ratios = []
    for load in skewed_loads(num_experts, num_ranks):
        problem = planned(load, num_ranks, slots_per_rank)
        found, best = check(problem), optimum(problem)
        assert best >= 1
        assert bound(problem) == pytest.approx(best, rel=1e-7)
        if not chained(problem):
            assert best == pytest.approx(max(exports(problem) + imports(problem)), rel=1e-7)
        ratios.append(float(slowest_link(problem, found)) / best)
    print(f"{shape}: over T*, mean {np.mean(ratios):.4f}, worst {max(ratios):.4f}")
    assert np.mean(ratios) < 1.005
    assert max(ratios) < 1.03


def random_plans(count: int) -> Iterator[Problem]:
    rng = np.random.default_rng(8)
    for _ in range(count):
        num_ranks, slots_per_rank = int(rng.choice([4, 8, 16, 24])), int(rng.integers(1, 5))
        num_experts = num_ranks * int(rng.choice([1, 2, 4]))
        home = contiguous(num_experts, num_ranks)
        if rng.random() < 0.5:
            home = rng.integers(0, num_ranks, num_experts).tolist()
        weight = 1 / np.arange(1, num_experts + 1) ** rng.choice([0, 0.6, 1.2])
        rows = [
            rng.choice(num_experts, num_experts, replace=False, p=weight / weight.sum()).tolist()
            for _ in range(num_ranks)
        ]
        full = placed(home, rows, slots_per_rank)
        kept = rng.random((num_ranks, slots_per_rank)) < rng.choice([0.3, 0.7, 1])
        yield replace(full, slot_expert=np.where(kept, full.slot_expert, -1).tolist())


@pytest.mark.cases
def test_any_plan_is_sent_close_to_the_bound() -> None:
    """Plans no planner made, nearly all with chains; the bounds are what is reached there."""
    ratios, gaps, exact, unlike = [], [], [], 0
    for problem in random_plans(cases(150, 300)):
        found, best = check(problem), optimum(problem)
        if best == 0:
            continue
        ratios.append(max(*found.egress, max(imports(problem)) * 65536) / 65536 / best)
        gaps.append(float(max(gap(problem, found, expert) for expert in problem.replicas())))
        exact.append(float(bound(problem)) / best)
        unlike += best > max(exports(problem) + imports(problem)) + 1e-6
    print(f"over T*: mean {np.mean(ratios):.4f}, worst {max(ratios):.4f}; gap {max(gaps):.3f}")
    assert unlike >= 10  # where chains make the bound more than two maxima
    assert np.mean(ratios) < 1.01
    assert max(ratios) < 1.09
    assert max(gaps) < 0.5
    assert min(exact) > 0.999
    assert np.mean(np.array(exact) > 1 - 1e-7) > 0.95


def drifting(
    shape: tuple[int, int, int], residents: tuple[int, int], moves: tuple[int, int], count: int
) -> Iterator[Problem]:
    """Plans that fill a few slots anew: hot experts, of a load unlike that of the other slots."""
    num_ranks, num_experts, slots_per_rank = shape
    rng = np.random.default_rng(num_ranks)
    home = contiguous(num_experts, num_ranks)

    def fill(slots: np.ndarray, load: np.ndarray, num: int) -> np.ndarray:
        filled = slots.copy()
        while (filled != slots).sum() < num:
            rank, slot = rng.integers(num_ranks), rng.integers(slots_per_rank)
            expert = rng.choice(num_experts, p=load / load.sum())
            full = slots[rank, slot] >= 0 and (slots[rank] < 0).any()  # empty slots first
            if home[expert] != rank and expert not in [*filled[rank], *slots[rank]] and not full:
                filled[rank, slot] = expert
        return filled

    for i in range(count):
        load = rng.lognormal(0, 1, num_experts) if i % 2 else rng.pareto(1.2, num_experts) + 0.01
        held = fill(np.full((num_ranks, slots_per_rank), -1), load, rng.integers(*residents))
        load *= rng.lognormal(0, rng.choice([0.1, 0.5, 1]), num_experts)
        if rng.random() < 0.5:
            load[rng.integers(num_experts, size=2)] = load.sum() * rng.choice([0.1, 0.3])
        slots = fill(held, load, rng.integers(*moves))
        yield Problem(slot_expert=slots.tolist(), home=home, residents=held.tolist())


@pytest.mark.parametrize(
    ("shape", "residents", "moves"),
    [((64, 128, 2), (60, 101), (5, 21)), ((8, 32, 2), (8, 15), (1, 7))],
)
def test_moves_are_sent_close_to_the_bound(
    shape: tuple[int, int, int], residents: tuple[int, int], moves: tuple[int, int]
) -> None:
    """The bound lets an expert leave several holders in parts; here it leaves one."""
    ratios, from_homes = [], []
    for problem in drifting(shape, residents, moves, cases(100, 600)):
        found, best = check(problem), float(bound(problem))
        most = max(imports(problem))
        assert best == pytest.approx(optimum(problem), rel=1e-7)
        ratios.append(max(max(found.egress) / 65536, most) / best)
        moved = np.where(
            np.equal(problem.slot_expert, problem.residents), -1, problem.slot_expert
        ).tolist()
        homes = in_numpy(replace(problem, slot_expert=moved), "push")
        from_homes.append(max(homes.max_egress, most) / best)
    print(f"{shape}: over T*, mean {np.mean(ratios):.4f}, worst {max(ratios):.4f}")
    print(f"from homes alone: mean {np.mean(from_homes):.4f}, worst {max(from_homes):.4f}")
    assert np.mean(ratios) < 1.01
    assert max(ratios) <= 1.5
    assert np.mean(from_homes) > 1.03


def bound(problem: Problem) -> Fraction:
    held = None if problem.residents is None else np.array(problem.residents)
    return find_transfer_bound(np.array(problem.slot_expert), np.array(problem.home), held)[0]


@given(problems(max_ranks=6, max_experts=8))
@settings(max_examples=cases(20, 80))
def test_the_bound_is_one(problem: Problem) -> None:
    """Three statements of T*: the densest set of ranks, the linear program, and the library's."""
    best = densest(problem)
    assert optimum(problem) == pytest.approx(float(best), abs=1e-7)
    assert bound(problem) == best
    if not chained(problem) and max(map(len, problem.holders().values()), default=1) == 1:
        assert best == max(exports(problem) + imports(problem))


# ---- mode="auto" ----------------------------------------------------------------------------

costs = st.tuples(
    st.sampled_from([0, 1_100, 80_000]),
    st.sampled_from([0, 200, 60_000]),
    st.sampled_from([0, 50_000, 300_000]),
    st.sampled_from([0, 1_000_000, 10_000_000]),
    st.integers(1, 30_000),
).map(list)


def crosses_often(problem: Problem) -> bool:
    """Whether a source that does all the work sends an expert into one domain several times."""
    sources = plain(in_numpy(problem, "direct"), problem.domain).sources
    return any(
        len(at) > 1 and problem.is_foreign(entry, sources[entry][0])
        for entry, at in problem.entries().items()
    )


@given(problems() | crossing(), costs, st.booleans())
@settings(max_examples=cases(50, 300))
def test_auto_takes_a_cheapest_legal_mode(
    problem: Problem, cost: list[int], may_pull: bool
) -> None:
    legal = [mode for mode in MODES if may_pull or mode != "pull"]
    if crosses_often(problem):
        legal = ["pull" if may_pull else "push"]  # whatever it costs
    forced = {
        MODES[mode]: in_core(problem, MODES[mode], may_pull=may_pull, cost=cost) for mode in legal
    }
    chosen = in_core(problem, None, may_pull=may_pull, cost=cost)
    assert chosen == in_core(problem, None, may_pull=may_pull, cost=cost)
    assert chosen == forced[chosen["mode"]]  # also the hubs and the modelled time
    assert chosen["modelled_ps"] == min(found["modelled_ps"] for found in forced.values())


RACK = [1_100, 200, 50_000, 1_500_000, 6_400]


@pytest.mark.parametrize(
    ("fan_out", "num_bytes", "may_pull", "mode"),
    [
        (1, 37_748_736, True, "direct"),  # nothing to relay
        (12, 37_748_736, False, "push"),
        (12, 37_748_736, True, "pull"),
        (2, 4096, True, "direct"),  # a second hop costs more than the bytes
    ],
)
def test_auto_on_a_rack(fan_out: int, num_bytes: int, may_pull: bool, mode: str) -> None:
    chosen = [[0] if 1 <= rank <= fan_out else [] for rank in range(64)]
    problem = placed(contiguous(256, 64), chosen, 2, segment_bytes=[num_bytes])
    found = in_core(problem, None, may_pull=may_pull, cost=RACK)
    assert found["mode"] is MODES[mode]


# ---- the oracle and the errors --------------------------------------------------------------


@pytest.mark.parametrize("may_pull", [False, True])
def test_auto_crosses_once(may_pull: bool) -> None:
    """Though a second hop costs more than the bytes."""
    problem = placed([0, 0], [[], [], [0], [0]], 1, segment_bytes=[4096])
    found = in_core(problem, None, may_pull=may_pull, cost=RACK)
    assert found["mode"] is _core.Mode.DIRECT
    apart = replace(problem, domain=[0, 0, 1, 1])
    found = in_core(apart, None, may_pull=may_pull, cost=RACK)
    assert found["mode"] is (_core.Mode.PULL if may_pull else _core.Mode.PUSH)
    alone = replace(apart, domain=[0, 0, 1, 2])  # there is nobody to hand it on to
    assert in_core(alone, None, may_pull=may_pull, cost=RACK)["mode"] is _core.Mode.DIRECT


def broken(problem: Problem, good: Schedule, rule: str) -> Schedule:
    """A schedule that breaks one rule."""
    pieces, egress = list(good.pieces), list(good.egress)
    expert, hub, begin, end = pieces[1]
    match rule:
        case "the replicas are the plan's, by expert and rank":
            at = {e: [(rank, 1 - slot) for rank, slot in r] for e, r in good.replicas.items()}
            return replace(good, replicas=at)
        case "a source holds its expert":
            return replace(good, sources={0: (1, 0)})
        case "a hub has an instance of its expert":
            pieces[1] = (expert, 5, begin, end)
        case "every group has exactly one hub":
            pieces[1] = (expert, hub, begin, end - 1)
        case "egress is what the ranges say, but for their rounding":
            egress[0], egress[1] = egress[1], egress[0]
        case "every replica is sent once":
            egress[2] += 1
        case "every replicated expert leaves its source":
            egress[0], egress[2] = egress[0] - 32_768, egress[2] + 32_768
        case "no hub is fuller than a rank that could take over from it":
            # The first replica takes the whole range of the second: legal, but not level.
            moved = egress[2] // 2
            pieces[1] = (expert, hub, begin, end)
            pieces[1:3] = [(expert, hub, begin, pieces[2][3]), (expert, pieces[2][1], end, end)]
            egress[1], egress[2] = egress[1] + moved, egress[2] - moved
        case "in direct mode the source is the only hub":
            return replace(good, mode="direct")
    return replace(good, pieces=pieces, egress=egress)


@pytest.mark.parametrize(
    "rule",
    [
        "the replicas are the plan's, by expert and rank",
        "a source holds its expert",
        "a hub has an instance of its expert",
        "every group has exactly one hub",
        "egress is what the ranges say, but for their rounding",
        "every replica is sent once",
        "every replicated expert leaves its source",
        "no hub is fuller than a rank that could take over from it",
        "in direct mode the source is the only hub",
    ],
)
def test_the_oracle_notices(rule: str) -> None:
    problem = placed([0, 0], [[], [0], [0], [0], [0], []], 2)
    assert rule in violations(problem, broken(problem, check(problem), rule))


def test_the_oracle_notices_an_expert_that_crosses_for_each_replica() -> None:
    problem = placed([0, 0], [[], [0], [0], [0], [0], []], 2)
    apart = replace(problem, domain=[0, 1, 1, 1, 1, 1])
    alone = replace(plain(in_numpy(apart, "direct"), apart.domain), mode="push")
    assert violations(apart, alone) == [
        "an expert crosses once to a domain that lacks it",
        "no hub is fuller than a rank that could take over from it",
    ]


def test_the_oracle_notices_sources_in_another_domain() -> None:
    kept = [[-1, -1], [0, -1], [-1, -1]]
    problem = Problem(
        slot_expert=[[-1, -1], [0, -1], [0, -1]], home=[0], residents=kept, domain=[0, 1, 1]
    )
    good = check(problem)
    assert good.sources == {(0, 1): (1, 0)}
    bad = replace(good, sources={(0, 1): (0, -1)})
    assert violations(problem, bad) == ["a source holds its expert"]


def test_the_oracle_notices_a_home_that_does_all_the_work() -> None:
    problem = placed([0, 0], [[], [0], [0], [0], [0], []], 2)
    alone = replace(plain(in_numpy(problem, "direct")), mode="push")
    assert violations(problem, alone) == [
        "no hub is fuller than a rank that could take over from it"
    ]


@pytest.mark.parametrize("pieces", [[(0, 0, 0, 576)] * 2, [(0, 0, 0, 577)], [(0, 0, 576, 0)], []])
def test_the_oracle_notices_overlap_excess_and_omission(
    pieces: list[tuple[int, int, int, int]],
) -> None:
    problem = placed([0], [[], [0]], 1)
    bad = replace(check(problem), pieces=pieces)
    assert "every group has exactly one hub" in violations(problem, bad)


@pytest.mark.parametrize(
    "change",
    [
        {"slot_expert": [0, -1]},  # on its own home
        {"slot_expert": [-1, 2]},
        {"slot_expert": [-1, -2]},
        {"slot_expert": [-1]},
        {"home": [0, 2]},
        {"home": [-1, 1]},
        {"slots_per_rank": -1},
        {"segment_bytes": [-1]},
        {"segment_bytes": [1 << 62, 1 << 62]},
        {"tile_bytes": 0},
        {"mode": 3},
        {"mode": -1},
        {"cost": [1, 1, 1, 1]},
        {"cost": [1, 1, 1, 1, 0]},
        {"cost": [-1, 1, 1, 1, 1]},
        {"resident": [-1]},
    ],
)
def test_the_core_rejects_values_out_of_range(change: dict[str, object]) -> None:
    right = {
        "slot_expert": [1, 0],
        "home": [0, 1],
        "domain": [0, 0],
        "slots_per_rank": 1,
        "allow_cross_domain": False,
        "segment_bytes": [4096],
        "tile_bytes": 1024,
        "mode": _core.Mode.PUSH,
        "may_pull": False,
        "cost": NO_COST,
    }
    _core.make_schedule(**right)
    with pytest.raises(TypeError if "mode" in change else ValueError):
        _core.make_schedule(**(right | change))
