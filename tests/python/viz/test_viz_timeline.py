"""Timelines: the bars that are drawn, and the trace file's events, are the spans."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from recorded_groups import make_recorder

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.model.timeline import SPAN, Span
from ultraep_comm.plan.topology import Topology
from ultraep_comm.recording.file import OPERATIONS, Recording, save_recording
from ultraep_comm.viz.charts import Chart, chart_calls, chart_paths, chart_timeline
from ultraep_comm.viz.cli import main
from ultraep_comm.viz.style import save_png, short
from ultraep_comm.viz.timeline import LOOKS, draw_timeline, format_trace, trace_events

G, E, S = 3, 6, 1
KINDS = {Span.CALL: "call", Span.STORE: "store", Span.LOAD: "load", Span.WAIT: "wait"}


def make_timeline(num_ranks: int, seed: int = 0) -> NDArray[np.void]:
    """Spans that overlap and touch, of every kind."""
    rng = np.random.default_rng(seed)
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


def busy(timeline: NDArray[np.void], rank: int, kind: Span) -> float:
    """How long a rank was at each of its pieces of a kind, added up."""
    spans = timeline[(timeline["rank"] == rank) & (timeline["kind"] == kind)]
    total = 0.0
    for expert, piece in {(int(s["expert"]), int(s["piece"])) for s in spans}:
        own = spans[(spans["expert"] == expert) & (spans["piece"] == piece)]
        times = np.unique([own["begin_us"], own["end_us"]])
        for begin, end in itertools.pairwise(times):
            if ((own["begin_us"] <= begin) & (own["end_us"] >= end)).any():
                total += float(end - begin)
    return total


# ---- charts ---------------------------------------------------------------------------------


def tiles(rows: list[tuple[int, int, float, float]]) -> NDArray[np.void]:
    """Stores of rank 0: expert, piece, begin, end."""
    spans = [(0, Span.STORE, 1, e, p, begin, end, 10) for e, p, begin, end in rows]
    return np.array(spans, SPAN)


def test_tiles_of_a_piece_are_one_bar_where_they_overlap() -> None:
    timeline = tiles([(7, 0, 0, 2), (7, 1, 0, 9), (7, 0, 1, 3), (7, 0, 3.5, 5), (7, 0, 8, 9)])

    def bars(**more: Any) -> list[tuple[int, float, float, int | str]]:
        chart = chart_timeline(timeline, 2, title="", subtitle="", **more)
        return [(b.lane, b.begin_us, b.end_us, b.details["bytes"]) for b in chart.bars]

    piece_1 = (1, 0, 9, 10)
    assert bars() == [(0, 0, 3, 20), (0, 3.5, 5, 10), (0, 8, 9, 10), piece_1]
    assert bars(gap_us=1.0) == [(0, 0, 5, 30), (0, 8, 9, 10), piece_1]
    assert bars(max_lanes=2) == bars()
    assert bars(max_lanes=1) == [(0, 0, 9, 50)]


# ---- recorded calls -------------------------------------------------------------------------


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


def test_ranks_of_several_machines_meet_by_the_wall_clock() -> None:
    far = 3_600_000_000_000  # another machine, booted an hour later
    runs = [
        record(0, [far + 10_000], [far + 20_000]),
        replace(record(1, [11_000], [21_000]), epoch_ns=5_000 + far, machine="another"),
    ]
    chart = chart_calls(runs, source="run")
    assert [(b.begin_us, b.end_us) for b in chart.bars] == [(0.0, 10.0), (1.0, 11.0)]


def test_ranks_of_one_machine_have_one_clock() -> None:
    runs = [
        record(0, [10_000], [20_000]),
        replace(record(1, [11_000], [21_000]), epoch_ns=5_000 + 10**9),  # the wall clock was set
    ]
    chart = chart_calls(runs, source="run")
    assert [(b.begin_us, b.end_us) for b in chart.bars] == [(0.0, 10.0), (1.0, 11.0)]


def test_failed_calls_are_shown_as_such() -> None:
    runs = [
        replace(record(0, [10_000, 20_000, 30_000], [15_000, 0, 0]), failed_epoch=2),
        replace(record(1, [10_000, 20_000, 30_000], [15_000, 25_000, 0]), failed_epoch=3),
    ]
    chart = chart_calls(runs, source="run")
    found = [(b.rank, b.kind, b.begin_us, b.details["operation"]) for b in chart.bars]
    assert found == [
        (0, "replicate_experts", 0.0, "replicate_experts"),
        (0, "failed", 10.0, "reduce_expert_grads"),
        (0, "failed", 20.0, "replicate_experts"),
        (1, "replicate_experts", 0.0, "replicate_experts"),
        (1, "reduce_expert_grads", 10.0, "reduce_expert_grads"),
        (1, "failed", 20.0, "replicate_experts"),
    ]
    assert chart.subtitle == "run: 2 ranks of 3, 6 calls; call 2 failed"
    instants = [e for e in trace_events(chart)["traceEvents"] if e["ph"] == "i"]
    assert [(e["cat"], e["ts"]) for e in instants] == [
        ("failed", 10),
        ("failed", 20),
        ("failed", 20),
    ]
    pytest.importorskip("matplotlib")
    (axis,) = draw_timeline(chart).axes
    assert "failed call" in [text.get_text() for text in axis.get_legend().get_texts()]


# ---- PNG ------------------------------------------------------------------------------------


def test_names_are_no_formulas_and_settings_of_users_do_not_matter(
    chart: Chart, tmp_path: Path
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    name = r"$\frac$_x^{.npz"
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, settings in zip(paths, ({}, {"axes.facecolor": "red", "font.size": 30}), strict=True):
        with matplotlib.rc_context(settings):
            figure = draw_timeline(replace(chart, subtitle=name))
            save_png(figure, path)
    assert name in [text.get_text() for text in figure.texts]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_names_have_room(tmp_path: Path) -> None:
    assert short("run") == "run"
    assert short("a\nb\udcff\x1b") == "a?b??"
    long = short("abc" * 100)
    assert len(long) == 60
    assert long.startswith("abcabc")
    assert long.endswith("abcabc")


def test_the_picture_has_every_bar(chart: Chart) -> None:
    pytest.importorskip("matplotlib")
    timeline = make_timeline(G)
    figure = draw_timeline(chart)
    figure.draw_without_rendering()
    (axis,) = figure.axes
    drawn = {c.get_gid(): c for c in axis.collections}
    assert set(drawn) == set(KINDS.values())
    for kind, name in KINDS.items():
        corners = [path.vertices for path in drawn[name].get_paths()]
        assert len(corners) == sum(bar.kind == name for bar in chart.bars)
        total: Counter[int] = Counter()
        for box in corners:
            rank = int(np.floor(box[:, 1].mean()))
            assert rank - 0.1 < box[:, 1].min() < box[:, 1].max() < rank + 1
            total[rank] += box[:, 0].max() - box[:, 0].min()
        for rank in range(G):
            assert total[rank] == pytest.approx(busy(timeline, rank, kind))
    texts = [text.get_text() for text in axis.get_legend().get_texts()]
    assert texts == [LOOKS[name][1] for name in KINDS.values()] + ["bound, 10.0 us"]
    assert [text.get_text() for text in axis.get_yticklabels()] == [str(r) for r in range(G)]
    assert axis.get_xlabel() == "microseconds since the call's start"
    labels = [text for text in axis.texts if text.get_text()]
    boxes = [text.get_window_extent() for text in labels]
    assert boxes
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


@pytest.mark.parametrize("num_ranks", [1, 72])
def test_pictures_of_few_and_many_ranks(num_ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = draw_timeline(
        chart_timeline(make_timeline(num_ranks), num_ranks, title="a", subtitle="b")
    )
    figure.draw_without_rendering()
    (axis,) = figure.axes
    ticks = [text.get_window_extent() for text in axis.get_yticklabels()]
    assert len(ticks) == num_ranks
    assert not any(a.overlaps(b) for a, b in itertools.pairwise(ticks))


def test_calls_without_an_end_are_ticks() -> None:
    pytest.importorskip("matplotlib")
    figure = draw_timeline(chart_calls([record(0, [10_000, 20_000], [0, 0])], source="run"))
    (axis,) = figure.axes
    lines = [c for c in axis.collections if type(c).__name__ == "LineCollection"]
    assert sorted(float(s[0][0]) for c in lines for s in c.get_segments()) == [0.0, 10.0]


# ---- Perfetto -------------------------------------------------------------------------------


def assert_as_busy(events: list[dict[str, Any]], timeline: NDArray[np.void]) -> None:
    """Spans of every rank and kind last as long as the timeline's."""
    for rank in range(G):
        for kind, name in KINDS.items():
            own = [e for e in events if (e["pid"] - 1, e["cat"]) == (rank, name)]
            assert sum(e["dur"] for e in own) == pytest.approx(busy(timeline, rank, kind), abs=0.1)


