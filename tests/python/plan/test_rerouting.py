"""Both reroutes against each other, and against an independent statement of what is right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import reroute_oracle
from reference.planner import plan_slots
from reference.reroute import reroute_dense, reroute_ids, source_shares
from tiers import cases

import ultraep_comm as uec
from ultraep_comm import _core

Fault = _core.RerouteFault


@dataclass(frozen=True)
class Plan:
    """The arrays of a plan that can be rerouted."""

    load: NDArray[np.int32]  # [G, E]
    slot_expert: NDArray[np.int32]  # [G, S]
    slot_quota: NDArray[np.int32]  # [G, S]
    home_quota: NDArray[np.int32]  # [E]
    home: NDArray[np.int32]  # [E]

    def for_oracle(self) -> reroute_oracle.Plan:
        return reroute_oracle.Plan(**{name: array.tolist() for name, array in vars(self).items()})

    def changed(self, name: str, index: tuple[int, ...], value: int) -> Plan:
        array = getattr(self, name).copy()
        array[index] = value
        return Plan(**(vars(self) | {name: array}))


def reroute_in_core(
    plan: Plan, ids: NDArray[np.int64], rank: int
) -> tuple[_core.RerouteStatus, NDArray[np.int64]]:
    out = np.full_like(ids, -7)
    arrays = (plan.load, plan.slot_expert, plan.slot_quota, plan.home_quota, plan.home)
    return _core.reroute(ids, *arrays, rank, out), out


def reroute_map_in_core(
    plan: Plan, routing_map: NDArray[np.bool_], rank: int
) -> tuple[_core.RerouteStatus, NDArray[np.int64]]:
    arrays = (plan.load, plan.slot_expert, plan.slot_quota, plan.home_quota, plan.home)
    return _core.reroute_map(routing_map.view(np.uint8), *arrays, rank)


def map_of(row: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.bool_]:
    """A map that the row of the load counts, with a few rows more than it needs."""
    num_tokens = int(row.max()) + int(rng.integers(0, 4))
    order = rng.random((num_tokens, len(row))).argsort(axis=0)
    return np.ascontiguousarray(order < row)


def tokens_of(row: NDArray[np.int32], padding: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Ids in random order that the row of the load counts, with some padding among them."""
    ids = np.concatenate([np.repeat(np.arange(len(row)), row), np.full(padding, -1)])
    return rng.permutation(ids).astype(np.int64)


def random_plan(
    rng: np.random.Generator, num_ranks: int, num_experts: int, slots_per_rank: int, largest: int
) -> Plan:
    """Any legal plan, good or bad: replicas anywhere, any split of the load, also into zeros."""
    home = rng.integers(0, num_ranks, num_experts).astype(np.int32)
    load = rng.integers(0, largest + 1, (num_ranks, num_experts)).astype(np.int32)
    load *= rng.random(load.shape) < rng.choice([0.3, 1.0])
    slot_expert = np.full((num_ranks, slots_per_rank), -1, np.int32)
    slot_quota = rng.integers(0, 9, slot_expert.shape).astype(np.int32)  # counts in no empty slot
    for rank in range(num_ranks):
        away = rng.permutation(np.flatnonzero(home != rank))[:slots_per_rank]
        slots = rng.permutation(slots_per_rank)[: len(away)]
        keep = rng.random(len(away)) < 0.8
        slot_expert[rank, slots[keep]] = away[keep]
    home_quota = np.zeros(num_experts, np.int32)
    for expert, total in enumerate(load.sum(axis=0, dtype=np.int64).tolist()):
        slots_of = np.argwhere(slot_expert == expert)
        cuts = np.sort(rng.integers(0, total + 1, len(slots_of)))
        home_quota[expert], *quotas = np.diff([0, *cuts, total])
        for (rank, slot), quota in zip(slots_of, quotas, strict=True):
            slot_quota[rank, slot] = quota
    return Plan(load, slot_expert, slot_quota, home_quota, home)


