"""The replicate benchmark, from the command line to table, records and exit code."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benched import (
    ONE_PLAN_KEYS,
    SMALL,
    Done,
    bench,
    check_times,
    plain_environment,
)

from ultraep_comm.bench import ranks as bench_ranks
from ultraep_comm.bench.commands.replicate import one_plan
from ultraep_comm.bench.loads import generate_load, rank_imbalance
from ultraep_comm.bench.sizes import parse_size

SCRIPTS = Path(__file__).resolve().parents[3] / "bench" / "speed"
MODES = ["push", "pull", "direct", "auto"]
RECORD_KEYS = ONE_PLAN_KEYS | {
    *("algbw_gbps", "over_model", "over_memcpy", "p2p_time_us", "speedup_over_p2p")
}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python as a user does."""
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        env=plain_environment(),
    )


def check_records(done: Any, modes: list[str] = MODES) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    document = done.document()
    assert document["commit"]
    assert document["machine"]["cores"] >= 1
    records: list[dict[str, Any]] = document["records"]
    assert [r["mode"] for r in records] == modes
    for record in records:
        assert set(record) == RECORD_KEYS
        assert record["op"] == "replicate"
        assert record["wrong_bytes"] == 0
        check_times(record)
        total = record["replicas"] * record["expert_bytes"]
        assert record["algbw_gbps"] == pytest.approx(total / record["time_us"]["p50"] / 1e3)
        assert 0 <= record["critical_gbps"] <= record["algbw_gbps"]
        assert min(record[x] for x in ("over_memcpy", "speedup_over_p2p", "p2p_time_us")) > 0
    return records


def replicate(folder: Path, *arguments: str) -> Done:
    return bench(folder, "replicate", *arguments, "--json", "o.json")


# ---- the command ------------------------------------------------------------------------------


def test_all_modes_end_to_end(tmp_path: Path) -> None:
    done = replicate(tmp_path, *SMALL, "--check", "--tile-bytes", "16K")
    records = check_records(done)
    table = done.rows()
    assert list(table) == [*MODES, "p2p", "memcpy"]
    for cells, record in zip(list(table.values())[:4], records, strict=True):
        assert len(cells) == 10
        assert int(cells[0]) == record["replicas"] > 0
        assert int(cells[1]) == record["replicas"] * 96 * 1024
        assert float(cells[6]) >= 0.999  # no schedule beats its bound
        assert cells[-1] == "0"
    assert records[0]["ranks"] == 4
    assert records[0]["experts"] == 16
    assert records[0]["imbalance_before"] == pytest.approx(3, rel=0.01)
    assert records[0]["imbalance_after"] < 1.5


def test_odd_segments_and_one_mode(tmp_path: Path) -> None:
    segments = "w13=40001,w2=20003,scale=7,bias=1"
    arguments = ["--ranks", "3", "--mode", "pull", "--segments", segments, "--check"]
    (record,) = check_records(replicate(tmp_path, *arguments, "-n", "2", "-w", "0"), ["pull"])
    assert record["expert_bytes"] == 60012


def test_nothing_to_transfer(tmp_path: Path) -> None:
    done = replicate(tmp_path, *SMALL, "--ranks", "2", "--imbalance", "1")
    assert "nothing to transfer" in done.stdout
    for record in check_records(done):
        assert record["replicas"] == record["algbw_gbps"] == 0


def test_synthetic_trace(tmp_path: Path) -> None:
    counts = np.ones((2, 3, 4, 8), np.int32)
    counts[1, 2, :, 0] = 100
    np.savez(tmp_path / "t.npz", counts_src=counts)
    arguments = ["--trace", "t.npz", "--step", "1", "--layer", "2", "--ranks", "2", "-b", "64K"]
    done = replicate(tmp_path, *arguments, "-n", "2", "--check")
    records = check_records(done)
    assert "t.npz, step 1, layer 2" in done.stdout
    assert records[0]["experts"] == 8
    assert records[0]["imbalance_before"] == pytest.approx(412 * 2 / 428)
    assert records[0]["replicas"] > 0


@pytest.mark.exhaustive
def test_under_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*SMALL, "--mode", "push", "--json", "o.json"]
    done = run(*launcher, "-m", "ultraep_comm.bench", "replicate", *arguments, cwd=tmp_path)
    found = Done(done.returncode, done.stdout, done.stderr, tmp_path)
    (record,) = check_records(found, ["push"])
    assert record["ranks"] == 2
    assert done.stdout.count("#wrong") == 1  # one rank prints