def check_trace(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Check the format, as its readers do; return the spans."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    ends: dict[tuple[int, int], int] = {}
    for event in document["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["pid"] >= 1  # readers take 0 for the idle task
        assert event["tid"] >= 1
        assert event["ph"] in ("X", "M", "i")
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name",
                "process_sort_index",
                "thread_name",
                "thread_sort_index",
            )
            continue
        assert event["ts"] >= 0
        if event["ph"] == "i":
            assert event["s"] in ("t", "g")
            continue
        assert event["dur"] > 0
        thread = event["pid"], event["tid"]  # spans of a thread must not cut each other
        begin, length = event["ts"] * 1e3, event["dur"] * 1e3
        for number in (begin, length):
            assert abs(number - round(number)) < 1e-3  # whole nanoseconds
        assert ends.get(thread, 0) <= round(begin)
        ends[thread] = round(begin) + round(length)
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def test_the_trace_file_has_every_span(chart: Chart) -> None:
    timeline = make_timeline(G)
    document = json.loads(format_trace(chart))
    assert document == trace_events(chart)
    events = check_trace(document)
    assert len(events) == len(chart.bars)
    assert_as_busy(events, timeline)
    names = {
        e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {rank + 1: f"rank {rank}" for rank in range(G)}
    marks = [e for e in document["traceEvents"] if e.get("s") == "g"]
    assert [(e["name"], e["ts"]) for e in marks] == [("bound, 10.0 us", 10.0)]


def test_calls_without_an_end_are_instants() -> None:
    chart = chart_calls([record(0, [10_000, 20_000], [15_000, 0])], source="run")
    document = trace_events(chart)
    (span,) = check_trace(document)
    assert (span["ts"], span["dur"]) == (0.0, 5.0)
    instants = [event for event in document["traceEvents"] if event["ph"] == "i"]
    assert [event["ts"] for event in instants] == [10.0]


# ---- the command ----------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(G):
        recording = record(rank, [10_000, 20_000, 60_000], [15_000, 50_000, 90_000])
        save_recording(recording, folder / f"{rank}.npz")
    return folder


def test_the_command_draws_calls(run: Path, tmp_path: Path) -> None:
    outs = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for out in outs:
        assert main(["timeline", str(run), "--calls", "2:3", "--out", out]) == 0
    one, two = (Path(out).read_bytes() for out in outs)
    assert one == two
    assert len(check_trace(json.loads(one))) == 2 * G
    pytest.importorskip("matplotlib")
    assert main(["timeline", str(run), "--out", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("mode", ["push", "pull", "direct"])
def test_predictions_of_the_model(run: Path, tmp_path: Path, mode: str) -> None:
    model: Any = pytest.importorskip("ultraep_comm.model", reason="there is no model")
    size, out = 4 << 20, tmp_path / "p.json"
    command = ["timeline", str(run), "--predict", "1", "--expert-bytes", "4M", "--mode", mode]
    assert main([*command, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    events = check_trace(document)
    plan = uec.Plan.from_slots([[5], [0], [-1]], num_experts=E)
    found = model.predict(plan, size, "nvl72", mode, timeline=True)
    assert_as_busy(events, found.timeline)
    moved = sum(e["args"]["bytes"] for e in events if e["cat"] == "store")
    assert moved == plan.num_replicas * size
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(found.time_us, abs=1e-3)
    subtitle = document["otherData"]["subtitle"]
    assert f"mode {mode}: {found.time_us:,.1f} us, {found.over_bound:.3f} of the bound" in subtitle


def test_predictions_are_of_what_a_call_moves(run: Path, tmp_path: Path) -> None:
    """Rank 1 keeps expert 0, which rank 2 gets: from either of two. A reduction is of both."""
    model: Any = pytest.importorskip("ultraep_comm.model", reason="there is no model")
    slots, out = np.array([[-1], [0], [0]], np.int32), tmp_path / "p.json"
    reduction = OPERATIONS.index("reduce_expert_grads")
    recording = record(0, [10_000, 20_000], [15_000, 50_000])
    recording.calls["operation"][1] = reduction
    recording.slot_expert[:] = slots
    recording.moves[:] = slots >= 0
    recording.moves[:, 1] = False
    save_recording(recording, run / "0.npz")
    held = np.array([[-1], [0], [-1]])
    expected = [
        model.predict(uec.Plan.from_slots(slots, num_experts=E), 1000, residents=held),
        model.predict(uec.Plan.from_slots([[-1], [-1], [0]], num_experts=E), 1000),
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
    arguments = ["--imbalance", "2", "--ranks", "4", "--experts", "8", "--expert-bytes", "1M"]
    sizes = {}
    for width in (6, 12):
        outs = [str(tmp_path / f"{width}.png"), str(tmp_path / f"{width}.json")]
        shown = ["--mode", "push", "--width", str(width), "--out", *outs]
        assert main(["timeline", *arguments, *shown]) == 0
        sizes[width] = int.from_bytes((tmp_path / f"{width}.png").read_bytes()[16:20], "big")
    assert sizes[12] == 2 * sizes[6] == 12 * 150
    one, two = (json.loads((tmp_path / f"{width}.json").read_text()) for width in (6, 12))
    assert one == two
    assert "4 ranks, 8 experts of 1 MiB, imbalance 2" in one["otherData"]["subtitle"]
    assert {e["pid"] for e in one["traceEvents"] if e["ph"] == "X"} == {1, 2, 3, 4}


GENERATED_BAD = {
    "one of the two": ["--imbalance", "2", "run"],
    "files of a recording, or --imbalance": [],
    "--predict and --imbalance are given": ["--imbalance", "2", "--predict", "3"],
    "--calls and --imbalance are given": ["--imbalance", "2", "--calls", "1:2"],
    "expected 1 to 8": ["--imbalance", "9"],
    "--slots 2 gets no replicas": ["--imbalance", "1"],
    "--slots 0 gets no replicas": ["--imbalance", "2", "--slots", "0"],
}


@pytest.mark.parametrize("text", GENERATED_BAD)
def test_bad_generated_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    out = tmp_path / "o.png"
    assert main(["timeline", *GENERATED_BAD[text], "--out", str(out)]) == 2
    assert text in capsys.readouterr().err
    assert not out.exists()


BAD = {
    "has none of these calls; it has calls 1 to 3": ["--calls", "7:9"],
    "expected FIRST:LAST": ["--calls", "9"],
    "has no plan of a call 8": ["--predict", "8"],
    "is not a size": ["--predict", "1", "--expert-bytes", "many"],
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    out = tmp_path / "out.json"
    assert main(["timeline", str(run), *BAD[text], "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_files_of_two_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "again.npz").write_bytes((run / "0.npz").read_bytes())
    assert main(["timeline", str(run), "--out", str(run / "o.json")]) == 2
    assert "both of rank 0" in capsys.readouterr().err
    assert issubclass(errors.RecordingError, ValueError)


# ---- critical paths -------------------------------------------------------------------------

PATHS = Path(__file__).resolve().parents[3] / "bench" / "results" / "critical_path.json"
STEPS = {"gather": "count and gather", "plan": "plan"}
STEPS |= {"schedule": "schedule", "transfer": "transfer"}


def path_record(**changes: Any) -> dict[str, Any]:
    us = {"gather": 1.0, "plan": 2.0, "schedule": 3.0, "transfer": 4.0}
    record = {"op": "critical_path", "busiest": 1, "machine": "m", "mode": "push"}
    return record | {"us": us, "total_us": 10.0} | changes


def test_the_picture_of_critical_paths_has_every_part() -> None:
    pytest.importorskip("matplotlib")
    figure = draw_timeline(chart_paths(PATHS))
    figure.draw_without_rendering()
    (axis,) = figure.axes
    records = json.loads(PATHS.read_text())["records"]
    drawn = {c.get_gid(): [path.vertices for path in c.get_paths()] for c in axis.collections}
    assert list(drawn) == list(STEPS)
    for row, record in enumerate(records):
        begin = 0.0
        for step in STEPS:
            left, top = drawn[step][row].min(axis=0)
            right, bottom = drawn[step][row].max(axis=0)
            assert row <= top < bottom < row + 1
            assert (left, right - left) == pytest.approx((begin, record["us"][step]))
            begin = right
        assert begin == pytest.approx(record["total_us"], abs=0.3)  # of rounded figures
    names = [
        f"{r['machine']}, {r['mode']}, max(k, in) {r['busiest']}: {r['total_us']} us"
        for r in records
    ]
    assert [text.get_text() for text in axis.get_yticklabels()] == names
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [*STEPS.values()]
    assert axis.get_xlabel() == "microseconds"
    labels = sorted(f"{us:.1f}" for r in records for us in r["us"].values())
    assert sorted(text.get_text() for text in axis.texts) == labels


def test_the_command_draws_critical_paths(tmp_path: Path) -> None:
    path, out = tmp_path / "paths.JSON", tmp_path / "out.json"
    path.write_text(json.dumps([path_record(), path_record(mode="pull")]))
    assert main(["timeline", str(path), "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    events = [(e["pid"], e["cat"], e["ts"], e["dur"]) for e in check_trace(document)]
    parts = [("gather", 0, 1), ("plan", 1, 2), ("schedule", 3, 3), ("transfer", 6, 4)]
    assert events == [(pid, *part) for pid in (1, 2) for part in parts]
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"m, {mode}, max(k, in) 1: 10.0 us" for mode in ("push", "pull")]


BAD_PATHS = {
    "{": "is not a JSON file",
    "[]": "has no records",
    "[3]": "record 0 has op 3; expected 'critical_path'",
    '[{"op": "model"}]': "record 0 has op 'model'; expected 'critical_path'",
    json.dumps([path_record(), path_record(us={"gather": 1.0})]): "record 1 is not a critical path",
    json.dumps([path_record(us=[])]): "is not a critical path",
    json.dumps([path_record(total_us="x")]): "is not a critical path",
    json.dumps([path_record(total_us=9.0)]): "that add up to the total",
    json.dumps([path_record(total_us=float("nan"))]): "that add up to the total",
    json.dumps([path_record(us=path_record()["us"] | {"plan": -1.0}, total_us=7.0)]): "from 0 to",
}


@pytest.mark.parametrize("content", BAD_PATHS)
def test_bad_critical_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path, out = tmp_path / "paths.json", tmp_path / "o.png"
    path.write_text(content)
    with pytest.raises(errors.InvalidArgumentError, match=r"paths\.json"):
        chart_paths(path)
    assert main(["timeline", str(path), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert BAD_PATHS[content] in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("option", ["--calls", "--predict"])
def test_critical_paths_have_no_calls(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["timeline", str(PATHS), option, "1", "--out", "o.json"]) == 2
    assert f"{option} is for recordings" in capsys.readouterr().err
