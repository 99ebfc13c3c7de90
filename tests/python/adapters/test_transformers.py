"""The adapter for transformers: on a fake of it, and its own models where it is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_transformers as fake
import pytest
import torch
from fake_transformers import DistributedConfig, adapter
from ranks import RankPool, raised
from training_layers import G, K, M, OnTransformers, draw, on

from ultraep_comm.adapters.checks import check_experts, warn_idle
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.recording import load_recordings

FOUND = importlib.util.find_spec("transformers")
SEAM = Path((FOUND and FOUND.origin) or "missing").parent / "distributed" / "expert_parallel.py"
needs_transformers = pytest.mark.skipif(
    not SEAM.exists(),  # DeepSpeed needs an earlier release
    reason="no transformers 5.23: pip install -c constraints.txt -e '.[transformers]'",
)


def shared(rank: int, pg: Any, num_tokens: int) -> None:
    """All ranks have the same batch, of which the dispatch takes a part on each."""
    with adapter() as api:
        made = OnTransformers(api, rank, pg, tp=pg)
        x = draw(num_tokens, made.x.shape[-1], seed=77)
        with torch.no_grad():
            y = made.run(made.layers, x, 0)
        torch.testing.assert_close(y, made.run(made.alone(), x, 0).detach())
        assert int(made.plan.load.sum()) == num_tokens * K  # every token counts once
        assert all(made.experts_of(layer).num_experts == M for layer in made.layers)
        made.group.close()


@pytest.mark.parametrize("num_tokens", [9, 2])  # of two, half of the ranks have none
def test_ranks_that_share_a_batch_count_it_once(ranks: RankPool, num_tokens: int) -> None:
    ranks.run(G, shared, num_tokens)


def unfreeze(made: Any) -> None:
    made.experts.requires_grad_(False)
    made.step(made.x.clone().requires_grad_()).sum().backward()
    frozen = made.group
    assert not frozen.slot_grads
    made.experts.requires_grad_(True)
    made.step(made.x).sum().backward()
    trained = made.group
    assert set(trained.slot_grads) == {"w1", "w2", "bias"}
    made.experts.requires_grad_(False)
    made.step(made.x)
    assert made.group is trained
    assert all(weight.grad is not None for weight in made.experts.parameters())
    frozen.close()


def test_slots_have_gradients_once_weights_are_trained(ranks: RankPool) -> None:
    ranks.run(G, on, "transformers", unfreeze)


def wrong_on_one_rank(rank: int, pg: Any) -> str:
    with adapter() as api:
        made = OnTransformers(api, rank, pg)
        if rank == 1:  # after its own set-up, before the first pass
            made.experts.register_buffer("running", torch.zeros(3))
        return str(raised(lambda: made.step(made.x)))


def test_what_one_rank_refuses_in_its_first_pass_all_refuse(ranks: RankPool) -> None:
    for text in ranks.run(G, wrong_on_one_rank):
        assert re.search("expert-parallel rank 1 cannot have replicas: .*buffer running", text)


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


def test_the_implementation_is_registered() -> None:
    with adapter() as api:
        assert fake.EPImplementationInterface.known == {"ultraep": api.UltraEP}


def test_other_signatures_are_an_error() -> None:
    other = type("AllToAllEP", (fake.AllToAllEP,), {"_combine_tokens": lambda self, output: output})
    refused = pytest.raises(UnsupportedError, match=r"takes \['self', 'output'\]; the adapter")
    with refused, adapter(AllToAllEP=other):
        pass


# ---- transformers itself -------------------------------------------------------------------------


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
