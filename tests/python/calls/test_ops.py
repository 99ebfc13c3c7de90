"""The calls under torch.compile: without a graph break, with the results of eager calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compilers import BACKENDS, COMPILE_TIMEOUT, COMPILES, assert_same
from ranks import RankPool, loopback, raised
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.calls.traced import ORDER, flatten, unflatten
from ultraep_comm.weights.binding import Binding

RANKS, EXPERTS, SLOTS, TOP_K, HIDDEN = 2, 8, 2, 2, 16
EXPERT = {"w": ((HIDDEN, HIDDEN), torch.float32), "b": ((HIDDEN,), torch.bfloat16)}
OPERATORS = torch.ops.ultraep_comm

pytestmark = COMPILES

Weights = dict[str, torch.Tensor]


def make_groups(num_ranks: int = RANKS) -> list[uec.Group]:
    return uec.testing.new_loopback_groups(
        num_ranks,
        num_experts=EXPERTS,
        slots_per_rank=SLOTS,
        expert=EXPERT,
        num_sms=1,
        timeout=COMPILE_TIMEOUT,
    )


@pytest.fixture
def alone() -> Iterator[uec.Group]:
    """A group of one rank."""
    (group,) = make_groups(1)
    yield group
    group.close()


def make_ids(rank: int, seed: int, tokens: int) -> torch.Tensor:
    """Skewed ids ``[T, k]``, none twice for a token."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    skew = torch.linspace(1 + seed % 3, 0, EXPERTS)
    return (torch.rand(tokens, EXPERTS, generator=generator) + skew).topk(TOP_K, dim=1).indices


def make_tokens(rank: int, seed: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2000 * seed + rank)
    return torch.randint(-4, 5, (tokens, HIDDEN), generator=generator).float()


def make_weights(rank: int, seed: int, num_ranks: int = RANKS) -> Weights:
    """Weights of small integers: sums are exact in whatever order they are made."""
    generator = torch.Generator().manual_seed(3000 * seed + rank)
    count = EXPERTS // num_ranks
    return {
        name: torch.randint(-4, 5, (count, *shape), generator=generator).to(dtype)
        for name, (shape, dtype) in EXPERT.items()
    }


def layer(
    tokens: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: Weights,
    group: uec.Group,
    async_op: bool,
) -> tuple[torch.Tensor, ...]:
    """Route, plan, replicate, and apply the experts that this rank holds to its own tokens."""
    load = uec.gather_load(topk_ids, group=group)
    plan = uec.plan_replicas(load, group=group)
    before = group.slots["w"] * 2
    work = uec.replicate_experts(weights, plan, group=group, async_op=async_op)
    physical = uec.reroute(topk_ids, plan, group=group)
    if work is not None:
        work.wait()
    instances = group.topology.instances_per_rank
    mine = physical // instances == group.rank
    index = torch.where(mine, physical % instances, 0)
    w = torch.cat([weights["w"], group.slots["w"]])
    b = torch.cat([weights["b"], group.slots["b"]])
    out = torch.einsum("th,tkhi->tki", tokens, w[index]) + b[index].float()
    return (out * mine[..., None]).sum(1), physical, before


# ---- operators -----------------------------------------------------------------------------


def plan_fields(plan: uec.Plan) -> tuple[torch.Tensor | None, ...]:
    return plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota


def test_probabilities_have_gradients(alone: uec.Group) -> None:
    """`tests/device/test_gpu_ops.py` checks the local operators without."""
    ids = make_ids(0, 0, 24)
    load = uec.gather_load(ids, group=alone)
    plan = uec.plan_replicas(load, group=alone)
    routing = torch.zeros(24, EXPERTS, dtype=torch.bool).scatter_(1, ids, True)
    probs = torch.rand(24, EXPERTS, requires_grad=True)
    rest = (*plan_fields(plan), plan.load, alone.topology.instances_per_rank, alone.name)
    for given in (probs, probs.detach().bfloat16()):
        opcheck(OPERATORS.reroute_map.default, (routing, given, *rest))


