"""The adapter for transformers: on a fake of it, and its own models where it is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_transformers as fake
import pytest
import torch
from fake_transformers import DistributedConfig, Experts, Mesh, adapter
from ranks import RankPool, raised, run_training
from tiers import cases, sampled
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from ultraep_comm.adapters.checks import check_experts, warn_idle
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError
from ultraep_comm.recording import load_recordings

G, E, H, F, K = 4, 8, 16, 32, 2
M = E // G
NAMES = ("w1", "w2", "bias")
FOUND = importlib.util.find_spec("transformers")
SEAM = Path((FOUND and FOUND.origin) or "missing").parent / "distributed" / "expert_parallel.py"
needs_transformers = pytest.mark.skipif(
    not SEAM.exists(),  # DeepSpeed needs an earlier release
    reason="no transformers 5.23: pip install -c constraints.txt -e '.[transformers]'",
)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def all_weights(layer: int) -> dict[str, torch.Tensor]:
    shapes = {"w1": (F, H), "w2": (H, F), "bias": (F,)}
    return {n: draw(E, *s, seed=10 * layer + i) / 3 for i, (n, s) in enumerate(shapes.items())}


def batch(rank: int, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, most of them of two experts, and their weights."""
    popular = draw(num_tokens, E, seed=100 * layer + rank) + torch.arange(E).lt(2) * 3
    return popular.topk(K).indices, draw(num_tokens, K, seed=1000 + 100 * layer + rank)


def tokens(rank: int, num_tokens: int | None = None) -> torch.Tensor:
    """Rank 2 has none."""
    number = (0 if rank == 2 else 6) if num_tokens is None else num_tokens
    return draw(number, H, seed=77 + rank)


def make_layers(api: Any, rank: int, ep: Any, tp: Any, count: int = 2) -> list[Any]:
    mine = slice(rank * M, (rank + 1) * M)
    every = [{n: w[mine].clone() for n, w in all_weights(i).items()} for i in range(count)]
    return [api.UltraEP(Experts(**own), Mesh(ep), Mesh(tp)) for own in every]


def run(layers: list[Any], x: torch.Tensor, rank: int, recompute: bool | None = None) -> Any:
    for i, layer in enumerate(layers):
        ids, scale = batch(rank, i, len(x))
        if recompute is None:
            x = x + layer(x, ids, scale)
        else:
            x = x + checkpoint(layer, x, ids, scale, use_reentrant=recompute)
    return x


def without_ranks(rank: int, every: list[Experts], x: torch.Tensor) -> torch.Tensor:
    for i, experts in enumerate(every):
        x = x + experts(x, *batch(rank, i, len(x)))
    return x


def train(rank: int, pg: Any, recompute: bool | None) -> dict[str, Any]:
    with adapter() as api:
        api.configure(slots_per_rank=2, timeout=30.0, engine="host")
        layers = make_layers(api, rank, pg, None)
        model = torch.nn.ModuleList(layer._experts for layer in layers)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        owned = dict(model.named_parameters())
        with torch.no_grad():
            alone = run(layers, tokens(rank), rank)
        x = tokens(rank).requires_grad_()
        y = run(layers, x, rank, recompute)
        assert torch.equal(alone, y)
        y.square().sum().backward()
        every = [Experts(**all_weights(i)) for i in range(len(layers))]
        for r in range(G):
            own = tokens(r).requires_grad_()
            wanted = without_ranks(r, every, own)
            wanted.square().sum().backward()
            if r == rank:
                torch.testing.assert_close(y, wanted)
                torch.testing.assert_close(x.grad, own.grad, rtol=1e-5, atol=1e-5)
        for layer, experts in zip(layers, every, strict=True):
            layer.group.assert_idle()
            for name, weight in layer._experts.named_parameters():
                right = getattr(experts, name).grad[rank * M : (rank + 1) * M]
                torch.testing.assert_close(weight.grad, right, rtol=1e-5, atol=1e-5)
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(owned[name] is value for name, value in model.named_parameters())
        assert all(experts.num_experts == M for experts in model)
        assert layers[0].group is layers[1].group
        assert api.layers(model) == {"0": layers[0], "1": layers[1]}
        plans = [layer.plan for layer in layers]
        layers[0].group.close()
    return {"before": [p.imbalance_before for p in plans], "after": [p.imbalance for p in plans]}


@pytest.mark.parametrize("recompute", [None, False, True])
def test_outputs_and_gradients_are_those_without_ranks(
    ranks: RankPool, recompute: bool | None
) -> None:
    for found in ranks.run(G, train, recompute):
        assert min(found["before"]) > 1.5
        assert max(found["after"]) < 1.2


