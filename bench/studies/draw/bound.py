"""The bound picture: time over bound by mode, against fan-outs or loads, from a result file."""

from __future__ import annotations

import reprlib
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
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    add_legend,
    clean,
    count,
    load_records,
    new_figure,
    plain_settings,
    set_titles,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour and marker of each mode; other modes take those of _MORE in order of appearance.
LOOKS = {
    "push": (BLUE, "o"),
    "pull": (GREEN, "s"),
    "direct": (VERMILION, "^"),
    "auto": (INK, "D"),
    "relay": (PURPLE, "v"),
}
_MORE = [("#8c6d00", "P"), (MUTED, "X"), (SKY, "*"), (ORANGE, "p"), (INK, "h"), ("#F0E442", "<")]
_COLUMNS = 3
_MOST = 1e9  # largest fan-out, and largest time over bound


@dataclass(frozen=True, kw_only=True)
class Result:
    """A time over the lower bound of any schedule.

    Attributes:
        size: of experts in bytes, or a string that names the panel.
        mode: of the transfer.
        case: replicas of an expert, or the name of a kind of load.
        over_bound: the ratio; the mean if of several plans.
        worst: the largest ratio of these plans.
    """

    size: int | str
    mode: str
    case: int | str
    over_bound: float
    worst: float


def load_results(path: Path) -> list[Result]:
    """Read a JSON file: records, or a document that has them under ``records``.

    Each record has ``size`` (bytes, or a string), ``mode``, ``fan_out`` and ``over_bound``; or it
    is one of ``python bench/studies model --json``. Other fields are ignored.

    Raises:
        InvalidArgumentError: the file has no such records; the text names the file and the record.
        OSError: the file cannot be read.
    """
    results = [
        r for i, d in enumerate(load_records(path)) for r in _check(d, f"{path}: record {i}")
    ]
    if len({type(result.case) for result in results}) > 1:
        raise InvalidArgumentError(
            f"{path} has records with a fan_out and others with a load; expected one kind"
        )
    return results


def _check(record: Any, place: str) -> list[Result]:
    if not isinstance(record, dict):
        raise InvalidArgumentError(f"{place} is {reprlib.repr(record)}; expected an object")
    if record.get("op") == "model":
        return _check_model(record, place)
    if "op" in record and "fan_out" not in record:
        raise InvalidArgumentError(
            f"{place} is of `{record['op']}`; expected one of `bench/studies model --json`, or one"
            " with size, mode, fan_out and over_bound"
        )
    for name, kinds in (("size", (int, str)), ("mode", (str,)), ("fan_out", (int,))):
        value = record.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise InvalidArgumentError(
                f"{place} has {name} {reprlib.repr(value)}; expected"
                f" {' or '.join(k.__name__ for k in kinds)}"
            )
    if isinstance(record["size"], int) and not 0 < record["size"] < 2**63:
        raise InvalidArgumentError(
            f"{place} has size {reprlib.repr(record['size'])}; expected bytes, above 0"
        )
    over, fan_out = record.get("over_bound"), record["fan_out"]
    if not isinstance(over, int | float) or not 0 < over <= _MOST or not 1 <= fan_out <= _MOST:
        raise InvalidArgumentError(
            f"{place} has fan_out {reprlib.repr(fan_out)} and over_bound {reprlib.repr(over)};"
            f" expected at least 1, and a number above 0, both at most {_MOST:g}"
        )
    ratio, size = float(over), record["size"]
    return [
        Result(
            size=short(size) if isinstance(size, str) else size,
            mode=short(record["mode"]),
            case=fan_out,
            over_bound=ratio,
            worst=ratio,
        )
    ]


