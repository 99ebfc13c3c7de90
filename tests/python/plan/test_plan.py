"""Plan: what from_slots accepts, what it rejects, and its figures."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from ranks import plan_alone

import ultraep_comm as uec
from ultraep_comm.errors import InvalidArgumentError, InvalidLoadError, InvalidPlanError
from ultraep_comm.plan import plan as plan_module

# 3 ranks, 5 experts: home 0 0 1 1 2.
SLOTS = [[2, -1], [0, 4], [0, -1]]
LOAD = [[9, 1, 2, 0, 3], [0, 1, 2, 0, 3], [0, 1, 2, 0, 4]]
SLOT_QUOTA = [[2, 0], [3, 5], [2, 0]]
HOME_QUOTA = [4, 3, 4, 0, 5]


def _plan(**changes: Any) -> uec.Plan:
    arguments: dict[str, Any] = {
        "slot_expert": torch.tensor(SLOTS),
        "num_experts": 5,
        "slot_quota": torch.tensor(SLOT_QUOTA),
        "home_quota": torch.tensor(HOME_QUOTA),
        "load": torch.tensor(LOAD),
    }
    return uec.Plan.from_slots(**{**arguments, **changes})


def test_a_plan_by_hand() -> None:
    plan = _plan()
    assert plan.slot_expert.dtype == torch.int32
    assert plan.home.tolist() == [0, 0, 1, 1, 2]
    assert (plan.num_ranks, plan.slots_per_rank, plan.num_experts) == (3, 2, 5)
    assert (plan.num_replicas, plan.max_exports, plan.max_imports) == (4, 1, 2)
    # Rank quotas 4+3+2, 4+0+3+5, 5+2 of 28 tokens.
    assert plan.imbalance == pytest.approx(12 * 3 / 28)
    assert plan.imbalance_bound == pytest.approx(10 * 3 / 28)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.load = None  # type: ignore[misc]


def test_any_integers_are_taken() -> None:
    for slots in (SLOTS, np.array(SLOTS, np.int64), torch.tensor(SLOTS, dtype=torch.int16)):
        assert torch.equal(_plan(slot_expert=slots).slot_expert, _plan().slot_expert)


def test_imbalance_before_is_that_of_the_homes() -> None:
    load = torch.tensor([[6, 0, 2, 0], [0, 3, 1, 0]])  # 9 tokens at home on rank 0, 3 on rank 1
    plan = plan_alone(load, slots_per_rank=1)
    assert plan.imbalance_before == 1.5
    assert plan.imbalance == 1.0
    empty = plan_alone(torch.zeros_like(load), slots_per_rank=1)
    assert empty.num_replicas == 0
    assert empty.imbalance_before == empty.imbalance == empty.imbalance_bound == 1.0
    assert math.isnan(plan_alone(load[0], num_ranks=2, slots_per_rank=1).imbalance_before)


def test_without_quotas_there_is_no_imbalance() -> None:
    plan = uec.Plan.from_slots(SLOTS, num_experts=5)
    assert np.isnan(plan.imbalance)
    assert np.isnan(plan.imbalance_bound)
    assert plan.load is None


def test_a_plan_keeps_its_own_numbers() -> None:
    slots, load = torch.tensor(SLOTS, dtype=torch.int32), torch.tensor(LOAD, dtype=torch.int32)
    by_hand = _plan(slot_expert=slots, load=load)
    planned = plan_alone(load, slots_per_rank=2)
    slots.fill_(-1)
    load.fill_(0)
    assert by_hand.slot_expert.tolist() == SLOTS
    assert by_hand.load is not None
    assert planned.load is not None
    assert by_hand.load.tolist() == planned.load.tolist() == LOAD


@pytest.mark.parametrize(
    "changes",
    [
        {"slot_expert": [[2], [0]]},
        {"slot_expert": torch.zeros((0, 1), dtype=torch.int32)},
        {"slot_quota": torch.zeros((3, 1), dtype=torch.int32)},
        {"slot_quota": torch.zeros((3, 2), dtype=torch.int64)},
        {"home_quota": torch.zeros(1, dtype=torch.int32)},
        {"load": torch.zeros((5, 3), dtype=torch.int32).T},
    ],
)
def test_a_plan_is_made_of_contiguous_int32(changes: dict[str, Any]) -> None:
    good = _plan()
    with pytest.raises(InvalidPlanError):
        dataclasses.replace(good, **changes)


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"slot_expert": [[5, -1], *SLOTS[1:]]}, r"slot_expert\[0, 0\] is 5"),
        ({"slot_expert": [[1, -1], *SLOTS[1:]]}, "the expert's home"),
        ({"slot_expert": [[2, 2], *SLOTS[1:]]}, "twice on rank 0"),
        ({"slot_expert": [1, 2, 3]}, "num_ranks, slots_per_rank"),
        ({"slot_expert": [[0.5, 1]]}, "float"),
        ({"slot_expert": [[1], [2, 3]]}, "not a tensor"),
        ({"home": [0, 0, 1, 1]}, "home has shape"),
        ({"home": [0, 0, 1, 1, 3]}, r"home\[4\] is 3"),
        ({"domains": [0, 0, 1]}, "outside the domain of the expert's home"),
        ({"home_quota": None}, "only slot_quota"),
        ({"slot_quota": [[2, 0], [3, 5], [1, 0]]}, "expert 0 sum to 8; expected its load, 9"),
        ({"slot_quota": [[2, 1], [3, 5], [2, 0]]}, "empty"),
        ({"slot_quota": [[-2, 0], [3, 5], [2, 0]]}, "at least 0"),
        ({"home_quota": [-4, 3, 4, 0, 5]}, "home_quota"),
        ({"load": torch.tensor(LOAD[:2])}, "load has shape"),
    ],
)
def test_bad_plans_are_rejected(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidPlanError, match=part):
        _plan(**changes)


@pytest.mark.parametrize(
    "load, part",
    [
        (torch.tensor([[3, 4], [5, -1]]), r"load\[1, 1\] is -1"),
        (torch.tensor([3, 2**31]), r"load\[1\] is 2147483648"),
        (torch.tensor([[0, 2**30], [0, 2**30]]), r"load\[1\] is 2147483648"),
        (torch.full((513,), 2**31 - 1), "sum of load is 1101659110911"),
        (torch.ones(2, 4), "torch.float32"),
        (torch.ones(3, 4, dtype=torch.int32), "load"),
    ],
)
def test_a_bad_load_is_named_with_its_place(load: torch.Tensor, part: str) -> None:
    with pytest.raises(InvalidLoadError, match=part):
        plan_alone(load, slots_per_rank=1, num_ranks=2)


@pytest.mark.parametrize(
    "arguments, part",
    [
        ({"slots_per_rank": -1}, "slots_per_rank is -1"),
        ({"slots_per_rank": 3}, "slots_per_rank is 3, but there are 2 experts"),
        ({"slots_per_rank": 1, "target": 0.5}, "target imbalance is 0.5"),
    ],
)
def test_bad_arguments_of_the_planner(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidArgumentError, match=part):
        plan_alone(torch.ones((2, 2), dtype=torch.int32), **arguments)


def test_all_tensors_of_a_plan_lie_where_its_slots_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are given a plan on a device read all of it there."""
    # The only other device of a CPU build has no values to look at.
    monkeypatch.setattr(plan_module, "as_int_tensor", lambda value, _: torch.as_tensor(value).int())
    monkeypatch.setattr(uec.Plan, "validate", lambda plan, **_: None)
    plan = uec.Plan.from_slots(
        torch.zeros(2, 1, dtype=torch.int32, device="meta"),
        num_experts=4,
        slot_quota=[[1], [1]],
        home_quota=[2, 2, 2, 2],
        load=[[1, 1, 1, 1], [1, 1, 1, 1]],
        domains=[0, 0],
    )
    assert {tensor.device.type for tensor in plan.tensors().values()} == {"meta"}
