"""Every planner on the same loads."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benched import check_csv
from benched import table_cells as cells

from studies.against.run import (
    EXPERT_BYTES,
    transfer_times_us,
)
from studies.cli import main
from studies.options import PEER_NAMES
from studies.peers.relay import predict_relay
from ultraep_comm import Plan
from ultraep_comm.model import predict

SMALL = ["against", "--sizes", "8/32/2", "--tokens", "512", "--topk", "4", "--seeds", "2"]
PLANNERS = ("ours", "ours exact", *PEER_NAMES)


def run(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    path = tmp_path / "o.json"
    assert main([*SMALL, "--json", str(path), "--csv", str(tmp_path / "o.csv"), *arguments]) == 0
    records: list[dict[str, Any]] = json.loads(path.read_text())["records"]
    check_csv(tmp_path / "o.csv", records)
    return records


def test_all_planners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = run(tmp_path, "--families", "zipf1.0,W1")
    printed = capsys.readouterr().out
    assert printed.count("our reading of") == len(PEER_NAMES) - 1
    table = cells(printed.replace("ours exact", "ours-exact"))
    assert [(r["family"], r["planner"]) for r in records] == [
        (family, planner) for family in ("zipf1.0", "W1") for planner in PLANNERS
    ]
    for row, record in zip(table, records, strict=True):
        assert row[4] == record["planner"].replace(" ", "-")
        assert float(row[5]) == pytest.approx(record["imbalance"]["mean"], abs=6e-5)
        assert float(row[15]) == pytest.approx(record["time_us"]["mean"], abs=0.6)
        assert record["op"] == "plan_against"
        assert record["vectors"] == 2
        assert record["transfer_bound"] >= max(record["max_exports"], record["max_imports"]) - 1e-9
        assert record["max_copies"] >= record["max_exports"]
        assert record["time_us"]["mean"] >= record["bound_us"] * 0.9  # links carry more alone
        planner = record["planner"]
        assert (record["planned_in"] == "C++") is planner.startswith("ours")
        if planner in ("ours exact", "moonep"):
            assert record["exact"] == 2
            assert record["imbalance"]["worst"] <= 1.0001
        if planner == "none":
            assert record["replicas"] == record["time_us"]["worst"] == 0
            assert record["imbalance"]["mean"] == pytest.approx(record["imbalance_before"])
    transfers = {r["planner"]: r["transfer"] for r in records}
    assert transfers["ours"] == transfers["ours exact"] == "hubs"
    assert transfers["ultraep"] == "relay"
    assert {transfers[n] for n in PEER_NAMES} == {"none", "relay", "direct"}


def test_a_planner_that_does_not_apply_has_no_row(tmp_path: Path) -> None:
    records = run(tmp_path, "--sizes", "4/12/1", "--families", "zipf1.0")
    planners = {r["planner"] for r in records}
    assert "lplb" not in planners  # no cube of 8 ranks
    assert "eplb" in planners


def test_moonep_cases(tmp_path: Path) -> None:
    sizes = ["--sizes", "8/24/2,8/32/2,8/8/2,8/16/2"]
    records = run(tmp_path, "--peers", "moonep", "--families", "moonep", *sizes)
    assert [r["vectors"] for r in records] == [n for n in (3, 4, 1, 1) for _ in range(3)]
    exact = [r for r in records if r["planner"] in ("ours exact", "moonep")]
    assert len(exact) == 8
    assert all(r["exact"] == r["vectors"] for r in exact)


def four_copies() -> Plan:
    slots = torch.full((8, 1), -1)
    slots[1:5] = 0
    quota = torch.where(slots == 0, 20, 0)
    home_quota = torch.tensor([20, 0, 0, 0, 0, 20, 20, 21])
    return Plan.from_slots(slots, num_experts=8, slot_quota=quota, home_quota=home_quota)


def test_each_system_transfers_in_its_own_way() -> None:
    plan = four_copies()
    direct, hubs = (transfer_times_us(plan, way)[0] for way in ("direct", "hubs"))
    relay, bound = transfer_times_us(plan, "relay")
    assert direct == predict(plan, EXPERT_BYTES, "nvl72", "direct").time_us
    assert hubs == predict(plan, EXPERT_BYTES, "nvl72", "auto").time_us
    assert relay == predict_relay(plan, EXPERT_BYTES, "nvl72").time_us
    assert bound == pytest.approx(EXPERT_BYTES / 710e3)  # one export
    assert hubs < relay < direct
    assert direct > 3.5 * bound
    assert transfer_times_us(plan, "none") == (0.0, 0.0)


def test_certificates_of_every_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = run(tmp_path, "--peers", "moonep,none", "--certify", "--families", "zipf1.0")
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("# 8/32/2 zipf1.0 ")]
    assert len(lines) == 4 * 2
    for record in records:
        certified = record["certified"]
        assert certified["exact"] == record["exact"]
        assert len(certified["plans"]) == 2
        for i, text in enumerate(certified["plans"]):
            assert f"# 8/32/2 zipf1.0 {i} {record['planner']}: {text}" in lines


def test_without_scipy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "scipy" else find(name)
    )
    assert main(SMALL) == 2
    assert "pip install 'ultraep_comm[bench]'" in capsys.readouterr().err
