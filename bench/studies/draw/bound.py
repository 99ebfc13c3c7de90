"""The bound picture: time over bound by mode, against fan-outs or loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from studies.draw.panels import Look, find_looks, make_panels
from studies.draw.records import figure, size_of
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.viz import style
from ultraep_comm.viz.style import FAINT, INK, clean, plain_settings, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "push": (style.BLUE, "o"),
    "pull": (style.GREEN, "s"),
    "direct": (style.VERMILION, "^"),
    "auto": (INK, "D"),
    "relay": (style.PURPLE, "v"),
}
_LEAST = 1e-6  # time over bound
Cases = dict[Any, int | str]  # by x coordinate


class Result(NamedTuple):
    """A time over the lower bound of any schedule."""

    size: int | str  # of experts in bytes, or the name of the panel
    mode: str
    case: int | str  # replicas of an expert, or the name of a kind of load
    over_bound: float  # the mean if of several plans
    worst: float  # of these plans


def read_result(record: Mapping[str, Any]) -> list[Result]:
    """Return the result of a record that has size, mode, fan_out and over_bound."""
    size, fan_out = record["size"], figure(record, "fan_out", 1)
    if fan_out % 1:
        raise ValueError(f"fan_out is {fan_out}; expected a whole number")
    size = short(size) if isinstance(size, str) else int(figure(record, "size", 1, 2**62))
    over = figure(record, "over_bound", _LEAST)
    return [Result(size, short(str(record["mode"])), int(fan_out), over, over)]


def read_model(record: Mapping[str, Any]) -> list[Result]:
    """Return the results of a record of ``model``, one for each mode."""
    load, results = short(str(record["load"])), []
    for mode, ratio in record["over_bound"].items():
        mean = figure(ratio, "mean", _LEAST)
        worst = figure(ratio, "worst", mean)
        results.append(Result(size_of(record), short(mode), load, mean, worst))
    return results


@plain_settings()
def draw_bound(results: list[Result], *, source: str) -> Figure:
    """Return the picture: a panel for each size, a line for each mode, against fan-outs or loads.

    If a point has several results, the line shows their median, and a band their range.
    """
    sizes: list[int | str] = list(dict.fromkeys(r.size for r in results))
    sizes.sort(key=lambda size: size if isinstance(size, int) else 0)  # strings keep their order
    named = isinstance(results[0].case, str)
    # Of each x coordinate: a number's own value, a name's index.
    cases = {i if named else c: c for i, c in enumerate(dict.fromkeys(r.case for r in results))}
    x = "load" if named else "replicas of an expert (fan-out)"
    picture, panels = make_panels(
        len(sizes), 3, (4.0, 4.2 if named else 3.2, 1.5), x, "time / bound", sharex=True
    )
    looks = find_looks([r.mode for r in results], LOOKS)
    handles: dict[str, Any] = {}
    for axis, size in zip(panels, sizes, strict=True):
        for mode, look in looks.items():
            if own := [r for r in results if (r.size, r.mode) == (size, mode)]:
                handles[mode] = _draw_mode(axis, own, cases, mode, look)
        axis.axhline(1, color=INK, lw=1.1, ls=(0, (5, 3)))
        text = f"experts of {format_size(size)}" if isinstance(size, int) else size
        place: dict[str, Any] = {"xy": (0.02, 0.97), "xycoords": "axes fraction", "va": "top"}
        axis.annotate(text, **place, fontsize=10, color=INK, backgroundcolor="white")
        axis.grid(axis="y", color=FAINT, lw=0.6)
        axis.set_axisbelow(True)
        clean(axis)
        if named:
            axis.tick_params(axis="x", rotation=90, labelbottom=True)
    _scale(panels[0], results, cases)
    ordered = [handles[mode] for mode in looks]
    style.add_legend(panels[0], ordered, list(looks), ncols=len(looks))
    subtitle = f"{source}; the dashed line is the least time that any schedule needs"
    subtitle += "; lines: mean of plans, bands: up to the worst" if named else ""
    title = f"Time over the bound, by mode and {'load' if named else 'fan-out'}"
    style.set_titles(picture, title, subtitle)
    return picture


def _draw_mode(axis: Axes, results: list[Result], cases: Cases, mode: str, look: Look) -> Any:
    """Draw a line and its band; return the line."""
    colour, marker = look
    at = [place for place in sorted(cases) if any(r.case == cases[place] for r in results)]
    groups = [[r for r in results if r.case == cases[place]] for place in at]
    middle = [float(np.median([r.over_bound for r in group])) for group in groups]
    low = [min(r.over_bound for r in group) for group in groups]
    high = [max(r.worst for r in group) for group in groups]
    # Lines of equally fast modes coincide: a large hollow marker keeps both visible.
    size, fill = (8.5, "none") if mode == "pull" else (5.5, colour)
    shape: dict[str, Any] = {"marker": marker, "ms": size, "mfc": fill}
    (line,) = axis.plot(at, middle, color=colour, lw=1.8, gid=mode, **shape)
    if low != high:
        axis.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)
    return line


def _scale(axis: Axes, results: list[Result], cases: Cases) -> None:
    """Set the scales of all panels: fan-outs by powers of two, large ratios logarithmic."""
    shown = sorted(cases)
    if shown == [cases[place] for place in shown]:
        axis.set_xscale("log", base=2)
        while len(shown) > 9:
            shown = shown[::2]
    axis.set_xticks(shown, [str(cases[place]) for place in shown])
    low, high = min(r.over_bound for r in results), max(r.worst for r in results)
    if high > 6:
        axis.set_yscale("log")
        ticks = [t for t in (0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500) if t <= high * 1.3]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ylim(min(0.95, low * 0.95), high * 1.6)
    else:
        axis.set_ylim(min(0.95, low - 0.05), max(high + (high - 1) * 0.25, 1.1))
    axis.minorticks_off()
