"""Training through the hooks: gradients with replicas are those without."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_model import H, Model, Order, T, experts
from ranks import bytes_stored, loopback, raised
from torch.utils.checkpoint import checkpoint

import ultraep_comm as uec
import ultraep_comm.nn as unn
from ultraep_comm import errors
from ultraep_comm.nn import hooks

ONE_AFTER_THE_OTHER: Order = [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 2)]
ONE_F_ONE_B: Order = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]


def replicate_on_rank_1(model: Model) -> None:
    """Give half of rank 1's tokens to a replica of rank 0's only expert."""
    model.plans[0, 0] = uec.Plan.from_slots([[-1, -1], [0, -1]], num_experts=2)
    model.instances[0, 0, 0] = torch.zeros(T, dtype=torch.int64)
    model.instances[1, 0, 0] = torch.arange(T) % 2


@pytest.mark.parametrize(
    ("num_ranks", "order"), [(2, ONE_F_ONE_B), (3, ONE_AFTER_THE_OTHER), (4, ONE_F_ONE_B)]
)
def test_gradients_are_those_without_replicas(
    models: Callable[..., Model], num_ranks: int, order: Order
) -> None:
    model = models(num_ranks, num_ranks=num_ranks)
    assert sum(plan.num_replicas for plan in model.plans.values()) > num_ranks
    assert model.error(model.train(order), [0, 1, 2]) < 1e-5
    for group in model.groups:
        assert all(not grad.any() for grad in group.slot_grads.values())
        group.close()  # says nothing: every handle has ended


def test_a_bank_for_each_layer_keeps_what_the_backward_pass_needs(
    models: Callable[..., Model],
) -> None:
    """Between passes of other microbatches, only what these have replaced is restored."""
    stored = {}
    for name, order in (("in turn", ONE_AFTER_THE_OTHER), ("1F1B", ONE_F_ONE_B)):
        for banks in (1, 2):
            model = models(5, banks=banks)
            assert model.error(model.train(order), [0, 1, 2]) < 1e-5
            stored[name, banks] = sum(bytes_stored(group) for group in model.groups)
            if banks > 1:
                for group in model.groups:
                    assert all(not g.any() for b in group.banks for g in b.slot_grads.values())
    num_replicas = sum(plan.num_replicas for plan in model.plans.values())
    expert_bytes = sum(s.nbytes for s in model.groups[0].segments.values())
    # A transfer in each direction, and the reductions: the same in both.
    assert stored["in turn", 1] == stored["1F1B", 1] > 2 * num_replicas * expert_bytes
    assert stored["in turn", 2] <= stored["in turn", 1] - num_replicas * expert_bytes
    assert stored["in turn", 2] < stored["1F1B", 2] < stored["1F1B", 1]


def test_gradients_of_bfloat16_parameters(models: Callable[..., Model]) -> None:
    model = models(0, dtype=torch.bfloat16)
    assert model.error(model.train(ONE_F_ONE_B), [0, 1, 2]) < 3e-2
    assert model.modules[0][0].weights["w1"].grad.dtype == torch.bfloat16


def test_ranks_without_tokens_take_part(models: Callable[..., Model]) -> None:
    model = models(1, num_tokens=0)

    def no_experts(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros(0, H)  # depends on nothing

    for modules in model.modules:
        for module in modules:
            module.experts = no_experts if module.group.rank == 0 else experts
    found = model.train(ONE_F_ONE_B)
    assert all(x.shape == (0, H) for x in found.values())
    for name in ("w1", "w2"):
        grad = model.modules[0][0].weights[name].grad
        assert grad is not None
        assert not grad.any()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_recomputed_layers(models: Callable[..., Model], reentrant: bool) -> None:
    model = models(5)

    def run(module: Any, *args: Any) -> Any:
        return checkpoint(module, *args, use_reentrant=reentrant)

    assert model.error(model.train(ONE_F_ONE_B, run), [0, 1, 2]) < 1e-5


def test_what_empty_slots_hold_does_no_harm(models: Callable[..., Model]) -> None:
    """Gradients of an empty slot may be NaN, and the slot may be filled by the next plan."""
    model = models(15, num_ranks=2, num_experts=2, num_layers=1, num_microbatches=2)
    model.plans[0, 0] = uec.Plan.from_slots([[-1, -1], [0, -1]], num_experts=2)
    model.plans[0, 1] = uec.Plan.from_slots([[-1, -1], [-1, 0]], num_experts=2)
    for mb in range(2):
        model.instances[0, 0, mb] = torch.zeros(T, dtype=torch.int64)
        model.instances[1, 0, mb] = torch.arange(T) % 2 * (mb + 1)

    def careless(x: torch.Tensor, local: Any, slots: Any, instance: torch.Tensor) -> torch.Tensor:
        y = experts(x, local, slots, instance)
        return y + 0 * (slots["w1"][1] * float("nan")).nansum()  # its gradient is NaN

    model.modules[1][0].experts = careless
    assert model.error(model.train([("F", 0), ("B", 0)]), [0]) < 1e-5
    assert not model.groups[1].slot_grads["w1"].isnan().any()
    model.modules[1][0].experts = experts
    for modules in model.modules:
        modules[0].zero_grad()
    found = model.train([("F", 1), ("B", 1)])
    assert model.error(found, [1]) < 1e-5


def test_nothing_stays_saved_without_gradients(models: Callable[..., Model]) -> None:
    model = models(2)

    def check(rank: int) -> None:
        group = model.groups[rank]
        with torch.no_grad():
            y = model.forward(rank, 0, model.inputs[rank, 0], lambda module, *a: module(*a))
        group.assert_idle()
        x = model.inputs[rank, 0].clone().requires_grad_()
        with_graph = model.forward(rank, 0, x, lambda module, *a: module.eval()(*a))
        assert torch.equal(with_graph, y)
        with pytest.raises(errors.GroupBusyError, match=r"2 saved plans .*layer 0, microbatch 0"):
            group.assert_idle()
        del with_graph  # and so the graph
        group.assert_idle()

    loopback(model.num_ranks, check)


def test_frozen_experts_have_no_reduction(models: Callable[..., Model]) -> None:
    model = models(3, num_microbatches=1)
    for modules in model.modules:
        for module in modules:
            module.weights.requires_grad_(False)
    calls = [group.health().epoch for group in model.groups]
    found = model.train([("F", 0), ("B", 0)])
    _, expected = model.expected([0])
    for key, grad in found.items():
        assert torch.allclose(grad, expected[key], atol=1e-5)
    after = [group.health().epoch for group in model.groups]
    assert [b - a for a, b in zip(calls, after, strict=True)] == [4] * 3  # two there, two back


def test_outputs_can_be_added_to_in_place(models: Callable[..., Model]) -> None:
    """Residuals and the outputs of shared experts are added to them."""
    model = models(16, num_ranks=2, num_layers=1)

    def train(rank: int, in_place: bool) -> list[torch.Tensor]:
        module, x = model.modules[rank][0], model.inputs[rank, 0].clone().requires_grad_()
        y = module(x, model.plans[0, 0], model.instances[rank, 0, 0])
        if in_place:
            y += x
        else:
            y = y + x
        model.loss(y).backward()
        found = [y, x.grad, *(module.weights[name].grad for name in ("w1", "w2"))]
        module.zero_grad()
        return found

    expected = loopback(2, lambda rank: train(rank, in_place=False))
    for a, b in zip(loopback(2, lambda rank: train(rank, True)), expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_plan_without_replicas_makes_no_calls_in_the_backward_pass(
    models: Callable[..., Model],
) -> None:
    model = models(3, num_layers=1, num_microbatches=1)
    model.plans[0, 0] = uec.Plan.from_slots([[-1, -1]] * 3, num_experts=7)
    for rank, group in enumerate(model.groups):
        local = group.num_local_experts
        model.instances[rank, 0, 0] = torch.arange(T) % local
    calls = [group.health().epoch for group in model.groups]
    assert model.error(model.train([("F", 0), ("B", 0)]), [0]) < 1e-5
    after = [group.health().epoch for group in model.groups]
    assert [b - a for a, b in zip(calls, after, strict=True)] == [1] * 3  # the forward pass's
    for group in model.groups:
        group.assert_idle()


@pytest.mark.parametrize("has_replicas", [True, False])
def test_gradients_are_copied_only_where_the_reduction_adds(
    models: Callable[..., Model], monkeypatch: pytest.MonkeyPatch, has_replicas: bool
) -> None:
    """``parameter.grad`` is the memory that the reduction was given: a copy, or autograd's own."""
    model = models(16, num_ranks=2, num_layers=1, num_microbatches=1)
    expert = int((model.home == (1 if has_replicas else 0)).nonzero()[0])
    slots = torch.full((2, 2), -1)
    slots[0 if has_replicas else 1, 0] = expert
    model.plans[0, 0] = uec.Plan.from_slots(slots, num_experts=7)
    for rank, group in enumerate(model.groups):
        model.instances[rank, 0, 0] = torch.arange(T) % group.num_local_experts
    kept: list[list[list[int]]] = []  # addresses: who holds a gradient makes autograd copy it
    own_gradients = hooks._own_gradients

    def remember(run: Any, local: Any, grads: Any) -> list[torch.Tensor]:
        own = own_gradients(run, local, grads)
        if run.handle.group.rank == 1:
            kept.append([[grad.data_ptr() for grad in found] for found in (grads, own)])
        return own

    monkeypatch.setattr(hooks, "_own_gradients", remember)
    assert model.error(model.train([("F", 0), ("B", 0)]), [0]) < 1e-5
    ((autograd, own),) = kept
    assert [a == b for a, b in zip(autograd, own, strict=True)] == [not has_replicas] * 2
    assert [model.modules[1][0].weights[name].grad.data_ptr() for name in ("w1", "w2")] == own


