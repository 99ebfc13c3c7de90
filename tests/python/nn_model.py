"""Layers of experts over loopback ranks, and their gradients without replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compilers import COMPILE_TIMEOUT
from ranks import loopback

import ultraep_comm as uec
import ultraep_comm.nn as unn

H, S, T = 6, 2, 12  # hidden size, slots, tokens of a rank
Order = list[tuple[str, int]]  # "F" or "B", and the microbatch


def experts(x: torch.Tensor, local: Any, slots: Any, instance: torch.Tensor) -> torch.Tensor:
    """Two matrices and a fixed scale per instance; main instances first, then slots.

    The backward pass reads the weights in place.
    """
    num_local_experts = len(local["w1"])
    rows, outputs = [x.new_zeros(0, dtype=torch.int64)], [x[:0]]
    for i in range(num_local_experts + len(slots["w1"])):
        held, at = (local, i) if i < num_local_experts else (slots, i - num_local_experts)
        rows.append((instance == i).nonzero()[:, 0])
        hidden = torch.tanh(x[rows[-1]] @ held["w1"][at].T)
        outputs.append(hidden @ held["w2"][at].T * held["scale"][at])
    return x.index_add(0, torch.cat(rows), torch.cat(outputs))


class Model:
    """Layers over loopback ranks; tokens go through instances on their own rank.

    Plans differ by layer and microbatch, instances also by rank.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_ranks: int = 3,
        num_experts: int = 7,
        num_layers: int = 2,
        num_microbatches: int = 3,
        dtype: torch.dtype = torch.float32,
        num_tokens: int = T,
        engine: str = "host",
        banks: int = 1,  # more: one for each layer
    ) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.num_ranks, self.num_experts = num_ranks, num_experts
        self.groups = uec.testing.new_loopback_groups(
            num_ranks,
            num_experts=num_experts,
            slots_per_rank=S,
            expert={"w1": ((H, H), dtype), "w2": ((H, H), dtype), "scale": ((1,), dtype)},
            grads={"w1": torch.float32, "w2": torch.float32},
            engine=engine,
            banks=banks,
            timeout=COMPILE_TIMEOUT,
        )
        self.home = torch.from_numpy(self.groups[0].topology.home)
        shapes = {"w1": (H, H), "w2": (H, H), "scale": (1,)}
        self.weights = [
            {name: self.random(num_experts, *shape).to(dtype) for name, shape in shapes.items()}
            for _ in range(num_layers)
        ]
        calls = [(layer, mb) for layer in range(num_layers) for mb in range(num_microbatches)]
        self.plans = {call: self.plan() for call in calls}
        if banks > 1:
            self.plans = {
                call: plan.in_bank(call[0], reuse=True) for call, plan in self.plans.items()
            }
        self.instances = {
            (rank, *call): self.choose(rank, self.plans[call], num_tokens)
            for rank in range(num_ranks)
            for call in calls
        }
        self.inputs = {
            (rank, mb): self.random(num_tokens, H).to(dtype)
            for rank in range(num_ranks)
            for mb in range(num_microbatches)
        }
        self.modules = [
            [
                unn.ReplicatedExperts(group, experts, self.own(group, layer), layer=layer)
                for layer in range(num_layers)
            ]
            for group in self.groups
        ]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.draw) / H**0.5

    def own(self, group: uec.Group, layer: int) -> dict[str, torch.nn.Parameter]:
        mine = self.home == group.rank
        return {
            name: torch.nn.Parameter(tensor[mine].clone(), requires_grad=name != "scale")
            for name, tensor in self.weights[layer].items()
        }

    def plan(self) -> uec.Plan:
        slots = torch.full((self.num_ranks, S), -1)
        for rank in range(self.num_ranks):
            order = torch.randperm(self.num_experts, generator=self.draw)
            order = order[self.home[order] != rank]
            filled = int(torch.randint(0, min(S, len(order)) + 1, (), generator=self.draw))
            slots[rank, :filled] = order[:filled]
        return uec.Plan.from_slots(slots, num_experts=self.num_experts)

    def held(self, rank: int, plan: uec.Plan) -> list[int]:
        """Return the experts of a rank's instances; -1: an empty slot."""
        local = torch.nonzero(self.home == rank)[:, 0]
        return [*local.tolist(), *plan.slot_expert[rank].tolist()]

    def choose(self, rank: int, plan: uec.Plan, num_tokens: int) -> torch.Tensor:
        legal = torch.tensor([i for i, e in enumerate(self.held(rank, plan)) if e >= 0])
        return legal[torch.randint(len(legal), (num_tokens,), generator=self.draw)]

    # ---- with and without replicas

    def expected(self, microbatches: list[int]) -> tuple[list[Any], dict[Any, torch.Tensor]]:
        """Return the gradients of all experts, by layer, and of inputs, without replicas."""
        weights = [
            {name: w.float().clone().requires_grad_() for name, w in layer.items()}
            for layer in self.weights
        ]
        inputs = {key: x.float().clone().requires_grad_() for key, x in self.inputs.items()}
        for rank in range(self.num_ranks):
            for mb in microbatches:
                x = inputs[rank, mb]
                for layer, own in enumerate(weights):
                    held = torch.tensor(self.held(rank, self.plans[layer, mb]))
                    expert = held[self.instances[rank, layer, mb]]
                    none = {name: w[:0] for name, w in own.items()}
                    x = experts(x, own, none, expert)
                self.loss(x).backward()
        return [{n: w.grad for n, w in layer.items()} for layer in weights], {
            key: x.grad for key, x in inputs.items() if x.grad is not None
        }

    @staticmethod
    def loss(y: torch.Tensor) -> torch.Tensor:
        return (y.float() ** 2).sum() + y.float().sum()

    def forward(self, rank: int, mb: int, x: torch.Tensor, run: Callable[..., Any]) -> torch.Tensor:
        for layer, module in enumerate(self.modules[rank]):
            x = run(module, x, self.plans[layer, mb], self.instances[rank, layer, mb])
        return x

    def train(
        self, order: Order, run: Callable[..., Any] = lambda module, *args: module(*args)
    ) -> dict[Any, torch.Tensor]:
        """Run every rank's passes in an order; return the gradients of inputs."""
        inputs = {key: x.clone().requires_grad_() for key, x in self.inputs.items()}

        def train(rank: int) -> None:
            losses: dict[int, torch.Tensor] = {}
            for what, mb in order:
                if what == "F":
                    losses[mb] = self.loss(self.forward(rank, mb, inputs[rank, mb], run))
                else:
                    losses.pop(mb).backward()
            self.groups[rank].assert_idle()

        loopback(self.num_ranks, train)
        return {key: x.grad for key, x in inputs.items() if x.grad is not None}

    def error(self, found_inputs: dict[Any, torch.Tensor], microbatches: list[int]) -> float:
        """Return the largest relative error, by norm, of any gradient."""
        weights, inputs = self.expected(microbatches)
        assert set(inputs) == set(found_inputs)
        pairs = [(found_inputs[key], inputs[key]) for key in inputs]
        for rank, modules in enumerate(self.modules):
            for layer, module in enumerate(modules):
                assert module.weights["scale"].grad is None
                for name in ("w1", "w2"):
                    found = module.weights[name].grad
                    assert found is not None
                    pairs.append((found, weights[layer][name][self.home == rank]))
        return max(
            float((found.float() - exact).norm() / exact.norm().clamp(min=1e-6))
            for found, exact in pairs
        )
