"""The adapter for torchtitan: on a fake of it, and its debug model where it is installed."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_torchtitan as fake
import pytest
import torch
from changed_experts import hook
from fake_torchtitan import AllToAllTokenDispatcher, GroupedExperts, ParallelDims, adapter
from ranks import RankPool, raised, run_training
from tiers import cases, sampled
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from ultraep_comm.adapters.checks import warn_idle
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError

G, E, D, F, K, B, L = 4, 8, 16, 32, 2, 2, 6
M = E // G
NAMES = ("w1", "w2", "bias")
needs_torchtitan = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed: see docs/frameworks.md",
)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(rank: int) -> torch.Tensor:
    return draw(B, L, D, seed=rank)


def all_weights(layer: int) -> dict[str, torch.Tensor]:
    shapes = {"w1": (F, D), "w2": (D, F), "bias": (F,)}
    return {n: draw(E, *s, seed=10 * layer + i) / 3 for i, (n, s) in enumerate(shapes.items())}


def routing(rank: int, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, ids, most of them of two experts, and how many each expert has."""
    popular = draw(B, L, E, seed=100 * layer + rank) + torch.arange(E).lt(2) * 3
    ids = popular.topk(K).indices
    scores = draw(B, L, K, seed=1000 + 100 * layer + rank)
    return scores, ids, torch.bincount(ids.flatten(), minlength=E)


def make(
    api: Any, pg: Any, weights: dict[str, torch.Tensor], spare: int = 0, **options: Any
) -> Any:
    plain = fake.RoutedExperts.Config(
        inner_experts=GroupedExperts(**weights),
        token_dispatcher=AllToAllTokenDispatcher(E, spare),
    )
    config = api.replicate(plain, **{"engine": "host", "timeout": 30.0} | options)
    layer = api.ReplicatedRoutedExperts(config)
    layer.parallelize(ParallelDims(pg))
    return layer


def own(rank: int, layer: int) -> dict[str, torch.Tensor]:
    return {n: w[rank * M : (rank + 1) * M].clone() for n, w in all_weights(layer).items()}


def run(layers: list[Any], x: torch.Tensor, rank: int, recompute: bool | None = None) -> Any:
    for i, layer in enumerate(layers):
        given = routing(rank, i)
        if recompute is None:
            x = x + layer(x, *given)
        else:
            x = x + checkpoint(layer, x, *given, use_reentrant=recompute)
    return x


def without_ranks(count: int) -> list[Any]:
    return [
        fake.RoutedExperts(
            fake.RoutedExperts.Config(
                inner_experts=GroupedExperts(**all_weights(i)),
                token_dispatcher=AllToAllTokenDispatcher(E),
            )
        )
        for i in range(count)
    ]


def train(rank: int, pg: Any, recompute: bool | None, spare: int) -> list[tuple[float, float]]:
    with adapter() as api:
        layers = [make(api, pg, own(rank, i), spare) for i in range(2)]
        model = torch.nn.ModuleList(layers)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        owned = dict(model.named_parameters())
        with torch.no_grad():
            alone = run(layers, tokens(rank), rank)
        x = tokens(rank).requires_grad_()
        y = run(layers, x, rank, recompute)
        assert torch.equal(alone, y)
        y.square().sum().backward()
        every = without_ranks(2)
        for r in range(G):
            theirs = tokens(r).requires_grad_()
            wanted = run(every, theirs, r)
            wanted.square().sum().backward()
            if r == rank:
                torch.testing.assert_close(y, wanted)
                torch.testing.assert_close(x.grad, theirs.grad, rtol=1e-5, atol=1e-5)
        for layer, whole in zip(layers, every, strict=True):
            layer.group.assert_idle()
            for name, weight in layer.inner_experts.named_parameters():
                right = getattr(whole.inner_experts, name).grad[rank * M : (rank + 1) * M]
                torch.testing.assert_close(weight.grad, right, rtol=1e-4, atol=1e-5)
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(owned[name] is value for name, value in model.named_parameters())
        assert layers[0].group is layers[1].group
        assert api.layers(model) == {"0": layers[0], "1": layers[1]}
        assert layers[0].token_dispatcher.experts_at_wiring == E + 2 * G
        plans = [layer.plan for layer in layers]
        layers[0].group.close()
    return [(p.imbalance_before, p.imbalance) for p in plans]


@pytest.mark.parametrize(("recompute", "spare"), [(None, 0), (False, 0), (True, 0), (None, 3)])
def test_outputs_and_gradients_are_those_without_ranks(
    ranks: RankPool, recompute: bool | None, spare: int
) -> None:
    for before, after in ranks.run(G, train, recompute, spare)[0]:
        assert after < 1.1
        assert before > 1.5


def test_one_rank_needs_no_replicas(caplog: pytest.LogCaptureFixture) -> None:
    warn_idle.cache_clear()
    with adapter() as api:
        layer = make(api, None, all_weights(0))
        x = tokens(0)
        assert torch.equal(run([layer], x, 0), run(without_ranks(1), x, 0))
        assert layer.group is None
        assert layer.token_dispatcher.num_experts == E
    assert "torchtitan: no expert is replicated" in caplog.text


def refuse(rank: int, pg: Any) -> None:
    with adapter() as api:
        weights = own(rank, 0) | {"w1_scale": torch.ones(())}
        with pytest.raises(
            UnsupportedError, match=r"parameter w1_scale of shape \(\).*without the"
        ):
            make(api, pg, weights)


