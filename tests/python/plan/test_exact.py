"""A target of 1.0: every rank has the floor or the ceiling of the mean, and buffers fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import close_all, plan_alone
from reference import planner
from reference.planner_oracle import optimum
from test_planner import problem_of
from tiers import cases

import ultraep_comm as uec
from ultraep_comm import _core, errors
from ultraep_comm.bench.loads import make_loads
from ultraep_comm.plan.topology import Topology

EXACT = 1_000_000  # parts per million


def rank_tokens(plan: Any, home: np.ndarray, num_ranks: int) -> np.ndarray:
    """Tokens of each rank, of a plan that is checked here for whatever else it promises."""
    slot_expert, slot_quota, home_quota = plan
    tokens = np.bincount(home, home_quota, num_ranks).astype(np.int64)
    for rank, row in enumerate(slot_expert.tolist()):
        used = [e for e in row if e >= 0]
        assert len(set(used)) == len(used)
        assert all(home[e] != rank for e in used)
    assert (home_quota >= 0).all()
    assert ((slot_quota > 0) == (slot_expert >= 0)).all()
    return tokens + slot_quota.sum(axis=1)


def plan_exactly(load: np.ndarray, home: np.ndarray, num_ranks: int, slots: int) -> np.ndarray:
    domain = np.zeros(num_ranks, np.int32)
    return _core.plan_replicas(load, home, domain, slots, False, EXACT, None)


def served(plan: Any) -> np.ndarray:
    slot_expert, slot_quota, home_quota = plan
    tokens = home_quota.astype(np.int64)
    np.add.at(tokens, slot_expert[slot_expert >= 0], slot_quota[slot_expert >= 0])
    return tokens


def loads_of(num_experts: int, most: int) -> Iterator[np.ndarray]:
    for values in product(range(most + 1), repeat=num_experts):
        yield np.array(values, np.int64)


@pytest.mark.parametrize(
    ("local_counts", "most"),
    [
        ((2, 2), 5),
        ((3, 0), 7),
        ((2, 2, 2), 2),
        ((3, 1, 0), 4),
        ((1, 1, 1, 1), 5),
        ((4, 0, 0, 1), 3),
        ((1, 2, 1, 2), 2),
    ],
    ids=str,
)
def test_every_small_load_is_exact_with_the_certain_slots(
    local_counts: tuple[int, ...], most: int
) -> None:
    num_ranks, num_experts = len(local_counts), sum(local_counts)
    home = np.repeat(np.arange(num_ranks, dtype=np.int32), local_counts)
    slots = uec.slots_for_exact(num_ranks=num_ranks, num_experts=num_experts, home=home)
    for load in loads_of(num_experts, most + cases(0, 1)):
        plan = plan_exactly(load, home, num_ranks, slots)
        tokens = rank_tokens(plan, home, num_ranks)
        assert (served(plan) == load).all()
        assert tokens.max() - tokens.min() <= 1, load


@pytest.mark.parametrize(
    "by_home",
    [
        [[0, 0], [20, 20], [44, 0], [20, 20], [20, 20]],
        [[20, 20, 20, 20], [20, 20, 20, 20], [0, 0, 0, 0], [48, 0, 0, 0]],
    ],
    ids=str,
)
def test_where_only_the_last_style_is_exact(by_home: list[list[int]]) -> None:
    load = np.array(by_home, np.int64).reshape(-1)
    num_ranks = len(by_home)
    slots = uec.slots_for_exact(num_ranks=num_ranks, num_experts=len(load))
    home = np.arange(len(load), dtype=np.int32) // len(by_home[0])
    tokens = rank_tokens(plan_exactly(load, home, num_ranks, slots), home, num_ranks)
    assert tokens.max() - tokens.min() <= 1


@given(st.data())
@settings(max_examples=cases(150, 1500))
def test_large_loads_are_exact_with_the_certain_slots(data: st.DataObject) -> None:
    """Also with few experts in use, where slots are scarce; the definition finds the same plan."""
    local_counts = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any))
    num_ranks, num_experts = len(local_counts), sum(local_counts)
    home = np.repeat(np.arange(num_ranks, dtype=np.int32), local_counts)
    home = home[np.array(data.draw(st.permutations(range(num_experts))))]
    slots = uec.slots_for_exact(num_ranks=num_ranks, num_experts=num_experts, home=home)
    one = st.sampled_from([0, 0, 1, 1000]) | st.integers(0, 2**31 - 1)
    load = np.array(data.draw(st.lists(one, min_size=num_experts, max_size=num_experts)))
    plan = plan_exactly(load, home, num_ranks, slots)
    tokens = rank_tokens(plan, home, num_ranks)
    assert tokens.max() - tokens.min() <= 1
    expected = planner.plan_slots(
        load,
        num_ranks=num_ranks,
        slots_per_rank=slots,
        home=home,
        domain=np.zeros(num_ranks, np.int32),
        target=1.0,
    )
    for found, wanted in zip(plan, expected, strict=True):
        assert (found == wanted).all()


@pytest.mark.parametrize(("num_ranks", "local_counts"), [(2, 1), (2, 4), (3, 3), (5, 2)])
def test_fewer_slots_are_not_certain(num_ranks: int, local_counts: int) -> None:
    """The load that `slots_for_exact` names: no plan at all is exact with one slot less."""
    num_experts = num_ranks * local_counts
    slots = uec.slots_for_exact(num_ranks=num_ranks, num_experts=num_experts)
    load = [num_ranks] * (num_experts - local_counts) + [0] * local_counts
    problem = problem_of(load, num_ranks, slots - 1, target=1.0)
    mean = -(-sum(load) // num_ranks)
    if slots > 1:
        assert optimum(problem) > mean
    for target in (1.0, 1.01):
        plan = plan_alone(
            torch.tensor(load), num_ranks=num_ranks, slots_per_rank=slots - 1, target=target
        )
        assert not plan.is_exact
        assert plan.limited_by == "slots"


# ---- large groups -------------------------------------------------------------------------------


def drawn(family: str, num_ranks: int, num_experts: int, seeds: int) -> list[np.ndarray]:
    tokens = {"num_tokens": num_ranks * 4096, "topk": 8}
    return make_loads(family, num_ranks=num_ranks, num_experts=num_experts, **tokens, seeds=seeds)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("family", ["zipf0.6", "zipf1.4", "lognormal"])
def test_exact_at_the_bounds_of_transfer(family: str, slots: int) -> None:
    """G - 1 replicas, an import a rank, and hardly an export more than a home's excess needs."""
    num_ranks, num_experts = 64, 256
    home = np.arange(num_experts, dtype=np.int32) // 4
    more = []
    for load in drawn(family, num_ranks, num_experts, cases(4, 16)):
        plan = plan_exactly(load, home, num_ranks, slots)
        tokens = rank_tokens(plan, home, num_ranks)
        assert tokens.max() - tokens.min() <= 1
        filled = plan[0] >= 0
        assert filled.sum() <= num_ranks - 1
        assert filled.sum(axis=1).max() <= 1
        exported = np.unique(plan[0][filled])
        by_home = -np.sort(-load.reshape(num_ranks, 4), axis=1).cumsum(axis=1)
        excess = by_home[:, -1:] - tokens.max()
        fewest = 1 + (np.cumsum(-np.sort(-load.reshape(num_ranks, 4)), axis=1) < excess).sum(axis=1)
        least = np.where(excess[:, 0] > 0, fewest, 0).max()
        more.append(np.bincount(home[exported]).max() - least)
    assert np.mean(more) <= 0.3


