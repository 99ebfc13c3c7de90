"""The plan benchmark: loads, other planners, table and records."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benched import check_csv
from benched import table_cells as cells
from ranks import plan_alone

from ultraep_comm import verify_plan
from ultraep_comm.bench.cli import main
from ultraep_comm.bench.commands.plan import PlanSize, parse_sizes
from ultraep_comm.bench.commands.plan.cells import plan_load
from ultraep_comm.bench.loads import draw_topk, make_loads, rank_imbalance, tuned_load
from ultraep_comm.bench.options import FAMILIES, PUBLISHED

TINY = ["plan", "--tokens", "64", "--topk", "2", "--seeds", "2"]


def run_plan(folder: Path, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
    """Run the command; return the records, which are in both files."""
    path = folder / "o.json"
    files = ["--json", str(path), "--csv", str(folder / "o.csv")]
    assert main([*TINY, *arguments, *files]) == status
    records: list[dict[str, Any]] = json.loads(path.read_text())["records"]
    check_csv(folder / "o.csv", records)
    return records


# ---- loads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("popularity", [[5, 3, 1, 1], [1000, 30, 1, 1]], ids=["even", "skewed"])
def test_tokens_take_different_experts(popularity: list[int]) -> None:
    """The probability of each pair, drawn one after the other in proportion to popularity."""
    share, tokens = np.array(popularity) / sum(popularity), 100_000
    expected = np.zeros(4)
    for first, second in itertools.permutations(range(4), 2):
        chance = share[first] * share[second] / (1 - share[first])
        expected[[first, second]] += chance
    load = draw_topk(share, tokens, 2, np.random.default_rng(0))
    assert load.sum() == 2 * tokens
    sigma = np.sqrt(tokens * expected * (1 - expected))
    assert (np.abs(load - tokens * expected) < 5 * sigma + 1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    shape = {"num_ranks": 8, "num_experts": 32, "num_tokens": 8 * 100, "topk": 4}
    loads = make_loads(family, **shape, seeds=3)
    assert len(loads) == (5 if family == "adversarial" else 3)
    for load, again in zip(loads, make_loads(family, **shape, seeds=5), strict=False):
        assert (load.shape, load.dtype) == ((32,), np.int64)
        assert load.min() >= 0
        assert load.sum() == 8 * 100 * 4
        assert np.array_equal(load, again)
    assert len({load.tobytes() for load in loads}) == len(loads)


@pytest.mark.parametrize("wanted", PUBLISHED.values())
@pytest.mark.parametrize("size", parse_sizes("8/32/2,72/288/2", "--sizes"), ids=str)
def test_published_loads_have_their_imbalance(wanted: float, size: PlanSize) -> None:
    g = size.num_ranks
    load = tuned_load(g, size.num_experts, wanted, g * 4096 * 8, seed=1)
    assert rank_imbalance(load, g) == pytest.approx(wanted, rel=2e-3)


# ---- the command ------------------------------------------------------------------------------


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = run_plan(tmp_path, "--sizes", "4/16/2,6/12/1", "--domain-size", "4")
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["settings"]["sizes"] == ["4/16/2", "6/12/1 by 4"]
    expected = [("4/16/2", f) for f in FAMILIES if f != "published4"]
    expected += [("6/12/1", f) for f in FAMILIES]
    table = cells(capsys.readouterr().out.replace(" by 4", ""))
    assert [(row[0], row[1]) for row in table] == expected
    for row, record in zip(table, records, strict=True):
        assert record["vectors"] == (5 if record["family"] == "adversarial" else 2)
        worst, bound = record["imbalance"]["worst"], record["imbalance_bound"]
        assert 1 <= record["imbalance"]["mean"] <= worst
        assert bound <= max(worst, 1.01) + 1e-9
        assert worst / bound - 1e-9 <= record["over_bound"] <= worst
        assert record["transfer_bound"] >= max(record["max_exports"], record["max_imports"]) - 1e-9
        assert 0 < record["time_us"]["p50"] <= record["time_us"]["p99"]
        assert float(row[5]) == pytest.approx(worst, abs=1e-4)


@pytest.mark.parametrize(("limit", "gate", "status"), [("1.2", "met", 0), ("1.001", "bound", 3)])
def test_a_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str, gate: str, status: int
) -> None:
    few = ["--sizes", "8/16/2", "--workload", "published2", "--tokens", "4096", "--topk", "8"]
    limits = ["--target", "1.1", "--max-over-bound", limit]
    (record,) = run_plan(tmp_path, *few, *limits, status=status)
    assert record["gate"] == gate
    named = "gate not met by 1 of 1, expected at most 1.001 times the bound: 8/16/2 published2 "
    assert (named in capsys.readouterr().err) is (status == 3)


def test_domains(tmp_path: Path) -> None:
    """A hot rank replicates only inside its domain, and the bound reflects that."""
    few = ["--sizes", "8/16/2", "--workload", "adversarial"]
    (split,) = run_plan(tmp_path, *few, "--domain-size", "2")
    (whole,) = run_plan(tmp_path, *few)
    assert split["imbalance_bound"] > 3 > whole["imbalance_bound"]
    one, many = parse_sizes("72/288/2,256/512/2", "--sizes")
    assert set(one.domain.tolist()) == {0}
    assert np.bincount(many.domain).tolist() == [64] * 4


def test_a_row_says_what_the_planner_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--sizes", "8/16/1", "--workload", "published2,adversarial", "--target", "1.0"]
    records = run_plan(tmp_path, *few, "--certify")
    printed = capsys.readouterr().out
    shape = {"num_ranks": 8, "num_experts": 16, "num_tokens": 8 * 64, "topk": 2, "seeds": 2}
    planned = partial(plan_alone, slots_per_rank=1, num_ranks=8, target=1.0)
    for row, record in zip(cells(printed), records, strict=True):
        loads = make_loads(record["family"], **shape)
        plans = [planned(torch.from_numpy(load)) for load in loads]
        assert record["imbalance_before"] == np.mean([rank_imbalance(x, 8) for x in loads])
        assert record["replicas"] == np.mean([plan.num_replicas for plan in plans])
        found = [verify_plan(plan, load) for plan, load in zip(plans, loads, strict=True)]
        for i, one in enumerate(found):
            assert f"# 8/16/1 {record['family']} {i}: {one}" in printed
        exact, at_bound = (sum(x.is_exact for x in found), sum(not x.over_bound for x in found))
        counts = {"exact": exact, "at_bound": at_bound}
        assert record["certified"] == {**counts, "plans": [str(x) for x in found]}
        assert row[-2:] == [str(exact), str(at_bound)]


def test_every_plan_is_verified(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --certify too: a plan for another load ends the run."""
    monkeypatch.setattr(
        "ultraep_comm.bench.commands.plan.run.plan_load",
        lambda size, load, target: plan_load(size, load[::-1], target),
    )
    assert main([*TINY, "--sizes", "4/16/2", "--workload", "zipf1.0"]) == 2
    assert "expected its load" in capsys.readouterr().err


def test_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "t.npz"
    few = ["--sizes", "4/16/2,2/8/1", "--workload", "trace"]
    counts = {"counts_src": rng.integers(0, 5000, (3, 2, 4, 16))}
    ids = {"topk": rng.integers(0, 16, (1000, 3, 2)), "n_experts": 16}
    for arrays, vectors in ((counts, "6"), (ids, "9")):  # 3 windows of 4 * 64 tokens, 3 layers
        np.savez(path, **arrays)
        assert main([*TINY, *few, "--trace", str(path)]) == 0
        printed = capsys.readouterr().out
        assert "t.npz, every step and layer" in printed
        (row,) = cells(printed)
        assert row[:3] == ["4/16/2", "trace", vectors]
    np.savez(path, counts_src=np.ones((1, 1, 2, 6), np.int32))
    assert main(["plan", "--trace", str(path)]) == 2
    assert "6 experts" in capsys.readouterr().err
