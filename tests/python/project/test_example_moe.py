"""The example trains: its parts against one process, and whole runs against its claims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from tiers import cases

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "moe"))
from batches import TEXT, Batches
from claims import Comparison, Results
from exchange import combine, dispatch, find_route
from experts import Instance, apply_experts
from training import FreeRun

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "moe" / "train.py"
SMALL = ["--tokens", "64", "--context", "16", "--hidden", "16", "--inner", "16"]


# ---- exchange --------------------------------------------------------------------------------


INSTANCES, WIDTH, TOPK = 3, 5, 2
TOKENS = [7, 0, 12, 5]


def _tokens(rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, probabilities and physical ids, which leave some instances without tokens."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS[rank], WIDTH, generator=generator)
    probs = torch.rand(TOKENS[rank], TOPK, generator=generator)
    order = torch.rand(TOKENS[rank], num_ranks * INSTANCES - 4, generator=generator).argsort(1)
    return tokens.requires_grad_(), probs.requires_grad_(), order[:, :TOPK]


def _scales(num_ranks: int) -> torch.Tensor:
    return torch.linspace(-1, 2, num_ranks * INSTANCES).view(num_ranks, INSTANCES)


def _dispatch_and_combine(rank: int, process_group: Any) -> Any:
    """A layer whose experts multiply by a number each."""
    num_ranks = dist.get_world_size(process_group)
    tokens, probs, ids = _tokens(rank, num_ranks)
    scales = _scales(num_ranks)[rank].clone().requires_grad_()
    route = find_route(ids, INSTANCES, process_group)
    rows = dispatch(tokens, route)
    assert len(rows) == route.num_rows == sum(route.counts)
    scale = scales.repeat_interleave(torch.tensor(route.counts)).unsqueeze(1)
    result = combine(rows * scale, probs, route)
    (result**2).sum().backward()
    return result.detach(), tokens.grad, probs.grad, scales.grad


def test_dispatch_and_combine_against_one_process(ranks: RankPool) -> None:
    num_ranks = len(TOKENS)
    scales = _scales(num_ranks).flatten().requires_grad_()
    results = ranks.run(num_ranks, _dispatch_and_combine)
    for rank, (result, tokens_grad, probs_grad, _) in enumerate(results):
        tokens, probs, ids = _tokens(rank, num_ranks)
        expected = (tokens.unsqueeze(1) * (probs * scales[ids]).unsqueeze(2)).sum(1)
        (expected**2).sum().backward()
        torch.testing.assert_close(result, expected.detach())
        torch.testing.assert_close(tokens_grad, tokens.grad)
        torch.testing.assert_close(probs_grad, probs.grad)
    assert scales.grad is not None
    torch.testing.assert_close(torch.cat([r[3] for r in results]), scales.grad)


def test_experts_against_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    counts = [4, 0, 3, 0]  # the last one has no instance
    sizes = [(6, 5), (5, 3), (6, 5), (5, 3)]
    instances = [Instance(*(draw(size) for size in sizes)) for _ in range(3)]
    before = [i.w13_grad.clone() for i in instances], [i.w2_grad.clone() for i in instances]
    rows = draw(7, 5).requires_grad_()
    weight = draw(7, 5)
    out = apply_experts(rows, counts, instances)
    (out * weight).sum().backward()

    again = rows.detach().clone().requires_grad_()
    w13 = [i.w13.clone().requires_grad_() for i in instances]
    w2 = [i.w2.clone().requires_grad_() for i in instances]
    parts = []
    for part, a, b in zip(again.split(counts[:3]), w13, w2, strict=True):
        gate, up = (part @ a.T).chunk(2, dim=1)
        parts.append((torch.nn.functional.silu(gate) * up) @ b.T)
    expected = torch.cat(parts)
    (expected * weight).sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(rows.grad, again.grad)
    for i, instance in enumerate(instances):
        first, second = w13[i].grad, w2[i].grad
        assert first is not None
        assert second is not None
        torch.testing.assert_close(instance.w13_grad, before[0][i] + first)
        torch.testing.assert_close(instance.w2_grad, before[1][i] + second)


# ---- batches, claims, picture ------------------------------------------------------------------


def test_batches_are_drawn_from_each_ranks_part() -> None:
    text = TEXT.read_bytes()
    assert 12_000 <= len(text) <= 20_000
    assert text.isascii()
    quarter = len(text) // 4
    for rank in range(4):
        batches = Batches(rank=rank, num_ranks=4, batch=3, context=32, seed=5)
        read, following = batches.draw(2)
        assert torch.equal(read, batches.draw(2)[0])
        assert not torch.equal(read, batches.draw(3)[0])
        for line, target in zip(read, following.view(3, 32), strict=True):
            window = bytes([*line.tolist(), int(target[-1])])
            assert abs(text.index(window) - (rank + 0.5) * quarter) <= quarter / 2 + 4
            assert torch.equal(line[1:], target[:-1])
    with pytest.raises(ValueError, match="rank 1: its part of the text has 2 bytes"):
        Batches(rank=1, num_ranks=2, batch=1, context=4, seed=0, text=b"abcd")


def _run(losses: list[float], rows: list[list[float]]) -> FreeRun:
    tensor = torch.tensor(rows)
    home = torch.tensor([[float(tensor.sum()), *[0.0] * (tensor.shape[1] - 1)]]).expand_as(tensor)
    return FreeRun(losses=losses, at_home=[home], computed=[tensor], buffer_bytes=8)


@pytest.mark.parametrize(
    "broken, differences, losses, rows",
    [
        (None, 1e-6, [1.0, 1.05], [100.0, 104.0]),
        ("gradients", 2e-5, [1.0, 1.05], [100.0, 100.0]),
        ("gradients", float("inf"), [1.0, 1.05], [100.0, 100.0]),
        ("loss", 1e-6, [1.3, 1.0], [100.0, 100.0]),
        ("loss", 1e-6, [float("nan"), 1.0], [100.0, 100.0]),
        ("imbalance", 1e-6, [1.0, 1.0], [80.0, 100.0]),
    ],
)
def test_claims_that_do_not_hold(
    broken: str | None, differences: float, losses: list[float], rows: list[float]
) -> None:
    plain = _run([1.0, 1.0], [[200.0, 0.0]])
    results = Results(
        comparison=Comparison(outputs={"logits": 0.0}, grads={"a": 0.0, "b": differences}),
        plain=plain,
        other_seed=_run([1.1, 0.9], [[200.0, 0.0]]),
        replicated=_run(losses, [rows]),
    )
    assert [c.key for c in results.claims() if not c.holds] == ([broken] if broken else [])
    assert {k for k, c in results.to_json()["claims"].items() if not c["holds"]} == (
        {broken} if broken else set()
    )


# ---- whole runs ----------------------------------------------------------------------------------


def _train(
    *arguments: str, launcher: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "COLUMNS": "200", **variables},
    )


@pytest.mark.cases
def test_quick_run_keeps_its_claims(tmp_path: Path) -> None:
    steps = cases(8, 20)
    quick = ["--quick"] if steps == 20 else ["--steps", str(steps), "--compare-steps", "2"]
    done = _train(*quick, "--json", str(tmp_path / "result.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    for key, claim in result["claims"].items():
        assert claim["holds"], key
        assert claim["limit"] is None or f"{claim['value']:.3g}" in done.stdout
    assert len(result["differences"]["outputs"]) == 3
    grads = result["differences"]["gradients"]
    # Sums are split differently, so that equality to the last bit would mean that none was.
    assert grads["moe.0.experts.w13"] > 0
    assert {"input", "embedding", "moe.0.router", "moe.1.experts.w2"} <= set(grads)
    runs = {name: run["losses"] for name, run in result["runs"].items()}
    assert all(len(losses) == steps and losses[-1] < losses[0] - 1 for losses in runs.values())
    assert runs["plain"] != runs["other_seed"]

    replicated = result["runs"]["replicated"]
    at_home = torch.tensor(replicated["rows_at_home"], dtype=torch.float64)
    computed = torch.tensor(replicated["rows_computed"], dtype=torch.float64)
    assert computed.shape == (steps, 2, 4)
    assert bool((computed.sum(2) == 4 * 512 * 2).all())
    assert bool((at_home.sum(2) == 4 * 512 * 2).all())
    assert float((at_home.amax(2) / at_home.mean(2)).mean()) > 1.3  # there was something to do
    assert float((computed.amax(2) / computed.mean(2)).max()) <= 1.05
    plain = result["runs"]["plain"]
    assert plain["rows_computed"] == plain["rows_at_home"]
    busiest = torch.tensor(plain["rows_computed"]).max()
    assert plain["buffer_bytes"] == int(busiest) * 96 * 4
    assert replicated["buffer_bytes"] == int(computed.max()) * 96 * 4


@pytest.mark.exhaustive
def test_without_slots_the_claim_of_balance_fails(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ImportError")  # it runs without, and says so
    few = (*SMALL, "--slots", "0", "--steps", "2", "--compare-steps", "1")
    done = _train(*few, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("rich is not installed") == 1
    assert "with replicas: 2 steps done" in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "worst layer" in line]
    assert line.endswith("NO")


@pytest.mark.exhaustive
def test_errors_have_another_status() -> None:
    done = _train("--tokens", "100")
    assert done.returncode == 2
    assert "--tokens 100: expected a multiple of --context" in done.stderr
    done = _train("--tokens", "16000", "--context", "16000")
    assert done.returncode == 2
    assert "its part of the text has" in done.stderr


@pytest.mark.exhaustive
def test_under_torchrun(tmp_path: Path) -> None:
    done = _train(
        *("--tokens", "512", "--hidden", "16", "--inner", "16", "--steps", "2"),
        *("--compare-steps", "1", "--json", str(tmp_path / "result.json")),
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ranks"] == 2
    assert len(result["runs"]["plain"]["rows_computed"][0][0]) == 2
