"""The package's tensors are on the right device, whatever torch's default device is."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranks import close_all, loopback
from torch.utils._device import _device_constructors

import ultraep_comm as uec

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "ultraep_comm"
COMMANDS = ("bench", "viz")  # programs, whose default device is torch's own
G, E, S = 2, 4, 1
EXPERT = {"w": ((8,), torch.float32)}


def on_meta(call: Callable[[int], Any]) -> list[Any]:
    """Call each rank in its own thread, with meta as its default device."""

    def run(rank: int) -> Any:
        torch.set_default_device("meta")
        return call(rank)

    return loopback(G, run)


def test_every_call_of_tensors_on_the_cpu() -> None:
    with torch.device("meta"):
        groups = uec.testing.new_loopback_groups(
            G, num_experts=E, slots_per_rank=S, expert=EXPERT, grads=torch.float32, timeout=60.0
        )
    ids = [torch.tensor([[0], [0], [1], [2]]), torch.tensor([[0], [0], [0], [3]])]
    maps = [torch.nn.functional.one_hot(own[:, 0], E).bool() for own in ids]
    weights = [torch.arange(2.0)[:, None].repeat(1, 8) + 2 * rank for rank in range(G)]
    main_grads = [torch.zeros(2, 8) for _ in range(G)]
    listed = [[[2], [0]], [0, 0, 1, 1]]

    def run(rank: int) -> tuple[uec.Plan, list[torch.Tensor]]:
        group = groups[rank]
        load = uec.gather_load(ids[rank], group=group)
        plan = uec.plan_replicas(load, group=group, target=1.0)
        bound = group.bind({"w": weights[rank]})
        uec.replicate_experts(bound, plan, group=group, async_op=True).synchronize()  # type: ignore[union-attr]
        found = [group.slots["w"].clone(), uec.reroute(ids[rank], plan, group=group)]
        physical, _ = uec.reroute_map(maps[rank], None, plan, group=group)
        by_hand = uec.Plan.from_slots(listed[0], num_experts=E, home=listed[1])
        with group.save(by_hand) as handle:
            group.slot_grads["w"].fill_(1.0)
            work = uec.reduce_expert_grads(
                {"w": main_grads[rank]}, handle, group=group, async_op=True
            )
            assert work is not None
            work.synchronize()
        uec.gather_and_plan(ids[rank], group=group)
        tensors = [load, physical, *plan.tensors().values()]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        return plan, found

    for rank, (plan, (slots, physical)) in enumerate(on_meta(run)):
        for slot, expert in enumerate(plan.slot_expert[rank].tolist()):
            assert expert < 0 or slots[slot].eq(expert).all()
        assert physical.shape == ids[rank].shape
    assert plan.num_replicas > 0
    assert [own[:, 0].tolist() for own in main_grads] == [[1.0, 0.0], [1.0, 0.0]]
    close_all(groups)


def test_every_tensor_is_made_on_a_named_device() -> None:
    factories = {function.__name__ for function in _device_constructors()}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in COMMANDS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "torch"
                and node.func.attr in factories
                and not any(keyword.arg == "device" for keyword in node.keywords)
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: torch.{node.func.attr}")
    assert found == []
