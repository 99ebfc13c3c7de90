"""The planner on top of residents: both versions, what they promise, and how little they move.

`gptoss20b_counts.npz` has the routing of a real model: `counts [26 steps, 24 layers, 32 experts]`
of 8,192 consecutive tokens a step, top-4, made from the data set GPT-OSS-MoE-ExpertFingerprinting
by Aman Priyanshu (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import resident_planner
from reference.planner_oracle import (
    Plan,
    Problem,
    least_moves,
    placement_optimum,
    target_tokens,
    worst_rank_after,
)
from test_planner import plan_in_core as plan_from_empty
from test_planner import problem_of
from tiers import cases, sampled

import ultraep_comm as uec
from ultraep_comm import _core
from ultraep_comm.plan.planner import target_to_ppm

EXACT = 1_000_000
Slots = list[list[int]]  # [G][S]


def plan_in_core(problem: Problem, held: Slots) -> Plan:
    arrays = _core.plan_with_residents(
        np.array(problem.load, np.int64),
        np.array(problem.home, np.int32),
        np.array(problem.domain, np.int32),
        np.array(held, np.int32).reshape(problem.num_ranks, problem.slots_per_rank),
        problem.allow_cross_domain,
        target_to_ppm(problem.target),
    )
    return Plan.of(arrays)


def plan_in_python(problem: Problem, held: Slots) -> Plan:
    arrays = resident_planner.plan_slots_with_residents(
        problem.load,
        home=problem.home,
        domain=problem.domain,
        residents=np.array(held).reshape(problem.num_ranks, problem.slots_per_rank),
        allow_cross_domain=problem.allow_cross_domain,
        target=problem.target,
    )
    return Plan.of(arrays)


def nobody(problem: Problem) -> Slots:
    return [[-1] * problem.slots_per_rank for _ in problem.domain]


class Moves(NamedTuple):
    """The modelled transfer of a plan's moves, and how many there are."""

    transfer: int
    count: int


def moves_of(problem: Problem, plan: Plan, held: Slots) -> Moves:
    moved = [
        (expert, rank)
        for rank, row in enumerate(plan.slot_expert)
        for expert, resident in zip(row, held[rank], strict=True)
        if expert != resident
    ]
    imports = np.bincount([rank for _, rank in moved], minlength=1)
    exports = np.bincount([problem.home[e] for e in {e for e, _ in moved}], minlength=1)
    return Moves(max(imports.max(), exports.max()), len(moved))


def check(problem: Problem, plan: Plan, held: Slots) -> None:
    """Hold a plan to its promises, by the public check and by those that it does not make."""
    uec.Plan.from_slots(
        torch.tensor(plan.slot_expert, dtype=torch.int32),
        num_experts=len(problem.load),
        home=torch.tensor(problem.home),
        slot_quota=torch.tensor(plan.slot_quota, dtype=torch.int32),
        home_quota=torch.tensor(plan.home_quota, dtype=torch.int32),
    )
    served = list(plan.home_quota)
    for rank, (row, quotas) in enumerate(zip(plan.slot_expert, plan.slot_quota, strict=True)):
        for expert, quota, resident in zip(row, quotas, held[rank], strict=True):
            assert quota > 0 or expert == resident  # only what is needed moves
            if expert >= 0:
                assert problem.may_hold(expert, rank)
                served[expert] += quota
    assert served == problem.load
    allowed = max(target_tokens(problem), worst_rank_after(problem, plan_from_empty(problem)))
    assert worst_rank_after(problem, plan) <= allowed


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[Problem], Slots]:
    """A few steps of one group, and what its slots hold at first."""
    num_ranks, slots = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 16))
    domain = draw(st.sampled_from([[0] * num_ranks, [r % 2 for r in range(num_ranks)]]))
    rank = st.integers(0, num_ranks - 1)
    first = Problem(
        load=[0] * num_experts,
        home=draw(st.lists(rank, min_size=num_experts, max_size=num_experts)),
        domain=domain,
        slots_per_rank=slots,
        allow_cross_domain=draw(st.booleans()),
        target=draw(st.sampled_from([1.0, 1.01, 1.3])),
    )
    tokens = st.integers(0, 50) | st.integers(0, 5000) | st.integers(0, 2**31 - 1)
    loads = draw(st.lists(st.lists(tokens, min_size=num_experts, max_size=num_experts), max_size=4))
    held = []
    for r in range(num_ranks):
        legal = [e for e in range(num_experts) if first.may_hold(e, r)]
        row = draw(st.lists(st.sampled_from(legal), unique=True, max_size=slots)) if legal else []
        held.append(draw(st.permutations(row + [-1] * (slots - len(row)))))
    return [replace(first, load=load) for load in loads], held