def test_a_gradient_that_autograd_shares_is_copied(models: Callable[..., Model]) -> None:
    """The reduction takes no memory twice, not even where it adds nothing."""
    model = models(16, num_ranks=2, num_layers=1, num_microbatches=1)
    slots = torch.full((2, 2), -1)
    slots[0, 0] = int((model.home == 1).nonzero()[0])
    model.plans[0, 0] = uec.Plan.from_slots(slots, num_experts=7)

    def added(x: torch.Tensor, local: Any, slots: Any, instance: Any) -> torch.Tensor:
        both = (local["w1"] + local["w2"]).sum() + 0 * (slots["w1"] + slots["w2"]).sum()
        return x * both  # expanded gradients, of two weights in one memory

    for modules in model.modules:
        modules[0].experts = added
    model.train([("F", 0), ("B", 0)])
    for (module,) in model.modules:
        first, second = (module.weights[name].grad for name in ("w1", "w2"))
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()


def test_weights_and_slots_are_in_one_order(models: Callable[..., Model]) -> None:
    """So that the experts can zip them: a ParameterDict sorts the dict it is made from."""
    model = models(16, num_ranks=1, num_experts=2, num_layers=1)
    orders = []

    def seen(x: torch.Tensor, local: Any, slots: Any, instance: Any) -> torch.Tensor:
        orders.append((list(local), list(slots)))
        return experts(x, local, slots, instance)

    model.modules[0][0].experts = seen
    model.train([("F", 0), ("B", 0)])
    assert orders == [(["w1", "w2", "scale"], ["w1", "w2", "scale"])]


