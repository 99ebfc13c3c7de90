"""The layer benchmark, with its own layer and with those of the frameworks that are installed."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benched import bench, check_times, settings_of
from tiers import sampled

from studies.layer import native as layer
from studies.layer.data import ROWS, balanced_ids, draw_ids
from studies.layer.native import PHASES
from studies.layer.run import make_record
from ultraep_comm.bench.measure import Measured, Times
from ultraep_comm.nn import hooks

FEW = ["layer", "--experts", "8", "--tokens", "64", "--topk", "2", "-n", "2", "-w", "1"]
FEW += ["--hidden", "32", "--inner", "48"]


def records_of(done: Any) -> dict[str, dict[str, Any]]:
    return {r["routing"]: r for r in done.document()["records"]}


@pytest.mark.parametrize("ranks", sampled([2, 3], lambda ranks: ranks == 3))
def test_all_routings_end_to_end(tmp_path: Path, ranks: int) -> None:
    done = bench(tmp_path, *FEW, "--ranks", str(ranks), "--check", "--json", "o.json")
    assert done.returncode == 0, done.stderr
    records = records_of(done)
    assert list(done.rows()) == list(records) == ["plain", "replicated", "balanced"]
    for record in records.values():
        assert record["gate"] is None
        check_times(record)
        assert (record["over_bound"] is None) == (record["routing"] != "replicated")
        assert record["wrong_values"] == 0
        assert record["tokens_per_s"] == pytest.approx(ranks * 64e6 / record["time_us"]["p50"])
        assert record["assignments_per_s"] == pytest.approx(2 * record["tokens_per_s"])
        step = record["step_ms"]
        assert 0 < step["min"] <= step["mean"] <= record["time_us"]["max"] / 1e3
        assert (record["framework"], record["workload"]) == (None, None)
    assert records["replicated"]["replicas"] >= 1
    assert records["replicated"]["imbalance"] < records["plain"]["imbalance"]
    assert records["balanced"]["share_of_balanced"] == 1
    over_bound = 1 / records["replicated"]["share_of_balanced"]
    assert records["replicated"]["over_bound"] == pytest.approx(over_bound)
    assert [place["rank"] for place in done.document()["topology"]] == [*range(ranks)]


def _spoil_replica(group: Any, filled: torch.Tensor) -> None:
    group.slots["w2"].view(torch.int32)[filled, 5, 7] ^= 1


def _spoil_empty(group: Any, filled: torch.Tensor) -> None:
    group.slots["w2"][~filled, 5, 7] = 1


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
    """Spoil a value after the transfer, or around the reduction, on this rank."""
    replicate, reduce = layer.replicate_experts, layer.reduce_expert_grads

    def at(now: str, plan: Any, group: Any) -> None:
        if now == when:
            spoil(group, plan.slot_expert[group.rank] >= 0)

    def broken_replicate(weights: Any, plan: Any, *, group: Any, async_op: bool) -> Any:
        work = replicate(weights, plan, group=group, async_op=async_op)
        assert work is not None
        work.wait()
        at("replicated", plan, group)
        return work

    def broken_reduce(grads: Any, plan: Any, *, group: Any) -> None:
        at("reducing", plan, group)
        reduce(grads, plan, group=group)
        at("reduced", plan, group)

    layer.replicate_experts = broken_replicate  # type: ignore[assignment]
    layer.reduce_expert_grads = broken_reduce  # type: ignore[assignment]


@pytest.mark.parametrize("fault", sampled(FAULTS, "a gradient is lost".__eq__))
def test_what_goes_wrong_is_found(tmp_path: Path, fault: str) -> None:
    """Negative controls."""
    broken = functools.partial(break_layer, *FAULTS[fault])
    done = bench(tmp_path, *FEW, "--ranks", "2", "--json", "o.json", fault=broken)
    assert done.returncode == 1, done.stderr
    assert records_of(done)["replicated"]["wrong_values"] >= 1


def test_ids_are_skewed_or_even() -> None:
    settings = settings_of(*FEW, "--ranks", "4", "--imbalance", "3", "--tokens", "4096")
    (routing,) = settings.routings
    drawn = np.concatenate([draw_ids(settings, routing, 0, r).numpy().ravel() for r in range(4)])
    by_rank = np.bincount(drawn // 2, minlength=4)
    assert by_rank.max() / by_rank.mean() == pytest.approx(3, rel=0.05)
    assert (draw_ids(settings, routing, 0, 1) != draw_ids(settings, routing, 1, 1)).any()
    even = np.concatenate([balanced_ids(settings, rank).numpy() for rank in range(4)])
    assert np.bincount(even.ravel()).tolist() == [4 * 4096 * 2 // 8] * 8
    assert (even[:, 0] != even[:, 1]).all()


def test_shares_are_of_the_same_iteration() -> None:
    settings = settings_of(*FEW)

    def row(*times_us: float) -> tuple[Measured, Any]:
        times = np.array(times_us)
        phases = [1000, 2000, 3000, 4000]  # ns
        ranks = np.array([[[*phases, int(us), 10, 0] for us in times_us]])
        found = Times(iterations=times, ranks=times)
        return Measured(mode="replicated", chosen="", times=found, wrong=0), ranks

    slow_second, plain = row(20, 200, 20), row(40, 100, 80)
    record = make_record(
        settings, settings.routings[0], PHASES, slow_second, plain, row(10, 100, 10)
    )
    assert record["speedup"] == 2
    assert record["share_of_balanced"] == record["compute_share_of_balanced"] == 0.5
    assert record["over_bound"] == 2
    assert record["phases_us"] == {"plan": 1, "replicate": 2, "reroute": 3, "reduce": 4}
    assert record["phases_share"] == 0.5
    assert record["imbalance"] == 1


def needs(package: str) -> Any:
    found = list(importlib.metadata.distributions(name=package))
    reason = f"{package} is not installed: pip install -c constraints.txt {package}"
    return pytest.mark.skipif(not found, reason=reason)


FRAMEWORKS = [
    pytest.param("transformers", marks=needs("transformers")),
    pytest.param("megatron", marks=needs("megatron-core")),
]
CHECKED = [*FEW, "--ranks", "2", "--workload", "W1,W0", "--check", "--json", "o.json"]


@pytest.mark.parametrize("framework", ["", *FRAMEWORKS])
def test_public_workloads(tmp_path: Path, framework: str) -> None:
    """Their steps are the iterations', alike on all ranks; the owners' imbalance is measured."""
    whose = ["--framework", framework] if framework else []
    done = bench(tmp_path, *CHECKED, *whose)
    assert done.returncode == 0, done.stderr
    assert (f"# layer of {framework}" in done.stdout) == bool(framework)
    records = done.document()["records"]
    found = [(r["workload"], r["routing"]) for r in records]
    assert found == [(workload, routing) for workload in ("W1", "W0") for routing in ROWS]
    settings = settings_of(*CHECKED)
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
    phases = ["begin", "forward", "backward"] if framework else list(PHASES)
    for record in records:
        ours = record["routing"] == "replicated"
        assert record["framework"] == (framework or None)
        assert record["wrong_values"] == 0
        if ours:
            assert list(record["phases_us"]) == phases
            assert all(us > 0 for us in record["phases_us"].values())
            assert 0 < record["phases_share"] < 1
        else:
            assert record["phases_us"] is None
            assert record["phases_share"] is None


def clear_gradients() -> None:
    """Clear replicas' gradients before they are reduced."""
    reduce = hooks.uec.reduce_expert_grads

    def lost(main_grads: Any, plan: Any, *, group: Any, **options: Any) -> Any:
        for grad in group.slot_grads.values():
            grad.zero_()
        return reduce(main_grads, plan, group=group, **options)

    hooks.uec.reduce_expert_grads = lost


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_lost_gradients_are_found(tmp_path: Path, framework: str) -> None:
    done = bench(tmp_path, *CHECKED, "--framework", framework, fault=clear_gradients)
    assert done.returncode == 1, done.stderr
    wrong = [record["wrong_values"] > 0 for record in done.document()["records"]]
    assert wrong[:3] == [False, True, False]
