"""The benchmark of reductions, from the command line to table, records and exit code."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benched import ONE_PLAN_KEYS, SMALL, Done, baselines_of, bench, check_times, modes_of, run_on
from stand_in import StandIn
from tiers import sampled

from ultraep_comm import Plan
from ultraep_comm.bench.commands.replicate import reduction
from ultraep_comm.bench.payload import MAIN, GradPayload, count_different
from ultraep_comm.bench.traffic import count_reduction_traffic

RECORD_KEYS = ONE_PLAN_KEYS | {
    *("bytes", "algbw_gbps", "over_model", "over_copy_add", "gloo_time_us", "speedup_over_gloo")
}
MODES = ["pull", "direct", "auto"]


def check_document(done: Done) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    document = done.document()
    assert [r["mode"] for r in modes_of(document)] == MODES
    for record in modes_of(document):
        assert set(record) == RECORD_KEYS
        assert record["op"] == "reduce"
        assert record["wrong_bytes"] == 0
        assert record["replicas"] > 0
        check_times(record)
        assert min(record["over_copy_add"], record["speedup_over_gloo"]) > 0
    return document


def test_all_modes_end_to_end(tmp_path: Path) -> None:
    done = bench(tmp_path, "reduce", *SMALL, "--ranks", "4", "--check", "--json", "o.json")
    document = check_document(done)
    table = done.rows()
    assert list(table) == [*MODES, "gloo", "copy+add"]
    assert {cells[-1] for cells in table.values()} == {"0"}
    for mode in MODES:
        assert float(table[mode][6]) >= 0.999  # no schedule beats its bound
    assert document["settings"]["grad_dtype"] == "float32"


@pytest.mark.parametrize("main_dtype", ["float32", "bfloat16"])
def test_types_and_odd_sizes(tmp_path: Path, main_dtype: str) -> None:
    arguments = ["--segments", "w13=40002,w2=20006,bias=2", "--grad-dtype", "bfloat16"]
    arguments += ["--main-dtype", main_dtype, "--ranks", "3", "--check", "-n", "2"]
    done = bench(tmp_path, "reduce", *arguments, "-w", "0", "-J", "o.json")
    assert check_document(done)["settings"]["main_dtype"] == main_dtype


def break_pulls(fault: str) -> None:
    """Spoil a value after every call in pull, on this rank."""
    whole = reduction.reduce_expert_grads

    def broken(grads: Any, plan: Any, *, group: Any, **more: Any) -> Any:
        work = whole(grads, plan, group=group, **more)
        filled = plan.slot_expert[group.rank] >= 0
        if more["mode"] != "pull" or more["async_op"]:
            return work
        if fault == "main":
            grads.tensors["w2"].view(torch.uint8)[:, 5] ^= 1
        elif fault == "not cleared":
            group.slot_grads["w13"][filled, 7] = -0.0
        elif fault == "empty slot":
            group.slot_grads["w13"][~filled, 7] = 1.0
        else:
            group.slots["w2"][:, 3] = 1
        return work

    reduction.reduce_expert_grads = broken  # type: ignore[assignment]


@pytest.mark.parametrize(
    "fault",
    sampled(["main", "not cleared", "empty slot", "weight"], ["main", "weight"].__contains__),
)
def test_a_wrong_byte_is_found(tmp_path: Path, fault: str) -> None:
    """Negative controls."""
    few = ["-b", "64K", "-n", "2", "-w", "0", "--ranks", "2", "--experts", "8", "--json", "o.json"]
    done = bench(tmp_path, "reduce", *few, fault=functools.partial(break_pulls, fault))
    assert done.returncode == 1, done.stderr
    record = done.document()["records"][0]
    assert record["mode"] == "pull"
    assert record["wrong_bytes"] >= 1


def test_a_sum_in_another_order_is_wrong() -> None:
    """Negative control: sums of the payload depend on their order."""
    kinds = {"grad_dtype": torch.float32, "main_dtype": torch.float32}
    payload = GradPayload(1, {"w": 1000}, 8, **kinds)
    where: dict[str, Any] = {"epoch": 3, "expert": 2, "segment": "w"}
    right = payload.reduced(ranks=[0, 1, 3], **where)
    assert count_different(right, payload.reduced(ranks=[0, 1, 3], **where)) == 0
    assert count_different(right, payload.reduced(ranks=[3, 1, 0], **where)) > 0
    first, *others = (payload.values(rank=rank, **where) for rank in (MAIN, 0, 1, 3))
    for other in others:  # the main gradient first instead of last
        first = first + other
    assert count_different(right, first) > 0


# ---- one process for all ranks ----------------------------------------------------------------


HERE = ["reduce", "--engine", "cuda", "-b", "96K", "-n", "2", "-w", "1", "--experts", "16"]


def test_a_sweep_over_sms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "o.json"
    few = [*HERE, "--check", "--num-workers", "2,1", "--json", str(path)]
    assert run_on(StandIn(), *few, "--grad-dtype", "bfloat16") == 0
    document = json.loads(path.read_text())
    records, baselines = modes_of(document), baselines_of(document)
    assert [(r["num_sms"], r["mode"]) for r in records] == [(n, m) for n in (1, 2) for m in MODES]
    assert [baseline["mode"] for baseline in baselines] == ["copy", "big copy"]
    big = baselines[1]["moved_gbps"]
    for record in records:
        assert record["op"] == "reduce"
        assert record["wrong_bytes"] == 0
        moved = record["moved_bytes"] / record["time_us"]["p50"] / 1e3
        assert record["moved_gbps"] == pytest.approx(moved)
        assert record["over_big_copy"] == pytest.approx(moved / big)
        assert record["host_bound_us"] > 0
        assert record["host_unbound_us"] > 0
    assert "reduce, engine cuda" in capsys.readouterr().out


def test_traffic_of_a_reduction() -> None:
    """Expert 0, at home on rank 0, is on ranks 1 to 3; expert 2, at home on rank 1, on rank 0."""
    plan = Plan.from_slots(np.array([[2], [0], [0], [0]]), num_experts=8)
    part = 32 << 10  # of a flag group: 3 groups
    sizes: dict[str, Any] = {"segment_bytes": [3 * part], "tile_bytes": 32 << 10}
    direct = count_reduction_traffic(plan, "direct", grad_bytes=4, main_bytes=2, **sizes)
    assert direct.loads.tolist() == [(9 + 1.5) * part, (3 + 1.5) * part, 0, 0]
    assert direct.stores.tolist() == [(3 + 1.5) * part, (3 + 1.5) * part, 3 * part, 3 * part]
    assert direct.egress.tolist() == [9 * part, 3 * part, 0, 0]
    pull = count_reduction_traffic(plan, "pull", grad_bytes=2, main_bytes=4, **sizes)
    assert pull.loads.tolist() == [(6 + 6) * part, (3 + 3 + 6) * part, 3 * part, 3 * part]
    assert pull.stores.tolist() == [(3 + 6) * part, (3 + 2 + 6) * part, 5 * part, 5 * part]
    assert pull.egress.tolist() == [6 * part, (2 + 3) * part, 2 * part, 2 * part]