def test_larger_than_a_rack() -> None:
    """Exact with one slot in one domain; in domains of 64 at 1.01 of what their loads allow."""
    num_ranks, num_experts = 512, 2048
    home = np.arange(num_experts, dtype=np.int32) // 4
    for family in ("zipf1.0", "lognormal"):
        (load,) = drawn(family, num_ranks, num_experts, 1)
        tokens = rank_tokens(plan_exactly(load, home, num_ranks, 1), home, num_ranks)
        assert tokens.max() - tokens.min() <= 1
        domains = np.arange(num_ranks) // 64
        plan = plan_alone(
            torch.from_numpy(load.copy()), num_ranks=num_ranks, slots_per_rank=1, domains=domains
        )
        assert plan.imbalance <= max(1.01, plan.imbalance_bound * (1 + 1 / 4096))
        assert plan.limited_by == "domains"


# ---- what plans say of themselves ---------------------------------------------------------------


def test_a_plan_says_whether_it_is_exact_and_why_not() -> None:
    load = torch.tensor([7, 0, 1, 0])
    four = {"num_ranks": 2, "slots_per_rank": 1}
    exact = plan_alone(load, target=1.0, **four)
    assert exact.is_exact
    assert exact.limited_by is None
    loose = plan_alone(load, target=2.0, **four)
    assert not loose.is_exact
    assert loose.limited_by == "target"
    (skewed,) = drawn("zipf1.0", 64, 256, 1)  # with one slot, of four that make it certain
    loose = plan_alone(torch.from_numpy(skewed.copy()), num_ranks=64, slots_per_rank=1)
    assert loose.limited_by == "target"
    apart = plan_alone(load, target=1.0, domains=[0, 1], **four)
    assert apart.limited_by == "domains"
    none = plan_alone(load, target=1.0, num_ranks=2, slots_per_rank=0)
    assert none.limited_by == "slots"
    placed = uec.Plan.from_slots([[-1], [0]], num_experts=4)
    assert not placed.is_exact
    assert placed.limited_by is None  # nobody knows
    nothing = plan_alone(torch.zeros(4, dtype=torch.int64), target=1.0, **four)
    assert nothing.is_exact


