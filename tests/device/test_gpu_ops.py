"""Operators and torch.compile on the CUDA engine: aliasing, and results of compiled layers.

Each test runs the kernels on the CPU too, but for what needs torch's own CUDA graphs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import loopback, plan_alone
from stage_cases import assert_same
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.library import opcheck

import ultraep_comm as uec
from ultraep_comm import ops
from ultraep_comm.calls.traced import ORDER
from ultraep_comm.engines.cuda import device

EXPERTS, SLOTS, TOKENS, TOPK = 6, 2, 30, 2
EXPERT = {"w": ((16,), torch.float32)}
OPERATORS = torch.ops.ultraep_comm

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux", reason="inductor needs g++"
)


class Place:
    """Puts tensors on the device, and orders torch's own work with the library's."""

    def __init__(self, new_groups: Callable[..., list[uec.Group]]) -> None:
        self.device = device.find_device()
        self.make = partial(
            new_groups,
            num_experts=EXPERTS,
            slots_per_rank=SLOTS,
            expert=EXPERT,
            engine="cuda",
            num_sms=2,
            timeout=120,  # the first rank to call waits while others compile
        )

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def synchronize(self) -> None:
        self.device.synchronize()


@pytest.fixture
def place(
    streams: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    new_groups: Callable[..., list[uec.Group]],
    nothing_compiled: None,
) -> Place:
    """A device. On the emulated one torch's work is on no stream: operators end complete there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # no graphs of earlier runs
    made = Place(new_groups)
    if streams == "emulated":
        _complete_calls(made, monkeypatch)
        monkeypatch.setattr(type(made.device), "is_on_device", lambda self, tensor: True)
    return made


