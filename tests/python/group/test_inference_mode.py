"""A group created in inference mode can be used outside of it."""

from __future__ import annotations

import pytest
import torch
from emulated_device import EmulatedDevice

import ultraep_comm as uec

EXPERT = {"w": ((8,), torch.float32)}


@pytest.mark.parametrize("engine", ["host", "cuda"])
def test_memory_of_groups_made_in_inference_mode(
    engine: str, request: pytest.FixtureRequest
) -> None:
    if engine == "cuda":
        request.getfixturevalue("emulated")
    with torch.inference_mode():
        (group,) = uec.testing.new_loopback_groups(
            1,
            num_experts=4,
            slots_per_rank=1,
            expert=EXPERT,
            grads=torch.float32,
            instances=True,
            engine=engine,
            timeout=60.0,
        )
        weights = group.empty_weights()["w"]
        instances, grads = (
            group.banks[0].empty_instances()["w"],
            group.banks[0].empty_instance_grads()["w"],
        )
    x = torch.ones(8, requires_grad=True)
    for tensor in (group.slots["w"], group.slot_grads["w"], weights, instances, grads):
        assert not tensor.is_inference()
        tensor.fill_(2.0)
        (tensor * x).sum().backward()
    assert x.grad is not None
    group.close()


def test_tables_and_plans_of_the_device(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = uec.testing.new_loopback_groups(
        1, num_experts=4, slots_per_rank=1, expert=EXPERT, engine="cuda", timeout=60.0
    )
    plan = uec.plan_replicas(emulated.put(torch.ones(1, 4, dtype=torch.int32)), group=group)
    with torch.inference_mode():
        bound = group.bind({"w": torch.ones(4, 8)})
        handle = group.save(plan)
    assert bound.table is not None
    assert not bound.table.is_inference()
    assert not any(t.is_inference() for t in handle.plan.tensors().values())
    # As on a GPU, where torch copies.
    monkeypatch.setattr(emulated, "upload", lambda to, values: to.copy_(values))
    bound.table.zero_()
    bound.update({"w": torch.zeros(4, 8)})
    assert bound.table.count_nonzero() == 4
    handle.release()
    group.close()
