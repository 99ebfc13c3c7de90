"""The pictures of studies: what they show is the file's records."""

from __future__ import annotations

import json
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from studies.cli import main
from studies.draw import run
from studies.draw.paths import PARTS
from ultraep_comm.viz import style
from ultraep_comm.viz.style import save

EXAMPLE = Path(__file__).parent / "data" / "over_bound.json"
Draw = Callable[..., Any]


@pytest.fixture
def draw(tmp_path: Path) -> Draw:
    """Return the figure that the command saves for such records."""
    pytest.importorskip("matplotlib")

    def figure_of(records: Any, name: str = "a.json") -> Any:
        path, out = tmp_path / name, tmp_path / "a.png"
        path.write_text(json.dumps(records))
        with mock.patch.object(run, "save", wraps=save) as saved:
            assert main(["draw", str(path), "--out", str(out)]) == 0
        assert out.read_bytes()[:4] == b"\x89PNG"
        return saved.call_args.args[0]

    return figure_of


def test_a_picture_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "a.png"
    with mock.patch.object(style, "write_whole", side_effect=OSError(ENOSPC, "No space left")):
        assert main(["draw", str(EXAMPLE), "--out", str(out)]) == 2
    said = f"error: {out} cannot be written: No space left; choose another file\n"
    assert capsys.readouterr().err == said


