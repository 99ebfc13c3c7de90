"""The picture of planners: its points are the file's records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from studies.cli import main
from studies.draw.frontier import Point, draw_frontier, frontier, load_points


def record(planner: str, load: str, imbalance: float, us: float, ranks: int = 64) -> dict[str, Any]:
    """A record as ``against`` writes it."""
    figures = {"imbalance": {"mean": imbalance}, "time_us": {"mean": us}}
    size = {"ranks": ranks, "experts": 256, "slots": 2}
    return {"op": "plan_against", **size, "family": load, "planner": planner, **figures}


RECORDS = [
    record("ours", "zipf", 1.01, 120),
    record("ours exact", "zipf", 1.0, 130),
    record("moonep", "zipf", 1.0, 600),
    record("none", "zipf", 7.5, 0),
    record("ours", "W5", 1.02, 160),
    record("moonep", "W5", 1.0, 260),
    record("ours", "zipf", 1.0, 70, ranks=8),
    record("another", "zipf", 1.3, 90, ranks=8),
]


def points_of(*pairs: tuple[float, float]) -> list[Point]:
    return [
        Point(panel="", load="", planner=str(i), imbalance=y, time_us=x)
        for i, (x, y) in enumerate(pairs)
    ]


def test_the_frontier_is_what_nothing_beats() -> None:
    points = points_of((0, 7), (120, 1.01), (600, 1.0), (130, 1.0), (130, 2.0), (119, 7), (120, 3))
    assert [p.planner for p in frontier(points)] == ["0", "1", "3"]
    assert [p.planner for p in frontier(points_of((6, 1), (6, 1), (0, 1)))] == ["2"]


def draw(tmp_path: Path) -> Any:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.json"
    path.write_text(json.dumps(RECORDS))
    figure = draw_frontier(load_points(path), source="a.json")
    figure.draw_without_rendering()
    return figure


def test_a_panel_for_each_size_and_a_marker_for_each_planner(tmp_path: Path) -> None:
    figure = draw(tmp_path)
    large, small = figure.axes
    assert [axis.get_title(loc="left") for axis in (large, small)] == [
        "64 ranks, 256 experts, 2 slots",
        "8 ranks, 256 experts, 2 slots",
    ]
    lines = {line.get_gid(): line for line in large.lines if line.get_gid()}
    assert lines["ours"].get_xdata().tolist() == [120, 160]
    assert lines["ours"].get_ydata().tolist() == pytest.approx([0.01, 0.02])
    assert lines["moonep"].get_ydata().tolist() == [0, 0]
    assert list(lines["frontier zipf"].get_xdata()) == [0, 120, 130]
    assert list(lines["frontier W5"].get_xdata()) == [160, 260]
    assert "another" in {line.get_gid() for line in small.lines}
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["ours", "ours exact", "moonep", "none", "another"]
    looks = {(line.get_color(), line.get_marker()) for line in legend.get_lines()}
    assert len(looks) == len(texts)
    labels = [t.get_text() for t in large.get_yticklabels()]
    assert labels[0] == "1 (exact)"
    assert "1.01" in labels
    assert large.get_ylim()[1] > 6.5


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"records": RECORDS}))
    outs = [tmp_path / "a.png", tmp_path / "b.png"]
    for out in outs:
        assert main(["draw", str(path), "--out", str(out)]) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()


BAD = {
    "{": "is not a JSON file",
    "[]": "has no records",
    json.dumps([RECORDS[0], 3]): "record 1 has op 3; expected 'plan_against'",
    json.dumps([RECORDS[0], {"op": "plan"}]): "record 1 has op 'plan'; expected 'plan_against'",
    '[{"op": "plan_against", "ranks": 64}]': "KeyError('experts') is wrong or missing",
    json.dumps([RECORDS[0], {**RECORDS[0], "imbalance": 3}]): "record 1 is not of against",
    json.dumps([record("ours", "x", 0.5, 1)]): "has imbalance 0.5",
    json.dumps([record("ours", "x", 1, -1)]): "time_us -1.0; expected at least 1 and 0",
    json.dumps([record("ours", "x", float("nan"), 1)]): "has imbalance nan",
}


@pytest.mark.parametrize("content", BAD)
def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert main(["draw", str(path), "--out", str(tmp_path / "o.png")]) == 2
    error = capsys.readouterr().err
    assert BAD[content] in error
    assert str(path) in error
    assert not (tmp_path / "o.png").exists()
