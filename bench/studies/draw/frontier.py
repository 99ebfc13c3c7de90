"""The picture of planners: imbalance against transfer time, a point for each planner and load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.draw.records import read_records
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.viz.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    clean,
    count,
    new_figure,
    plain_settings,
    set_titles,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "ours": (BLUE, "o"),
    "ours exact": (GREEN, "D"),
    "moonep": (VERMILION, "^"),
    "ultraep": (PURPLE, "v"),
    "llep": (ORANGE, "s"),
    "eplb": (MUTED, "P"),
    "eplb-hier": (INK, "X"),
    "lplb": (SKY, "p"),
    "none": (INK, "x"),
}
_OTHER = (INK, "*")
_COLUMNS = 2
_MOST = 1e9  # largest figure
_LINEAR = 0.003  # of the imbalance above 1, below which the scale is linear
_TICKS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A planner's figures on loads of one kind.

    Attributes:
        panel: names the size.
        load: kind of load.
        planner: its name.
        imbalance: the busiest rank over the mean; mean of the loads.
        time_us: of the transfer; mean of the loads.
    """

    panel: str
    load: str
    planner: str
    imbalance: float
    time_us: float


def load_points(path: Path) -> list[Point]:
    """Read the records of ``against --json`` or of its recipe; raises as `read_records` does."""
    found = read_records(path, "plan_against", "against", _point)
    for point, place in found:
        if not (1 <= point.imbalance <= _MOST and 0 <= point.time_us <= _MOST):
            raise InvalidArgumentError(
                f"{place} has imbalance {point.imbalance} and time_us {point.time_us}; expected at"
                f" least 1 and 0, at most {_MOST:g}"
            )
    return [point for point, _ in found]


def _point(record: Mapping[str, Any]) -> Point:
    return Point(
        panel=", ".join(count(record[f"{what}s"], what) for what in ("rank", "expert", "slot")),
        load=short(str(record["family"])),
        planner=short(str(record["planner"])),
        imbalance=float(record["imbalance"]["mean"]),
        time_us=float(record["time_us"]["mean"]),
    )


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

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    panels = list(dict.fromkeys(p.panel for p in points))
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(max(7.5, 5.2 * columns), 1.7 + 3.3 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    shown = list(axes.ravel())
    planners = dict.fromkeys(p.planner for p in points)
    names = [name for name in LOOKS if name in planners]
    names += [name for name in planners if name not in LOOKS]
    for i, axis in enumerate(shown):
        if i >= len(panels):
            axis.remove()
            continue
        own = [p for p in points if p.panel == panels[i]]
        _draw_panel(axis, own, names)
        axis.set_title(panels[i], loc="left", fontsize=10, color=INK)
        if i % columns == 0:
            axis.set_ylabel("busiest rank / mean")
        if i + columns >= len(panels):
            axis.set_xlabel("modelled transfer (us)")
    _scale(shown[0], max(p.imbalance for p in points) - 1)
    handles = [shown[0].plot([], [], **_look(name))[0] for name in names]
    figure.legend(
        handles, names, loc="outside lower left", ncols=len(names), frameon=False, fontsize=9.5
    )
    loads = len({(p.panel, p.load) for p in points})
    set_titles(
        figure,
        "Balance and what it costs, by planner",
        f"{source}: {count(loads, 'kind')} of load, their means; lines join the plans of one kind"
        " that no other plan beats in both",
    )
    return figure


def _look(name: str) -> dict[str, Any]:
    colour, marker = LOOKS.get(name, _OTHER)
    return {"color": colour, "marker": marker, "ls": "", "ms": 6, "mew": 1.2}


def _draw_panel(axis: Axes, points: list[Point], names: list[str]) -> None:
    for load in dict.fromkeys(p.load for p in points):
        best = frontier([p for p in points if p.load == load])
        axis.plot(
            [p.time_us for p in best],
            [p.imbalance - 1 for p in best],
            color=MUTED,
            alpha=0.4,
            lw=1.2,
            drawstyle="steps-post",
            gid=f"frontier {load}",
            zorder=1,
        )
    for name in names:
        own = [p for p in points if p.planner == name]
        if own:
            x, y = [p.time_us for p in own], [p.imbalance - 1 for p in own]
            axis.plot(x, y, **_look(name), alpha=0.85, gid=name, zorder=3, clip_on=False)
    axis.grid(color=FAINT, lw=0.5)
    axis.set_axisbelow(True)
    axis.set_xlim(left=0)
    clean(axis)


def _scale(axis: Axes, most: float) -> None:
    """Set the scale of all panels: logarithmic above 1, with the exact plans at the bottom."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_yscale("symlog", linthresh=_LINEAR, linscale=0.5)
    ticks = [tick for tick in _TICKS if tick <= max(most, 0.01) * 1.2]
    axis.yaxis.set_major_locator(FixedLocator(ticks))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(lambda value, _: f"{1 + value:g}" if value else "1 (exact)")
    axis.set_ylim(0, max(most, 0.01) * 1.4)