def lines_of(axis: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line.get_gid(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axis.lines
        if line.get_gid() is not None
    }


def transfer(size: Any, mode: Any, fan_out: Any, over_bound: Any) -> dict[str, Any]:
    return {"size": size, "mode": mode, "fan_out": fan_out, "over_bound": over_bound}


def model(experts: int, load: str, **over_bound: tuple[float, float]) -> dict[str, Any]:
    """A record as the model's benchmark writes it."""
    ratios = {way: {"mean": mean, "worst": worst} for way, (mean, worst) in over_bound.items()}
    figures = {"ranks": 64, "experts": experts, "slots": 2, "load": load, "over_bound": ratios}
    return {"op": "model", **figures, "bound_us": 53.2}


def test_lines_are_medians_of_records(draw: Draw) -> None:
    small, large = draw(json.loads(EXAMPLE.read_text())).axes
    assert lines_of(small) == {"push": ([1, 4], [1.5, 1.3]), "direct": ([1, 4], [1.1, 3.9])}
    assert lines_of(large) == {"push": ([1, 4], [1.03, 1.04]), "other": ([16], [2.0])}
    (band,) = small.collections  # of the two results for push with 4
    assert band.get_datalim(small.transData).y1 == 1.5
    assert small.texts[0].get_text() == "experts of 4 MiB"


def test_results_of_the_model(draw: Draw) -> None:
    records = [
        model(256, "zipf1.0", push=(1.05, 1.06), relay=(2.0, 2.5)),
        model(256, "lognormal", push=(1.04, 1.09), relay=(1.5, 3.0)),
        model(128, "zipf1.0", push=(1.07, 1.07), relay=(1.9, 1.9)),
    ]
    one, two = draw({"records": records, "claims": []}).axes
    assert two.texts[0].get_text() == "64 ranks, 128 experts, 2 slots"
    assert lines_of(one) == {"push": ([0, 1], [1.05, 1.04]), "relay": ([0, 1], [2.0, 1.5])}
    assert [band.get_datalim(one.transData).y1 for band in one.collections] == [1.09, 3.0]
    assert [t.get_text() for t in one.get_xticklabels()] == ["zipf1.0", "lognormal"]


def test_modes_of_any_name_are_in_the_legend_and_look_different(draw: Draw) -> None:
    modes = ["push", "", "_hidden", "$x$", "a", "b", "c"]
    (axis,) = draw([transfer(1, mode, fan, 1.2) for mode in modes for fan in (1, 2)]).axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == modes
    lines = [line for line in axis.lines if line.get_gid() is not None]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(modes)


def planned(
    planner: str, load: str, imbalance: float, us: float, ranks: int = 64
) -> dict[str, Any]:
    """A record as ``against`` writes it."""
    figures = {"imbalance": {"mean": imbalance}, "time_us": {"mean": us}}
    size = {"ranks": ranks, "experts": 256, "slots": 2}
    return {"op": "plan_against", **size, "family": load, "planner": planner, **figures}


def test_a_panel_for_each_size_and_a_marker_for_each_planner(draw: Draw) -> None:
    records = [
        planned("ours", "zipf", 1.01, 120),
        planned("ours exact", "zipf", 1.0, 130),
        planned("llep", "zipf", 2.0, 130),  # beaten, like the next one
        planned("eplb", "zipf", 3.0, 120),
        planned("moonep", "zipf", 1.0, 600),
        planned("none", "zipf", 7.5, 0),
        planned("ours", "W5", 1.02, 160),
        planned("moonep", "W5", 1.0, 260),
        planned("another", "zipf", 1.3, 90, ranks=8),
    ]
    figure = draw(records)
    large, small = figure.axes
    lines = lines_of(large)
    assert lines["ours"] == ([120, 160], pytest.approx([0.01, 0.02]))  # above 1
    assert lines["moonep"] == ([600, 260], [0, 0])
    assert lines["frontier zipf"] == ([0, 120, 130], pytest.approx([6.5, 0.01, 0]))
    assert lines["frontier W5"][0] == [160, 260]
    assert set(lines_of(small)) == {"another", "frontier zipf"}
    legend = figure.legends[0].get_lines()
    assert len({(line.get_color(), line.get_marker()) for line in legend}) == len(legend) == 7
    labels = [t.get_text() for t in large.get_yticklabels()]
    assert labels[0] == "1 (exact)"
    assert "1.01" in labels
    assert large.get_ylim()[1] > 6.5


def steady(way: str, slots: int, moves: Any, **more: Any) -> dict[str, Any]:
    """A record as ``steady`` writes it."""
    figures = {"imbalance": {"mean": 1.005, "worst": 1.01}, "moves_by_step": moves}
    return {"op": "steady", "way": way, "slots": slots, **figures, **more}


def test_a_square_for_each_layer_and_step(draw: Draw) -> None:
    records = [
        steady("empty", 1, [[5, 6, 7], [5, 5, 5]]),
        steady("residents", 1, [[0, 1, 2], [0, 0, 3]]),
        steady("empty", 2, [[5, 6, 7], [5, 5, 5]]),
    ]
    axes = draw(records).axes
    images = {image.get_gid(): image for axis in axes for image in axis.get_images()}
    for record in records:
        image = images[f"{record['way']} {record['slots']}"]
        assert np.array(image.get_array()).T.tolist() == record["moves_by_step"]
        assert image.get_clim() == (0, 7)  # one scale for all
    titles = [axis.get_title(loc="left") for axis in axes]
    assert "residents, 1 slot: 1.00 moves, 50% nothing" in titles


def path_record(**changes: Any) -> dict[str, Any]:
    """A record as ``bench/recipes/critical_path.py`` writes it."""
    us = {"gather": 1.0, "plan": 2.0, "schedule": 3.0, "transfer": 4.0}
    record = {"op": "critical_path", "busiest": 1, "machine": "m", "mode": "push"}
    return record | {"us": us, "total_us": 10.0} | changes


def test_the_parts_of_critical_paths(draw: Draw) -> None:
    records = [path_record(), path_record(mode="pull")]
    (axis,) = draw(records).axes
    drawn = {c.get_gid(): [path.vertices for path in c.get_paths()] for c in axis.collections}
    for part, begin, us in zip(PARTS, (0, 1, 3, 6), (1, 2, 3, 4), strict=True):
        for row, corners in enumerate(drawn[part]):
            left, top = corners.min(axis=0)
            right, bottom = corners.max(axis=0)
            assert row <= top < bottom < row + 1
            assert (left, right) == pytest.approx((begin, begin + us))
    names = [text.get_text() for text in axis.get_yticklabels()]
    assert names == [f"m, {mode}, max(k, in) 1: 10.0 us" for mode in ("push", "pull")]


PLANNED = planned("ours", "x", 1.0, 1)
BAD: list[tuple[Any, str]] = [
    (b"{", "is not a JSON file"),
    ({"records": 3}, "has no records"),
    ([3], "record 0 cannot be drawn: AttributeError"),
    ([{"op": "replicate", "mode": "push"}], "KeyError('size'); expected one of against"),
    ([transfer(0, "push", 1, 1)], "size is 0; expected a number from 1"),
    ([transfer(1, "push", 1, float("nan"))], "over_bound is nan"),
    ([model(8, "x", push=(1.2, 1.1))], "worst is 1.1; expected a number from 1.2"),
    ([PLANNED, transfer(1, "push", 1, 1)], "record 1 cannot be drawn: ValueError('of another"),
    ([PLANNED | {"imbalance": {"mean": 0.9}}], "imbalance.mean is 0.9; expected a number from 1"),
    ([steady("empty", 1, [1, 2])], "shape (2,)"),
    ([steady("empty", 1, [[-1]])], "expected [steps, layers], from 0"),
    ([path_record(us={})], "us.gather is None"),
]


@pytest.mark.parametrize(("content", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, text: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert main(["draw", str(path), "--out", str(tmp_path / "o.png")]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert str(path) in error
    assert not (tmp_path / "o.png").exists()
