"""The layer benchmark, from the command line to its table, its records and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_bench import rows, run
from test_bench_gate import check_csv

from ultraep_comm.bench.cli import _parser, main
from ultraep_comm.bench.layer_report import LayerRow
from ultraep_comm.bench.layer_settings import LayerSettings, make_layer_settings

FEW = ["--experts", "8", "--tokens", "64", "--topk", "2", "--hidden", "32", "--inner", "48"]
FEW += ["-n", "2", "-w", "1"]
RECORD_KEYS = {
    *("op", "routing", "ranks", "experts", "slots", "time_us", "rank_time_us", "tokens_per_s"),
    *("share_of_balanced", "over_bound", "compute_us", "compute_share_of_balanced", "imbalance"),
    *("replicas", "phases_us", "phases_share", "wrong_values", "gate"),
}


def records_of(path: Path) -> dict[str, dict[str, Any]]:
    return {r["routing"]: r for r in json.loads(path.read_text())["records"]}


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_routings_end_to_end(tmp_path: Path, ranks: int) -> None:
    arguments = ["layer", *FEW, "--ranks", str(ranks), "--check", "--json", "o.json"]
    done = run("-m", "ultraep_comm.bench", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    routings = ["plain", "replicated", "balanced"]
    assert list(rows(done.stdout)) == routings
    records = records_of(tmp_path / "o.json")
    assert list(records) == routings
    for record in records.values():
        assert set(record) == RECORD_KEYS
        assert record["gate"] is None
        times, own = record["time_us"], record["rank_time_us"]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
        assert 0 < own["min"] <= own["avg"] <= own["max"] <= times["max"]
        assert (record["over_bound"] is None) == (record["routing"] != "replicated")
        assert record["wrong_values"] == 0
        assert record["tokens_per_s"] == pytest.approx(ranks * 64e6 / record["time_us"]["p50"])
    assert records["replicated"]["replicas"] >= 1
    assert records["replicated"]["imbalance"] < records["plain"]["imbalance"]
    assert all(us > 0 for us in records["replicated"]["phases_us"].values())
    assert not any(records["plain"]["phases_us"].values())
    assert records["balanced"]["share_of_balanced"] == 1


@pytest.mark.parametrize(("limit", "status"), [("1e9", 0), ("1e-9", 3)])
def test_a_gate(tmp_path: Path, limit: str, status: int) -> None:
    """The step with replicas is held against the balanced one, and no other."""
    arguments = ["layer", *FEW, "--max-over-bound", limit, "--json", "o.json", "--csv", "o.csv"]
    done = run("-m", "ultraep_comm.bench", *arguments, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert done.stdout.count("# topology: 2 ranks on 1 host, 1 domain; engine host") == 1
    document = json.loads((tmp_path / "o.json").read_text())
    assert [place["rank"] for place in document["topology"]] == [0, 1]
    assert document["gate"]["met"] is (status == 0)
    verdict = "bound" if status else "met"
    assert [r["gate"] for r in document["records"]] == [None, verdict, None]
    replicated = document["records"][1]
    assert replicated["over_bound"] == pytest.approx(1 / replicated["share_of_balanced"])
    assert ("gate not met by 1 of 1" in done.stderr) is (status == 3)
    check_csv(tmp_path / "o.csv", document["records"])


BROKEN = """
import sys

from ultraep_comm.bench import layer

whole = {{name: getattr(layer, name) for name in ("replicate_experts", "reduce_expert_grads")}}


def replicate_experts(weights, plan, *, group, async_op):
    work = whole["replicate_experts"](weights, plan, group=group, async_op=True)
    work.wait()
    filled = plan.slot_expert[group.rank] >= 0
    {replicated}
    return work


def reduce_expert_grads(grads, plan, *, group):
    filled = plan.slot_expert[group.rank] >= 0
    {reducing}
    whole["reduce_expert_grads"](grads, plan, group=group)
    {reduced}


layer.replicate_experts = replicate_experts
layer.reduce_expert_grads = reduce_expert_grads

if __name__ == "__main__":
    from ultraep_comm.bench.cli import main

    sys.exit(main(["layer", *sys.argv[1:], "--ranks", "2", "--json", "o.json"]))
"""
FAULTS = {
    "a bit of a replica": {
        "replicated": "group.slots['w2'].view(torch.int32)[filled, 5, 7] ^= 1",
    },
    "an empty slot": {"replicated": "group.slots['w2'][~filled, 5, 7] = 1"},
    "a gradient is lost": {"reducing": "group.slot_grads['w13'][filled] = 0"},
    "not cleared": {"reduced": "group.slot_grads['w13'][filled, 1, 2] = 1e-9"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_is_found(tmp_path: Path, fault: str) -> None:
    """Negative control: something is wrong after the transfer, or around the reduction."""
    parts = dict.fromkeys(("replicated", "reducing", "reduced"), "pass")
    text = "import torch\n" + BROKEN.format(**{**parts, **FAULTS[fault]})
    (tmp_path / "broken.py").write_text(text)
    done = run("broken.py", *FEW, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    records = records_of(tmp_path / "o.json")
    assert records["replicated"]["wrong_values"] >= 1


def settings_of(*arguments: str) -> LayerSettings:
    return make_layer_settings(_parser().parse_args(["layer", *FEW, *arguments]))


def test_ids_are_skewed_or_even() -> None:
    settings = settings_of("--ranks", "4", "--imbalance", "3", "--tokens", "4096")
    drawn = np.concatenate([settings.draw_ids(0, rank).numpy().ravel() for rank in range(4)])
    by_rank = np.bincount(drawn // 2, minlength=4)
    assert by_rank.max() / by_rank.mean() == pytest.approx(3, rel=0.05)
    assert (settings.draw_ids(0, 1) != settings.draw_ids(1, 1)).any()
    even = np.concatenate([settings.balanced_ids(rank).numpy() for rank in range(4)])
    assert np.bincount(even.ravel()).tolist() == [4 * 4096 * 2 // 8] * 8
    assert (even[:, 0] != even[:, 1]).all()


def test_shares_are_of_the_same_iteration() -> None:
    def row(*times: int) -> LayerRow:
        return LayerRow(
            routing="plain",
            times=np.array(times),
            rank_times=np.array(times, np.float64),
            phases=np.array([[1000, 2000, 3000, 4000]] * len(times)),
            compute=np.array(times),
            imbalance=np.ones(len(times)),
            replicas=np.zeros(len(times), np.int64),
            wrong_values=0,
        )

    slow_second = row(20_000, 200_000, 20_000)
    assert slow_second.share_of(row(10_000, 100_000, 10_000)) == 0.5
    assert slow_second.phases_us == {"plan": 1, "replicate": 2, "reroute": 3, "reduce": 4}
    assert slow_second.phases_share == 0.5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "9"], "at least one for each of 9 ranks"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--imbalance", "5"], "expected 1 to 2"),
        (["--max-over-bound", "-1"], "--max-over-bound is -1.0"),
        (["--json", "none/o.json"], "no such folder"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert main(["layer", *FEW, *arguments]) == 2
    assert text in capsys.readouterr().err