# ---- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("has_replicas", [True, False])
def test_backward_twice_on_one_handle(models: Callable[..., Model], has_replicas: bool) -> None:
    model = models(4, num_ranks=2, num_layers=1)
    if not has_replicas:
        model.plans[0, 1] = uec.Plan.from_slots([[-1, -1], [-1, -1]], num_experts=7)
        for group in model.groups:
            model.instances[group.rank, 0, 1] = torch.arange(T) % group.num_local_experts

    def train(rank: int) -> BaseException | None:
        module = model.modules[rank][0]
        y = module(
            model.inputs[rank, 1].clone().requires_grad_(),
            model.plans[0, 1],
            model.instances[rank, 0, 1],
            microbatch=7,
        )
        model.loss(y).backward(retain_graph=True)
        return raised(lambda: model.loss(y).backward())

    found = loopback(2, train)
    assert any(isinstance(error, errors.PlanHandleError) for error in found)
    for rank, error in enumerate(found):
        if isinstance(error, errors.PlanHandleError):
            assert error.rank == rank
            assert "layer 0, microbatch 7" in str(error)
            assert "was reduced already: backward twice on one handle" in str(error)
        else:  # it heard of the other's error first
            assert isinstance(error, errors.UltraEPError)


def test_second_derivatives_are_refused(models: Callable[..., Model]) -> None:
    model = models(4, num_ranks=2, num_layers=1)

    def train(rank: int) -> BaseException | None:
        x = model.inputs[rank, 0].clone().requires_grad_()
        y = model.modules[rank][0](x, model.plans[0, 0], model.instances[rank, 0, 0])
        (grad,) = torch.autograd.grad(model.loss(y), x, create_graph=True)
        return raised(lambda: grad.sum().backward())

    for error in loopback(2, train):
        assert "once_differentiable" in str(error)


