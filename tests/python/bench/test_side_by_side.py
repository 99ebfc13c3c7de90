"""The comparison of two checkouts, with scripted figures: rows and exit statuses."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SPEED = Path(__file__).resolve().parents[3] / "bench" / "speed"
SCRIPT = """
import pathlib, sys
records, log = pathlib.Path(__file__).with_name("records"), pathlib.Path({log!r})
log.open("a").write({side!r})
pathlib.Path(sys.argv[-1]).write_text(records.read_text())
"""


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SPEED))
    return importlib.import_module("side_by_side")


def checkout(root: Path, times: dict[str, float]) -> Path:
    folder = root / "bench" / "anywhere"
    folder.mkdir(parents=True)
    text = SCRIPT.format(log=str(root.parent / "log"), side=root.name[0])
    (folder / "empty_plan.py").write_text(text)
    records = [{"op": op, "ranks": 4, "time_us": {"p50": t}} for op, t in times.items()]
    (folder / "records").write_text(json.dumps({"records": records}))
    return root


@pytest.mark.parametrize(
    ("here", "limit", "status"),
    [(4.1, "5%", 0), (4.1, "2%", 3), (3.0, "0%", 0)],
)
def test_what_has_grown(
    tmp_path: Path,
    side_by_side: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    here: float,
    limit: str,
    status: int,
) -> None:
    before = checkout(tmp_path / "before", {"empty": 4.0, "gather": 60})
    monkeypatch.setattr(
        side_by_side, "ROOT", checkout(tmp_path / "here", {"empty": here, "gather": 50})
    )
    rounds = ["--python", sys.executable, "--only", "empty_plan", "--rounds", "2"]
    assert side_by_side.main([str(before), *rounds, "--max-increase", limit]) == status
    assert f"{here / 4 - 1:+.1%}" in capsys.readouterr().out
    assert (tmp_path / "log").read_text() == "bhhb"


def test_other_figures_are_not_compared(
    tmp_path: Path, side_by_side: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "ROOT", checkout(tmp_path / "here", {"empty": 4}))
    before = checkout(tmp_path / "before", {"gather": 4})
    rounds = ["--python", sys.executable, "--only", "empty_plan", "--rounds", "1"]
    with pytest.raises(SystemExit, match="only one side"):
        side_by_side.main([str(before), *rounds])
