"""The benchmark of reductions, from the command line to table, records and exit code."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benched import ONE_PLAN_KEYS, Done, bench, check_times, modes_of

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
    """With types and sizes that are not the default ones."""
    arguments = ["--segments", "w13=40002,w2=20006,bias=2", "--grad-dtype", "bfloat16"]
    arguments += ["--main-dtype", "bfloat16", "--ranks", "3", "--check", "-n", "2", "-w", "0"]
    done = bench(tmp_path, "reduce", *arguments, "-J", "o.json")
    document = check_document(done)
    table = done.rows()
    assert list(table) == [*MODES, "gloo", "copy+add"]
    assert {cells[-1] for cells in table.values()} == {"0"}
    for mode in MODES:
        assert float(table[mode][6]) >= 0.999  # no schedule beats its bound
    assert document["settings"]["main_dtype"] == "bfloat16"


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
        else:
            group.slots["w2"][:, 3] = 1
        return work

    reduction.reduce_expert_grads = broken  # type: ignore[assignment]


@pytest.mark.parametrize("fault", ["main", "not cleared", "weight"])
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
