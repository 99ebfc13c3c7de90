"""Timelines: the bars that are drawn, and the trace file's events, are the spans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from recorded_groups import make_recorder

import ultraep_comm as uec
from ultraep_comm.model import predict
from ultraep_comm.model.timeline import SPAN, Span
from ultraep_comm.plan.topology import Topology
from ultraep_comm.recording.file import OPERATIONS, Recording, save_recording
from ultraep_comm.viz.charts import Chart, chart_calls, chart_timeline
from ultraep_comm.viz.cli import main
from ultraep_comm.viz.style import save, short
from ultraep_comm.viz.timeline import draw_timeline, format_trace, trace_events

G, E, S = 3, 6, 1
KINDS = {Span.CALL: "call", Span.STORE: "store", Span.LOAD: "load", Span.WAIT: "wait"}


def make_timeline(num_ranks: int) -> NDArray[np.void]:
    """Spans that overlap and touch, of every kind."""
    rng = np.random.default_rng(0)
    rows: list[tuple[Any, ...]] = []
    for rank in range(num_ranks):
        time = 1.5
        for piece in range(5):
            expert, wait = int(rng.integers(30)), float(rng.exponential(5))
            rows.append((rank, Span.WAIT, -1, -1, piece, time, time + wait, 0))
            kind = Span.STORE if piece % 2 else Span.LOAD
            length = float(rng.exponential(20)) + 1
            for peer in range(2):
                begin = time + wait + peer
                rows.append((rank, kind, peer, expert, piece, begin, begin + length, 1 << 20))
            time += wait + length + 1
        rows.append((rank, Span.CALL, -1, -1, -1, 0.0, time + 9, 0))
    return np.array(rows, SPAN)


@pytest.fixture
def chart() -> Chart:
    return chart_timeline(
        make_timeline(G), G, title="A title", subtitle="of tests", marks={"bound, 10.0 us": 10.0}
    )


def test_tiles_of_a_piece_are_one_bar_where_they_overlap() -> None:
    rows = [(7, 0, 0, 2), (7, 1, 0, 9), (7, 0, 1, 3), (7, 0, 3.5, 5), (7, 0, 8, 9)]
    stores = [(0, Span.STORE, 1, e, piece, begin, end, 10) for e, piece, begin, end in rows]

    def bars(**more: Any) -> list[tuple[int, float, float, int | str]]:
        chart = chart_timeline(np.array(stores, SPAN), 2, title="", subtitle="", **more)
        return [(b.lane, b.begin_us, b.end_us, b.details["bytes"]) for b in chart.bars]

    piece_1 = (1, 0, 9, 10)
    assert bars() == [(0, 0, 3, 20), (0, 3.5, 5, 10), (0, 8, 9, 10), piece_1]
    assert bars(gap_us=1.0) == [(0, 0, 5, 30), (0, 8, 9, 10), piece_1]
    assert bars(max_lanes=2) == bars()
    assert bars(max_lanes=1) == [(0, 0, 9, 50)]


def record(rank: int, begins: list[int], ends: list[int]) -> Recording:
    """Transfers of a rank at such times in nanoseconds; an end of 0 is not known."""
    known = dict(enumerate(ends, 1))
    topology = Topology.make(num_ranks=G, num_experts=E, slots_per_rank=S)
    recorder = make_recorder(rank, topology, loads=True, finished_at=known.__getitem__)
    plan = uec.Plan.from_slots([[5], [0], [-1]], num_experts=E)
    for epoch, begin in enumerate(begins, 1):
        recorder.enter()
        recorder._begin = begin
        operation = "replicate_experts" if epoch % 2 else "reduce_expert_grads of layer 4"
        recorder.add(epoch, operation, "pull", plan, (4 + 1) << 32 | epoch, 1000)
    return replace(recorder.recording(), epoch_ns=5_000)


def test_recorded_calls_are_bars() -> None:
    runs = [
        record(0, [10_000, 20_000, 60_000], [15_000, 50_000, 90_000]),
        record(2, [12_000, 21_000, 30_000], [16_000, 41_000, 0]),
    ]
    chart = chart_calls(runs, source="run")
    assert chart.num_ranks == G
    assert chart.subtitle == "run: 2 ranks of 3, 6 calls; 1 call without a known end"
    found = [(b.rank, b.lane, b.kind, b.begin_us, b.end_us, b.label) for b in chart.bars]
    assert found == [
        (0, 0, "replicate_experts", 0.0, 5.0, "L4 m1"),
        (0, 0, "reduce_expert_grads", 10.0, 40.0, "L4 m2"),
        (0, 0, "replicate_experts", 50.0, 80.0, "L4 m3"),
        (2, 0, "replicate_experts", 2.0, 6.0, "L4 m1"),
        (2, 0, "reduce_expert_grads", 11.0, 31.0, "L4 m2"),
        (2, 1, "replicate_experts", 20.0, 20.0, "L4 m3"),
    ]
    details = {"operation": "replicate_experts", "epoch": 1, "layer": 4, "microbatch": 1}
    details |= {"mode": "pull", "bytes": 1000}
    assert chart.bars[0].details == details
    assert chart.bars[3].details == details | {"bytes": 0}  # no replica there
    part = chart_calls(runs, source="run", epochs=range(2, 3))
    assert [(b.rank, b.begin_us) for b in part.bars] == [(0, 0.0), (2, 1.0)]


def test_machines_meet_by_the_wall_clock_and_ranks_of_one_have_one_clock() -> None:
    def times(one: Recording, two: Recording) -> list[tuple[float, float]]:
        return [(b.begin_us, b.end_us) for b in chart_calls([one, two], source="run").bars]

    far = 3_600_000_000_000  # another machine, booted an hour later
    here, there = record(0, [far + 10_000], [far + 20_000]), record(1, [11_000], [21_000])
    another = replace(there, epoch_ns=5_000 + far, machine="another")
    assert times(here, another) == [(0.0, 10.0), (1.0, 11.0)]
    late = replace(there, epoch_ns=5_000 + 10**9)  # the wall clock was set
    assert times(record(0, [10_000], [20_000]), late) == [(0.0, 10.0), (1.0, 11.0)]


def test_failed_calls_are_shown_as_such() -> None:
    runs = [
        replace(record(0, [10_000, 20_000, 30_000], [15_000, 0, 0]), failed_epoch=2),
        replace(record(1, [10_000, 20_000, 30_000], [15_000, 25_000, 0]), failed_epoch=3),
    ]
    chart = chart_calls(runs, source="run")
    kinds = [bar.kind for bar in chart.bars]
    assert kinds[:3] == ["replicate_experts", "failed", "failed"]
    assert kinds[3:] == ["replicate_experts", "reduce_expert_grads", "failed"]
    assert chart.bars[1].details["operation"] == "reduce_expert_grads"
    assert chart.subtitle == "run: 2 ranks of 3, 6 calls; call 2 failed"
    pytest.importorskip("matplotlib")
    (axis,) = draw_timeline(chart).axes
    assert "failed" in {drawn.get_gid() for drawn in axis.collections}


def test_calls_without_an_end_are_instants_and_ticks() -> None:
    chart = chart_calls([record(0, [10_000, 20_000], [15_000, 0])], source="run")
    document = trace_events(chart)
    (span,) = check_trace(document)
    assert (span["ts"], span["dur"]) == (0.0, 5.0)
    instants = [event for event in document["traceEvents"] if event["ph"] == "i"]
    assert [event["ts"] for event in instants] == [10.0]
    pytest.importorskip("matplotlib")
    (axis,) = draw_timeline(chart).axes
    boxes = [path.vertices[:, 0] for c in axis.collections for path in c.get_paths()]
    assert sorted((min(x), max(x)) for x in boxes) == [(0.0, 5.0), (10.0, 10.0)]
    assert [*axis.collections[-1].get_linewidths()] == [1.6]  # or nothing would be seen


def test_names_are_no_formulas_and_settings_of_users_do_not_matter(
    chart: Chart, tmp_path: Path
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    named = replace(chart, subtitle=r"$\frac$_x^{.npz")
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, settings in zip(paths, ({}, {"axes.facecolor": "red", "font.size": 30}), strict=True):
        with matplotlib.rc_context(settings):
            save(draw_timeline(named), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_names_have_room() -> None:
    assert short("a\nb\udcff\x1b") == "a?b??"
    assert short("abc" * 100).startswith("abcabc")
    assert len(short("abc" * 100)) == 60


def test_the_picture_has_every_bar(chart: Chart) -> None:
    pytest.importorskip("matplotlib")
    figure = draw_timeline(chart)
    figure.draw_without_rendering()
    (axis,) = figure.axes
    drawn = {c.get_gid(): [path.vertices for path in c.get_paths()] for c in axis.collections}
    assert set(drawn) == set(KINDS.values())
    for kind, boxes in drawn.items():
        bars = [bar for bar in chart.bars if bar.kind == kind]
        for bar, box in zip(bars, boxes, strict=True):
            (left, top), (right, bottom) = box.min(axis=0), box.max(axis=0)
            assert (left, right) == (bar.begin_us, bar.end_us)
            assert bar.rank - 0.1 < top < bottom < bar.rank + 1
    boxes = [text.get_window_extent() for text in axis.texts if text.get_text()]
    assert boxes
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


def check_trace(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Check the format, as its readers do; return the spans."""
    ends: dict[tuple[int, int], int] = {}
    spans = []
    for event in document["traceEvents"]:
        thread = event["pid"], event["tid"]
        assert all(type(number) is int and number >= 1 for number in thread)  # 0: the idle task
        if event["ph"] == "M":
            what, _, value = event["name"].partition("_")
            assert what in ("process", "thread")
            assert value in ("name", "sort_index")
            continue
        assert event["ts"] >= 0
        if event["ph"] == "i":
            assert event["s"] in ("t", "g")
            continue
        assert event["ph"] == "X"
        begin, length = event["ts"] * 1e3, event["dur"] * 1e3
        assert length > 0
        for number in (begin, length):
            assert abs(number - round(number)) < 1e-3  # whole nanoseconds
        assert ends.get(thread, 0) <= round(begin)  # spans of a thread must not cut each other
        ends[thread] = round(begin) + round(length)
        spans.append(event)
    return spans


