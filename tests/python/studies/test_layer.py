"""The layer study."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benched import bench, check_times, settings_of
from tiers import sampled

from studies.layer.data import ROWS, draw_ids
from studies.layer.run import make_record
from studies.watch import PHASES
from ultraep_comm.bench.measure import Measured, Times
from ultraep_comm.nn import hooks

FEW = ["layer", "--experts", "8", "--tokens", "64", "--topk", "2", "-n", "2", "-w", "1"]
FEW += ["--hidden", "32", "--inner", "48"]


def records_of(done: Any) -> dict[str, dict[str, Any]]:
    return {r["routing"]: r for r in done.document()["records"]}


def test_all_routings_end_to_end(tmp_path: Path) -> None:
    done = bench(tmp_path, *FEW, "--ranks", "3", "--check", "--json", "o.json")
    assert done.returncode == 0, done.stderr
    records = records_of(done)
    assert list(done.rows()) == list(records) == ["plain", "replicated", "balanced"]
    for record in records.values():
        assert record["gate"] is None
        check_times(record)
        assert (record["over_bound"] is None) == (record["routing"] != "replicated")
        assert record["wrong_values"] == 0
        assert record["workload"] is None
    assert records["replicated"]["replicas"] >= 1
    assert records["replicated"]["imbalance"] < records["plain"]["imbalance"]
    assert records["balanced"]["share_of_balanced"] == 1
    over_bound = 1 / records["replicated"]["share_of_balanced"]
    assert records["replicated"]["over_bound"] == pytest.approx(over_bound)
    assert [place["rank"] for place in done.document()["topology"]] == [0, 1, 2]


def _spoil_replica(group: Any, filled: torch.Tensor) -> None:
    group.slots["w2"].data.view(torch.int32)[filled, 5, 7] ^= 1


def _spoil_empty(group: Any, filled: torch.Tensor) -> None:
    group.slots["w2"].data[~filled, 5, 7] = 1


def _lose_gradient(group: Any, filled: torch.Tensor) -> None:
    group.slot_grads["w13"][filled] = 0


def _leave_gradient(group: Any, filled: torch.Tensor) -> None:
    group.slot_grads["w13"][filled, 1, 2] = 1e-9


Spoil = Callable[[Any, torch.Tensor], None]
FAULTS: dict[str, tuple[str, Spoil]] = {
    "a bit of a replica": ("replicated", _spoil_replica),
    "an empty slot": ("replicated", _spoil_empty),
    "a gradient is lost": ("reducing", _lose_gradient),
    "not cleared": ("reduced", _leave_gradient),
}


def break_layer(when: str, spoil: Spoil) -> None:
    """Spoil a value after a transfer, or around the reduction, on this rank."""
    replicate, reduce = hooks.uec.replicate_experts, hooks.uec.reduce_expert_grads

    def at(now: str, handle: Any, group: Any) -> None:
        if now == when:
            spoil(group, handle.stored.slot_expert[group.rank] >= 0)

    def broken_replicate(weights: Any, plan: Any, *, group: Any, **options: Any) -> Any:
        work = replicate(weights, plan, group=group, **options)
        assert work is not None
        work.wait()
        at("replicated", plan, group)
        return work

    def broken_reduce(grads: Any, plan: Any, *, group: Any, **options: Any) -> Any:
        at("reducing", plan, group)
        work = reduce(grads, plan, group=group, **options)
        assert work is not None
        work.wait()
        at("reduced", plan, group)
        return work

    hooks.uec.replicate_experts = broken_replicate  # type: ignore[assignment]
    hooks.uec.reduce_expert_grads = broken_reduce  # type: ignore[assignment]


@pytest.mark.parametrize("fault", sampled(FAULTS, "a gradient is lost".__eq__))
def test_what_goes_wrong_is_found(tmp_path: Path, fault: str) -> None:
    """Negative controls."""
    broken = functools.partial(break_layer, *FAULTS[fault])
    done = bench(tmp_path, *FEW, "--ranks", "2", "--json", "o.json", fault=broken)
    assert done.returncode == 1, done.stderr
    assert records_of(done)["replicated"]["wrong_values"] >= 1


def test_shares_are_of_the_same_iteration() -> None:
    settings = settings_of(*FEW)

    def row(*times_us: float) -> tuple[Measured, Any]:
        times = np.array(times_us)
        phases = [1000, 2000, 3000]  # ns
        ranks = np.array([[[*phases, int(us), 10, 0] for us in times_us]])
        found = Times(iterations=times, ranks=times)
        return Measured(mode="replicated", chosen="", times=found, wrong=0), ranks

    slow_second, plain = row(20, 200, 20), row(40, 100, 80)
    record = make_record(settings, settings.routings[0], slow_second, plain, row(10, 100, 10))
    assert record["speedup"] == 2
    assert record["share_of_balanced"] == record["compute_share_of_balanced"] == 0.5
    assert record["over_bound"] == 2
    assert record["phases_us"] == {"begin": 1, "forward": 2, "backward": 3}
    assert record["phases_share"] == 0.3
    assert record["imbalance"] == 1


def test_public_workloads(tmp_path: Path) -> None:
    """Their steps are the iterations', alike on all ranks; the owners' imbalance is measured."""
    chosen = [*FEW, "--ranks", "2", "--workload", "W1,W0", "--check", "--json", "o.json"]
    done = bench(tmp_path, *chosen)
    assert done.returncode == 0, done.stderr
    records = done.document()["records"]
    found = [(r["workload"], r["routing"]) for r in records]
    assert found == [(workload, routing) for workload in ("W1", "W0") for routing in ROWS]
    settings = settings_of(*chosen)
    for routing, plain in zip(settings.routings, records[::3], strict=True):
        name = {"W1": "W1_hot_expert_set", "W0": "W0_balanced"}[routing.workload]
        assert f"# routing: {name} of seed 1234, imbalance {routing.imbalance:.3f}\n" in done.stdout
        drawn = [draw_ids(settings, routing, step, 0) for step in (1, 2)]  # behind one warm-up
        assert torch.equal(drawn[0], draw_ids(settings, routing, 1, 1))
        owners = [np.bincount(ids.numpy().ravel() // 4, minlength=2) for ids in drawn]
        expected = np.median([counts.max() / counts.mean() for counts in owners])
        assert plain["imbalance"] == pytest.approx(expected)
        assert routing.imbalance == pytest.approx(expected, rel=0.1)
    plain, replicated, balanced = records[:3]
    assert plain["imbalance"] > 1.3
    assert replicated["imbalance"] < 1.02
    assert balanced["imbalance"] == 1
    assert replicated["replicas"] >= 1
    assert records[4]["replicas"] == 0
    for record in records:
        ours = record["routing"] == "replicated"
        assert record["wrong_values"] == 0
        if ours:
            assert list(record["phases_us"]) == list(PHASES)
            assert all(us > 0 for us in record["phases_us"].values())
            assert 0 < record["phases_share"] < 1
        else:
            assert record["phases_us"] is None
            assert record["phases_share"] is None
