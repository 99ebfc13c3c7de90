"""The picture of ranks' loads before and after replication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.viz.loads import LoadSeries, imbalance, relative
from ultraep_comm.viz.style import (
    BLUE,
    DIVERGING,
    FAINT,
    INK,
    MUTED,
    ORANGE,
    clean,
    count,
    new_figure,
    plain_settings,
    set_titles,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_GROUPS = 16  # of columns that have a label and a line each; of more, some


@plain_settings()
def draw_load(series: LoadSeries) -> Figure:
    """Return the picture: imbalance over steps and layers, and every rank's load as a colour.

    Columns are steps, each with its layers in order; or layers, each with its steps, where those
    are more.

    Raises:
        UnsupportedError: there is no matplotlib.
    """
    figure = new_figure(11, 7.6)
    axes = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [1.15, 1, 1]})
    known = series.known
    before, after = series.before, series.after
    lines = (_outer_first(imbalance(loads, known)) for loads in (before, after))
    _draw_imbalance(axes[0], *lines)
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    colours = LinearSegmentedColormap.from_list("load", DIVERGING)
    shares = [
        _outer_first(relative(loads, known)).reshape(-1, series.num_ranks)
        for loads in (before, after)
    ]
    top = max(1.5, float(np.nanmax(shares)))
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=top)
    for axis, share, text in zip(
        axes[1:], shares, ("Before: experts at home only", "After: with replicas"), strict=True
    ):
        image = axis.imshow(share.T, aspect="auto", cmap=colours, norm=norm, interpolation="none")
        axis.set_title(text, loc="left", fontsize=10, color=INK)
        axis.set_ylabel("rank")
        every = max(1, -(-series.num_ranks // 8))
        axis.set_yticks(range(0, series.num_ranks, every))
        clean(axis)
    bar = figure.colorbar(image, ax=axes[1:], pad=0.01, aspect=30)
    bar.set_label("tokens of a rank / mean of all ranks")
    bar.set_ticks(_ticks(top))
    bar.ax.spines[:].set_visible(False)
    _label_columns(series, list(axes))
    figure.align_ylabels()
    set_titles(figure, "Load per rank before and after replication", describe_series(series))
    return figure


def describe_series(series: LoadSeries) -> str:
    """Return a line for below a title: the source and the numbers of everything."""
    slots, experts = series.slot_expert.shape[3], len(series.home)
    lost = int((~series.known).sum())
    return (
        f"{series.source}: {count(series.num_ranks, 'rank')}, {count(experts, 'expert')},"
        f" {count(slots, 'slot')} per rank; {count(len(series.steps), 'step')} of"
        f" {count(len(series.layers), 'layer')}"
        + (f", {lost} of these plans not recorded" if lost else "")
    )


def _outer_first(values: NDArray[Any]) -> NDArray[Any]:
    """Return ``[T, L, ...]`` with the shorter of its two axes first: columns go by that."""
    return values.swapaxes(0, 1) if values.shape[0] > values.shape[1] else values


def _draw_imbalance(axis: Axes, before: NDArray[np.float64], after: NDArray[np.float64]) -> None:
    for values, text, colour in ((before, "before", ORANGE), (after, "after", BLUE)):
        outer, inner = values.shape
        label = f"{text}: mean {np.nanmean(values):.3f}, worst {np.nanmax(values):.3f}"
        at = np.arange(values.size, dtype=np.float64).reshape(values.shape)
        lines = values
        if outer > 1 and inner > 1:  # none from a step's last layer to the next one's first
            gap = np.full((outer, 1), np.nan)
            at, lines = np.hstack([at, gap]), np.hstack([values, gap])
        marker = "o" if values.size <= 60 else ""
        axis.plot(
            at.ravel(), lines.ravel(), color=colour, label=label, lw=1.6, marker=marker, ms=3.5
        )
    axis.axhline(1, color=MUTED, lw=0.8, ls=":")
    top = float(np.nanmax([np.nanmax(before), np.nanmax(after), 1.1]))
    axis.set_ylim(1 - 0.05 * (top - 1), top + 0.08 * (top - 1))
    axis.set_ylabel("busiest rank / mean")
    axis.grid(axis="y", color=FAINT, lw=0.6)
    axis.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        frameon=False,
        fontsize=9.5,
        borderpad=0,
        borderaxespad=0.5,
        handlelength=1.6,
    )
    clean(axis)


def _ticks(top: float) -> list[float]:
    step = 0.5 if top <= 3 else 1.0 if top <= 8 else 2.0 if top <= 16 else float(np.ceil(top / 8))
    above = np.arange(1 + step, top + 1e-9, step)
    return [0.0, 0.5, 1.0, *above.tolist()]


def _label_columns(series: LoadSeries, axes: list[Axes]) -> None:
    """Number the outer ones of steps and layers, or the inner ones if there is one outer one."""
    outer, inner = (series.steps, "step"), (series.layers, "layer")
    if len(outer[0]) > len(inner[0]):
        outer, inner = inner, outer
    (numbers, what), (others, other) = outer, inner
    last = axes[-1]
    if len(numbers) == 1:
        every = max(1, -(-len(others) // 24))
        at = range(0, len(others), every)
        last.set_xticks(list(at), [str(others[i]) for i in at])
        last.set_xlabel(other)
        return
    every = max(1, -(-len(numbers) // _MAX_GROUPS))
    for axis in axes:
        for i in range(every, len(numbers), every):
            axis.axvline(i * len(others) - 0.5, color=MUTED, lw=0.7)
    at = range(0, len(numbers), every)
    middle = [(i + min(i + every, len(numbers))) * len(others) / 2 - 0.5 for i in at]
    last.set_xticks(middle, [str(numbers[i]) for i in at])
    last.tick_params(axis="x", length=0)
    first = what if every == 1 else f"first of {every} {what}s"
    last.set_xlabel(
        f"{first}; in each {what} {other}s {others[0]} to {others[-1]}, from left to right"
    )