def _complete_calls(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            found = call(*arguments, **options)
            if not options.get("async_op"):
                place.synchronize()
            return found

        return run

    names = ("gather_load", "plan_for_group", "reroute", "reroute_map", "reroute_gradient")
    for name in (*names, "replicate_experts", "reduce_expert_grads"):
        monkeypatch.setattr(ops, name, complete(getattr(ops, name)))
    monkeypatch.setattr(uec.Work, "wait", complete(uec.Work.wait))


def draw_ids(hot: int, draw: torch.Generator) -> torch.Tensor:
    drawn = torch.randint(-1, EXPERTS, (TOKENS, TOPK), generator=draw)
    return torch.where(torch.rand(drawn.shape, generator=draw) < 0.6, hot, drawn)


# ---- operators ------------------------------------------------------------------------------


def make_plan(place: Place, load: torch.Tensor, group: uec.Group) -> uec.Plan:
    """Plan with the operator."""
    slot_expert, slot_quota, home_quota, home, domains = OPERATORS.plan_replicas(
        load, group.num_ranks, EXPERTS, SLOTS, 1.01, [], group.name
    )
    place.synchronize()
    return uec.Plan(
        slot_expert=slot_expert,
        home=home,
        slot_quota=slot_quota,
        home_quota=home_quota,
        domains=domains,
    )


@pytest.mark.parametrize("shape", [(2, EXPERTS), (EXPERTS,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tensors_of_a_plan_share_no_memory(
    place: Place, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Torch requires it of operators, as graphs reuse the memory of their results."""
    group = place.make(2)[0]
    load = place.put(torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape))
    with SchemaCheckMode():
        plan = make_plan(place, load, group)
    tensors = [load, *plan.tensors().values()]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors) == 6


def test_plans_do_not_depend_on_what_was_done_to_earlier_ones(place: Place) -> None:
    """Eager plans share the group's maps; those of operators are for their graph to write to."""
    group = place.make(2)[0]
    load = torch.tensor([[9, 1, 0, 0, 2, 0], [7, 0, 1, 0, 3, 0]], dtype=torch.int32)
    expected = plan_alone(load.sum(0), slots_per_rank=SLOTS, num_ranks=2)
    for _ in range(3):
        plan = make_plan(place, place.put(load), group)
        assert_same(plan, expected)
        for tensor in plan.tensors().values():
            tensor.copy_(tensor.flip(0))  # ranks 0 and 1 in each other's place
    again = uec.plan_replicas(place.put(load.sum(0)), group=group)
    place.synchronize()
    assert_same(again, expected)


def test_operators_are_what_torch_asks_of_them(place: Place) -> None:
    (group,) = place.make(1)
    ids = place.put(draw_ids(0, torch.Generator().manual_seed(0)))
    opcheck(OPERATORS.gather_load.default, (ids, 1, EXPERTS, ORDER, group.name))
    load = OPERATORS.gather_load(ids, 1, EXPERTS, ORDER, group.name)
    for given in (load, load.sum(0)):
        for costs in ([], [1.0, 1e-6, 0.0]):
            arguments = (given, 1, EXPERTS, SLOTS, 1.01, costs, group.name)
            opcheck(OPERATORS.plan_replicas.default, arguments)
    plan = make_plan(place, load, group)
    transferred = (plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota)
    fields = (*transferred, load)
    opcheck(OPERATORS.reroute.default, (ids, *fields, group.name))
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    routing = place.put(chosen.scatter_(1, torch.arange(TOKENS)[:, None] % EXPERTS, True))
    load = place.put(chosen.sum(0, dtype=torch.int32)[None])
    plan = make_plan(place, load, group)
    fields = (plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota, load)
    columns = group.topology.instances_per_rank
    probs = place.put(torch.rand(TOKENS, EXPERTS))
    for given_probs in (probs, None):
        arguments = (routing, given_probs, *fields, columns, group.name)
        opcheck(OPERATORS.reroute_map.default, arguments)
    grad = place.put(torch.rand(TOKENS, columns))
    opcheck(OPERATORS.reroute_map_backward.default, (grad, routing, *fields, group.name))
    weights = [place.put(torch.rand(EXPERTS, 16))]
    slots = list(group.slots.values())
    arguments = (
        *(weights, [-1], ["w"], *transferred),
        *(slots, ["w"], ORDER, "auto", 0, False, None, None, group.name),
    )
    opcheck(OPERATORS.replicate_experts.default, arguments)
    opcheck(OPERATORS.start_replicate_experts.default, arguments)
    place.synchronize()


# ---- compiled -------------------------------------------------------------------------------


def layer(
    ids: torch.Tensor, weights: dict[str, torch.Tensor], group: uec.Group, synchronize: Any
) -> tuple[torch.Tensor, ...]:
    """From ids to slots and physical ids; ``synchronize`` is for eager calls when emulated."""
    load = uec.gather_load(ids, group=group)
    synchronize()
    plan = uec.plan_replicas(load, group=group)
    synchronize()
    before = group.slots["w"] * 2
    work = uec.replicate_experts(weights, plan, group=group, async_op=True)
    physical = uec.reroute(ids, plan, group=group)
    synchronize()
    assert work is not None
    work.wait()
    return physical, load, plan.slot_expert, plan.home * 1, before, group.slots["w"] * 1


def nothing() -> None:
    pass


def check_compiled(place: Place, num_ranks: int, compiled: Callable[..., Any]) -> None:
    """Run layers with other ids and weights each time, and compare with eager ones."""
    draw, replicas = torch.Generator().manual_seed(0), 0
    groups, others = place.make(num_ranks), place.make(num_ranks)
    ids = [place.put(torch.zeros(TOKENS, TOPK, dtype=torch.int64)) for _ in groups]
    num_local = EXPERTS // num_ranks
    weights = [{"w": place.put(torch.zeros(num_local, 16))} for _ in groups]

    def run(fn: Callable[..., Any], groups: list[uec.Group], synchronize: Any) -> list[Any]:
        def call(rank: int) -> list[torch.Tensor]:
            with torch.no_grad():
                found = fn(ids[rank], weights[rank], groups[rank], synchronize)
            return [tensor.clone() for tensor in found]  # of torch's graphs: until the next run

        # In this thread if it can be: torch's graphs are made for each thread, and some versions
        # of torch refuse threads that are not their own.
        found = [call(0)] if num_ranks == 1 else loopback(num_ranks, call)
        place.synchronize()
        return found

    for turn in range(4):
        for r in range(num_ranks):
            ids[r].copy_(draw_ids(turn, draw))
            weights[r]["w"].copy_(torch.rand(num_local, 16, generator=draw))

        got = run(compiled, groups, nothing)
        expected = run(layer, others, place.synchronize)
        for one, other in zip(got, expected, strict=True):
            for i, (a, b) in enumerate(zip(one, other, strict=True)):
                assert torch.equal(a, b), (turn, i)
        replicas += int((expected[0][2] >= 0).sum())
    assert replicas > 0 or num_ranks == 1


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[pytest.mark.exhaustive, needs_compiler])],
)
def test_compiled_layers_give_what_eager_ones_do(
    place: Place, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = torch._functorch.config
    if hasattr(config, "error_on_custom_op_aliasing"):  # as in later versions of torch
        monkeypatch.setattr(config, "error_on_custom_op_aliasing", True)
    check_compiled(place, 2, torch.compile(layer, fullgraph=True, backend=backend))


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("streams", ["cuda"], indirect=True)
def test_layers_compiled_for_cuda_graphs_give_what_eager_ones_do(place: Place) -> None:
    """Torch leaves the operators out of its graphs, or does without. One rank, in this thread."""
    check_compiled(place, 1, torch.compile(layer, fullgraph=True, mode="reduce-overhead"))