def test_what_would_stay_behind_is_said_at_setup_on_every_rank(ranks: RankPool) -> None:
    ranks.run(G, refuse)


def hooked_on_one_rank(rank: int, pg: Any) -> str:
    with adapter() as api:
        layer = make(api, pg, own(rank, 0))
        if rank == 1:
            layer.inner_experts.register_forward_hook(hook)
        x = tokens(rank)
        return str(raised(lambda: run([layer], x, rank)))


def test_ranks_whose_experts_run_other_code_are_refused(ranks: RankPool) -> None:
    (text,) = set(ranks.run(G, hooked_on_one_rank))
    assert text.startswith("expert-parallel rank 1 has MoE layers with experts")
    assert "forward_hooks: changed_experts.hook" in text


def copied(rank: int, pg: Any) -> None:
    with adapter() as api:
        layer, x = make(api, pg, own(rank, 0)), tokens(rank)
        first = run([layer], x, rank).detach()
        second = AveragedModel(layer).module
        file = io.BytesIO()
        mesh, second.token_dispatcher.ep_mesh = second.token_dispatcher.ep_mesh, None
        torch.save(second, file)
        second.token_dispatcher.ep_mesh = mesh
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded.token_dispatcher.ep_mesh = mesh
        with torch.no_grad():
            for other in (second, loaded):
                other.inner_experts.w2.mul_(2)
                torch.testing.assert_close(run([other], x, rank) - x, 2 * (first - x))
                assert torch.equal(run([layer], x, rank), first)
                assert other.group is layer.group
        layer.group.close()


def test_copies_and_loaded_layers_have_their_own_experts(ranks: RankPool) -> None:
    ranks.run(G, copied)


def test_other_options_and_configurations_are_errors() -> None:
    with adapter() as api:
        assert fake.REGISTERED["ultraep_comm.adapters.torchtitan.replicate"] is (
            fake.RoutedExperts.Config
        )
        unknown = r"no option \['slots'\]; expected some of"
        with pytest.raises(InvalidArgumentError, match=unknown):
            make(api, None, all_weights(0), slots=3)
        other = type("Config", (fake.RoutedExperts.Config,), {})
        with pytest.raises(UnsupportedError, match=r"expected RoutedExperts\.Config"):
            api.replicate(other(inner_experts=None, token_dispatcher=None))


def typed(rank: int, pg: Any) -> None:
    with adapter(is_type_checking=lambda: True) as api:
        layer = make(api, pg, own(rank, 0))
        with pytest.raises(UnsupportedError, match=r"spmd_typechecking=False"):
            run([layer], tokens(rank), rank)


def test_types_are_not_checked(ranks: RankPool) -> None:
    ranks.run(G, typed)


def test_other_signatures_are_an_error() -> None:
    other = type("RoutedExperts", (fake.RoutedExperts,), {"parallelize": lambda self, mesh: None})
    refused = pytest.raises(UnsupportedError, match=r"takes \['self', 'mesh'\]; the adapter")
    with refused, adapter(RoutedExperts=other):
        pass


# ---- torchtitan itself ---------------------------------------------------------------------------


@needs_torchtitan
def test_the_patch_points_are_those_of_the_installed_release() -> None:
    assert fake.differences() == []


PROGRAM = Path(__file__).resolve().parents[1] / "torchtitan_training.py"
QUICK = ["EP4", "EP2 x FSDP, full recomputation"]
FURTHER = ["EP4, full recomputation", "EP4, selective recomputation", "EP2 x FSDP"]
FURTHER += ["EP2 x FSDP, selective recomputation", "EP4, bf16", "EP4, no replicas for few tokens"]
FURTHER += ["EP1"]
RUN = cases(QUICK, QUICK + FURTHER)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_training(PROGRAM, [*RUN, "new tensors"], tmp_path_factory.mktemp("torchtitan"))


@needs_torchtitan
@pytest.mark.parametrize("case", sampled(QUICK + FURTHER, QUICK.__contains__))
def test_the_debug_model_trains_alike(results: dict[str, Any], case: str) -> None:
    found = SimpleNamespace(**results[case])
    # bf16 rounds what instances sum apart: 2 ** -8 of a value, a few times.
    exact = case != "EP4, bf16"
    for plain, replicated in zip(*found.losses, strict=True):
        assert replicated == pytest.approx(plain, rel=1e-6 if exact else 1e-3)
    for plain, replicated in zip(*found.norms, strict=True):
        assert replicated == pytest.approx(plain, rel=1e-5 if exact else 1e-2)
    assert max(found.gradients + found.expert_gradients) < (2e-5 if exact else 0.1)
    assert found.state < (1e-3 if exact else 0.02)  # a few tokens may be rerouted
    assert bool(found.imbalance) == (case != "EP1")
    few = case == "EP4, no replicas for few tokens"
    for _, before, after, replicas in found.imbalance:
        assert after == before if few else after < before
        assert (replicas == 0) == few


@needs_torchtitan
def test_layers_of_a_model_create_no_tensor_as_large_as_main_weights(
    results: dict[str, Any],
) -> None:
    found = SimpleNamespace(**results["new tensors"])
    assert found.replicas > 0
    assert 0 < found.largest < found.mains
