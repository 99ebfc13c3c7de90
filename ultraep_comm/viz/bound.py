"""The picture of time over bound, by mode and fan-out, from a file of results."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ultraep_comm.bench.sizes import format_size
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.viz.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    MUTED,
    PURPLE,
    VERMILION,
    clean,
    new_figure,
    set_titles,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour and marker of each mode; others follow in the order in which they come.
LOOKS = {
    "push": (BLUE, "o"),
    "pull": (GREEN, "s"),
    "direct": (VERMILION, "^"),
    "auto": (INK, "D"),
}
_MORE = [(PURPLE, "v"), ("#8c6d00", "P"), (MUTED, "X")]
_COLUMNS = 3


@dataclass(frozen=True, kw_only=True)
class Result:
    """One record: ``over_bound`` is the time over the least time that any schedule needs."""

    size: int | str
    mode: str
    fan_out: int
    over_bound: float


def load_results(path: Path) -> list[Result]:
    """Read a JSON file: records, or a document that has them under ``records``.

    Each has ``size`` (bytes, or a text), ``mode``, ``fan_out`` and ``over_bound``; what else is
    there does not matter.

    Raises:
        InvalidArgumentError: it is something else; names the file and the record.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is no JSON file: {error}") from None
    records = document.get("records") if isinstance(document, dict) else document
    if not isinstance(records, list) or not records:
        raise InvalidArgumentError(
            f"{path} has no records; expected a list of them, or an object with 'records'"
        )
    return [_check(record, f"{path}: record {i}") for i, record in enumerate(records)]


def _check(record: Any, place: str) -> Result:
    if not isinstance(record, dict):
        raise InvalidArgumentError(f"{place} is {record!r}; expected an object")
    for name, kinds in (("size", (int, str)), ("mode", (str,)), ("fan_out", (int,))):
        value = record.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise InvalidArgumentError(
                f"{place} has {name} {value!r}; expected {' or '.join(k.__name__ for k in kinds)}"
            )
    over, fan_out = record.get("over_bound"), record["fan_out"]
    if not isinstance(over, int | float) or not (math.isfinite(over) and over > 0) or fan_out < 1:
        raise InvalidArgumentError(
            f"{place} has fan_out {fan_out} and over_bound {over!r}; expected at least 1, and a"
            " number above 0"
        )
    return Result(size=record["size"], mode=record["mode"], fan_out=fan_out, over_bound=float(over))


def draw_bound(results: list[Result], *, source: str) -> Figure:
    """Return the picture: a panel for each size, a line for each mode.

    Where several results are of one size, mode and fan-out, the line has their median, and a band
    their range.

    Raises:
        UnsupportedError: there is no matplotlib.
    """
    sizes = sorted({r.size for r in results}, key=lambda size: (isinstance(size, str), size))
    columns = min(_COLUMNS, len(sizes))
    rows = -(-len(sizes) // columns)
    figure = new_figure(max(7.5, 4.0 * columns), 1.5 + 3.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    panels = list(grid.ravel())
    looks = _looks(results)
    for axis, size in zip(panels, sizes, strict=False):
        for mode, look in looks.items():
            _draw_mode(axis, [r for r in results if (r.size, r.mode) == (size, mode)], mode, look)
        axis.axhline(1, color=INK, lw=1.1, ls=(0, (5, 3)))
        text = f"experts of {format_size(size)}" if isinstance(size, int) else size
        axis.annotate(
            text,
            (0.02, 0.97),
            xycoords="axes fraction",
            va="top",
            fontsize=10,
            color=INK,
            backgroundcolor="white",
        )
        axis.grid(axis="y", color=FAINT, lw=0.6)
        axis.set_axisbelow(True)
        clean(axis)
    for axis in panels[len(sizes) :]:
        axis.remove()
    _scale(panels[0], results)
    for i, axis in enumerate(panels[: len(sizes)]):
        if i % columns == 0:
            axis.set_ylabel("time / bound")
        if i + columns >= len(sizes):
            axis.set_xlabel("replicas of an expert (fan-out)")
            axis.tick_params(labelbottom=True)
    handles: dict[str, Any] = {}
    for axis in panels[: len(sizes)]:
        found, names = axis.get_legend_handles_labels()
        handles |= dict(zip(names, found, strict=True))
    panels[0].legend(
        [handles[mode] for mode in looks],
        list(looks),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(looks),
        frameon=False,
        fontsize=9.5,
        borderpad=0,
        borderaxespad=0.5,
    )
    subtitle = f"{source}; the dashed line is the least time that any schedule needs"
    set_titles(figure, "Time over the bound, by mode and fan-out", subtitle, legend_rows=1)
    return figure


def _looks(results: list[Result]) -> dict[str, tuple[str, str]]:
    modes = dict.fromkeys(r.mode for r in results)
    others = [mode for mode in modes if mode not in LOOKS]
    known = {mode: LOOKS[mode] for mode in LOOKS if mode in modes}
    return known | {mode: _MORE[i % len(_MORE)] for i, mode in enumerate(others)}


def _draw_mode(axis: Axes, results: list[Result], mode: str, look: tuple[str, str]) -> None:
    if not results:
        return
    colour, marker = look
    fans = sorted({r.fan_out for r in results})
    values = [[r.over_bound for r in results if r.fan_out == fan] for fan in fans]
    middle = [float(np.median(v)) for v in values]
    low, high = [min(v) for v in values], [max(v) for v in values]
    axis.plot(fans, middle, color=colour, marker=marker, ms=5.5, lw=1.8, label=mode)
    if low != high:
        axis.fill_between(fans, low, high, color=colour, alpha=0.15, lw=0)


def _scale(axis: Axes, results: list[Result]) -> None:
    """Set the scales, which all panels share: by powers of two, and of time where it is far off."""
    from matplotlib.ticker import FixedLocator, NullLocator

    fans = sorted({r.fan_out for r in results})
    axis.set_xscale("log", base=2)
    shown = fans
    while len(shown) > 9:
        shown = shown[::2]
    axis.xaxis.set_major_locator(FixedLocator([float(fan) for fan in shown]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    low, high = min(r.over_bound for r in results), max(r.over_bound for r in results)
    if high > 6:
        axis.set_yscale("log")
        ticks = [t for t in (0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500) if t <= high * 1.3]
        axis.yaxis.set_major_locator(FixedLocator(ticks))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_ylim(min(0.95, low * 0.95), high * 1.6)
    else:
        axis.set_ylim(min(0.95, low - 0.05), max(high + (high - 1) * 0.25, 1.1))