def shared(rank: int, pg: Any, num_tokens: int) -> None:
    """All ranks have the same batch, of which the dispatch takes a part on each."""
    with adapter() as api:
        api.configure(engine="host", timeout=30.0)
        layers = make_layers(api, rank, pg, pg)
        x = tokens(0, num_tokens)
        with torch.no_grad():
            y = run(layers, x, 0)
        every = [Experts(**all_weights(i)) for i in range(len(layers))]
        torch.testing.assert_close(y, without_ranks(0, every, x).detach())
        # Every token counts once.
        assert int(layers[0].plan.load.sum()) == num_tokens * K
        layers[0].group.close()


@pytest.mark.parametrize("num_tokens", [9, 2])  # of two, half of the ranks have none
def test_ranks_that_share_a_batch_count_it_once(ranks: RankPool, num_tokens: int) -> None:
    ranks.run(G, shared, num_tokens)


def unfreeze(rank: int, pg: Any) -> None:
    with adapter() as api:
        api.configure(engine="host", timeout=30.0)
        (layer,) = make_layers(api, rank, pg, None, 1)
        experts, x = layer._experts.requires_grad_(False), tokens(rank)
        run([layer], x.clone().requires_grad_(), rank).sum().backward()
        frozen = layer.group
        assert not frozen.slot_grads
        experts.requires_grad_(True)
        run([layer], x, rank).sum().backward()
        trained = layer.group
        assert set(trained.slot_grads) == set(NAMES)
        experts.requires_grad_(False)
        run([layer], x, rank)
        assert layer.group is trained
        assert all(weight.grad is not None for weight in experts.parameters())
        for group in (frozen, trained):
            group.close()


def test_slots_have_gradients_once_weights_are_trained(ranks: RankPool) -> None:
    ranks.run(G, unfreeze)


def wrong_on_one_rank(rank: int, pg: Any) -> str:
    with adapter() as api:
        api.configure(engine="host", timeout=30.0)
        (layer,) = make_layers(api, rank, pg, None, 1)
        if rank == 1:  # after its own set-up, before the first pass
            layer._experts.register_buffer("running", torch.zeros(3))
        return str(raised(lambda: run([layer], tokens(rank), rank)))


def test_what_one_rank_refuses_in_its_first_pass_all_refuse(ranks: RankPool) -> None:
    for text in ranks.run(G, wrong_on_one_rank):
        assert re.search("expert-parallel rank 1 cannot have replicas: .*buffer running", text)


def copied(rank: int, pg: Any) -> None:
    with adapter() as api:
        api.configure(engine="host", timeout=30.0)
        (layer,) = make_layers(api, rank, pg, None, 1)
        x = tokens(rank)
        first = run([layer], x, rank).detach()
        experts = AveragedModel(layer._experts).module
        second = api.layers(experts)[""]
        assert second is not layer
        assert second._experts is experts
        with torch.no_grad():
            experts.w2.mul_(2)
            torch.testing.assert_close(run([second], x, rank) - x, 2 * (first - x))
            assert torch.equal(run([layer], x, rank), first)
        assert second.group is layer.group
        layer.group.close()


def test_a_copy_of_a_layer_has_its_own_experts(ranks: RankPool) -> None:
    ranks.run(G, copied)


def on_one_rank(rank: int, pg: Any) -> None:
    with adapter() as api:
        layer = api.UltraEP(Experts(**all_weights(0)), Mesh(pg), Mesh(pg))
        y = run([layer], tokens(0), 0)
        assert torch.equal(y, without_ranks(0, [layer._experts], tokens(0)))
        assert layer.group is None


def test_one_rank_needs_no_replicas(ranks: RankPool) -> None:
    ranks.run(1, on_one_rank)


def test_a_model_without_expert_parallelism_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """transformers makes no implementation then, which could say so."""
    with adapter() as api:
        warn_idle.cache_clear()
        DistributedConfig(2, api.NAME)
        DistributedConfig(None, "all_to_all")
        assert not caplog.records
        for ep_size in (None, 1):
            DistributedConfig(ep_size, api.NAME)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "transformers: no expert is replicated" in record.getMessage()
    assert "set ep_size above 1 in DistributedConfig" in record.getMessage()


def refuse(rank: int, pg: Any) -> None:
    with adapter() as api:
        experts = Experts(**{n: w[:M] for n, w in all_weights(0).items()})
        experts.register_buffer("w1_scale", torch.ones(M))
        with pytest.raises(UnsupportedError, match=r"buffer w1_scale.*all_to_all"):
            api.UltraEP(experts, Mesh(pg), Mesh())


