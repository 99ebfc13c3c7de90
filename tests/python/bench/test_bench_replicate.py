"""The replicate benchmark, from the command line to table, records and exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benched import (
    ONE_PLAN_KEYS,
    SMALL,
    Done,
    baselines_of,
    bench,
    check_times,
    modes_of,
    plain_environment,
)
from tiers import sampled

from ultraep_comm.bench import baselines
from ultraep_comm.bench import ranks as bench_ranks
from ultraep_comm.bench.commands.replicate import reduction
from ultraep_comm.bench.commands.replicate import run as replicate_run
from ultraep_comm.bench.loads import generate_load, rank_imbalance
from ultraep_comm.bench.sizes import parse_size

SCRIPTS = Path(__file__).resolve().parents[3] / "bench" / "speed"
MODES, PUSH = ["push", "pull", "direct", "auto"], ["--mode", "push"]
RECORD_KEYS = ONE_PLAN_KEYS | {
    *("bytes", "algbw_gbps", "over_model", "over_memcpy", "p2p_time_us", "speedup_over_p2p")
}


def check_records(done: Done, modes: list[str] = MODES) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    document = done.document()
    assert document["commit"]
    assert document["machine"]["cores"] >= 1
    records = modes_of(document)
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


def replicate(folder: Path, *arguments: str, fault: Callable[[], None] | None = None) -> Done:
    few = [*SMALL, "--ranks", "2", *arguments]
    return bench(folder, "replicate", *few, "--json", "o.json", fault=fault)


def run(folder: Path, *command: str) -> Done:
    """Run Python as a user does."""
    done = subprocess.run(
        [sys.executable, *command, "--json", "o.json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
        env=plain_environment(),
    )
    return Done(done.returncode, done.stdout, done.stderr, folder)


def test_all_modes_end_to_end(tmp_path: Path) -> None:
    done = replicate(tmp_path, "--ranks", "4", "--check", "--tile-bytes", "16K")
    records = check_records(done)
    table = done.rows()
    assert list(table) == [*MODES, "p2p", "memcpy"]
    for cells, record in zip(list(table.values())[:4], records, strict=True):
        assert int(cells[0]) == record["replicas"] > 0
        assert int(cells[1]) == record["replicas"] * 96 * 1024
        assert float(cells[6]) >= 0.999  # no schedule beats its bound
        assert cells[-1] == "0"
        assert (record["ranks"], record["experts"]) == (4, 16)
        assert record["imbalance_before"] == pytest.approx(3, rel=0.01)
        assert record["imbalance_after"] < 1.5


def test_a_trace_odd_segments_and_one_mode(tmp_path: Path) -> None:
    counts = np.ones((2, 3, 4, 8), np.int32)
    counts[1, 2, :, 0] = 100
    np.savez(tmp_path / "t.npz", counts_src=counts)
    few = ["--trace", "t.npz", "--step", "1", "--layer", "2", "--mode", "pull", "--check"]
    segments = ["--segments", "w13=40001,w2=20003,scale=7,bias=1"]
    done = bench(tmp_path, "replicate", *few, *segments, "--ranks", "2", "-n", "2", "-J", "o.json")
    (record,) = check_records(done, ["pull"])
    assert "t.npz, step 1, layer 2" in done.stdout
    assert (record["experts"], record["expert_bytes"]) == (8, 60012)
    assert record["imbalance_before"] == pytest.approx(412 * 2 / 428)
    assert record["replicas"] > 0


def test_nothing_to_transfer(tmp_path: Path) -> None:
    done = replicate(tmp_path, "--imbalance", "1")
    assert "nothing to transfer" in done.stdout
    for record in check_records(done):
        assert record["replicas"] == record["algbw_gbps"] == 0


@pytest.mark.exhaustive
def test_under_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(tmp_path, *launcher, "-m", "ultraep_comm.bench", "replicate", *SMALL, *PUSH)
    (record,) = check_records(done, ["push"])
    assert record["ranks"] == 2
    assert done.stdout.count("#wrong") == 1  # one rank prints


# ---- without shared memory --------------------------------------------------------------------

C10D: dict[str, tuple[list[str], list[str], set[str]]] = {  # options, rows, and keys of records
    "replicate": (
        [],
        ["push", "direct", "auto", "p2p", "broadcast"],
        {"broadcast_time_us", "speedup_over_broadcast", "p2p_time_us", "speedup_over_p2p"},
    ),
    "reduce": (
        ["--grad-dtype", "bfloat16", "--main-dtype", "bfloat16"],
        ["pull", "direct", "auto", "gloo", "reduce"],
        {"reduce_time_us", "speedup_over_reduce", "gloo_time_us", "speedup_over_gloo"},
    ),
}
ON_C10D = [*SMALL, "--engine", "c10d", "--ranks", "3", "--check", "--json", "o.json"]


@pytest.mark.parametrize("command", C10D)
def test_the_c10d_engine_beside_baselines_of_a_process_group(tmp_path: Path, command: str) -> None:
    more, rows, keys = C10D[command]
    done = bench(tmp_path, command, *ON_C10D, *more)
    assert done.returncode == 0, done.stderr
    assert list(done.rows()) == rows
    assert {cells[-1] for cells in done.rows().values()} == {"0"}
    for record in modes_of(done.document()):
        assert set(record) == ONE_PLAN_KEYS | {"bytes", "algbw_gbps", "over_model"} | keys
        assert (record["engine"], record["fabric"]) == ("c10d", "none")
        assert (record["bound_us"], record["over_bound"]) == (None, None)
        assert min(record["replicas"], *(record[key] for key in keys)) > 0


def do_nothing_in_the_last_baseline() -> None:
    for kind in (baselines.Broadcast, reduction.GroupReduction):
        kind.run = lambda self: None  # type: ignore[method-assign]


@pytest.mark.parametrize("command", C10D)
def test_a_baseline_that_moves_nothing_is_wrong(tmp_path: Path, command: str) -> None:
    done = bench(tmp_path, command, *ON_C10D, fault=do_nothing_in_the_last_baseline)
    assert done.returncode == 1, done.stderr
    wrong = [baseline["wrong_bytes"] for baseline in baselines_of(done.document())]
    assert wrong[0] == 0
    assert wrong[1] > 0


# ---- what is wrong ----------------------------------------------------------------------------


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
    plan = replicate_run.plan_replicas
    replicate_run.plan_replicas = lambda load, **more: plan(load.roll(1), **more)


def test_check_verifies_the_plan(tmp_path: Path) -> None:
    done = replicate(tmp_path, "--check", fault=plan_another_load)
    assert done.returncode == 2
    assert "own load" in done.stderr


@pytest.mark.parametrize("fault", ["filled", "empty"])
def test_a_single_wrong_bit_is_found(tmp_path: Path, fault: str) -> None:
    """Negative control: one bit of a filled slot, or of an empty one, changes in push."""
    done = replicate(tmp_path, fault=partial(break_pushes, fault))
    assert done.returncode == 1, done.stderr
    wrong = {record["mode"]: record["wrong_bytes"] for record in modes_of(done.document())}
    assert wrong["push"] >= 1
    if fault == "filled":  # other modes overwrite it
        assert wrong["pull"] == wrong["direct"] == wrong["auto"] == 0


def test_a_rank_that_dies_ends_the_run(tmp_path: Path) -> None:
    done = replicate(tmp_path, "-w", "0", fault=partial(break_pushes, "dies"))
    assert done.returncode == 7
    assert "rank 0" in done.stderr


def test_an_error_on_every_rank_is_reported_once(tmp_path: Path) -> None:
    done = replicate(tmp_path, "--tile-bytes", "1000")
    assert done.returncode == 2
    assert done.stderr.count("tile_bytes is 1000") == 1
    assert "Traceback" not in done.stderr


# ---- parts ------------------------------------------------------------------------------------


def test_sizes() -> None:
    sizes = {"1": 1, "64K": 65536, "64k": 65536, "16MiB": 1 << 24, "2GB": 2 << 30}
    assert {text: parse_size(text) for text in sizes} == sizes


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "imbalance"),
    [(4, 32, 1.0), (4, 32, 4.0), (3, 10, 2.5)],
)
def test_generated_load_has_the_wanted_imbalance(
    num_ranks: int, num_experts: int, imbalance: float
) -> None:
    shape = {"num_ranks": num_ranks, "num_experts": num_experts, "num_tokens": 100_000}
    load, again, other = (
        generate_load(**shape, imbalance=imbalance, seed=seed) for seed in (7, 7, 8)
    )
    assert (load.shape, load.dtype) == ((num_ranks, num_experts), np.int32)
    assert load.min() >= 0
    assert load.sum() == 100_000
    assert rank_imbalance(load.sum(axis=0), num_ranks) == pytest.approx(imbalance, rel=0.01)
    assert np.array_equal(load, again)
    assert not np.array_equal(load, other)


@pytest.mark.parametrize("name", sampled(["recorder_cost", "host_cost"], "host_cost".__eq__))
def test_costs_of_the_host_need_no_gpu(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, str(SCRIPTS / f"{name}.py"), "--ranks", "8", "--iters", "3")
    assert done.returncode == 0, done.stderr
    records = done.document()["records"]
    if name == "recorder_cost":
        assert [r["recorder"] for r in records] == ["off", "without loads", "all"]
        assert records[0]["added_median_us"] == 0
        assert all(0 < r["least_us"] <= r["median_us"] <= r["p95_us"] for r in records)
        return
    kinds = [(r["weights"], r["async_op"]) for r in records]
    names = ("bound", "stacked", "listed", "device", "resident")
    assert kinds == [(name, async_op) for name in names for async_op in (False, True)]
    assert all(0 < r["time_us"]["p50"] <= r["time_us"]["p99"] for r in records)
