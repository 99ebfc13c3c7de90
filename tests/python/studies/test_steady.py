"""The steady benchmark: what residents save, and that every byte is looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benched import check_csv

from studies.cli import main
from ultraep_comm.group.bank import Bank

SMALL = ["steady", "--ranks", "4", "--experts", "16", "--layers", "2", "--steps", "4"]
SMALL += ["--expert-bytes", "1001", "--slots", "1,2"]
WAYS = ["empty", "residents", "prefetch"]


def _records(arguments: list[str], path: Path, status: int = 0) -> list[dict[str, Any]]:
    assert main([*arguments, "--json", str(path)]) == status
    found: list[dict[str, Any]] = json.loads(path.read_text())["records"]
    return found


def test_residents_move_less_and_balance_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = _records([*SMALL, "--csv", str(tmp_path / "a.csv")], tmp_path / "a.json")
    check_csv(tmp_path / "a.csv", records)
    assert [(r["slots"], r["way"]) for r in records] == [(s, way) for s in (1, 2) for way in WAYS]
    by_way = {(r["slots"], r["way"]): r for r in records}
    for slots in (1, 2):
        empty, kept, fetched = (by_way[slots, way] for way in WAYS)
        assert kept["moves"] < empty["moves"]
        assert empty["prefetched"] == kept["prefetched"] == 0 < fetched["prefetched"]
        assert kept["slot_bytes"] == 2 * empty["slot_bytes"] == 2 * slots * 1001
        for record in (empty, kept, fetched):
            moves = np.array(record["moves_by_step"])
            assert moves.shape == (3, 2)
            assert record["moves"] == pytest.approx(moves.mean())
            assert record["moved_bytes"] == pytest.approx(moves.mean() * 1001)
            assert record["nothing_moves"] == pytest.approx((moves == 0).mean())
            assert record["imbalance"]["worst"] <= max(1.01, empty["imbalance"]["worst"])
            assert record["wrong"] == 0
        assert 0 < fetched["forecast_missed"] < 0.5
    assert "residents" in capsys.readouterr().out


def test_a_trace_is_played(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    counts = generator.integers(0, 300, (3, 2, 4, 16)).astype(np.int32)
    counts[..., 0] += 2000
    np.savez(tmp_path / "trace.npz", counts_src=counts)
    trace = ["--trace", str(tmp_path / "trace.npz")]
    records = _records([*SMALL, *trace, "--slots", "2"], tmp_path / "b.json")
    assert np.array(records[0]["moves_by_step"]).shape == (2, 2)
    assert all(record["wrong"] == 0 for record in records)
    counts[:] = counts[:1]
    np.savez(tmp_path / "trace.npz", counts_src=counts)
    still = _records([*SMALL, *trace, "--slots", "2"], tmp_path / "c.json")
    assert [record["nothing_moves"] for record in still[:2]] == [0.0, 1.0]
    assert still[2]["forecast_missed"] == 0.0
    assert still[2]["moves"] == 0.0


def test_stale_slots_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank that layers share without an invalidation has other layers' experts."""
    monkeypatch.setattr(Bank, "invalidate", lambda bank: None)
    records = _records([*SMALL, "--slots", "2"], tmp_path / "d.json", status=1)
    assert [record["wrong"] > 0 for record in records] == [False, False, True]
