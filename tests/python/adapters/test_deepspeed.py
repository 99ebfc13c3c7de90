"""The adapter for DeepSpeed: on a fake of it, and on AutoEP itself where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_deepspeed as fake
import pytest
import torch
from fake_deepspeed import AutoEPMoELayer, DeepSpeedEngine
from ranks import RankPool, raised, run_training
from test_training import parametrise
from tiers import cases, sampled
from training_layers import D, F, G, K, M, OnDeepSpeed, deepspeed_adapter, on

from ultraep_comm.errors import UnsupportedError

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: see docs/frameworks/deepspeed.md",
)


def replicate(engine: Any) -> None:
    with deepspeed_adapter() as api:
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
    with deepspeed_adapter(AutoEPMoELayer=other) as api, refused:
        api.replicate(None)


# ---- DeepSpeed itself ----------------------------------------------------------------------------


PROGRAM = Path(__file__).resolve().parents[1] / "deepspeed_training.py"
QUICK = ["EP4, ZeRO-1", "EP2 x DP2, ZeRO-2, 2 microbatches", "EP4, ZeRO-2, recomputed"]
FURTHER = ["EP4, ZeRO-2", "EP2 x DP2, ZeRO-1", "EP2 x DP2, ZeRO-2", "EP4, ZeRO-1, 2 microbatches"]
FURTHER += ["EP2 x DP2, ZeRO-1, recomputed, reentrant", "EP2 x DP2, ZeRO-2, overlapped"]
FURTHER += ["EP2 x DP2, ZeRO-2, experts' ranks apart", "EP4, ZeRO-1, expert by expert"]
FURTHER += ["EP4, ZeRO-1, scores before experts", "EP4, ZeRO-1, bf16", "mixtral, EP4, ZeRO-2"]
FURTHER += ["deepseek_v3, EP2 x DP2, ZeRO-1"]
FURTHER += ["EP2 x DP2, ZeRO-2, bf16, 2 microbatches", "EP4, no ZeRO"]
FURTHER += ["EP4, ZeRO-1, no replicas for few tokens", "EP1, ZeRO-1"]
RUN = cases(QUICK, QUICK + FURTHER)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_training(PROGRAM, [*RUN, "checkpoints"], tmp_path_factory.mktemp("deepspeed"))


@needs_deepspeed
@pytest.mark.parametrize("case", sampled(QUICK + FURTHER, QUICK.__contains__))
def test_a_model_trains_alike(results: dict[str, Any], case: str) -> None:
    found = SimpleNamespace(**results[case])
    # bf16 rounds what instances sum apart: 2 ** -8 of a value, a few times.
    exact = "bf16" not in case
    loss, rounding = (1e-6, 5e-6) if exact else (1e-4, 0.03)
    for plain, replicated in zip(*found.losses, strict=True):
        assert replicated == pytest.approx(plain, rel=loss)
    assert max(*found.gradients, *found.expert_gradients) < rounding
    assert max(found.parameters, found.optimizer, found.state, found.logits) < rounding
    microbatches = 2 if "2 microbatches" in case else 1
    assert found.arrivals == [[3 * microbatches]] * 2  # each a gradient for every parameter
    assert bool(found.imbalance) == (case != "EP1, ZeRO-1")
    few = "few tokens" in case
    for _, before, after, replicas in found.imbalance:
        assert after == before if few else after < 1.02 < before
        assert (replicas == 0) == few


@needs_deepspeed
def test_checkpoints_are_those_without_replicas(results: dict[str, Any]) -> None:
    found = SimpleNamespace(**results["checkpoints"])
    plain, ours = found.files
    assert plain == ours
    assert any("expert_7" in name for name, _ in plain)
    first, *others, elsewhere = found.continued
    assert len(others) == 3
    assert elsewhere != pytest.approx(first, rel=1e-5)
    assert all(each == pytest.approx(first, rel=1e-6) for each in others)