@given(sequences())
@settings(max_examples=cases(300, 1500), deadline=None)
def test_both_versions_agree_and_keep_their_promises(case: tuple[list[Problem], Slots]) -> None:
    steps, held = case
    for problem in steps:
        plan = plan_in_core(problem, held)
        assert plan == plan_in_python(problem, held)
        check(problem, plan, held)
        assert plan_in_core(problem, nobody(problem)) == plan_from_empty(problem)
        if sum(problem.load) < 2**31 and problem.target > 1:  # as the oracle can count
            before = replace(plan_from_empty(problem), slot_expert=held)
            if placement_optimum(problem, before) <= target_tokens(problem):
                assert plan.slot_expert == held  # who suffices stays
        held = plan.slot_expert


@pytest.mark.parametrize("target", [1.0, 1.01])
def test_what_a_plan_has_brought_suffices_for_the_same_load(target: float) -> None:
    random = np.random.default_rng(0)
    load = random.multinomial(64 * 4096, random.dirichlet(np.full(128, 0.7)))
    problem = problem_of(load.tolist(), 32, target=target)
    plan = plan_from_empty(problem)
    again = plan_in_core(problem, plan.slot_expert)
    check(problem, again, plan.slot_expert)
    assert again.slot_expert == plan.slot_expert
    used = [q > 0 for row in again.slot_quota for q in row]
    assert 0 < sum(used) <= sum(e >= 0 for row in plan.slot_expert for e in row)


def test_a_useless_resident_gives_way_to_a_useful_expert() -> None:
    """Also if it is worth more than an empty slot would be, of which there is none."""
    problem = problem_of([90, 10, 20, 0], 2, slots_per_rank=1)
    plan = plan_in_core(problem, [[3], [1]])
    assert plan.slot_expert == [[3], [0]]
    assert plan.slot_quota == [[0], [40]]


def test_residents_of_no_use_may_be_overwritten_only_inside_their_domain() -> None:
    problem = problem_of([100, 0, 0, 0], 4, slots_per_rank=1, domain=[0, 0, 1, 1])
    held = [[-1], [-1], [3], [-1]]
    plan = plan_in_core(problem, held)
    assert plan.slot_expert == [[-1], [0], [3], [-1]]
    assert plan.home_quota[0] == 50
    far = plan_in_core(replace(problem, allow_cross_domain=True), held)
    assert far.home_quota[0] == 25


@pytest.mark.parametrize(
    ("held", "match"),
    [
        ([[0], [-1]], r"residents\[0, 0\] is 0"),
        ([[4], [-1]], r"residents\[0, 0\] is 4"),
        ([[-1], [-2]], r"residents\[1, 0\] is -2"),
        ([[2, 2], [-1, -1]], r"residents\[0, 1\] is 2"),
        ([[-1]], "length of residents"),
    ],
)
def test_illegal_residents_are_rejected(held: Slots, match: str) -> None:
    load, home = np.ones(4, np.int64), np.array([0, 0, 1, 1], np.int32)
    domain = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match=match):
        _core.plan_with_residents(load, home, domain, np.array(held, np.int32), False, EXACT)


