"""Plans by cost: costs in seconds, and the plans that follow from them."""

from __future__ import annotations

import pytest
import torch
from ranks import close_all, plan_alone

import ultraep_comm as uec
from ultraep_comm.errors import InvalidArgumentError

LOAD = torch.tensor([4000, 400, 400, 400, 400, 400, 200, 200])
BANDWIDTH = 700e9


def plan(cost: uec.PlanCost) -> uec.Plan:
    return plan_alone(LOAD, num_ranks=4, slots_per_rank=2, cost=cost)


def test_a_faster_link_pays_for_more_balance() -> None:
    plans = [
        plan(uec.PlanCost(token=50e-9, expert_byte=1 / b, expert_bytes=38 << 20))
        for b in (1e6, BANDWIDTH, 1e15)
    ]
    imbalances = [p.imbalance for p in plans]
    assert plans[0].num_replicas == 0
    assert imbalances == sorted(imbalances, reverse=True)
    assert imbalances[1] < imbalances[0] / 2
    assert imbalances[2] == pytest.approx(1.0, abs=0.002)


def test_replicas_can_be_dear() -> None:
    one, many = (
        plan(uec.PlanCost(token=1e-6, expert_byte=0, replica=r, expert_bytes=1)).num_replicas
        for r in (600e-6, 0)
    )
    assert 0 < one < many


def test_the_groups_experts_are_as_large_as_they_are() -> None:
    cost = uec.PlanCost(token=50e-9, expert_byte=1 / BANDWIDTH)
    groups = uec.testing.new_loopback_groups(
        4, num_experts=8, slots_per_rank=2, expert={"w": ((1024,), torch.uint8)}
    )
    try:
        small = uec.plan_replicas(LOAD, group=groups[0], cost=cost)
    finally:
        close_all(groups)
    explicit = uec.PlanCost(token=50e-9, expert_byte=1 / BANDWIDTH, expert_bytes=1024)
    assert torch.equal(small.slot_expert, plan(explicit).slot_expert)
    with pytest.raises(InvalidArgumentError, match="expert_bytes"):
        plan(cost)


def test_integers_keep_the_ratios_and_fit() -> None:
    costs = uec.PlanCost(token=3e-7, expert_byte=2e-12, replica=1e-6, expert_bytes=10**7)
    token, transfer, replica = costs.in_integers(None)
    assert 2**20 < token < 2**22
    assert max(transfer, replica) < 2**40
    assert transfer / token == pytest.approx(2e-5 / 3e-7, rel=1e-5)
    assert replica / token == pytest.approx(1e-6 / 3e-7, rel=1e-5)
    nothing_but_replicas = uec.PlanCost(token=0, expert_byte=0, replica=1, expert_bytes=1)
    assert nothing_but_replicas.in_integers(None) == (0, 0, 2**39)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
@pytest.mark.parametrize("field", ["token", "expert_byte", "replica"])
def test_bad_costs_are_rejected(field: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        uec.PlanCost(**{"token": 1.0, "expert_byte": 1.0, field: value})


def test_something_has_to_cost_something() -> None:
    with pytest.raises(InvalidArgumentError, match="0 for everything"):
        plan(uec.PlanCost(token=0, expert_byte=0, expert_bytes=1))
