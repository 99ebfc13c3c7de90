"""Training through the hooks on the CUDA engine, on the emulated device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from emulated_device import EmulatedDevice
from nn_model import Model

import ultraep_comm as uec


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
