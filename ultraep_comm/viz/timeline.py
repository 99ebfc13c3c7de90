"""A chart as a picture, or as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ultraep_comm.viz import style
from ultraep_comm.viz.charts import CALL_LANE, Bar, Chart
from ultraep_comm.viz.cli import WIDTH
from ultraep_comm.viz.style import FAINT, INK, clean, plain_settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour and legend text by kind; waits are hatched, to stand out without colour too.
LOOKS = {
    "call": ("#e9eef2", "in the call"),
    "store": (style.BLUE, "stores to a peer"),
    "load": (style.GREEN, "loads from a peer"),
    "wait": ("#fbe3c0", "waits for a peer"),
    "gather_load": (style.PURPLE, "gather_load"),
    "gather_and_plan": (style.ORANGE, "gather_and_plan"),
    "replicate_experts": (style.SKY, "replicate_experts"),
    "reduce_expert_grads": (style.VERMILION, "reduce_expert_grads"),
    "failed": (INK, "failed call"),
    "gather": (style.PURPLE, "count and gather"),
    "plan": (style.ORANGE, "plan"),
    "schedule": (style.GREEN, "schedule"),
    "transfer": (style.BLUE, "transfer"),
}
# Kinds too light for white labels.
DARK = ("gather_load", "gather_and_plan", "replicate_experts", "gather", "plan")
_ROW, _GAP = 1.0, 0.16  # heights in axis units: a row, and the space between two
_MARGINS = 1.2  # inches beside the plot
_NARROW = 0.04  # inches
_MAX_HEIGHT = 17.0


@plain_settings()
def draw_timeline(chart: Chart, *, width: float = WIDTH) -> Figure:
    """Return the picture: a row of bars for each rank, or for each name of the chart's rows."""
    lanes = [chart.lanes_of(rank) for rank in range(chart.num_ranks)]
    row_inches = min(max(0.2 * max(lanes, default=1), 0.24), 0.9)
    height = min(1.9 + chart.num_ranks * row_inches, _MAX_HEIGHT)
    row_inches = (height - 1.9) / chart.num_ranks
    figure = style.new_figure(width, height)
    axis = figure.subplots()
    end = max(chart.end_us, *chart.marks.values(), 1e-9) * 1.01
    axis.set_xlim(0, end)
    axis.set_ylim(chart.num_ranks - _GAP / 2, -_GAP)
    # About how wide the plot is, beside the names of its rows.
    names_inches = 0.07 * max(map(len, chart.rows), default=0) + 0.1
    inches_per_us = (width - max(_MARGINS, names_inches)) / end
    for kind in LOOKS:
        bars = [bar for bar in chart.bars if bar.kind == kind]
        if bars:
            _draw_bars(axis, bars, lanes, inches_per_us)
    for bar in chart.bars:
        _write_label(axis, bar, lanes, inches_per_us, row_inches)
    for text, time in chart.marks.items():
        axis.axvline(time, color=INK, lw=1.2, ls=(0, (5, 3)), label=text)
    every = max(1, -(-chart.num_ranks // 40)) if row_inches < 0.2 else 1
    at = range(0, chart.num_ranks, every)
    names = [chart.rows[row] if chart.rows else str(row) for row in at]
    axis.set_yticks([row + (_ROW - _GAP) / 2 for row in at], names)
    axis.set_ylabel("" if chart.rows else "rank")
    scale, unit = (1e3, "milliseconds") if chart.end_us >= 2e4 else (1.0, "microseconds")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / scale:,.10g}")
    start = "the call's start" if any(b.kind == "call" for b in chart.bars) else "the first begin"
    axis.set_xlabel(unit if chart.rows else f"{unit} since {start}")
    axis.grid(axis="x", color=FAINT, lw=0.6, zorder=0)
    axis.set_axisbelow(True)
    clean(axis)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    if chart.bars:
        style.add_legend(axis, ncols=5, handlelength=1.4)
    style.set_titles(figure, chart.title, chart.subtitle)
    return figure


def _box(bar: Bar, lanes: list[int]) -> tuple[float, float]:
    """Return the top and the height of a bar."""
    if bar.lane == CALL_LANE:
        return bar.rank - _GAP / 4, _ROW - _GAP / 2
    height = (_ROW - _GAP) / lanes[bar.rank]
    return bar.rank + bar.lane * height, height * 0.88


def _draw_bars(axis: Axes, bars: list[Bar], lanes: list[int], inches_per_us: float) -> None:
    """Draw the bars of one kind; those that last no time are ticks."""
    from matplotlib.collections import PolyCollection

    kind = bars[0].kind
    colour, text = LOOKS[kind]
    corners, edges, widths = [], [], []
    for bar in bars:
        top, height = _box(bar, lanes)
        left, right = bar.begin_us, bar.end_us
        corners.append([(left, top), (right, top), (right, top + height), (left, top + height)])
        # A white edge separates touching bars, but would cover a bar of few pixels.
        narrow = (right - left) * inches_per_us < _NARROW
        edges.append(colour if narrow or kind == "call" else "white")
        widths.append(0.5 if right > left else 1.6)
    wait = kind == "wait"
    drawn = PolyCollection(
        corners,
        facecolors=colour,
        edgecolors="#b8792a" if wait else edges,
        linewidths=widths,
        hatch="////" if wait else None,
        label=text,
        zorder=1 if kind == "call" else 2,
        gid=kind,
    )
    axis.add_collection(drawn)


def _write_label(
    axis: Axes, bar: Bar, lanes: list[int], inches_per_us: float, row_inches: float
) -> None:
    """Write the label into a bar if it has room for it."""
    top, height = _box(bar, lanes)
    size = min(8.0, height * row_inches * 72 * 0.72)
    needed = len(bar.label) * size / 72 * 0.66 + 0.04
    if not bar.label or size < 5 or (bar.end_us - bar.begin_us) * inches_per_us < needed:
        return
    axis.text(
        (bar.begin_us + bar.end_us) / 2,
        top + height / 2,
        bar.label,
        ha="center",
        va="center",
        fontsize=size,
        color=INK if bar.kind in DARK else "white",
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
        process = chart.rows[rank] if chart.rows else f"rank {rank}"
        events += _name("process", process, rank, CALL_LANE, rank)
    for rank, lane in sorted({(bar.rank, bar.lane) for bar in chart.bars}):
        thread = "call" if lane == CALL_LANE else f"lane {lane}"
        events += _name("thread", thread, rank, lane, lane)
    for bar in chart.bars:
        begin, end = round(bar.begin_us * 1e3), round(bar.end_us * 1e3)
        lasts = bar.end_us > bar.begin_us
        events.append(
            {
                "name": f"{bar.kind} {bar.label}".strip(),
                "cat": bar.kind,
                **_thread(bar.rank, bar.lane),
                "ts": begin / 1e3,
                "args": bar.details,
                **({"ph": "X", "dur": (end - begin) / 1e3} if lasts else {"ph": "i", "s": "t"}),
            }
        )
    for text, time in chart.marks.items():
        mark = {"ph": "i", "s": "g", "name": text, "cat": "mark", "ts": round(time, 3)}
        events.append({**mark, **_thread(0, CALL_LANE)})
    return {
        "displayTimeUnit": "ns",
        "otherData": {"title": chart.title, "subtitle": chart.subtitle},
        "traceEvents": events,
    }


def _name(what: str, name: str, rank: int, lane: int, index: int) -> list[dict[str, Any]]:
    event = {"ph": "M", **_thread(rank, lane)}
    return [
        {**event, "name": f"{what}_name", "args": {"name": name}},
        {**event, "name": f"{what}_sort_index", "args": {"sort_index": index}},
    ]


def _thread(rank: int, lane: int) -> dict[str, int]:
    return {"pid": rank + 1, "tid": lane - CALL_LANE + 1}


def format_trace(chart: Chart) -> str:
    """Return :func:`trace_events` as JSON text."""
    return json.dumps(trace_events(chart), separators=(",", ":")) + "\n"
