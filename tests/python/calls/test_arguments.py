"""Arguments of a wrong type: typed errors that say what was expected, in every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import plan_alone

import ultraep_comm as uec
from ultraep_comm import errors, nn

IDS, LOAD = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[3, 1]])
W: Any = {"w": torch.zeros(2, 2)}
PLAN = plan_alone(LOAD, slots_per_rank=1)
BALANCER = uec.adapters.balancer.Balancer  # an attribute of the package, as the README has it


def make(**options: Any) -> uec.Group:
    expert = {"w": ((2,), torch.float32)}
    (group,) = uec.testing.new_loopback_groups(
        1, num_experts=2, slots_per_rank=1, expert=expert, timeout=5, **options
    )
    return group


CALLS: dict[str, Callable[[Any], object]] = {
    "gather_load": lambda g: uec.gather_load(IDS, group=g),
    "gather_and_plan": lambda g: uec.gather_and_plan(IDS, group=g),
    "replicate_experts": lambda g: uec.replicate_experts(W, PLAN, group=g),
    "reduce_expert_grads": lambda g: uec.reduce_expert_grads(W, PLAN, group=g),
    "prefetch_experts": lambda g: uec.prefetch_experts(W, LOAD, bank=0, group=g),
    "reroute": lambda g: uec.reroute(IDS, PLAN, group=g),
    "reroute_map": lambda g: uec.reroute_map(IDS.bool(), None, PLAN, group=g),
    "Replication": nn.Replication,
    "ReplicatedExperts": lambda g: nn.ReplicatedExperts(g, torch.add, W),
    "Balancer": lambda g: BALANCER(g, W),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_group(name: str) -> None:
    for given in (None, "g"):
        with pytest.raises(errors.InvalidArgumentError, match=f"group is {given!r}; expected what"):
            CALLS[name](given)
    with pytest.raises(errors.InvalidArgumentError, match="group is 'g'"):
        uec.plan_replicas(LOAD, group="g")  # type: ignore[arg-type]


def begin(group: uec.Group, weights: Any) -> object:
    return nn.Replication(group).begin(weights, IDS)


WRONG: dict[str, tuple[Callable[[uec.Group], object], str]] = {
    "ids, list": (lambda g: uec.gather_load([[0]], group=g), "topk_ids is a list; expected a tens"),
    "ids, float": (lambda g: uec.gather_load(IDS.float(), group=g), r"pass topk_ids\.long\(\)"),
    "load, float": (lambda g: uec.plan_replicas(LOAD.float(), group=g), r"pass load\.long\(\)"),
    "load, list": (lambda g: uec.plan_replicas([[3]], topology=g.topology), "load is list; exp"),
    "load, experts": (lambda g: uec.plan_replicas(LOAD[..., :1], group=g), "for global sums"),
    "no group": (lambda _: uec.plan_replicas(LOAD), "neither of group= and topology=; expected"),
    "a topology too": (
        lambda g: uec.plan_replicas(LOAD, group=g, topology=g.topology),
        "both of group= and topology=; expected one",
    ),
    "topology, int": (lambda _: uec.plan_replicas(LOAD, topology=2), "topology is 2; expected"),
    "target, text": (lambda g: uec.plan_replicas(LOAD, group=g, target="1"), "target is '1'; exp"),
    "cost": (lambda g: uec.gather_and_plan(IDS, group=g, cost=3), "cost is 3; expected a PlanCost"),
    "costs": (lambda _: uec.PlanCost(token="1", expert_byte=0), "token is '1'; expected a number"),
    "forecast, list": (lambda _: uec.LoadForecast().update([3, 1]), "load is list; expected a ten"),
    "decay": (lambda _: uec.LoadForecast("mean", decay="1"), "decay is '1'; expected a number"),
    "mode": (lambda g: uec.replicate_experts(W, PLAN, group=g, mode=[]), r"mode is \[\]; expected"),
    "reduce mode": (
        lambda _: uec.reduce_expert_grads(W, PLAN, group=make(grads=torch.float32), mode="push"),
        r"mode is 'push'; expected 'auto' or one of \['pull'",
    ),
    "live": (lambda g: nn.Replication(g, live="1"), "live is '1'; expected an integer"),
    "weights, None": (lambda g: begin(g, None), "weights is a NoneType; expected {name: tensor"),
    "weights, 3": (lambda g: begin(g, {"w": 3}), r"weights\['w'\] is a int; expected a ten"),
    "experts": (lambda g: nn.ReplicatedExperts(g, torch.add, {"w": None}), "is a NoneType; expect"),
    "a list": (
        lambda g: nn.ReplicatedExperts(g, torch.add, {"w": [W["w"][0]] * 2}),  # type: ignore[dict-item]
        r"given 2 tensors for 'w'; expected one Parameter \[M, \*shape\]",
    ),
    "check": (lambda _: make(check="x"), "check is 'x'; expected True, False or None"),
    "rank": (lambda g: g.topology.local_experts(9), "rank is 9; expected 0 to 0"),
    "slots": (lambda g: g.slots["x"], r"no segment 'x'; expected \['w'\]"),
    "slot_grads": (lambda g: g.slot_grads["w"], "slot gradients need a group created with grads="),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_another_type(name: str) -> None:
    call, says = WRONG[name]
    with pytest.raises(errors.UltraEPError, match=says):
        call(make())


def test_weights_in_a_parameter_dict() -> None:
    weights: Any = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(2, 2))})
    weights.requires_grad_(False)
    with make(grads=torch.float32) as group:
        plan = uec.plan_replicas(LOAD, group=group)
        uec.replicate_experts(weights, plan, group=group)
        uec.reduce_expert_grads(weights, plan, group=group)
        group.bind(weights)
        begin(group, weights)
        BALANCER(group, weights).begin(IDS)
        assert uec.weights.segments.segments_like(weights) == (dict(group.segments), 2)


def test_packages_are_attributes() -> None:
    assert uec.model.predict is not None
    with pytest.raises(AttributeError, match="adapters' has no attribute 'nothing'"):
        uec.adapters.nothing  # noqa: B018


def test_slots_are_a_dict_to_torch() -> None:
    with make() as group:
        sums = torch.vmap(lambda expert: expert["w"].sum())(group.slots)
        assert torch.equal(sums, group.slots["w"].sum(1))