def check(plan: Plan, rng: np.random.Generator) -> None:
    """Reroutes every rank's tokens with both, and holds the result to the oracle's rules."""
    ids = [tokens_of(row, 3, rng) for row in plan.load]
    outs = []
    for rank, rank_ids in enumerate(ids):
        status, out = reroute_in_core(plan, rank_ids, rank)
        assert status.fault is Fault.NONE
        expected = reroute_ids(rank_ids, rank=rank, **vars(plan))
        np.testing.assert_array_equal(out, expected)
        outs.append(out.tolist())
    assert reroute_oracle.violations(plan.for_oracle(), [i.tolist() for i in ids], outs) == []


def check_maps(plan: Plan, rng: np.random.Generator) -> None:
    """Reroutes every rank's tokens as a map, with both, and holds it to the list of its experts."""
    for rank, row in enumerate(plan.load):
        routing_map = map_of(row, rng)
        probs = rng.standard_normal(routing_map.shape)
        physical_map, physical_probs = reroute_dense(routing_map, probs, rank=rank, **vars(plan))
        status, (before, after) = reroute_map_in_core(plan, routing_map, rank)
        assert status.fault is Fault.NONE
        np.testing.assert_array_equal(before, np.flatnonzero(routing_map))
        np.testing.assert_array_equal(np.sort(after), np.flatnonzero(physical_map))
        np.testing.assert_array_equal(physical_probs.flat[after], probs.flat[before])
        assert np.count_nonzero(physical_probs) == len(after)

        tokens, experts = np.nonzero(routing_map)
        status, ids = reroute_in_core(plan, experts.copy(), rank)
        assert status.fault is Fault.NONE
        np.testing.assert_array_equal(after, tokens * physical_map.shape[1] + ids)


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.integers(1, 7),
    num_experts=st.integers(1, 12),
    slots_per_rank=st.integers(0, 4),
    largest=st.sampled_from([1, 3, 10, 40]),
)
@settings(max_examples=cases(30, 150))
def test_any_plan_is_met_exactly(
    seed: int, num_ranks: int, num_experts: int, slots_per_rank: int, largest: int
) -> None:
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, num_ranks, num_experts, slots_per_rank, largest)
    check(plan, rng)
    check_maps(plan, rng)
    for expert in range(num_experts):
        shares = reroute_oracle.expected_shares(plan.for_oracle(), expert)
        ranks = sorted(shares[0])
        quotas = [
            int(plan.home_quota[expert])
            if rank == plan.home[expert]
            else int(plan.slot_quota[rank][plan.slot_expert[rank] == expert].item())
            for rank in ranks
        ]
        for source in range(num_ranks):
            share = source_shares(plan.load[:, expert].tolist(), ranks, quotas, source)
            assert dict(zip(ranks, share, strict=True)) == shares[source]


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(8, 8), (16, 64), (256, 1024)])
@pytest.mark.parametrize("kind", ["hot expert", "hot rank", "zero", "random"])
def test_planned_loads(num_ranks: int, num_experts: int, kind: str) -> None:
    rng = np.random.default_rng(num_experts)
    home = (np.arange(num_experts) * num_ranks // num_experts).astype(np.int32)
    load = np.zeros((num_ranks, num_experts), np.int32)
    if kind == "hot expert":
        load[:, num_experts // 2] = 90
        load[:, 0] += 10
    elif kind == "hot rank":
        load[num_ranks // 2, home == num_ranks // 3] = 300
    elif kind == "random":
        load[:] = rng.integers(0, 3, load.shape) * (rng.random(num_experts) < 0.1)
    arrays = plan_slots(
        load.sum(axis=0),
        num_ranks=num_ranks,
        slots_per_rank=2,
        home=home,
        domain=np.zeros(num_ranks, np.int32),
    )
    plan = Plan(load, *arrays, home)
    if num_experts <= 256:
        check(plan, rng)
        check_maps(plan, rng)
    for rank in {0, num_ranks // 2, num_ranks - 1}:  # the large case, in part
        ids = tokens_of(load[rank], 5, rng)
        status, out = reroute_in_core(plan, ids, rank)
        assert status.fault is Fault.NONE
        np.testing.assert_array_equal(out, reroute_ids(ids, rank=rank, **vars(plan)))


@pytest.mark.parametrize("num_experts", [64, 130])
def test_maps_of_any_width(num_experts: int) -> None:
    """The core reads 64 experts at a time, and then the rest."""
    rng = np.random.default_rng(num_experts)
    check_maps(random_plan(rng, 3, num_experts, 4, 9), rng)


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.integers(1, 5),
    num_experts=st.integers(1, 6),
    slots_per_rank=st.integers(0, 3),
    largest=st.sampled_from([0, 1, 12]),
)
@settings(max_examples=cases(15, 60))
def test_local_share_is_the_most_there_can_be_and_is_reached(
    seed: int, num_ranks: int, num_experts: int, slots_per_rank: int, largest: int
) -> None:
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, num_ranks, num_experts, slots_per_rank, largest)
    total = int(plan.load.sum())
    share = uec.Plan(**{name: torch.from_numpy(a) for name, a in vars(plan).items()}).local_share
    if total == 0:
        assert share == 1.0
        return
    assert share == reroute_oracle.most_local_tokens(plan.for_oracle()) / total
    table = reroute_oracle.instances_by_physical_id(plan.for_oracle())
    stayed = 0
    for rank, row in enumerate(plan.load):
        _, out = reroute_in_core(plan, tokens_of(row, 2, rng), rank)
        stayed += sum(table[i].rank == rank for i in out.tolist() if i != -1)
    assert share == stayed / total


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_dtypes_shapes_and_libraries(dtype: type, library: str) -> None:
    rng = np.random.default_rng(1)
    plan = random_plan(rng, 3, 4, 2, 5)
    ids = tokens_of(plan.load[1], 1 + int(plan.load[1].sum() + 1) % 2, rng).astype(dtype)
    ids = ids.reshape(-1, 2)
    expected = reroute_ids(ids, rank=1, **vars(plan))
    assert expected.dtype == dtype
    assert expected.shape == ids.shape
    out = np.empty_like(ids)
    arrays = [ids, plan.load, plan.slot_expert, plan.slot_quota, plan.home_quota, plan.home]
    if library == "torch":
        status = _core.reroute(*map(torch.from_numpy, arrays), 1, torch.from_numpy(out))
    else:
        status = _core.reroute(*arrays, 1, out)
    assert status.fault is Fault.NONE
    np.testing.assert_array_equal(out, expected)
    assert _core.reroute(*arrays, 1, ids).fault is Fault.NONE  # in place
    np.testing.assert_array_equal(ids, expected)


def example() -> tuple[Plan, NDArray[np.int64]]:
    """Two ranks, experts 0 and 1 at home there, expert 0 replicated on rank 1."""
    plan = Plan(
        load=np.array([[4, 1], [2, 0]], np.int32),
        slot_expert=np.array([[-1], [0]], np.int32),
        slot_quota=np.array([[0], [3]], np.int32),
        home_quota=np.array([3, 1], np.int32),
        home=np.array([0, 1], np.int32),
    )
    return plan, np.array([0, -1, 0, 1, 0, 0], np.int64)


def test_an_example_by_hand() -> None:
    """P = 2: local experts are instances 0 and 2, the replica is 3. Rank 1 keeps its two tokens."""
    plan, ids = example()
    status, out = reroute_in_core(plan, ids, 0)
    assert status.fault is Fault.NONE
    assert out.tolist() == [0, -1, 0, 2, 0, 3]
    assert reroute_in_core(plan, np.array([0, 0]), 1)[1].tolist() == [3, 3]


@pytest.mark.parametrize("bad", [-2, 2, 2**40])
def test_ids_out_of_range_are_reported(bad: int) -> None:
    plan, ids = example()
    ids[2] = bad
    status, _ = reroute_in_core(plan, ids, 0)
    assert (status.fault, status.position, status.value) == (Fault.ID_OUT_OF_RANGE, 2, bad)
    with pytest.raises(ValueError, match="expert id"):
        reroute_ids(ids, rank=0, **vars(plan))


@pytest.mark.parametrize(("new", "expert", "counted", "expected"), [(1, 0, 3, 4), (0, 0, 5, 4)])
def test_miscounted_tokens_are_reported(new: int, expert: int, counted: int, expected: int) -> None:
    plan, ids = example()
    ids[3 if new == 0 else 0] = new
    status, _ = reroute_in_core(plan, ids, 0)
    assert status.fault is Fault.COUNT_MISMATCH
    assert (status.expert, status.counted, status.expected) == (expert, counted, expected)
    with pytest.raises(ValueError, match=f"occurs {counted} times"):
        reroute_ids(ids, rank=0, **vars(plan))


@pytest.mark.parametrize(
    ("size", "expert", "counted", "expected"),
    [((4, 2), 1, 4, 1), ((9, 2), 0, 9, 4), ((0, 2), 0, 0, 4)],
)
def test_miscounted_maps_are_reported(
    size: tuple[int, int], expert: int, counted: int, expected: int
) -> None:
    plan, _ = example()
    routing_map = np.ones(size, bool)
    status, _ = reroute_map_in_core(plan, routing_map, 0)
    assert status.fault is Fault.COUNT_MISMATCH
    assert (status.expert, status.counted, status.expected) == (expert, counted, expected)
    with pytest.raises(ValueError, match=f"occurs {counted} times"):
        reroute_dense(routing_map, np.ones(size), rank=0, **vars(plan))


def test_a_huge_load_makes_no_huge_answer() -> None:
    """The plan is sound and the map is small: that is a miscount, not 16 GiB of moves."""
    plan = Plan(
        load=np.array([[2**31 - 1]], np.int32),
        slot_expert=np.zeros((1, 0), np.int32),
        slot_quota=np.zeros((1, 0), np.int32),
        home_quota=np.array([2**31 - 1], np.int32),
        home=np.zeros(1, np.int32),
    )
    status, moves = reroute_map_in_core(plan, np.ones((3, 1), bool), 0)
    assert (status.fault, status.counted) == (Fault.COUNT_MISMATCH, 3)
    assert moves.shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "index", "value", "fault"),
    [
        ("load", (1, 0), 3, Fault.QUOTA_MISMATCH),
        ("home_quota", (1,), 0, Fault.QUOTA_MISMATCH),
        ("slot_expert", (1, 0), -1, Fault.QUOTA_MISMATCH),
        ("load", (1, 0), -2, Fault.BAD_COUNT),
        ("slot_quota", (1, 0), -3, Fault.BAD_COUNT),
        ("load", (1, 0), 2**31 - 1, Fault.BAD_COUNT),
        ("slot_expert", (1, 0), 2, Fault.BAD_SLOT),
        ("slot_expert", (0, 0), 0, Fault.BAD_SLOT),
    ],
)
def test_unusable_plans_are_reported(
    name: str, index: tuple[int, ...], value: int, fault: _core.RerouteFault
) -> None:
    plan, ids = example()
    status, _ = reroute_in_core(plan.changed(name, index, value), ids, 0)
    assert status.fault is fault
    on_map, moves = reroute_map_in_core(plan.changed(name, index, value), np.ones((4, 2), bool), 0)
    assert on_map.fault is fault
    assert moves.shape == (2, 0)
    if fault is Fault.BAD_SLOT:
        assert (status.position, status.value) == (index[0], value)


def test_a_wrong_rank_or_output_is_rejected() -> None:
    plan, ids = example()
    arrays = (plan.load, plan.slot_expert, plan.slot_quota, plan.home_quota, plan.home)
    with pytest.raises(ValueError, match="rank"):
        _core.reroute_map(np.zeros((1, 2), np.uint8), *arrays, -1)
    with pytest.raises(ValueError, match="rank"):
        _core.reroute(ids, *arrays, 2, np.empty_like(ids))
    with pytest.raises(ValueError, match="out"):
        _core.reroute(ids, *arrays, 0, np.empty(5, np.int64))
    with pytest.raises(TypeError):
        _core.reroute(ids, *arrays, 0, np.empty(6, np.int32))
