"""The comparison of two checkouts, with scripted figures: rows and exit statuses."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SPEED = Path(__file__).resolve().parents[3] / "bench" / "speed"
SCRIPT = """
import pathlib, sys
records, log = pathlib.Path(__file__).with_name("records"), pathlib.Path({log!r})
log.open("a").write({side!r})
pathlib.Path(sys.argv[-1]).write_text(records.read_text())
"""


Compare = Callable[..., int]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Compare checkouts with these times: of the other one, and here."""
    monkeypatch.syspath_prepend(str(SPEED))
    side_by_side = importlib.import_module("side_by_side")

    def checkout(name: str, times: dict[str, float]) -> Path:
        folder = tmp_path / name / "bench" / "anywhere"
        folder.mkdir(parents=True)
        text = SCRIPT.format(log=str(tmp_path / "log"), side=name[0])
        (folder / "empty_plan.py").write_text(text)
        records = [{"op": op, "ranks": 4, "time_us": {"p50": t}} for op, t in times.items()]
        (folder / "records").write_text(json.dumps({"records": records}))
        return tmp_path / name

    def run(before: dict[str, float], here: dict[str, float], *arguments: str) -> int:
        monkeypatch.setattr(side_by_side, "ROOT", checkout("here", here))
        few = ["--python", sys.executable, "--only", "empty_plan", *arguments]
        status: int = side_by_side.main([str(checkout("before", before)), *few])
        return status

    return run


@pytest.mark.parametrize(
    ("here", "limit", "status"), [(4.1, "5%", 0), (4.1, "2%", 3), (3.0, "0%", 0)]
)
def test_what_has_grown(
    tmp_path: Path,
    compare: Compare,
    capsys: pytest.CaptureFixture[str],
    here: float,
    limit: str,
    status: int,
) -> None:
    times = {"empty": 4.0, "gather": 60}, {"empty": here, "gather": 50}
    assert compare(*times, "--rounds", "2", "--max-increase", limit) == status
    assert f"{here / 4 - 1:+.1%}" in capsys.readouterr().out
    assert (tmp_path / "log").read_text() == "bhhb"
