"""Copies of modules that hold a group, and modules that were saved and loaded."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_model import Model
from ranks import bytes_stored, loopback
from torch.optim.swa_utils import AveragedModel

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.nn import ReplicatedExperts, Replication

Forms = Callable[[Any], Any]


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("form", [copy.deepcopy, lambda m: AveragedModel(m).module, saved])
def test_a_copy_trains_beside_the_original(models: Callable[..., Model], form: Forms) -> None:
    model = models(3, num_layers=1)
    microbatches = [("F", 0), ("B", 0)]
    before = [module.state_dict() for (module,) in model.modules]
    for modules, group in zip(model.modules, model.groups, strict=True):
        copied = form(modules[0])
        if form is saved:
            with pytest.raises(errors.GroupClosedError, match=r"set its attribute group"):
                copied(torch.zeros(1), model.plans[0, 0])
            copied.group = group
        assert copied.group is group
        with torch.no_grad():
            for weight in modules[0].parameters():
                weight.mul_(2)  # of the original alone
        modules[0] = copied
    assert model.error(model.train(microbatches), [0]) < 1e-5
    assert all(
        list(m.state_dict()) == list(b) for (m,), b in zip(model.modules, before, strict=True)
    )
    for group in model.groups:
        group.close()


def test_a_loaded_module_takes_a_group_that_fits(models: Callable[..., Model]) -> None:
    module = saved(models(3).modules[0][0])
    with pytest.raises(errors.InvalidArgumentError, match="expected the group's segments"):
        module.group = _groups("host")[0]
    group = _groups("host", banks=3)[0]
    replication = saved(Replication(group, layer=4, bank=1, reuse=True, live=2))
    with pytest.raises(errors.InvalidArgumentError, match="layer 4 is to have 2 live microbatches"):
        replication.group = _groups("host")[0]


def _groups(engine: str, banks: int = 1) -> list[uec.Group]:
    expert = {"w": ((1,), torch.float32)}
    return uec.testing.new_loopback_groups(
        2, num_experts=2, slots_per_rank=1, expert=expert, engine=engine, banks=banks, timeout=20.0
    )


def held(replication: Any, weights: Any, plan: uec.Plan) -> float:
    with torch.no_grad():
        run = replication.begin(weights, plan=plan)
        _, _, slots = run.before_experts(run.before_dispatch(torch.zeros(1)))
    return float(slots["w"][0])


@pytest.mark.parametrize("engine", ["host", "c10d"])
@pytest.mark.parametrize("own_bank", [True, False])
def test_a_bank_of_the_original_is_not_taken_for_that_of_the_copy(
    engine: str, own_bank: bool
) -> None:
    """A slot that holds an expert is not filled again; but the copy's expert is another."""
    groups = _groups(engine)
    plan = uec.Plan.from_slots([[1], [0]], num_experts=2).in_bank(0, reuse=True)

    def run(rank: int) -> None:
        group = groups[rank]
        original = Replication(group, reuse=own_bank)
        copied = copy.deepcopy(original)
        first = {"w": torch.full((1, 1), float(rank))}
        second = {"w": torch.full((1, 1), 10.0 + rank)}
        for _ in range(2):
            assert held(original, first, plan) == 1 - rank
            assert held(copied, second, plan) == 11 - rank
        stored = bytes_stored(group)
        assert held(copied, second, plan) == 11 - rank
        assert bytes_stored(group) == stored  # a bank keeps what it holds

    loopback(2, run)
    for group in groups:
        group.close()


def test_a_shallow_copy_shares_group_and_weights() -> None:
    (group, _) = _groups("host")
    weights = {"w": torch.nn.Parameter(torch.zeros(1, 1), requires_grad=False)}
    module = ReplicatedExperts(group, max, weights)
    assert copy.copy(module).weights["w"] is weights["w"]
    assert copy.copy(module).group is group
