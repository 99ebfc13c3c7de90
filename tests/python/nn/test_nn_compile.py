"""Training under torch.compile: what traces, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from compilers import BACKENDS, COMPILES
from nn_model import Model
from ranks import bytes_stored, loopback
from torch._dynamo.testing import CompileCounterWithBackend

import ultraep_comm as uec

pytestmark = COMPILES


def dense_experts(x: torch.Tensor, local: Any, slots: Any, instance: torch.Tensor) -> torch.Tensor:
    """The same experts, each for all tokens: shapes do not depend on values."""
    y, num_local_experts = x, len(local["w1"])
    for i in range(num_local_experts + len(slots["w1"])):
        held, at = (local, i) if i < num_local_experts else (slots, i - num_local_experts)
        mine = (instance == i)[:, None]
        hidden = torch.tanh((x * mine) @ held["w1"][at].T)
        y = y + hidden @ torch.where(mine.any(), held["w2"][at].T, 0.0) * held["scale"][at]
    return y


def layers(modules: Any, x: torch.Tensor, plans: Any, instances: Any) -> torch.Tensor:
    for module, plan, instance in zip(modules, plans, instances, strict=True):
        x = module(x, plan, instance)
    return x


@pytest.mark.parametrize("banks", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_layers_have_the_gradients_of_eager_ones(
    models: Callable[..., Model], backend: str, banks: int
) -> None:
    """All layers of a group in one graph, and a backward pass before the next forward pass.

    With banks, of plans by which the second slot has no tokens, and so no gradient to reduce.
    """
    model = models(11, num_ranks=2, num_experts=4, banks=banks)
    if banks > 1:
        first, none = torch.tensor([1, 0], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        model.plans = {
            call: replace(plan, slot_quota=(plan.slot_expert >= 0) * first, home_quota=none)
            for call, plan in model.plans.items()
        }
    counter = CompileCounterWithBackend(backend)
    for modules in model.modules:
        for module in modules:
            module.experts = dense_experts

    def train(rank: int, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        for mb in range(2):
            x = model.inputs[rank, mb].clone().requires_grad_()
            plans = [model.plans[layer, mb] for layer in range(2)]
            instances = [model.instances[rank, layer, mb] for layer in range(2)]
            y = run(model.modules[rank], x, plans, instances)
            model.loss(y).backward()
            found += [y, x.grad]
        for module in model.modules[rank]:
            found += [module.weights[name].grad for name in ("w1", "w2")]
            module.zero_grad()
        model.groups[rank].assert_idle()
        return found

    def stored() -> int:
        return sum(bytes_stored(group) for group in model.groups)

    eager, alone = loopback(2, lambda rank: train(rank, layers)), stored()
    for bank in (bank for group in model.groups for bank in group.banks):
        bank.invalidate()
    compiled = [torch.compile(layers, fullgraph=True, backend=counter) for _ in range(2)]
    got = loopback(2, lambda rank: train(rank, compiled[rank]))
    assert counter.frame_count >= 2
    assert stored() == 2 * alone
    for rank in range(2):
        for a, b in zip(got[rank], eager[rank], strict=True):
            assert torch.allclose(a, b, atol=1e-5, rtol=1e-5)


def test_weights_that_the_group_does_not_reduce_are_refused(models: Callable[..., Model]) -> None:
    """Also by a trace: gradients without the replicas' would be incomplete."""
    model = models(12, num_ranks=1, num_experts=2, num_layers=1)
    (module,) = model.modules[0]
    module.experts = dense_experts
    arguments = (model.inputs[0, 0], model.plans[0, 0], model.instances[0, 0, 0])
    module.weights["w2"].requires_grad_(False)
    run = torch.compile(lambda: module(*arguments), fullgraph=True, backend="aot_eager")
    for call in (lambda: module(*arguments), run):
        with pytest.raises(Exception, match=r"main weights \['w1'\] need gradients; expected all"):
            call()


def test_compiled_microbatches_in_flight_are_refused(models: Callable[..., Model]) -> None:
    """The slots that the first graph saved for its backward pass belong to the second by then."""
    model = models(12, num_ranks=1, num_experts=2, num_layers=1)
    (module,) = model.modules[0]
    module.experts = dense_experts
    run = torch.compile(layers, fullgraph=True, backend="aot_eager")
    losses = []
    for mb in range(2):
        x = model.inputs[0, mb].clone().requires_grad_()
        plan, instance = model.plans[0, mb], model.instances[0, 0, mb]
        losses.append(model.loss(run([module], x, [plan], [instance])))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()
    losses[1].backward()


def test_handles_are_not_for_compiled_functions(models: Callable[..., Model]) -> None:
    model = models(14, num_ranks=1, num_experts=2, num_layers=1)
    group, weights = model.groups[0], dict(model.modules[0][0].weights.items())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def replicate(handle: uec.PlanHandle) -> None:
        uec.replicate_experts(weights, handle, group=group)  # type: ignore[arg-type]

    with group.save(model.plans[0, 0]) as handle, pytest.raises(Exception, match="PlanHandle in a"):
        replicate(handle)