def check_collective_operators(rank: int, process_group: dist.ProcessGroup) -> None:
    group = uec.new_group(
        process_group,
        num_experts=EXPERTS,
        slots_per_rank=SLOTS,
        expert=EXPERT,
        grads=torch.float32,
        banks=2,
        num_sms=1,
    )
    with group:
        ids = make_ids(rank, 0, 24)
        opcheck(OPERATORS.gather_load.default, (ids, RANKS, EXPERTS, ORDER, group.name))
        load = uec.gather_load(ids, group=group)
        for given in (load, load.sum(0)):
            arguments = (given, RANKS, EXPERTS, SLOTS, 1.01, [], ORDER, 1, group.name)
            opcheck(OPERATORS.plan_replicas_in_bank.default, arguments)
        plan = uec.plan_replicas(load, group=group)
        assert (plan.slot_expert >= 0).any(dim=1).any()
        tensors, names = list(make_weights(rank, 0).values()), list(EXPERT)
        for bank, reuse, version in (
            (1, True, None),
            (1, True, 2),
            (1, False, None),
            (0, False, None),
        ):
            slots = list(group.banks[bank].slots.values())
            arguments = (
                *(tensors, [-1, -1], names, *plan_fields(plan)),
                *(slots, names, ORDER, "auto", bank, reuse, version, None, group.name),
            )
            opcheck(OPERATORS.replicate_experts.default, arguments)
            opcheck(OPERATORS.start_replicate_experts.default, arguments)
        token = OPERATORS.start_replicate_experts(*arguments)
        opcheck(
            OPERATORS.wait_replicate_experts.default,
            (token, tensors, plan.slot_expert, slots, names, ORDER, 0, group.name, False),
        )
        grads = [tensor.float() for tensor in tensors]
        slot_grads = list(group.slot_grads.values())
        opcheck(
            OPERATORS.reduce_expert_grads.default,
            (
                *(grads, [-1, -1], names, *plan_fields(plan)),
                *(slot_grads, ORDER, "auto", True, 0, False, group.name),
            ),
        )


def test_collective_operators(ranks: RankPool) -> None:
    ranks.run(RANKS, check_collective_operators, timeout=120)


@pytest.mark.parametrize("async_op", [False, True])
def test_copies_of_slots_receive_what_the_slots_would(
    async_op: bool, groups: list[uec.Group]
) -> None:
    plan = uec.Plan.from_slots([[EXPERTS - 1, -1], [0, 1]], num_experts=EXPERTS)
    names = list(EXPERT)

    def replicate(rank: int) -> dict[str, torch.Tensor]:
        group = groups[rank]
        for slots in group.slots.values():
            slots.fill_(7)
        copies = {name: torch.zeros_like(slots) for name, slots in group.slots.items()}
        rest = (list(copies.values()), names, ORDER)
        tensors = list(make_weights(rank, 0).values())
        arguments = (
            *(tensors, [-1, -1], names, *plan_fields(plan), *rest),
            *("auto", 0, False, None, None, group.name),
        )
        if async_op:
            token = OPERATORS.start_replicate_experts(*arguments)
            OPERATORS.wait_replicate_experts(
                token, tensors, plan.slot_expert, *rest, 0, group.name, False
            )
        else:
            OPERATORS.replicate_experts(*arguments)
        return copies

    copies = loopback(RANKS, replicate)
    for name in names:
        first, last = make_weights(0, 0)[name], make_weights(1, 0)[name]
        assert torch.equal(copies[0][name][0], last[-1])
        assert not copies[0][name][1].any()  # an empty slot
        assert torch.equal(copies[1][name], first[:2])
        # A read of the slots still sees the old contents.
        assert all((group.slots[name] == 7).all() for group in groups)


