"""From ids to filled slots and physical ids without the host, on an emulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from ranks import MIXED, loopback, make_weights, plan_alone, prepare_all, wrong_bytes
from tiers import sampled

import ultraep_comm as uec

SIZES = [(2, 6, 1), (4, 9, 2)]
TOKENS, TOPK = 40, 2


class Layer:
    """All ranks of a group, their weights, and ids in fixed memory."""

    def __init__(self, device: EmulatedDevice, groups: list[uec.Group]) -> None:
        self.groups = groups
        self.weights = [make_weights(group) for group in groups]
        self.bound = [group.bind(w) for group, w in zip(groups, self.weights, strict=True)]
        self.ids = [device.put(torch.zeros(TOKENS, TOPK, dtype=torch.int64)) for _ in groups]
        self.rng = torch.Generator().manual_seed(len(groups))

    def draw_ids(self) -> None:
        """Route most tokens to one expert, drawn anew each time."""
        num_experts = self.groups[0].topology.num_experts
        hot = int(torch.randint(num_experts, (1,), generator=self.rng))
        for ids in self.ids:
            drawn = torch.randint(-1, num_experts, ids.shape, generator=self.rng)
            chosen = torch.rand(ids.shape, generator=self.rng) < 0.6
            ids.copy_(torch.where(chosen, hot, drawn))

    def path(self, rank: int, at_once: bool) -> tuple[torch.Tensor, uec.Plan, torch.Tensor]:
        """Make the calls of the critical path on one rank."""
        group = self.groups[rank]
        if at_once:
            plan = uec.gather_and_plan(self.ids[rank], group=group)
            assert plan.load is not None
            load = plan.load
        else:
            load = uec.gather_load(self.ids[rank], group=group)
            plan = uec.plan_replicas(load, group=group)
        work = uec.replicate_experts(self.bound[rank], plan, group=group, async_op=True)
        physical = uec.reroute(self.ids[rank], plan, group=group)
        assert work is not None
        work.wait()
        return load, plan, physical

    def prepare(self, epoch: int) -> None:
        self.draw_ids()
        prepare_all(self.groups, self.weights, epoch)

    def check(self, found: list[Any], epoch: int) -> int:
        """Compare everything with the host's results; return the number of replicas."""
        topology = self.groups[0].topology
        load = torch.stack(
            [
                torch.bincount(ids.flatten() + 1, minlength=topology.num_experts + 1)[1:].int()
                for ids in self.ids
            ]
        )
        expected = plan_alone(
            load,
            slots_per_rank=topology.slots_per_rank,
            num_ranks=topology.num_ranks,
            home=topology.home,
        )
        for group, (gathered, plan, physical) in zip(self.groups, found, strict=True):
            assert torch.equal(gathered, load)
            for name in ("slot_expert", "slot_quota", "home_quota"):
                assert torch.equal(getattr(plan, name), getattr(expected, name)), name
            ids = self.ids[group.rank].clone()  # on the CPU
            assert torch.equal(physical, uec.reroute(ids, expected, group=group))
            assert wrong_bytes(group, expected, epoch) == 0
        return expected.num_replicas


@pytest.fixture
def layer_of(emulated: EmulatedDevice, new_groups: Callable[..., Any]) -> Callable[..., Layer]:
    options = {"expert": MIXED, "timeout": 60.0, "num_sms": 1, "engine": "cuda"}

    def make(size: tuple[int, int, int]) -> Layer:
        num_ranks, num_experts, slots = size
        shape = {"num_experts": num_experts, "slots_per_rank": slots}
        return Layer(emulated, new_groups(num_ranks, **shape, **options))

    return make


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_every_stage_is_that_of_the_host(
    emulated: EmulatedDevice, layer_of: Any, size: tuple[int, int, int], at_once: bool
) -> None:
    layer = layer_of(size)
    replicas = 0
    for epoch in range(1, 5):
        layer.prepare(epoch)
        found = loopback(size[0], lambda rank: layer.path(rank, at_once))
        emulated.synchronize()
        replicas += layer.check(found, epoch)
    assert replicas > 0


@pytest.mark.parametrize("at_once", sampled([False, True], bool))
@pytest.mark.parametrize("size", SIZES)
def test_one_graph_replays_with_fresh_ids_and_weights(
    emulated: EmulatedDevice, layer_of: Any, size: tuple[int, int, int], at_once: bool
) -> None:
    layer = layer_of(size)
    layer.prepare(1)
    emulated.synchronize()
    emulated.begin_capture()
    captured = loopback(size[0], lambda rank: layer.path(rank, at_once))
    graph = emulated.end_capture()
    replicas = 0
    for epoch in range(2, 10):
        layer.prepare(epoch)
        if epoch == 5:  # the same calls, one by one, between replays
            found = loopback(size[0], lambda rank: layer.path(rank, at_once))
        else:
            emulated.replay(graph)
            found = captured
        emulated.synchronize()
        replicas += layer.check(found, epoch)
    assert replicas > 0


def test_ids_to_slots_are_two_launches(emulated: EmulatedDevice, layer_of: Any) -> None:
    layer = layer_of((3, 6, 1))
    layer.prepare(1)

    def launches(rank: int) -> None:
        plan = uec.gather_and_plan(layer.ids[rank], group=layer.groups[rank])
        uec.replicate_experts(layer.bound[rank], plan, group=layer.groups[rank])

    before = emulated.launches()
    loopback(3, launches)
    assert emulated.launches() - before == 2  # of all ranks, which share them


def test_ranks_that_plan_for_something_else_are_told(
    emulated: EmulatedDevice, layer_of: Any
) -> None:
    layer = layer_of((2, 6, 1))
    layer.prepare(1)
    found: list[Any] = [None, None]

    def call(rank: int) -> None:
        target = 1.01 + rank / 10
        try:
            uec.gather_and_plan(layer.ids[rank], group=layer.groups[rank], target=target)
        except uec.errors.UltraEPError as error:
            found[rank] = error

    loopback(2, call)
    assert isinstance(found[0], uec.errors.PlanMismatchError)
    assert isinstance(found[1], uec.errors.TransferAbortedError)


def test_bad_ids_leave_an_empty_plan_and_an_error(emulated: EmulatedDevice, layer_of: Any) -> None:
    layer = layer_of((2, 6, 1))
    layer.prepare(1)
    layer.ids[1][3, 1] = 6
    emulated.delay(50_000)  # the calls return before they fail
    plans = loopback(2, lambda rank: uec.gather_and_plan(layer.ids[rank], group=layer.groups[rank]))
    emulated.synchronize()
    assert all(plan.num_replicas == 0 and not plan.home_quota.any() for plan in plans)
    with pytest.raises(uec.errors.GroupClosedError) as raised:
        uec.gather_and_plan(layer.ids[1], group=layer.groups[1])
    assert isinstance(raised.value.__cause__, uec.errors.InvalidLoadError)
    assert "id 6 at position 7" in str(raised.value.__cause__)


def test_ids_on_the_host_give_a_plan_on_the_host(emulated: EmulatedDevice, layer_of: Any) -> None:
    layer = layer_of((2, 6, 1))
    layer.draw_ids()
    plans = loopback(
        2, lambda rank: uec.gather_and_plan(layer.ids[rank].clone(), group=layer.groups[rank])
    )
    for plan in plans:
        assert not emulated.is_on_device(plan.slot_expert)
        assert torch.equal(plan.slot_expert, plans[0].slot_expert)
