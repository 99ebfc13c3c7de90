"""Both definitions of the schedule against each other, what is right, and what is best."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.mark.parametrize("shape", [(64, 256, 2), (40, 160, 4)])
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


@pytest.mark.parametrize(
    "change",
    [
        {"slot_expert": [0, -1]},  # on its own home
        {"slot_expert": [-1, 2]},
        {"slot_expert": [-1]},
        {"home": [0, 2]},
        {"slots_per_rank": -1},
        {"segment_bytes": [-1]},
        {"segment_bytes": [1 << 62, 1 << 62]},
        {"tile_bytes": 0},
        {"mode": 3},
        {"cost": [1, 1, 1, 1]},
        {"cost": [1, 1, 1, 1, 0]},
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