def test_moves_are_nearly_as_few_as_any_plan_needs() -> None:
    """Against the optimum, by mixed-integer programming, over steps that keep their residents."""
    ours, best = np.zeros(2), np.zeros(2)
    for seed in range(cases(10, 100)):
        random = np.random.default_rng(seed)
        skew = 1.5 * random.normal(size=8)
        problem = problem_of([0] * 8, 4, target=1.02)
        held = nobody(problem)
        for step in range(5):
            share = np.exp(skew)
            load = random.multinomial(40_000, share / share.sum())
            problem = replace(problem, load=load.tolist())
            skew = 0.9 * skew + 1.5 * np.sqrt(1 - 0.9**2) * random.normal(size=8)
            plan = plan_in_core(problem, held)
            least = least_moves(problem, held, target_tokens(problem)) if step > 0 else None
            if least is not None and worst_rank_after(problem, plan) <= target_tokens(problem):
                mine = moves_of(problem, plan, held)
                assert mine >= least
                assert (mine.count == 0) == (least[1] == 0)
                ours += mine
                best += least
            held = plan.slot_expert
    assert best[1] > 10
    assert (ours <= 1.15 * best).all()


# ---- loads as they come: means over a run's steps after the first, whose slots were empty


@dataclass
class Result:
    moves: float = 0.0
    transfer: float = 0.0
    idle: float = 0.0  # share of the steps in which nothing moves
    replicas: float = 0.0  # that planning from empty slots needs


def run(runs: Iterator[list[np.ndarray]], num_ranks: int) -> Result:
    rows: list[tuple[Any, ...]] = []
    for loads in runs:
        held = nobody(problem_of(loads[0].tolist(), num_ranks))
        for step, load in enumerate(loads):
            problem = problem_of(load.tolist(), num_ranks)
            plan = plan_in_core(problem, held)
            check(problem, plan, held)
            if step > 0:
                replicas = np.array(plan_from_empty(problem).slot_expert) >= 0
                moves = moves_of(problem, plan, held)
                rows.append((moves.count, moves.transfer, moves.count == 0, replicas.sum()))
            held = plan.slot_expert
    return Result(*np.mean(rows, axis=0))


@cache
def recorded() -> np.ndarray:
    counts = np.load(Path(__file__).with_name("gptoss20b_counts.npz"))["counts"]
    return counts.astype(np.int64)


def layers(step_tokens: int, order: int) -> Iterator[list[np.ndarray]]:
    """Every layer's loads; order 0 is as recorded, others shuffle the steps."""
    joined = step_tokens // 8192
    counts = recorded()[: 26 // joined * joined]
    counts = counts.reshape(-1, joined, *counts.shape[1:]).sum(axis=1)
    if order > 0:
        counts = counts[np.random.default_rng(order).permutation(len(counts))]
    for layer in range(24):
        yield list(counts[:, layer])


@pytest.mark.cases
@pytest.mark.parametrize(
    ("tokens", "num_ranks", "replicas", "moves", "transfer", "idle"),
    [
        # As recorded, a plan with the fewest moves of each step has nothing to move in 0.21.
        (32_768, 8, 4, 1.3, 0.9, 0.22),
        (8192, 8, 0, 1.1, 0.75, 0.38),
        (32_768, 32, 20, 7, 7, 0),
    ],
)
@pytest.mark.parametrize("order", sampled(range(6), lambda order: order < 2))
def test_recorded_steps_move_little(
    order: int,
    tokens: int,
    num_ranks: int,
    replicas: float,
    moves: float,
    transfer: float,
    idle: float,
) -> None:
    result = run(layers(tokens, order), num_ranks)
    assert result.replicas > replicas
    assert result.moves <= moves
    assert result.transfer <= transfer
    assert result.idle >= idle


def drifting(rho: float, seed: int, num_experts: int = 128) -> Iterator[list[np.ndarray]]:
    for run_seed in range(cases(2, 8)):
        random = np.random.default_rng([seed, run_seed])
        z = random.normal(size=num_experts)
        loads = []
        for _ in range(8):
            share = np.exp(z)
            loads.append(random.multinomial(4096 * 8 * 64, share / share.sum()))
            z = rho * z + np.sqrt(1 - rho**2) * random.normal(size=num_experts)
        yield loads


@pytest.mark.cases
@pytest.mark.parametrize(("rho", "share"), [(0.9, 0.27), (0.97, 0.18)])
def test_a_drifting_load_moves_a_part_of_what_empty_slots_need(rho: float, share: float) -> None:
    result = run(drifting(rho, seed=1), num_ranks=64)
    assert result.replicas > 35
    assert 0 < result.moves <= share * result.replicas