def test_domains_limit_unless_replicas_cross_them() -> None:
    load = torch.tensor([7, 0, 0, 1, 0, 0])
    six = {"num_ranks": 6, "slots_per_rank": 1, "domains": [0, 0, 0, 1, 1, 1]}
    inside = plan_alone(load, target=1.0, **six)
    assert inside.limited_by == "domains"
    assert inside.imbalance == inside.imbalance_bound == 3 * 6 / 8
    across = plan_alone(load, target=1.0, allow_cross_domain=True, **six)
    assert across.is_exact
    assert across.imbalance == across.imbalance_bound == 2 * 6 / 8
    loose = plan_alone(load, target=2.25, allow_cross_domain=True, **six)
    assert loose.num_replicas > 0
    assert loose.limited_by == "target"
    level = torch.tensor([7, 0, 0, 7, 0, 0])  # 14 tokens on six ranks
    assert plan_alone(level, target=1.0, **six).limited_by == "domains"


def test_no_slots_make_domains_exact() -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"domains has 2 values, \[0, 3\]"):
        uec.slots_for_exact(num_ranks=2, num_experts=2, domains=[3, 0])
    assert uec.slots_for_exact(num_ranks=1, num_experts=9) == 0
    assert uec.slots_for_exact(num_ranks=4, num_experts=9, home=[0] * 8 + [1]) == 6
    with pytest.raises(errors.InvalidArgumentError, match="num_ranks is 0"):
        uec.slots_for_exact(num_ranks=0, num_experts=9)


# ---- buffers ------------------------------------------------------------------------------------


def groups_of(num_ranks: int) -> list[uec.Group]:
    return uec.testing.new_loopback_groups(
        num_ranks, num_experts=6, slots_per_rank=2, expert={"w": ((4,), torch.uint8)}, timeout=20.0
    )


def test_the_capacity_holds_for_every_rank() -> None:
    groups = groups_of(3)
    load = torch.tensor([[3, 0, 0, 1, 0, 0], [4, 4, 0, 0, 0, 0], [0, 0, 7, 0, 0, 0]])
    capacity = groups[0].topology.token_capacity([2, 4, 4], 2)
    assert capacity == 7  # 20 over 3
    assert groups[0].topology.token_capacity(5, 4) == 20
    assert groups[0].topology.token_capacity(2**62, 2) == 2**63
    plan = uec.plan_replicas(load, group=groups[0], target=1.0)
    ids = [torch.repeat_interleave(torch.arange(6), row)[:, None] for row in load]
    per_rank = groups[0].topology.instances_per_rank
    received = sum(
        torch.bincount(uec.reroute(i, plan, group=group)[:, 0], minlength=3 * per_rank)
        for group, i in zip(groups, ids, strict=True)
    )
    for group in groups:
        ends = group.instance_offsets(plan, pad_to=capacity)
        assert ends.dtype == torch.int32
        first = group.rank * per_rank
        expected = received[first : first + group.num_local_experts + 2].cumsum(0)
        assert ends.tolist() == expected.tolist()
        assert 6 <= ends[-1] <= capacity
    close_all(groups)


def test_a_plan_beyond_the_buffer_is_refused() -> None:
    groups = groups_of(2)
    plan = uec.plan_replicas(torch.tensor([9, 0, 0, 0, 0, 2]), group=groups[0], target=1.9)
    with pytest.raises(errors.InvalidPlanError, match="rank 0: the plan gives this rank 9 tokens"):
        groups[0].instance_offsets(plan, pad_to=6)
    assert groups[1].instance_offsets(plan, pad_to=6).tolist()[-1] == 2
    bare = uec.Plan.from_slots([[-1, -1], [0, -1]], num_experts=6)
    with pytest.raises(errors.InvalidPlanError, match="has no quotas"):
        groups[0].instance_offsets(bare, pad_to=6)
    with pytest.raises(errors.InvalidArgumentError, match="pad_to is -1"):
        groups[0].instance_offsets(plan, pad_to=-1)
    close_all(groups)


@pytest.mark.parametrize(
    ("options", "found"),
    [({"domains": [0, 0, 1]}, "several domains"), ({"slots_per_rank": 0}, "no slots")],
)
def test_no_capacity_where_plans_cannot_be_exact(options: dict[str, Any], found: str) -> None:
    topology = Topology.make(**{"num_ranks": 3, "num_experts": 6, "slots_per_rank": 2, **options})
    with pytest.raises(errors.InvalidArgumentError, match=f"the group has {found}"):
        topology.token_capacity(4, 2)


@pytest.mark.parametrize("num_tokens", [[1, -2, 3], [1, 2], "12"])
def test_capacities_of_nothing(num_tokens: Any) -> None:
    topology = Topology.make(num_ranks=3, num_experts=6, slots_per_rank=2)
    with pytest.raises(errors.InvalidArgumentError, match="num_tokens"):
        topology.token_capacity(num_tokens, 2)
    with pytest.raises(errors.InvalidArgumentError, match="topk"):
        topology.token_capacity(3, -1)
