"""Layers on the fakes of frameworks for training: with replicas, and the same on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import fake_deepspeed
import fake_torchtitan
import fake_transformers
import torch
from token_exchange import Mesh
from torch.utils.checkpoint import checkpoint

from ultraep_comm.adapters import checks

G, E, D, F, K, LAYERS = 4, 8, 16, 32, 2, 2
M = E // G
Tensor = torch.Tensor


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class OnTransformers:
    """A rank's layers with replicas, and what their forward passes are given.

    Without a process group there is one rank, which has all experts.
    """

    shapes: ClassVar = {"w1": (F, D), "w2": (D, F), "bias": (F,)}
    tokens_shape: tuple[int, ...] = (6,)
    idle = "transformers: no expert is replicated; set ep_size above 1 in DistributedConfig"
    instead = "all_to_all"
    rounding = 2e-5  # of gradients

    def __init__(
        self,
        api: Any,
        rank: int,
        pg: Any = None,
        *,
        spoil: Callable[[Any], Any] = lambda experts: None,
        tp: Any = None,
        **options: Any,
    ) -> None:
        """Make the layers; ``spoil`` changes their experts before they have replicas."""
        self.api, self.rank, self.pg, self.tp, self.spoil = api, rank, pg, tp, spoil
        self.x = self.tokens(rank)
        self.layers = self.make({"engine": "host", "timeout": 30.0} | options)
        self.layer = self.layers[0]
        self.experts = self.experts_of(self.layer)

    def weights(self, layer: int) -> dict[str, Tensor]:
        every = {
            n: draw(E, *s, seed=10 * layer + i) / 3 for i, (n, s) in enumerate(self.shapes.items())
        }
        mine = slice(None) if self.pg is None else slice(self.rank * M, (self.rank + 1) * M)
        return {name: weight[mine].clone() for name, weight in every.items()}

    def tokens(self, rank: int, microbatch: int = 0) -> Tensor:
        """Rank 2 has none."""
        shape = (0,) if rank == 2 else self.tokens_shape
        return draw(*shape, D, seed=77 + 10 * microbatch + rank)

    def route(self, x: Tensor, rank: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return ids, most of them of two experts, and their weights."""
        popular = draw(*x.shape[:-1], E, seed=100 * layer + rank) + torch.arange(E).lt(2) * 3
        scale = draw(*x.shape[:-1], K, seed=1000 + 100 * layer + rank)
        return popular.topk(K).indices, scale.to(x.dtype)

    def given(self, x: Tensor, rank: int, layer: int = 0) -> tuple[Tensor, ...]:
        return self.route(x, rank, layer)

    def run(self, layers: list[Any], x: Tensor, rank: int, recompute: bool | None = None) -> Tensor:
        for i, layer in enumerate(layers):
            given = self.given(x, rank, i)
            if recompute is None:
                x = x + layer(x, *given)
            else:
                x = x + checkpoint(layer, x, *given, use_reentrant=recompute)
        return x

    def step(self, x: Tensor, layer: Any = None) -> Tensor:
        y: Tensor = (layer or self.layer)(x, *self.given(x, self.rank))
        return y

    def make(self, options: dict[str, Any]) -> list[Any]:
        self.api.configure(**options)
        every = [fake_transformers.Experts(**self.weights(i)) for i in range(LAYERS)]
        for experts in every:
            self.spoil(experts)
        layers = [self.api.UltraEP(e, Mesh(self.pg), Mesh(self.tp)) for e in every]
        self.api.configure()  # for the next ones
        self.model = torch.nn.ModuleList(every)
        return layers

    def alone(self) -> list[Any]:
        """Return the same layers of one rank, without the adapter."""
        self.pg = None
        return [fake_transformers.Experts(**self.weights(i)) for i in range(LAYERS)]

    @property
    def runner(self) -> tuple[Any, str]:
        return self.layer, "_run_instances"

    @staticmethod
    def experts_of(layer: Any) -> Any:
        return getattr(layer, "_experts", layer)

    @staticmethod
    def group_of(layer: Any) -> Any:
        return layer.group

    @staticmethod
    def plan_of(layer: Any) -> Any:
        return layer.plan

    @property
    def group(self) -> Any:
        return self.group_of(self.layer)

    @property
    def plan(self) -> Any:
        return self.plan_of(self.layer)


