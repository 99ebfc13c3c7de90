"""The adapter for DeepSpeed: on a fake of it, and on AutoEP itself where it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fake_deepspeed as fake
import pytest
import torch
from fake_deepspeed import AutoEPMoELayer, DeepSpeedEngine
from ranks import RankPool, raised, run_python, run_training
from tiers import cases, sampled
from torch.utils.checkpoint import checkpoint

from ultraep_comm.adapters import checks
from ultraep_comm.adapters import deepspeed as adapter

G, E, D, F, K, B, L = 4, 8, 16, 48, 2, 2, 6
M = E // G
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: see docs/frameworks.md",
)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(rank: int, microbatch: int = 0) -> torch.Tensor:
    """Most of them prefer two experts: the first element of each is large."""
    x = draw(B, L, D, seed=10 * microbatch + rank)
    x[..., 0] = 2.0
    return x


def make(layer: int, pg: Any = None) -> AutoEPMoELayer:
    shapes = {"w1": (F, D), "w2": (D, F), "w3": (F, D)}
    every = {n: draw(E, *s, seed=50 * layer + i) / 3 for i, (n, s) in enumerate(shapes.items())}
    if pg is not None:
        every = {n: w[pg.rank() * M : (pg.rank() + 1) * M].clone() for n, w in every.items()}
    gate = draw(E, D, seed=50 * layer + 9) / 3
    gate[:2, 0] += 1
    return AutoEPMoELayer(gate, every, K, pg)


class Model(torch.nn.Module):
    def __init__(self, pg: Any = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(make(i, pg) for i in range(2))

    def forward(self, x: torch.Tensor, recompute: bool | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if recompute is None else checkpoint(layer, x, use_reentrant=recompute)
        return x


VERSION = mock.patch.object(importlib.metadata, "version", return_value=fake.VERSION)


def on_the_fake(rank: int, pg: Any, run: Callable[..., Any], *args: Any) -> Any:
    with fake.installed(), VERSION:
        return run(pg, *args)


def engine_of(pg: Any, **options: Any) -> DeepSpeedEngine:
    return DeepSpeedEngine(Model(pg), pg, **options)


def replicate(engine: Any, slots_per_rank: int = 2, **options: Any) -> list[Any]:
    return adapter.replicate(engine, slots_per_rank, engine="host", timeout=30.0, **options)


def train(pg: Any, recompute: bool | None) -> list[tuple[float, float]]:
    rank = pg.rank()
    engine, plain = engine_of(pg), Model(pg)
    model = engine.module
    owned, before = dict(model.named_parameters()), dict(model.state_dict())
    kinds = [type(m) for m in model.modules()]
    layers = replicate(engine)
    assert layers == list(model.layers)
    assert all(isinstance(layer, AutoEPMoELayer) for layer in layers)
    changed = [type(m) for m in model.modules()]
    assert sum(a is not b for a, b in zip(kinds, changed, strict=True)) == 2
    assert layers[0].replicas.group is layers[1].replicas.group
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(rank)), plain(tokens(rank)))
    arrivals = dict.fromkeys(owned, 0)
    for name, parameter in owned.items():

        def count(_: Any, name: str = name) -> None:
            arrivals[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    whole = Model()
    plans = []
    for microbatch in range(2):
        x = tokens(rank, microbatch).requires_grad_()
        y = model(x, recompute)
        y.square().sum().backward()
        assert set(arrivals.values()) == {microbatch + 1}
        layers[0].replicas.group.assert_idle()
        plans += [layer.replica_plan for layer in layers]
        for r in range(G):
            theirs = tokens(r, microbatch).requires_grad_()
            wanted = whole(theirs)
            wanted.square().sum().backward()
            if r == rank:
                torch.testing.assert_close(y, wanted)
                torch.testing.assert_close(x.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    for ours, every in zip(layers, whole.layers, strict=True):
        for name, weight in ours.experts.named_parameters():
            right = getattr(every.experts, name).grad[rank * M : (rank + 1) * M]
            torch.testing.assert_close(weight.grad, right, rtol=1e-3, atol=1e-3)
    passes = 3 if recompute is None else 5  # one without gradients; recomputed ones count too
    for layer in layers:
        assert layer.tokens_per_expert.sum() == passes * B * L * K
    assert list(model.state_dict()) == list(before)
    assert all(value.data_ptr() == before[n].data_ptr() for n, value in model.state_dict().items())
    assert all(owned[name] is value for name, value in model.named_parameters())
    layers[0].replicas.group.close()
    return [(p.imbalance_before, p.imbalance) for p in plans]


@pytest.mark.parametrize("recompute", [None, False, True])
def test_outputs_and_gradients_are_those_without_ranks(
    ranks: RankPool, recompute: bool | None
) -> None:
    found = ranks.run(G, on_the_fake, train, recompute)[0]
    assert len(found) == 4
    for before, after in found:
        assert after < 1.1
        assert before > 1.4


def test_one_rank_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    checks.warn_idle.cache_clear()
    engine = DeepSpeedEngine(Model())
    before = [type(m) for m in engine.module.modules()]
    assert on_the_fake(0, engine, replicate) == []
    assert [type(m) for m in engine.module.modules()] == before
    assert "DeepSpeed: no expert is replicated" in caplog.text


def frozen(pg: Any) -> None:
    engine = engine_of(pg)
    for layer in engine.module.layers:
        layer.experts.requires_grad_(False)
    layers = replicate(engine)
    x = tokens(pg.rank()).requires_grad_()
    engine.module(x).sum().backward()
    group = layers[0].replicas.group
    assert dict(group.slot_grads) == {}
    assert x.grad is not None
    group.close()


def test_experts_may_be_frozen(ranks: RankPool) -> None:
    ranks.run(G, on_the_fake, frozen)


class LowRank(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.ones(F, 1)), torch.nn.Parameter(torch.ones(1, D))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.a @ self.b


def with_lora(layer: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(layer.experts, "w1", LowRank())


def with_replicas(layer: Any) -> None:
    layer.replicas = None


def with_larger(layer: Any) -> None:
    layer.experts.w1 = torch.nn.Parameter(torch.zeros(M, F + 1, D))


def with_row(layer: Any) -> None:
    layer.experts.w2 = torch.nn.Parameter(torch.zeros(M + 1, D, F))


# What happens to the second layer of rank 1, and what every rank is told.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "scale": (
        lambda m: m.experts.register_parameter("scale", torch.nn.Parameter(torch.ones(()))),
        "parameter scale of shape ()",
    ),
    "bias of all experts": (
        lambda m: m.experts.register_parameter("bias", torch.nn.Parameter(torch.ones(D))),
        f"parameter bias of shape ({D},)",
    ),
    "buffer": (lambda m: m.experts.register_buffer("seen", torch.ones(M)), "buffer seen"),
    "norm": (
        lambda m: m.experts.add_module("norm", torch.nn.LayerNorm(D)),
        "parameter norm.weight, of a module inside",
    ),
    "rows": (with_row, f"parameter w2 of shape ({M + 1}, {D}, {F})"),
    "shape": (with_larger, "data-parallel rank 1 has MoE layers with experts"),
    "frozen in part": (lambda m: m.experts.w1.requires_grad_(False), "are frozen"),
    "half": (lambda m: m.experts.half(), "'w1' need gradients and are torch.float16; expected"),
    "lora": (with_lora, "it has a ParametrizedGroupedExperts; expected GroupedExperts"),
    "other layer": (
        lambda m: setattr(m, "__class__", type("Mine", (AutoEPMoELayer,), {})),
        "it has a Mine; expected AutoEPMoELayer",
    ),
    "deepep": (lambda m: setattr(m, "comm_backend", "deepep"), "comm_backend='deepep', which"),
    "async": (lambda m: setattr(m, "async_split_plan", True), "async_split_plan=True, which"),
    "folding": (lambda m: setattr(m, "folding_group_handles", (4, 2)), "folding_group_handles="),
    "twice": (with_replicas, "it has replicas already"),
}


def refusals(pg: Any) -> dict[str, str]:
    found: dict[str, str] = {}

    def note(name: str, engine: Any) -> None:
        error = raised(lambda: replicate(engine))
        found[name] = f"{type(error).__name__}: {error}"

    for name, (change, _) in REFUSED.items():
        engine = engine_of(pg)
        if pg.rank() == 1:
            change(engine.module.layers[1])
        kinds = [type(m) for m in engine.module.modules()]
        note(name, engine)
        assert [type(m) for m in engine.module.modules()] == kinds
    note("stage", engine_of(pg, stage=3))
    for name in ("mp_world_size", "sequence_parallel_size"):
        engine = engine_of(pg)
        setattr(engine, name, 2)
        note(name, engine)
    note("pipeline", fake.PipelineEngine(Model(pg), pg))
    note("no engine", Model(pg))
    note("no layers", DeepSpeedEngine(torch.nn.Linear(2, 2), pg))
    return found


def test_what_cannot_work_is_an_error_on_every_rank(ranks: RankPool) -> None:
    found = ranks.run(G, on_the_fake, refusals)
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
    assert found[0]["no engine"].startswith("InvalidArgumentError: replicate was given a Model")
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
    with fake.installed(AutoEPMoELayer=other), VERSION:
        error = raised(lambda: replicate(DeepSpeedEngine(Model())))
    assert type(error).__name__ == "UnsupportedError"
    with pytest.raises(type(error), match=text):
        raise error


# ---- DeepSpeed itself ----------------------------------------------------------------------------


PROGRAM = Path(__file__).resolve().parents[1] / "deepspeed_training.py"
# In a process of its own: frameworks change each other's modules.
COMPARISON = """
import json, fake_deepspeed as fake
found = [fake.differences()]
fake.GroupedExperts.forward = lambda self, x: x
fake.READ[fake.DeepSpeedEngine] = ["module", "no_such_size"]
print(json.dumps([*found, fake.differences()]))
"""


@needs_deepspeed
def test_the_fake_is_like_the_installed_release_and_differences_are_found() -> None:
    done = run_python("-W", "ignore", "-c", COMPARISON, PYTHONPATH=str(PROGRAM.parent))
    assert done.returncode == 0, done.stderr
    none, (first, second) = json.loads(done.stdout.splitlines()[-1])
    assert none == []
    assert "GroupedExperts.forward takes ['self', 'x', 'num_tokens_per_expert'], here" in first
    assert second.endswith("DeepSpeedEngine sets no no_such_size")


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
    return run_training(
        PROGRAM,
        [*RUN, "checkpoints", "new tensors"],
        tmp_path_factory.mktemp("deepspeed"),
    )


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


@needs_deepspeed
def test_layers_of_a_model_create_no_tensor_as_large_as_main_weights(
    results: dict[str, Any],
) -> None:
    found = SimpleNamespace(**results["new tensors"])
    assert found.replicas > 0
    assert 0 < found.largest < found.mains
