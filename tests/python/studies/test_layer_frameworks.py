"""The layer benchmark with the frameworks' own layers, where they are installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
from benched import bench

FEW = ["--ranks", "2", "--experts", "8", "--topk", "2", "--tokens", "64", "--hidden", "32"]
FEW += ["--inner", "48", "-n", "2", "-w", "1", "--check", "--json", "o.json"]


def _needs(package: str) -> Any:
    found = list(importlib.metadata.distributions(name=package))
    reason = f"{package} is not installed: pip install -c constraints.txt {package}"
    return pytest.mark.skipif(not found, reason=reason)


FRAMEWORKS = [
    pytest.param("transformers", marks=_needs("transformers")),
    pytest.param("megatron", marks=_needs("megatron-core")),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_its_layer_with_and_without_replicas(tmp_path: Path, framework: str) -> None:
    done = bench(tmp_path, "layer", "--framework", framework, "--workload", "W1,W0", *FEW)
    assert done.returncode == 0, done.stderr
    assert f"# layer of {framework}" in done.stdout
    records = done.document()["records"]
    assert [(r["workload"], r["routing"]) for r in records] == [
        (workload, routing)
        for workload in ("W1", "W0")
        for routing in ("plain", "replicated", "balanced")
    ]
    plain, replicated, balanced = records[:3]
    assert plain["imbalance"] > 1.3
    assert balanced["imbalance"] == 1
    assert replicated["imbalance"] < 1.02
    assert replicated["replicas"] >= 1
    for record in records:
        ours = record["routing"] == "replicated"
        assert record["framework"] == framework
        assert record["wrong_values"] == 0
        assert list(record["phases_us"]) == ["begin", "forward", "backward"]
        assert all((us > 0) == ours for us in record["phases_us"].values())
        assert 0 < record["phases_share"] < 1 or not ours
    assert records[4]["replicas"] == 0


def _lose_gradients() -> None:
    """Clear replicas' gradients before they are reduced."""
    from ultraep_comm.nn import hooks

    reduce = hooks.uec.reduce_expert_grads

    def lost(main_grads: Any, plan: Any, *, group: Any, **options: Any) -> Any:
        for grad in group.slot_grads.values():
            grad.zero_()
        return reduce(main_grads, plan, group=group, **options)

    hooks.uec.reduce_expert_grads = lost


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_lost_gradients_are_found(tmp_path: Path, framework: str) -> None:
    done = bench(tmp_path, "layer", "--framework", framework, *FEW, fault=_lose_gradients)
    assert done.returncode == 1, done.stderr
    wrong = {r["routing"]: r["wrong_values"] for r in done.document()["records"]}
    assert wrong["replicated"] > 0
    assert wrong["plain"] == wrong["balanced"] == 0