def _check_model(record: dict[str, Any], place: str) -> list[Result]:
    """Return the results of a record of the ``model`` benchmark, one for each mode."""
    try:
        size = ", ".join(count(record[f"{what}s"], what) for what in ("rank", "expert", "slot"))
        results = [
            Result(
                size=size,
                mode=short(way),
                case=short(str(record["load"])),
                over_bound=float(ratio["mean"]),
                worst=float(ratio["worst"]),
            )
            for way, ratio in record["over_bound"].items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(
            f"{place} is not a record of the model benchmark: {reprlib.repr(error)} is wrong or"
            " missing"
        ) from None
    if not all(0 < r.over_bound <= r.worst <= _MOST for r in results):
        raise InvalidArgumentError(
            f"{place} has impossible times over the bound; expected 0 < mean <= worst <= {_MOST:g}"
        )
    return results


@plain_settings()
def draw_bound(results: list[Result], *, source: str) -> Figure:
    """Return the picture: a panel for each size, a line for each mode, against fan-outs or loads.

    If a point has several results, the line shows their median, and a band their range.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    sizes: list[int | str] = list(dict.fromkeys(r.size for r in results))
    sizes.sort(key=lambda size: size if isinstance(size, int) else 0)  # strings keep their order
    cases: list[int | str] = list(dict.fromkeys(r.case for r in results))
    named = isinstance(cases[0], str)
    columns = min(_COLUMNS, len(sizes))
    rows = -(-len(sizes) // columns)
    figure = new_figure(max(7.5, 4.0 * columns), 1.5 + (4.2 if named else 3.2) * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    panels = list(grid.ravel())
    looks = _looks(results)
    for axis, size in zip(panels, sizes, strict=False):
        for mode, look in looks.items():
            own = [r for r in results if (r.size, r.mode) == (size, mode)]
            _draw_mode(axis, own, cases, mode, look)
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
    _scale(panels[0], results, cases)
    for i, axis in enumerate(panels[: len(sizes)]):
        if i % columns == 0:
            axis.set_ylabel("time / bound")
        if i + columns >= len(sizes):
            axis.set_xlabel("load" if named else "replicas of an expert (fan-out)")
            axis.tick_params(labelbottom=True)
        if named:
            axis.tick_params(axis="x", rotation=90, labelbottom=True)
    handles: dict[str, Any] = {}
    for axis in panels[: len(sizes)]:
        handles |= {line.get_gid(): line for line in axis.lines if line.get_gid() is not None}
    add_legend(panels[0], [handles[mode] for mode in looks], list(looks), ncols=len(looks))
    subtitle = f"{source}; the dashed line is the least time that any schedule needs"
    subtitle += "; lines: mean of plans, bands: up to the worst" if named else ""
    title = f"Time over the bound, by mode and {'load' if named else 'fan-out'}"
    set_titles(figure, title, subtitle)
    return figure


def _looks(results: list[Result]) -> dict[str, tuple[str, str]]:
    modes = dict.fromkeys(r.mode for r in results)
    others = [mode for mode in modes if mode not in LOOKS]
    known = {mode: LOOKS[mode] for mode in LOOKS if mode in modes}
    return known | {mode: _MORE[i % len(_MORE)] for i, mode in enumerate(others)}


def _places(cases: list[int | str]) -> dict[int | str, int]:
    """Return the x coordinate of each case: a number's value, a name's index."""
    return {case: case if isinstance(case, int) else i for i, case in enumerate(cases)}


def _draw_mode(
    axis: Axes, results: list[Result], cases: list[int | str], mode: str, look: tuple[str, str]
) -> None:
    if not results:
        return
    colour, marker = look
    places = _places(cases)
    at = sorted({places[r.case] for r in results})
    groups = [[r for r in results if places[r.case] == place] for place in at]
    middle = [float(np.median([r.over_bound for r in group])) for group in groups]
    low = [min(r.over_bound for r in group) for group in groups]
    high = [max(r.worst for r in group) for group in groups]
    # Lines of equally fast modes coincide: a large hollow marker keeps both visible.
    size, fill = (8.5, "none") if mode == "pull" else (5.5, colour)
    axis.plot(at, middle, color=colour, marker=marker, ms=size, mfc=fill, lw=1.8, gid=mode)
    if low != high:
        axis.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)


def _scale(axis: Axes, results: list[Result], cases: list[int | str]) -> None:
    """Set the scales of all panels: fan-outs by powers of two, large ratios logarithmic."""
    from matplotlib.ticker import FixedLocator, NullLocator

    names = {place: str(case) for case, place in _places(cases).items()}
    shown = sorted(names)
    if isinstance(cases[0], int):
        axis.set_xscale("log", base=2)
        while len(shown) > 9:
            shown = shown[::2]
    axis.xaxis.set_major_locator(FixedLocator([float(place) for place in shown]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: names.get(round(value), ""))
    low, high = min(r.over_bound for r in results), max(r.worst for r in results)
    if high > 6:
        axis.set_yscale("log")
        ticks = [t for t in (0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500) if t <= high * 1.3]
        axis.yaxis.set_major_locator(FixedLocator(ticks))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_ylim(min(0.95, low * 0.95), high * 1.6)
    else:
        axis.set_ylim(min(0.95, low - 0.05), max(high + (high - 1) * 0.25, 1.1))