def test_gradients_leave_behind_the_reduction(
    models: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is late: rank 0's gradients stay until they are complete."""
    model = models(7, num_ranks=2, num_experts=2, num_layers=1, num_microbatches=1)
    replicate_on_rank_1(model)
    left, started = threading.Event(), threading.Event()
    reduce = uec.reduce_expert_grads

    def reduce_late(*args: Any, **kwargs: Any) -> Any:
        if kwargs["group"].rank == 1:
            assert started.wait(10)
            assert not left.wait(0.2)  # rank 0's gradients are held back
        else:
            started.set()
        return reduce(*args, **kwargs)

    monkeypatch.setattr(uec, "reduce_expert_grads", reduce_late)
    model.modules[0][0].weights["w1"].register_hook(lambda grad: left.set())
    assert model.error(model.train([("F", 0), ("B", 0)]), [0]) < 1e-5


def test_a_reduction_that_was_not_started_is_missed(models: Callable[..., Model]) -> None:
    model = models(8, num_ranks=2)
    group = model.groups[0]
    run = hooks.ExpertPass(group.save(model.plans[0, 0], layer=9), model.modules[0][0].weights)
    x = torch.ones(1, requires_grad=True)
    y, _ = hooks.join_reduction(x, run, {})
    with pytest.raises(
        errors.InvalidArgumentError, match=r"rank 0: .* layer 9, microbatch 0 is joined but"
    ):
        y.sum().backward()
    run.handle.release()


def test_layers_side_by_side_are_refused(models: Callable[..., Model]) -> None:
    """Two layers of equal plans on one group's slots: backward passes ran into each other."""
    model = models(8, num_ranks=2)
    assert model.plans[0, 0].num_replicas > 0

    def train(rank: int) -> BaseException | None:
        group = model.groups[rank]
        x = torch.ones(1, requires_grad=True)
        runs, outputs = [], []
        for layer in range(2):
            weights = dict(model.modules[rank][layer].weights.items())
            runs.append(hooks.ExpertPass(group.save(model.plans[0, 0], layer=layer), weights))
            joined, weights = hooks.join_reduction(x, runs[layer], weights)
            started, *_ = hooks.start_reduction(joined, runs[layer], weights, group.slots)
            outputs.append((started, hooks.restore_replicas(started * 2, runs[layer])))
        (grad,) = torch.autograd.grad(outputs[0][1].sum(), outputs[0][0])  # restored
        torch.autograd.grad(outputs[1][1].sum(), outputs[1][0])
        error = raised(lambda: outputs[0][0].backward(grad))
        for run in runs:
            run.handle.release()
        return error

    for error in loopback(2, train):
        assert isinstance(error, errors.InvalidArgumentError)
        assert re.search(r"layer 0, microbatch 0 .* of layer 1", str(error))


def passed(
    model: Model, rank: int, mb: int, *, transfer: bool = True, number: int | None = None
) -> tuple[hooks.ExpertPass, torch.Tensor, torch.Tensor]:
    """Run a forward pass of a rank's only layer with the hooks; return input and output."""
    group, module = model.groups[rank], model.modules[rank][0]
    weights = dict(module.weights.items())
    handle = group.save(model.plans[0, mb], microbatch=mb if number is None else number)
    run = hooks.ExpertPass(handle, weights)
    if transfer:
        uec.replicate_experts(weights, run.handle, group=group)
    x = model.inputs[rank, mb].clone().requires_grad_()
    joined, local = hooks.join_reduction(x, run, weights)
    started, local, slots = hooks.start_reduction(joined, run, local, group.slots)
    y = experts(started, local, slots, model.instances[rank, 0, mb])
    return run, x, hooks.restore_replicas(y, run, anchor=started)


def test_a_transfer_before_the_experts_backward_is_noticed(models: Callable[..., Model]) -> None:
    """A schedule that runs a forward pass between a prefetch and the experts' backward."""
    model = models(8, num_ranks=2, num_layers=1)
    assert not torch.equal(model.plans[0, 0].slot_expert, model.plans[0, 1].slot_expert)

    def train(rank: int) -> BaseException | None:
        run, _, y = passed(model, rank, 0)
        later = hooks.prefetch_replicas(y * 1.0, run)
        (grad,) = torch.autograd.grad(model.loss(later), y)
        weights = run.weights
        with torch.no_grad():
            uec.replicate_experts(weights, model.plans[0, 1], group=model.groups[rank])
        error = raised(lambda: y.backward(grad))
        run.handle.release()
        return error

    for rank, error in enumerate(loopback(2, train)):
        if not isinstance(error, errors.PeerRejectedError):
            assert isinstance(error, errors.InvalidArgumentError)
            assert f"rank {rank}: the experts of layer 0, microbatch 0 had" in str(error)
            assert "the replicas of another plan in their backward pass" in str(error)


@pytest.mark.parametrize("number", [1, 0], ids=["another number", "the same number"])
def test_experts_without_their_own_transfer_are_noticed(
    models: Callable[..., Model], number: int
) -> None:
    model = models(8, num_ranks=2, num_layers=1)

    def train(rank: int) -> BaseException | None:
        passed(model, rank, 0)
        return raised(lambda: passed(model, rank, 1, transfer=False, number=number))

    for error in loopback(2, train):
        assert isinstance(error, errors.InvalidArgumentError)
        assert f"microbatch {number} had the replicas of layer 0, microbatch 0 in" in str(error)


def test_what_hooks_refuse(models: Callable[..., Model]) -> None:
    model = models(8, num_ranks=2)
    group, weights = model.groups[0], dict(model.modules[0][0].weights.items())
    handle = group.save(model.plans[0, 0])
    x = torch.ones(1, requires_grad=True)
    run = hooks.ExpertPass(handle, weights)
    with pytest.raises(errors.InvalidArgumentError, match="'w1' of layer 0 have not been through"):
        hooks.start_reduction(x, run, weights, group.slots)
    fused = hooks.ExpertPass(handle, weights, main_grads=weights)
    with pytest.raises(errors.InvalidArgumentError, match="layer 0 needs no gradient"):
        hooks.start_reduction(x.detach(), fused, weights, group.slots)
    with pytest.raises(errors.InvalidArgumentError, match="experts of layer 0 is a tuple"):
        hooks.restore_replicas((x, None), run)  # type: ignore[arg-type]
    weights["w2"].requires_grad_(False)
    with pytest.raises(errors.InvalidArgumentError, match=r"\['w1'\] need gradients; expected all"):
        hooks.start_reduction(x, hooks.ExpertPass(handle, weights), weights, group.slots)
    with pytest.raises(errors.InvalidArgumentError, match=r"\['w1'\]; expected .* stay behind"):
        unn.ReplicatedExperts(group, experts, {"w1": weights["w1"]})
    handle.release()


# ---- frameworks that add to gradients by themselves ---------------------------------------------


class FusedExperts(torch.autograd.Function):
    """Experts as one function that adds weight gradients to ``main_grad`` and to slot gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, local: Any, slots: Any, sums: Any, instance: Any) -> Any:
        ctx.held = local, slots, sums, instance
        ctx.save_for_backward(x)
        return experts(x, local, slots, instance)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        local, slots, (main_sums, slot_sums), instance = ctx.held
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            parts = [
                {n: w.detach().requires_grad_(n in main_sums) for n, w in given.items()}
                for given in (local, slots)
            ]
            y = experts(x, *parts, instance)
        leaves = [parts[i][n] for i in range(2) for n in main_sums]
        grad_x, *grads = torch.autograd.grad(y, [x, *leaves], grad)
        for total, found in zip([*main_sums.values(), *slot_sums.values()], grads, strict=True):
            total.add_(found)
        return grad_x, None, None, None, None


@pytest.mark.parametrize("prefetch", [False, True])
def test_hooks_on_activations_alone(models: Callable[..., Model], prefetch: bool) -> None:
    model = models(9)
    totals: dict[int, dict[str, torch.Tensor]] = {}

    def run(module: Any, x: torch.Tensor, plan: uec.Plan, instance: torch.Tensor) -> torch.Tensor:
        group, weights = module.group, dict(module.weights.items())
        sums = totals.setdefault(
            id(module), {n: torch.zeros_like(weights[n]) for n in group.slot_grads}
        )
        calls = unn.Replication(group, layer=module.layer)
        one = calls.begin(weights, plan=plan, main_grads=sums)
        x, _, slots = one.before_experts(one.before_dispatch(x))
        y = FusedExperts.apply(x, weights, slots, (sums, group.slot_grads), instance)  # type: ignore[no-untyped-call]
        y = one.after_experts(y)
        return one.after_combine(y * 1.0) if prefetch else y

    found = model.train(ONE_F_ONE_B, run)
    for modules in model.modules:
        for module in modules:
            for name, total in totals[id(module)].items():
                assert module.weights[name].grad is None
                module.weights[name].grad = total
    assert model.error(found, [0, 1, 2]) < 1e-5


def test_hooks_of_parameters_may_wait_for_the_reduction(models: Callable[..., Model]) -> None:
    """Parameters went through join_reduction although experts add to ``main_grads``."""
    model = models(9, num_ranks=2, num_layers=1, num_microbatches=1)
    joined: list[bool] = []

    class Signalling(FusedExperts):
        """Returns an unused gradient, so that a parameter's hooks run."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            return FusedExperts.forward(ctx, *args[:-1])

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return *FusedExperts.backward(ctx, grad), torch.zeros_like(ctx.held[0]["w1"])

    def run(module: Any, x: torch.Tensor, plan: uec.Plan, instance: torch.Tensor) -> torch.Tensor:
        group, weights = module.group, dict(module.weights.items())
        sums = {n: torch.zeros_like(weights[n]) for n in group.slot_grads}
        one = unn.Replication(group).begin(weights, plan=plan, main_grads=sums)
        waiting = weakref.ref(one._run)  # the parameter keeps its hook, and this the parameter
        weights["w1"].register_post_accumulate_grad_hook(
            lambda _: joined.append(not waiting().handle.is_live and waiting().reducing is None)
        )
        x, local, slots = one.before_experts(one.before_dispatch(x))
        held = (weights, slots, (sums, group.slot_grads), instance)
        y = Signalling.apply(x, *held, local["w1"])  # type: ignore[no-untyped-call]
        return one.after_experts(y)

    model.train([("F", 0), ("B", 0)], run)
    assert joined == [True, True]


def test_gradients_that_others_hold_too_are_left_alone(models: Callable[..., Model]) -> None:
    """A sum's gradient is one tensor for all of its parts, such as low-rank updates of weights."""
    model = models(10, num_ranks=2, num_experts=2, num_layers=1, num_microbatches=1)
    replicate_on_rank_1(model)
    update = torch.zeros(1, H, H, requires_grad=True)

    def updated(x: torch.Tensor, local: Any, slots: Any, instance: torch.Tensor) -> torch.Tensor:
        return experts(x, {**local, "w1": local["w1"] + update}, slots, instance)

    model.modules[0][0].experts = updated
    assert model.error(model.train([("F", 0), ("B", 0)]), [0]) < 1e-5
    inputs = model.inputs[0, 0]
    own = {n: w[:1].clone().requires_grad_() for n, w in model.weights[0].items()}
    none = {n: w[:0] for n, w in own.items()}
    model.loss(experts(inputs, own, none, model.instances[0, 0, 0])).backward()
    assert update.grad is not None
    assert own["w1"].grad is not None
    assert torch.allclose(update.grad, own["w1"].grad, atol=1e-6)  # of rank 0's tokens alone