def test_the_trace_file_has_every_span(chart: Chart) -> None:
    document = json.loads(format_trace(chart))
    spans = check_trace(document)
    for span, bar in zip(spans, chart.bars, strict=True):
        assert (span["pid"] - 1, span["cat"], span["args"]) == (bar.rank, bar.kind, bar.details)
        assert span["ts"] == pytest.approx(bar.begin_us, abs=1e-3)
        assert span["ts"] + span["dur"] == pytest.approx(bar.end_us, abs=1e-3)
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"rank {rank}" for rank in range(G)]
    marks = [e for e in document["traceEvents"] if e.get("s") == "g"]
    assert [(e["name"], e["ts"]) for e in marks] == [("bound, 10.0 us", 10.0)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(G):
        recording = record(rank, [10_000, 20_000, 60_000], [15_000, 50_000, 90_000])
        save_recording(recording, folder / f"{rank}.npz")
    return folder


def test_the_command_draws_calls(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outs = [str(tmp_path / name) for name in ("a.json", "a.png")]
    for calls, number in ((["--calls", "2:3"], 2), ([], 3)):
        assert main(["timeline", str(run), *calls, "--out", *outs]) == 0
        assert len(check_trace(json.loads(Path(outs[0]).read_text()))) == number * G
    assert Path(outs[1]).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_predictions_of_the_model(run: Path, tmp_path: Path) -> None:
    size, out = 4 << 20, tmp_path / "p.json"
    command = ["timeline", str(run), "--predict", "1", "--expert-bytes", "4M", "--mode", "pull"]
    assert main([*command, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    events = check_trace(document)
    plan = uec.Plan.from_slots([[5], [0], [-1]], num_experts=E)
    found = predict(plan, size, "nvl72", "pull", timeline=True)
    moved = sum(e["args"]["bytes"] for e in events if e["cat"] == "store")
    assert moved == plan.num_replicas * size
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(found.time_us, abs=1e-3)
    subtitle = document["otherData"]["subtitle"]
    assert f"mode pull: {found.time_us:,.1f} us, {found.over_bound:.3f} of the bound" in subtitle


def test_predictions_are_of_what_a_call_moves(run: Path, tmp_path: Path) -> None:
    """Rank 1 keeps expert 0, which rank 2 gets: from either of two. A reduction is of both."""
    slots, out = np.array([[-1], [0], [0]], np.int32), tmp_path / "p.json"
    recording = record(0, [10_000, 20_000], [15_000, 50_000])
    recording.calls["operation"][1] = OPERATIONS.index("reduce_expert_grads")
    recording.slot_expert[:] = slots
    recording.moves[:] = slots >= 0
    recording.moves[:, 1] = False
    save_recording(recording, run / "0.npz")
    held = np.array([[-1], [0], [-1]])
    expected = [
        predict(uec.Plan.from_slots(slots, num_experts=E), 1000, residents=held),
        predict(uec.Plan.from_slots([[-1], [-1], [0]], num_experts=E), 1000),
    ]
    for epoch, found in enumerate(expected, 1):
        command = ["timeline", str(run / "0.npz"), "--predict", str(epoch)]
        assert main([*command, "--out", str(out)]) == 0
        document = json.loads(out.read_text())
        stores = [e for e in check_trace(document) if e["cat"] == "store"]
        assert sum(e["args"]["bytes"] for e in stores) == 1000
        assert f"{found.time_us:,.1f} us" in document["otherData"]["subtitle"]


def test_a_generated_load_needs_no_recording(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outs = [tmp_path / "a.png", tmp_path / "a.json"]
    load = "--imbalance 2 --ranks 4 --experts 8 --expert-bytes 1M --mode push --width 6"
    assert main(["timeline", *load.split(), "--out", *map(str, outs)]) == 0
    assert int.from_bytes(outs[0].read_bytes()[16:20], "big") == 6 * 150
    document = json.loads(outs[1].read_text())
    assert "4 ranks, 8 experts of 1 MiB, imbalance 2" in document["otherData"]["subtitle"]
    assert {e["pid"] for e in document["traceEvents"] if e["ph"] == "X"} == {1, 2, 3, 4}


BAD = [
    ("--imbalance 2 run", "one of the two"),
    ("", "files of a recording, or --imbalance"),
    ("--imbalance 2 --predict 3", "--predict and --imbalance are given"),
    ("--imbalance 9", "expected 1 to 8"),
    ("--imbalance 1", "--slots 2 gets no replicas"),
    ("run --calls 7:9", "has none of these calls; it has calls 1 to 3"),
    ("run --predict 8", "has no plan of a call 8"),
    ("run run/0.npz", "both of rank 0"),
]


@pytest.mark.parametrize(("given", "text"), BAD)
def test_bad_input(
    given: str,
    text: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run.parent)
    assert main(["timeline", *given.split(), "--out", "o.json"]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert not Path("o.json").exists()
