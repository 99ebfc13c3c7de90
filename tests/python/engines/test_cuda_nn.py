"""Training through the hooks on the CUDA engine, on the emulated device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from emulated_device import EmulatedDevice
from nn_model import Model

import ultraep_comm as uec
from ultraep_comm.nn.hooks import ExpertPass
from ultraep_comm.nn.weights import unbind_slots


def test_a_pass_does_not_read_a_plan_on_the_device(
    emulated: EmulatedDevice, models: Callable[..., Model]
) -> None:
    """Its save may not have run yet: the memory of an empty plan would leave out the calls."""
    model = models(3, num_ranks=2, num_layers=1, num_microbatches=1, engine="cuda")
    group, plan = model.groups[0], model.plans[0, 0]
    with group.save(emulated.put_plan(plan)) as handle, group.save(plan) as on_host:
        emulated.synchronize()
        handle.plan.slot_expert.fill_(-1)
        run = ExpertPass(handle, {})
        assert (run.slot_expert, run.is_empty) == (None, False)
        assert ExpertPass(on_host, {}).slot_expert == plan.slot_expert.tolist()
        slots = torch.zeros(2, 3, requires_grad=True)
        parts = unbind_slots(slots, handle.plan, group)
        assert [part.requires_grad for part in parts] == [True, True]


@pytest.mark.parametrize("on_device", [False, True], ids=["plans on the CPU", "on the device"])
def test_gradients_are_those_without_replicas(
    emulated: EmulatedDevice,
    models: Callable[..., Model],
    monkeypatch: pytest.MonkeyPatch,
    on_device: bool,
) -> None:
    """Two microbatches in flight."""
    wait = uec.Work.wait

    def wait_for_both(work: uec.Work) -> None:
        wait(work)
        work.synchronize()  # for the host's arithmetic, which is on no stream

    monkeypatch.setattr(uec.Work, "wait", wait_for_both)
    model = models(3, num_ranks=2, num_layers=2, num_microbatches=2, engine="cuda")
    assert model.plans[0, 0].num_replicas > 0
    if on_device:
        model.plans = {call: emulated.put_plan(plan) for call, plan in model.plans.items()}
    order = [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    assert model.error(model.train(order), [0, 1]) < 1e-5