# ---- what a compiler may not do ------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_call_is_kept_once(backend: str, alone: uec.Group) -> None:
    def calls(ids: torch.Tensor, weights: Weights, plan: uec.Plan) -> torch.Tensor:
        uec.gather_load(ids, group=alone)  # the result is unused
        first = uec.gather_load(ids, group=alone)
        uec.replicate_experts(weights, plan, group=alone)
        uec.replicate_experts(weights, plan, group=alone)
        return first + uec.gather_load(ids, group=alone)  # equal to the others

    ids, weights = make_ids(0, 0, 24), make_weights(0, 0, 1)
    plan = uec.plan_replicas(uec.gather_load(ids, group=alone), group=alone)
    before = alone.health().epoch
    result = torch.compile(calls, fullgraph=True, backend=backend)(ids, weights, plan)
    assert alone.health().epoch == before + 5
    assert torch.equal(result, 2 * uec.gather_load(ids, group=alone))


@pytest.mark.parametrize("marked", [False, True])
def test_other_numbers_of_tokens_compile_once_more_at_most(alone: uec.Group, marked: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    weights = make_weights(0, 0, 1)
    for tokens in (24, 31, 40, 57, 8):
        ids, values = make_ids(0, 0, tokens), make_tokens(0, 0, tokens)
        if marked:
            torch._dynamo.mark_dynamic(ids, 0)
            torch._dynamo.mark_dynamic(values, 0)
        got = compiled(values, ids, weights, alone, False)
        assert_same(got, layer(values, ids, weights, alone, False))
    assert counter.frame_count == (1 if marked else 2)


# ---- the rest of the public face ------------------------------------------------------------


def test_maps_and_their_gradient(alone: uec.Group) -> None:
    ids = make_ids(0, 0, 24)
    routing = torch.zeros(24, EXPERTS, dtype=torch.bool).scatter_(1, ids, True)
    plan = uec.plan_replicas(uec.gather_load(ids, group=alone), group=alone)
    factor = torch.rand(24, alone.topology.instances_per_rank)

    def rerouted(routing: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        physical_map, physical = uec.reroute_map(routing, probs, plan, group=alone)
        assert physical is not None
        only_map, nothing = uec.reroute_map(routing, None, plan, group=alone)
        assert nothing is None
        return physical_map, physical * factor, only_map

    compiled = torch.compile(rerouted, fullgraph=True, backend="aot_eager")
    gradients = []
    results = []
    for fn in (compiled, rerouted):
        torch.manual_seed(0)
        probs = torch.rand(24, EXPERTS, requires_grad=True)
        results.append(fn(routing, probs))
        results[-1][1].sum().backward()
        gradients.append(probs.grad)
    assert_same(*results)
    assert torch.equal(*gradients)


def test_weights_and_plans_of_every_form(groups: list[uec.Group]) -> None:
    cost = uec.PlanCost(token=1e-6, expert_byte=1e-12)

    def calls(load: torch.Tensor, stacked: Weights, bound: Binding, group: uec.Group) -> uec.Plan:
        plan = uec.plan_replicas(load, group=group, target=1.1)
        uec.replicate_experts(bound, plan, group=group, mode="push")
        listed = {name: list(tensor.unbind()) for name, tensor in stacked.items()}
        uec.replicate_experts(listed, plan, group=group, segments=("b",))
        by_sums = uec.plan_replicas(load.sum(0), group=group, cost=cost)
        uec.replicate_experts(stacked, by_sums, group=group, mode="direct")
        return plan

    def run(fn: Callable[..., uec.Plan], group: uec.Group) -> uec.Plan:
        load = torch.zeros(RANKS, EXPERTS, dtype=torch.int32)
        load[:, 0], load[:, 5] = 40, 10
        weights = make_weights(group.rank, 0)
        return fn(load, weights, group.bind(make_weights(group.rank, 1)), group)

    compiled = torch.compile(calls, fullgraph=True, backend="aot_eager")
    others = make_groups()
    got = loopback(RANKS, lambda r: run(compiled, groups[r]))
    expected = loopback(RANKS, lambda r: run(calls, others[r]))
    assert_same([plan.tensors() for plan in got], [plan.tensors() for plan in expected])
    assert_same([dict(g.slots) for g in groups], [dict(g.slots) for g in others])


def test_a_call_may_outlive_the_compiled_function(alone: uec.Group) -> None:
    def start(weights: Weights, plan: uec.Plan) -> uec.Work:
        work = uec.replicate_experts(weights, plan, group=alone, async_op=True)
        assert work is not None
        return work

    plan = uec.plan_replicas(torch.ones(1, EXPERTS, dtype=torch.int32), group=alone)
    work = torch.compile(start, fullgraph=True, backend="aot_eager")(make_weights(0, 0, 1), plan)
    assert isinstance(work, uec.Work)
    work.wait()
    work.synchronize()
    assert work.is_completed()
    assert work.exception() is None


# ---- errors --------------------------------------------------------------------------------


def test_errors_keep_their_types(groups: list[uec.Group]) -> None:
    def gather(ids: torch.Tensor, group: uec.Group) -> torch.Tensor:
        return uec.gather_load(ids, group=group)

    def replicate(weights: Weights, plan: uec.Plan, group: uec.Group) -> None:
        uec.replicate_experts(weights, plan, group=group)

    def reroute(ids: torch.Tensor, plan: uec.Plan, group: uec.Group) -> torch.Tensor:
        return uec.reroute(ids, plan, group=group)

    def make_plan(load: torch.Tensor, group: uec.Group) -> uec.Plan:
        return uec.plan_replicas(load, group=group)

    def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fn, fullgraph=True, backend="aot_eager")

    group = groups[0]
    load = torch.full((RANKS, EXPERTS), -1, dtype=torch.int32)
    with pytest.raises(errors.InvalidLoadError, match=r"load\[0, 0\] is -1"):
        compiled(make_plan)(load, group)
    by_hand = uec.Plan.from_slots([[-1] * SLOTS] * RANKS, num_experts=EXPERTS)
    with pytest.raises(errors.InvalidPlanError, match="cannot be rerouted"):
        compiled(reroute)(make_ids(0, 0, 8), by_hand, group)

    ids = [torch.full((4, TOP_K), EXPERTS if rank else 0) for rank in range(RANKS)]
    found = loopback(RANKS, lambda r: raised(lambda: compiled(gather)(ids[r], groups[r])))
    assert isinstance(found[1], errors.InvalidLoadError)
    assert isinstance(found[0], errors.PeerRejectedError)
    with pytest.raises(errors.GroupClosedError, match="failed in call 1"):
        compiled(replicate)(make_weights(0, 0), by_hand, group)


def test_operators_get_the_weights_that_were_given() -> None:
    """A rank without experts of its own lists none."""
    given = {"none": [], "stacked": torch.ones(2, 3), "listed": [torch.zeros(3), torch.ones(3)]}
    tensors, counts = flatten(given)
    assert (len(tensors), counts) == (3, [0, -1, 2])
    found = unflatten(tensors, counts, given)
    assert list(found) == list(given)
    assert found["stacked"] is given["stacked"]
    for name in ("none", "listed"):
        assert list(map(id, found[name])) == list(map(id, given[name]))


def test_a_group_that_is_gone_or_closed(alone: uec.Group) -> None:
    ids = make_ids(0, 0, 8)

    def gather(ids: torch.Tensor, group: uec.Group) -> torch.Tensor:
        return uec.gather_load(ids, group=group)

    (group,) = make_groups(1)
    name = group.name
    assert name != alone.name
    compiled = torch.compile(gather, fullgraph=True, backend="aot_eager")
    compiled(ids, group)
    group.close()
    with pytest.raises(errors.GroupClosedError, match="is closed"):
        compiled(ids, group)
    del group
    gc.collect()
    with pytest.raises(errors.GroupClosedError, match="no group named"):
        OPERATORS.gather_load(ids, 1, EXPERTS, ORDER, name)