class OnTorchtitan(OnTransformers):
    tokens_shape = (2, 6)
    idle = "torchtitan: no expert is replicated; set expert_parallel_degree above 1"
    instead = "without the override"
    runner = checks, "run_grouped"  # type: ignore[assignment]

    def tokens(self, rank: int, microbatch: int = 0) -> Tensor:
        return draw(*self.tokens_shape, D, seed=10 * microbatch + rank)

    def given(self, x: Tensor, rank: int, layer: int = 0) -> tuple[Tensor, ...]:
        ids, scores = self.route(x, rank, layer)
        return scores, ids, torch.bincount(ids.flatten(), minlength=E)

    def config(self, layer: int) -> Any:
        experts = fake_torchtitan.GroupedExperts(**self.weights(layer))
        self.spoil(experts)
        return fake_torchtitan.RoutedExperts.Config(
            inner_experts=experts,
            # The second one's dispatcher has rows that nobody uses.
            token_dispatcher=fake_torchtitan.AllToAllTokenDispatcher(E, 3 * layer),
        )

    def make(self, options: dict[str, Any]) -> list[Any]:
        configs = [self.api.replicate(self.config(i), **options) for i in range(LAYERS)]
        layers = [self.api.ReplicatedRoutedExperts(config) for config in configs]
        for layer in layers:
            layer.parallelize(fake_torchtitan.ParallelDims(self.pg))
        self.model = torch.nn.ModuleList(layers)
        return layers

    def alone(self) -> list[Any]:
        self.pg = None
        return [fake_torchtitan.RoutedExperts(self.config(i)) for i in range(LAYERS)]

    @staticmethod
    def experts_of(layer: Any) -> Any:
        return layer.inner_experts


class OnDeepSpeed(OnTransformers):
    shapes: ClassVar = {"w1": (F, D), "w2": (D, F), "w3": (F, D)}
    tokens_shape = (2, 6)
    rounding = 1e-3
    idle = "DeepSpeed: no expert is replicated; set autoep_size above 1 in expert_parallel"
    runner = checks, "run_grouped"  # type: ignore[assignment]

    def tokens(self, rank: int, microbatch: int = 0) -> Tensor:
        """Most of them prefer two experts: the first element of each is large."""
        x = draw(*self.tokens_shape, D, seed=10 * microbatch + rank)
        x[..., 0] = 2.0
        return x

    def given(self, x: Tensor, rank: int, layer: int = 0) -> tuple[Tensor, ...]:
        return ()

    def make(self, options: dict[str, Any]) -> list[Any]:
        self.model = torch.nn.ModuleList(map(self.plain, range(LAYERS)))
        for layer in self.model:
            self.spoil(layer.experts)
        engine = fake_deepspeed.DeepSpeedEngine(self.model, self.pg)
        self.replicated = self.api.replicate(engine, **options) if self.api else []
        return list(self.model)

    def plain(self, layer: int) -> Any:
        gate = draw(E, D, seed=50 * layer + 9) / 3
        gate[:2, 0] += 1
        return fake_deepspeed.AutoEPMoELayer(gate, self.weights(layer), K, self.pg)

    def alone(self) -> list[Any]:
        self.pg = None
        return list(map(self.plain, range(LAYERS)))

    @staticmethod
    def experts_of(layer: Any) -> Any:
        return layer.experts

    @staticmethod
    def group_of(layer: Any) -> Any:
        return layer.replicas.group if hasattr(layer, "replicas") else None

    @staticmethod
    def plan_of(layer: Any) -> Any:
        return layer.replica_plan


FRAMEWORKS: dict[str, tuple[Any, Any]] = {
    "transformers": (fake_transformers.adapter, OnTransformers),
    "torchtitan": (fake_torchtitan.adapter, OnTorchtitan),
    "deepspeed": (fake_deepspeed.adapter, OnDeepSpeed),
}


def on(
    rank: int, pg: Any, framework: str, run: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Run a function with a rank's layers on a framework."""
    adapter, kind = FRAMEWORKS[framework]
    with adapter() as api:
        made = kind(api, rank, pg, **options)
        found = run(made, *args)
        made.group.abort()
        return found
