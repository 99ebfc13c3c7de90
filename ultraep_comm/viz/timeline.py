"""A chart as a picture, or as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ultraep_comm.viz.charts import CALL_LANE, Bar, Chart
from ultraep_comm.viz.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    add_legend,
    clean,
    new_figure,
    plain_settings,
    set_titles,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour and legend text by kind; waits are hatched, to stand out without colour too.
LOOKS = {
    "call": ("#e9eef2", "in the call"),
    "store": (BLUE, "stores to a peer"),
    "load": (GREEN, "loads from a peer"),
    "wait": ("#fbe3c0", "waits for a peer"),
    "gather_load": (PURPLE, "gather_load"),
    "gather_and_plan": (ORANGE, "gather_and_plan"),
    "replicate_experts": (SKY, "replicate_experts"),
    "reduce_expert_grads": (VERMILION, "reduce_expert_grads"),
    "failed": (INK, "failed call"),
    "gather": (PURPLE, "count and gather"),
    "plan": (ORANGE, "plan"),
    "schedule": (GREEN, "schedule"),
    "transfer": (BLUE, "transfer"),
}
# Kinds too light for white labels.
DARK = ("gather_load", "gather_and_plan", "replicate_experts", "gather", "plan")
_ROW, _GAP = 1.0, 0.16  # heights in axis units: a row, and the space between two
_MARGINS = 1.2  # inches beside the plot
_NARROW = 0.04  # inches
_MAX_HEIGHT = 17.0


@plain_settings()
def draw_timeline(chart: Chart) -> Figure:
    """Return the picture: a row of bars for each rank, or for each name of the chart's rows.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    lanes = [chart.lanes_of(rank) for rank in range(chart.num_ranks)]
    row_inches = min(max(0.2 * max(lanes, default=1), 0.24), 0.9)
    height = min(1.9 + chart.num_ranks * row_inches, _MAX_HEIGHT)
    row_inches = (height - 1.9) / chart.num_ranks
    figure = new_figure(chart.width, height)
    axis = figure.subplots()
    scale, unit = (1e3, "milliseconds") if chart.end_us >= 2e4 else (1.0, "microseconds")
    end = max(chart.end_us / scale, *(m / scale for m in chart.marks.values()), 1e-9)
    axis.set_xlim(0, end * 1.01)
    axis.set_ylim(chart.num_ranks - _GAP / 2, -_GAP)
    for kind in LOOKS:
        bars = [bar for bar in chart.bars if bar.kind == kind]
        if bars:
            _draw_bars(axis, bars, lanes, scale, end, kind, _plot_inches(chart))
    _write_labels(axis, chart, lanes, scale, end, row_inches)
    for text, time in chart.marks.items():
        axis.axvline(time / scale, color=INK, lw=1.2, ls=(0, (5, 3)), label=text)
    every = max(1, -(-chart.num_ranks // 40)) if row_inches < 0.2 else 1
    at = range(0, chart.num_ranks, every)
    names = [chart.rows[row] if chart.rows else str(row) for row in at]
    axis.set_yticks([row + (_ROW - _GAP) / 2 for row in at], names)
    axis.set_ylabel("" if chart.rows else "rank")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    start = "the call's start" if any(b.kind == "call" for b in chart.bars) else "the first begin"
    axis.set_xlabel(unit if chart.rows else f"{unit} since {start}")
    axis.grid(axis="x", color=FAINT, lw=0.6, zorder=0)
    axis.set_axisbelow(True)
    clean(axis)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    if chart.bars:
        add_legend(axis, ncols=5, handlelength=1.4)
    set_titles(figure, chart.title, chart.subtitle)
    return figure


def _plot_inches(chart: Chart) -> float:
    """Return about how wide the plot is, beside the names of its rows."""
    return chart.width - max(_MARGINS, 0.07 * max(map(len, chart.rows), default=0) + 0.1)


def _box(bar: Bar, lanes: list[int]) -> tuple[float, float]:
    """Return the top and the height of a bar."""
    if bar.lane == CALL_LANE:
        return bar.rank - _GAP / 4, _ROW - _GAP / 2
    height = (_ROW - _GAP) / lanes[bar.rank]
    return bar.rank + bar.lane * height, height * 0.88


def _draw_bars(
    axis: Axes,
    bars: list[Bar],
    lanes: list[int],
    scale: float,
    end: float,
    kind: str,
    plot_inches: float,
) -> None:
    from matplotlib.collections import PolyCollection

    colour, text = LOOKS[kind]
    wait = kind == "wait"
    corners, edges = [], []
    for bar in bars:
        top, height = _box(bar, lanes)
        left, right = bar.begin_us / scale, bar.end_us / scale
        corners.append([(left, top), (right, top), (right, top + height), (left, top + height)])
        # A white edge separates touching bars, but would cover a bar of few pixels.
        narrow = right - left < _NARROW / plot_inches * end
        edges.append(colour if narrow or kind == "call" else "white")
    drawn = PolyCollection(
        corners,
        facecolors=colour,
        edgecolors="#b8792a" if wait else edges,
        linewidths=0.5,
        hatch="////" if wait else None,
        label=text,
        zorder=1 if kind == "call" else 2,
    )
    drawn.set_gid(kind)
    axis.add_collection(drawn)
    instants = [bar for bar in bars if bar.end_us == bar.begin_us]
    if instants:
        boxes = [_box(bar, lanes) for bar in instants]
        axis.vlines(
            [bar.begin_us / scale for bar in instants],
            [top for top, _ in boxes],
            [top + height for top, height in boxes],
            color=colour,
            lw=1.6,
            zorder=2,
        )


def _write_labels(
    axis: Axes, chart: Chart, lanes: list[int], scale: float, end: float, row_inches: float
) -> None:
    """Write the labels into the bars that have room for them."""
    inches = _plot_inches(chart) / (end * 1.01)
    for bar in chart.bars:
        if bar.lane == CALL_LANE or not bar.label or bar.kind == "wait":
            continue
        top, height = _box(bar, lanes)
        size = min(8.0, height * row_inches * 72 * 0.72)
        width = (bar.end_us - bar.begin_us) / scale * inches
        if size < 5 or width < len(bar.label) * size / 72 * 0.66 + 0.04:
            continue
        dark = bar.kind in DARK
        axis.text(
            (bar.begin_us + bar.end_us) / 2 / scale,
            top + height / 2,
            bar.label,
            ha="center",
            va="center",
            fontsize=size,
            color=INK if dark else "white",
            clip_on=True,
            zorder=3,
        )


# ---- Perfetto -----------------------------------------------------------------------------------


def trace_events(chart: Chart) -> dict[str, Any]:
    """Return the chart in the Trace Event Format: a process for each rank, a thread for each lane.

    Times are in microseconds, rounded to nanoseconds: readers round to these, and drop bars of a
    thread that then overlap. A bar without a known end becomes an instant. Process and thread ids
    start at 1, as Perfetto takes 0 for the idle task.
    """
    events: list[dict[str, Any]] = []
    for rank in range(chart.num_ranks):
        name = chart.rows[rank] if chart.rows else f"rank {rank}"
        events.append(_meta("process_name", rank, CALL_LANE, name=name))
        events.append(_meta("process_sort_index", rank, CALL_LANE, sort_index=rank))
        for lane in sorted({bar.lane for bar in chart.bars if bar.rank == rank}):
            name = "call" if lane == CALL_LANE else f"lane {lane}"
            events.append(_meta("thread_name", rank, lane, name=name))
            events.append(_meta("thread_sort_index", rank, lane, sort_index=lane))
    for bar in chart.bars:
        begin, end = round(bar.begin_us * 1e3), round(bar.end_us * 1e3)
        event = {
            "name": f"{bar.kind} {bar.label}".strip(),
            "cat": bar.kind,
            "pid": bar.rank + 1,
            "tid": _thread(bar.lane),
            "ts": begin / 1e3,
            "args": bar.details,
        }
        if bar.end_us > bar.begin_us:
            event |= {"ph": "X", "dur": (end - begin) / 1e3}
        else:
            event |= {"ph": "i", "s": "t"}
        events.append(event)
    marks = [
        {"ph": "i", "s": "g", "name": text, "cat": "mark", "ts": round(time, 3)}
        | {"pid": 1, "tid": _thread(CALL_LANE)}
        for text, time in chart.marks.items()
    ]
    return {
        "displayTimeUnit": "ns",
        "otherData": {"title": chart.title, "subtitle": chart.subtitle},
        "traceEvents": [*events, *marks],
    }


def _thread(lane: int) -> int:
    return lane - CALL_LANE + 1


def _meta(what: str, rank: int, lane: int, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank + 1, "tid": _thread(lane), "args": arguments}


def format_trace(chart: Chart) -> str:
    """Return :func:`trace_events` as JSON text."""
    return json.dumps(trace_events(chart), separators=(",", ":")) + "\n"
