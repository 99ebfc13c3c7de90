"""The adapter for DeepSpeed, on a fake of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_deepspeed as fake
import pytest
import torch
from fake_deepspeed import AutoEPMoELayer, DeepSpeedEngine
from ranks import RankPool, raised
from test_training import parametrise
from training_layers import D, F, G, K, M, OnDeepSpeed, on

from ultraep_comm.errors import UnsupportedError


def replicate(engine: Any) -> None:
    with fake.adapter() as api:
        api.replicate(engine, engine="host", timeout=30.0)


def step_twice(made: Any) -> None:
    assert made.replicated == made.layers
    assert all(isinstance(layer, AutoEPMoELayer) for layer in made.layers)
    x = made.x.requires_grad_()
    for _ in range(2):
        made.run(made.layers, x, made.rank).sum().backward()
    assert dict(made.group.slot_grads) == {}
    assert x.grad is not None
    for layer in made.layers:
        assert layer.tokens_per_expert.sum() == 2 * x[..., 0].numel() * K


def freeze_and_step(rank: int, pg: Any) -> None:
    on(rank, pg, "deepspeed", step_twice, spoil=lambda e: e.requires_grad_(False))


def test_experts_may_be_frozen_and_tokens_are_counted(ranks: RankPool) -> None:
    ranks.run(G, freeze_and_step)


def with_replicas(layer: Any) -> None:
    layer.replicas = None


def with_larger(layer: Any) -> None:
    layer.experts.w1 = torch.nn.Parameter(torch.zeros(M, F + 1, D))


def with_row(layer: Any) -> None:
    layer.experts.w2 = torch.nn.Parameter(torch.zeros(M + 1, D, F))


# What happens to the second layer of rank 1, and what every rank is told.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rows": (with_row, f"parameter w2 of shape ({M + 1}, {D}, {F})"),
    "shape": (with_larger, "data-parallel rank 1 has MoE layers with experts"),
    "frozen in part": (lambda m: m.experts.w1.requires_grad_(False), "are frozen"),
    "half": (lambda m: m.experts.half(), "'w1' need gradients and are torch.float16; expected"),
    "lora": (
        lambda m: parametrise(m.experts),
        "it has a ParametrizedGroupedExperts; expected GroupedExperts",
    ),
    "other layer": (
        lambda m: setattr(m, "__class__", type("Mine", (AutoEPMoELayer,), {})),
        "it has a Mine; expected AutoEPMoELayer",
    ),
    "deepep": (lambda m: setattr(m, "comm_backend", "deepep"), "comm_backend='deepep', which"),
    "async": (lambda m: setattr(m, "async_split_plan", True), "async_split_plan=True, which"),
    "folding": (lambda m: setattr(m, "folding_group_handles", (4, 2)), "folding_group_handles="),
    "twice": (with_replicas, "it has replicas already"),
}


def refusals(rank: int, pg: Any) -> dict[str, str]:
    found: dict[str, str] = {}

    def note(name: str, engine: Any) -> None:
        kinds = [type(m) for m in engine.modules()]
        error = raised(lambda: replicate(engine))
        found[name] = f"{type(error).__name__}: {error}"
        assert [type(m) for m in engine.modules()] == kinds

    def make(kind: Any = DeepSpeedEngine, **options: Any) -> Any:
        return kind(OnDeepSpeed(None, rank, pg).model, pg, **options)

    for name, (change, _) in REFUSED.items():
        engine = make()
        if rank == 1:
            change(engine.module[1])
        note(name, engine)
    note("stage", make(stage=3))
    for name in ("mp_world_size", "sequence_parallel_size"):
        engine = make()
        setattr(engine, name, 2)
        note(name, engine)
    note("pipeline", make(fake.PipelineEngine))
    note("no engine", make().module)
    note("no layers", DeepSpeedEngine(torch.nn.Linear(2, 2), pg))
    return found


def test_what_cannot_work_is_an_error_on_every_rank(ranks: RankPool) -> None:
    found = ranks.run(G, refusals)
    assert all(own == found[0] for own in found)
    for name, (_, text) in REFUSED.items():
        assert found[0][name].startswith("UnsupportedError: "), found[0][name]
        assert text in found[0][name]
        assert "data-parallel rank 1" in found[0][name]
    for name, text in (
        ("stage", "ZeRO stage 3 has only parts of the experts; expected at most 2"),
        ("mp_world_size", "tensor parallelism"),
        ("sequence_parallel_size", "sequence parallelism has never run"),
        ("pipeline", "a pipeline has several microbatches under way"),
    ):
        assert found[0][name].startswith("UnsupportedError: this engine's layers cannot")
        assert text in found[0][name]
    assert found[0]["no engine"].startswith(
        "InvalidArgumentError: replicate was given a ModuleList"
    )
    assert found[0]["no layers"].startswith("InvalidArgumentError: the engine's model has no")


def of_a_dispatcher(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return self.dispatcher(hidden_states, self.router, self.experts)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"_forward": lambda self, x, mask: x}, r"takes \['self', 'x', 'mask'\]; the adapter"),
        ({"_forward": of_a_dispatcher}, r"_forward reads no \['num_experts', "),
    ],
)
def test_other_signatures_and_another_pass_are_errors(fields: dict[str, Any], text: str) -> None:
    other = type("AutoEPMoELayer", (AutoEPMoELayer,), fields)
    refused = pytest.raises(UnsupportedError, match=text)
    with fake.adapter(AutoEPMoELayer=other) as api, refused:
        api.replicate(None)