def test_what_would_stay_behind_is_said_at_setup_on_every_rank(ranks: RankPool) -> None:
    ranks.run(G, refuse)


def test_the_implementation_is_registered() -> None:
    with adapter() as api:
        assert fake.EPImplementationInterface.known == {"ultraep": api.UltraEP}


def test_other_options_are_errors() -> None:
    unknown = pytest.raises(InvalidArgumentError, match=r"no option \['slots'\]; expected some of")
    with adapter() as api, unknown:
        api.configure(slots=3)


def test_other_signatures_are_an_error() -> None:
    other = type("AllToAllEP", (fake.AllToAllEP,), {"_combine_tokens": lambda self, output: output})
    refused = pytest.raises(UnsupportedError, match=r"takes \['self', 'output'\]; the adapter")
    with refused, adapter(AllToAllEP=other):
        pass


# ---- transformers itself -------------------------------------------------------------------------


@needs_transformers
def test_the_fake_is_like_the_installed_release() -> None:
    assert fake.differences() == []


@needs_transformers
def test_differences_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake.AllToAllEP, "_combine_tokens", lambda self, output: output)
    (found,) = fake.differences()
    assert f"{fake.PATH}:AllToAllEP._combine_tokens takes ['self', 'expert_output', 'sta" in found


@needs_transformers
def test_quantised_experts_travel_with_their_scales_or_not_at_all() -> None:
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.integrations.finegrained_fp8 import FP8Experts
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    fp8 = FP8Experts(Qwen3MoeConfig(**sizes, num_experts=M), block_size=(64, 64))
    check_experts(fp8, M, "")
    del fp8.down_proj_scale_inv
    with pytest.raises(UnsupportedError, match=r"down_proj of torch\.float8_e4m3fn without"):
        check_experts(fp8, M, "")
    del sizes["moe_intermediate_size"]
    mxfp4 = Mxfp4GptOssExperts(GptOssConfig(**sizes, num_local_experts=M))  # scales are no tensors
    with pytest.raises(UnsupportedError, match=r"gate_up_proj of torch\.uint8 without"):
        check_experts(mxfp4, M, "")


PROGRAM = Path(__file__).resolve().parents[1] / "transformers_training.py"
QUICK = ["qwen3", "gptoss", "shared batches", "recomputed", "new tensors"]
FURTHER = ["mixtral, two copies of an expert", "dsv3", "recomputed, reentrant", "adamw", "bf16"]
FURTHER += ["compiled", "no replicas for few tokens", "ranks without tokens", "routers alone"]
RUN = cases(QUICK, QUICK + FURTHER)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_training(PROGRAM, RUN, tmp_path_factory.mktemp("transformers"))


@needs_transformers
@pytest.mark.parametrize("case", sampled([*QUICK[:-1], *FURTHER], QUICK.__contains__))
def test_models_train_alike(results: dict[str, Any], case: str) -> None:
    found = SimpleNamespace(**results[case])
    print(f"{case}: losses {found.losses}, layer, imbalance before and after: {found.imbalance}")
    # bf16 rounds what instances sum apart: 2 ** -8 of a value, a few times.
    loss, rounding = (1e-4, 0.03) if case == "bf16" else (1e-6, 2e-5)
    for plain, replicated in zip(*found.losses, strict=True):
        assert replicated == pytest.approx(plain, rel=loss)
    assert found.losses[0][-1] < found.losses[0][0]
    assert max(*found.gradients, found.optimizer, found.state, found.logits) < rounding
    for _, before, after, replicas in found.imbalance:
        assert before > 1.15
        few = case == "no replicas for few tokens"
        assert after == before if few else after < 1.05
        assert (replicas == 0) == few
    if case == "bf16":
        plain, replicated = found.from_fp32
        assert replicated < 1.25 * plain


@needs_transformers
def test_layers_of_a_model_create_no_tensor_as_large_as_main_weights(
    results: dict[str, Any],
) -> None:
    found = SimpleNamespace(**results["new tensors"])
    assert found.replicas > 0
    assert 0 < found.largest < found.mains


@needs_transformers
@pytest.mark.exhaustive
def test_the_example_trains_balances_and_ends_cleanly(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[3] / "examples" / "transformers" / "finetune.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(script)],
        env=os.environ | {"ULTRAEP_RECORD": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "leaked" not in done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+);", done.stdout)]
    assert losses[-1] < losses[0]
    shown = [(float(a), float(b)) for a, b in re.findall(r"([0-9.]+) -> ([0-9.]+)", done.stdout)]
    assert max(before for before, _ in shown) > 1.5
    assert max(after for _, after in shown) < 1.1
    assert len(load_recordings([tmp_path])) == 4
