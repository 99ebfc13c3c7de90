"""The picture of planners: imbalance against transfer time, a point for each planner and load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from studies.draw.panels import Look, find_looks, make_panels
from studies.draw.records import figure, size_of
from ultraep_comm.viz import style
from ultraep_comm.viz.style import FAINT, INK, MUTED, clean, count, plain_settings, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "ours": (style.BLUE, "o"),
    "ours exact": (style.GREEN, "D"),
    "moonep": (style.VERMILION, "^"),
    "ultraep": (style.PURPLE, "v"),
    "llep": (style.ORANGE, "s"),
    "eplb": (MUTED, "P"),
    "eplb-hier": (INK, "X"),
    "lplb": (style.SKY, "p"),
    "none": (INK, "x"),
}
_LINEAR = 0.003  # of the imbalance above 1, below which the scale is linear
_TICKS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Point(NamedTuple):
    """A planner's figures on loads of one kind, the means of these loads."""

    panel: str  # names the size
    load: str  # kind of load
    planner: str
    imbalance: float  # the busiest rank over the mean
    time_us: float  # of the transfer


def read_point(record: Mapping[str, Any]) -> list[Point]:
    """Return the point of a record of ``against`` or of its recipe."""
    load, planner = short(str(record["family"])), short(str(record["planner"]))
    imbalance, time_us = figure(record, "imbalance.mean", 1), figure(record, "time_us.mean")
    return [Point(size_of(record), load, planner, imbalance, time_us)]


def frontier(points: list[Point]) -> list[Point]:
    """Return the points that no other one beats in both figures, by ascending time."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.time_us, p.imbalance)):
        if not best or point.imbalance < best[-1].imbalance:
            best.append(point)
    return best


@plain_settings()
def draw_frontier(points: list[Point], *, source: str) -> Figure:
    """Return the picture: a panel for each size, a marker for each planner and kind of load.

    A line joins the frontier of each kind of load: who is not on it is beaten in both figures.
    """
    names = list(dict.fromkeys(p.panel for p in points))
    picture, panels = make_panels(
        len(names), 2, (5.2, 3.3, 1.7), "modelled transfer (us)", "busiest rank / mean"
    )
    looks = find_looks([p.planner for p in points], LOOKS)
    for axis, name in zip(panels, names, strict=True):
        _draw_panel(axis, [p for p in points if p.panel == name], looks)
        axis.set_title(name, loc="left", fontsize=10, color=INK)
    _scale(panels[0], max(p.imbalance for p in points) - 1)
    handles = [_plot(panels[0], [], look) for look in looks.values()]
    place: dict[str, Any] = {"loc": "outside lower left", "ncols": len(looks)}
    picture.legend(handles, list(looks), **place, frameon=False, fontsize=9.5)
    loads = len({(p.panel, p.load) for p in points})
    style.set_titles(
        picture,
        "Balance and what it costs, by planner",
        f"{source}: {count(loads, 'kind')} of load, their means; lines join the plans of one kind"
        " that no other plan beats in both",
    )
    return picture


def _plot(axis: Axes, points: list[Point], look: Look, **options: Any) -> Any:
    x, y = [p.time_us for p in points], [p.imbalance - 1 for p in points]
    colour, marker = look
    return axis.plot(x, y, color=colour, marker=marker, ms=6, mew=1.2, **{"ls": "", **options})[0]


def _draw_panel(axis: Axes, points: list[Point], looks: dict[str, Look]) -> None:
    for load in dict.fromkeys(p.load for p in points):
        best = frontier([p for p in points if p.load == load])
        line = {"ls": "-", "lw": 1.2, "drawstyle": "steps-post", "gid": f"frontier {load}"}
        _plot(axis, best, (MUTED, ""), alpha=0.4, zorder=1, **line)
    for name, look in looks.items():
        if own := [p for p in points if p.planner == name]:
            _plot(axis, own, look, alpha=0.85, gid=name, zorder=3, clip_on=False)
    axis.grid(color=FAINT, lw=0.5)
    axis.set_axisbelow(True)
    axis.set_xlim(left=0)
    clean(axis)


def _scale(axis: Axes, most: float) -> None:
    """Set the scale of all panels: logarithmic above 1, with the exact plans at the bottom."""
    axis.set_yscale("symlog", linthresh=_LINEAR, linscale=0.5)
    ticks = [tick for tick in _TICKS if tick <= max(most, 0.01) * 1.2]
    axis.set_yticks(ticks, [f"{1 + tick:g}" if tick else "1 (exact)" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(0, max(most, 0.01) * 1.4)