def break_pushes(fault: str) -> None:
    """Run a fault after every call in push, on this rank."""
    whole = bench_ranks.replicate_experts

    def broken(weights: Any, plan: Any, *, group: Any, **more: Any) -> Any:
        work = whole(weights, plan, group=group, **more)
        if more["mode"] == "push":
            if fault == "dies":
                if group.rank == 1:
                    os._exit(7)
                return work
            filled = plan.slot_expert[group.rank] >= 0
            for slot in (filled if fault == "filled" else ~filled).nonzero()[:1]:
                group.slots["w2"][slot[0], 5] = 0xA4
        return work

    bench_ranks.replicate_experts = broken


def plan_another_load() -> None:
    plan = one_plan.plan_replicas
    one_plan.plan_replicas = lambda load, **more: plan(load.roll(1), **more)  # type: ignore[attr-defined]


def test_check_verifies_the_plan(tmp_path: Path) -> None:
    few = ["replicate", "-b", "64K", "-n", "1", "-w", "0", "--ranks", "2"]
    done = bench(tmp_path, *few, "--check", fault=plan_another_load)
    assert done.returncode == 2
    assert "own load" in done.stderr
    assert bench(tmp_path, *few, fault=plan_another_load).returncode == 0


def run_broken(folder: Path, fault: str) -> Done:
    few = ["replicate", "-b", "64K", "-n", "2", "-w", "0", "--ranks", "2", "--json", "o.json"]
    return bench(folder, *few, fault=functools.partial(break_pushes, fault))


@pytest.mark.parametrize("fault", ["filled", "empty"])
def test_a_single_wrong_bit_is_found(tmp_path: Path, fault: str) -> None:
    """Negative control: one bit of a filled slot, or of an empty one, changes in push."""
    done = run_broken(tmp_path, fault)
    assert done.returncode == 1, done.stderr
    wrong = {record["mode"]: record["wrong_bytes"] for record in done.document()["records"]}
    assert wrong["push"] >= 1
    if fault == "filled":  # other modes overwrite it
        assert wrong["pull"] == wrong["direct"] == wrong["auto"] == 0


def test_a_rank_that_dies_ends_the_run(tmp_path: Path) -> None:
    done = run_broken(tmp_path, "dies")
    assert done.returncode == 7
    assert "rank 0" in done.stderr


def test_an_error_on_every_rank_is_reported_once(tmp_path: Path) -> None:
    done = bench(tmp_path, "replicate", *SMALL, "--tile-bytes", "1000", "--ranks", "2")
    assert done.returncode == 2
    assert done.stderr.count("tile_bytes is 1000") == 1
    assert "Traceback" not in done.stderr


# ---- parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("64K", 65536), ("64k", 65536), ("16MiB", 1 << 24), ("2GB", 2 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "imbalance"),
    [(4, 32, 1.0), (4, 32, 3.0), (4, 32, 4.0), (2, 16, 1.5), (64, 256, 2.0), (3, 10, 2.5)],
)
def test_generated_load_has_the_wanted_imbalance(
    num_ranks: int, num_experts: int, imbalance: float
) -> None:
    def make(seed: int) -> np.ndarray:
        return generate_load(
            num_ranks=num_ranks,
            num_experts=num_experts,
            imbalance=imbalance,
            num_tokens=100_000,
            seed=seed,
        )

    load = make(seed=7)
    assert load.shape == (num_ranks, num_experts)
    assert load.dtype == np.int32
    assert load.min() >= 0
    assert load.sum() == 100_000
    assert rank_imbalance(load.sum(axis=0), num_ranks) == pytest.approx(imbalance, rel=0.01)
    assert np.array_equal(load, make(seed=7))
    assert not np.array_equal(load, make(seed=8))


@pytest.mark.parametrize("name", ["recorder_cost", "host_cost"])
def test_costs_of_the_host_need_no_gpu(tmp_path: Path, name: str) -> None:
    few = ["--ranks", "8", "--iters", "3", "--json", "r.json"]
    done = run(str(SCRIPTS / f"{name}.py"), *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "r.json").read_text())["records"]
    if name == "recorder_cost":
        assert [r["recorder"] for r in records] == ["off", "without loads", "all"]
        assert records[0]["added_median_us"] == 0
        assert all(0 < r["least_us"] <= r["median_us"] <= r["p95_us"] for r in records)
        return
    kinds = [(r["weights"], r["async_op"]) for r in records]
    names = ("bound", "stacked", "listed", "device", "resident")
    assert kinds == [(name, async_op) for name in names for async_op in (False, True)]
    assert all(0 < r["time_us"]["p50"] <= r["time_us"]["p99"] for r in records)
