"""The picture of time over bound: its lines are the file's records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from studies.cli import main
from studies.draw.bound import Result, draw_bound, load_results

EXAMPLE = Path(__file__).parent / "data" / "over_bound.json"


def draw(results: list[Result], **options: str) -> Any:
    pytest.importorskip("matplotlib")
    figure = draw_bound(results, **options)
    figure.draw_without_rendering()
    return figure


def test_lines_are_medians_of_records() -> None:
    figure = draw(load_results(EXAMPLE), source="over_bound.json")
    small, large = figure.axes
    lines = {
        line.get_gid(): (line.get_xdata().tolist(), line.get_ydata().tolist())
        for axis in (small, large)
        for line in axis.lines
        if line.get_gid() and axis is small
    }
    assert lines == {"push": ([1, 4], [1.5, 1.3]), "direct": ([1, 4], [1.1, 3.9])}
    others = {line.get_gid(): list(line.get_ydata()) for line in large.lines}
    assert others["push"] == [1.03, 1.04]
    assert others["other"] == [2.0]
    (band,) = small.collections  # of the two results for push with 4
    assert band.get_datalim(small.transData).y1 == 1.5
    texts = [text.get_text() for text in small.get_legend().get_texts()]
    assert texts == ["push", "direct", "other"]
    assert [axis.texts[0].get_text() for axis in (small, large)] == [
        "experts of 4 MiB",
        "experts of 36 MiB",
    ]
    assert small.get_ylabel() == "time / bound"


@pytest.mark.parametrize("sizes", [1, 2, 3, 4, 7])
def test_panels_of_any_number(sizes: int) -> None:
    results = [
        Result(size=f"case {s}", mode=mode, case=fan, over_bound=ratio, worst=ratio)
        for s in range(sizes)
        for mode in ("push", "direct", "auto", "pull")
        for fan in (1, 2, 63)
        for ratio in [float(fan) if mode == "direct" else 1.1]
    ]
    figure = draw(results, source="made")
    assert len(figure.axes) == sizes
    assert figure.axes[0].get_yscale() == "log"
    assert all(len(axis.lines) == 5 for axis in figure.axes)  # the modes and the bound
    lowest = figure.axes[-1]
    assert [t.get_text() for t in lowest.get_xticklabels()] == ["1", "2", "63"]


def model_record(experts: int, load: str, **over_bound: tuple[float, float]) -> dict[str, Any]:
    """A record as the model's benchmark writes it."""
    ratios = {way: {"mean": mean, "worst": worst} for way, (mean, worst) in over_bound.items()}
    figures = {"ranks": 64, "experts": experts, "slots": 2, "load": load, "over_bound": ratios}
    return {"op": "model", **figures, "bound_us": 53.2}


def test_results_of_the_model(tmp_path: Path) -> None:
    records = [
        model_record(256, "zipf1.0", push=(1.05, 1.06), relay=(2.0, 2.5)),
        model_record(256, "lognormal", push=(1.04, 1.09), relay=(1.5, 3.0)),
        model_record(128, "zipf1.0", push=(1.07, 1.07), relay=(1.9, 1.9)),
    ]
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"records": records, "claims": []}))
    results = load_results(path)
    text = "64 ranks, 256 experts, 2 slots"
    assert results[3] == Result(
        size=text, mode="relay", case="lognormal", over_bound=1.5, worst=3.0
    )
    figure = draw(results, source="model.json")
    one, two = figure.axes
    assert [axis.texts[0].get_text() for axis in (one, two)] == [text, text.replace("256", "128")]
    assert [list(line.get_ydata()) for line in one.lines[:2]] == [[1.05, 1.04], [2.0, 1.5]]
    assert [band.get_datalim(one.transData).y1 for band in one.collections] == [1.09, 3.0]
    assert [t.get_text() for t in one.get_xticklabels()] == ["zipf1.0", "lognormal"]
    assert figure.get_suptitle() == "Time over the bound, by mode and load"


def test_modes_of_any_name_are_in_the_legend_and_look_different() -> None:
    modes = ["push", "", "_hidden", "$x$", "a", "b", "c"]
    results = [
        Result(size=1, mode=mode, case=fan, over_bound=1.2, worst=1.2)
        for mode in modes
        for fan in (1, 2)
    ]
    figure = draw(results, source="made")
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == modes
    lines = [line for line in axis.lines if line.get_gid() is not None]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(modes)


def test_panels_have_one_distance() -> None:
    results = [
        Result(size=size, mode="push", case=1, over_bound=1.2, worst=1.2) for size in (1, 2, 3)
    ]
    figure = draw(results, source="a name of a file that is longer than a panel" * 2)
    left = [axis.get_position().x0 for axis in figure.axes]
    width = [axis.get_position().width for axis in figure.axes]
    assert left[1] - left[0] - width[0] < 0.06
    assert left[1] - left[0] == pytest.approx(left[2] - left[1], rel=0.1)
    (subtitle,) = [text for text in figure.texts if text.get_gid() == "subtitle"]
    legend = figure.axes[0].get_legend().get_window_extent()
    assert not legend.overlaps(subtitle.get_window_extent())


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outs = [tmp_path / "a.png", tmp_path / "b.png"]
    for out in outs:
        assert main(["draw", str(EXAMPLE), "--out", str(out)]) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()


BAD = {
    "[" * 100_000: "is not a JSON file",
    "{": "is not a JSON file",
    "[]": "has no records",
    '{"records": 3}': "has no records",
    "[3]": "record 0 is 3",
    '[{"op": "replicate", "size": null}]': "record 0 is of `replicate`; expected",
    '[{"mode": "push", "fan_out": 1, "over_bound": 1}]': "record 0 has size None",
    '[{"size": 1, "mode": 2, "fan_out": 1, "over_bound": 1}]': "has mode 2",
    '[{"size": 1, "mode": "push", "fan_out": 1.5, "over_bound": 1}]': "has fan_out 1.5",
    '[{"size": 1, "mode": "push", "fan_out": 0, "over_bound": 1}]': "fan_out 0",
    '[{"size": 1, "mode": "push", "fan_out": 1, "over_bound": NaN}]': "over_bound nan",
    '[{"size": 1, "mode": "push", "fan_out": 1, "over_bound": "1"}]': "over_bound '1'",
    '[{"op": "model", "ranks": 64}]': "KeyError('experts') is wrong or missing",
    json.dumps([model_record(8, "x", push=(1.2, 1.1))]): "impossible times over the bound",
    json.dumps(
        [
            model_record(8, "x", push=(1.0, 1.1)),
            {"size": 1, "mode": "push", "fan_out": 1, "over_bound": 1},
        ]
    ): "expected one kind",
}


@pytest.mark.parametrize("content", BAD)
def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    assert main(["draw", str(path), "--out", str(tmp_path / "o.png")]) == 2
    error = capsys.readouterr().err
    assert BAD[content] in error
    assert str(path) in error
    assert not (tmp_path / "o.png").exists()


def test_files_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert main(["draw", str(path), "--out", str(tmp_path / "o.png")]) == 2
    assert "is not a JSON file" in capsys.readouterr().err
    assert main(["draw", str(tmp_path / "none.json"), "--out", str(tmp_path / "o.png")]) == 2
    assert "No such file" in capsys.readouterr().err
