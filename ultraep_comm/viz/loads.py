"""Loads of ranks before and after replication, by step and layer: as a picture or an HTML page.

They come from a trace or a recording. The page is one self-contained HTML file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.bench.report import show_progress
from ultraep_comm.bench.traces import Trace
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.plan.topology import Topology, contiguous_home
from ultraep_comm.recording.file import OPERATIONS, Known, Recording
from ultraep_comm.viz.style import (
    BLUE,
    DIVERGING,
    FAINT,
    INK,
    MUTED,
    ORANGE,
    add_legend,
    clean,
    count,
    new_figure,
    plain_settings,
    set_titles,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadSeries:
    """The plans of T steps and L layers, with their quotas.

    Attributes:
        source: where the loads come from, for a subtitle.
        steps: ``[T]``, the steps' numbers.
        layers: ``[L]``, the layers' numbers.
        known: bool ``[T, L]``: whether there is a plan; if not, quotas are 0 and slots empty.
        home: ``[E]``.
        slot_expert: ``[T, L, G, S]``.
        slot_quota: ``[T, L, G, S]`` tokens.
        home_quota: ``[T, L, E]`` tokens.
    """

    source: str
    steps: Ints
    layers: Ints
    known: NDArray[np.bool_]
    home: Ints
    slot_expert: Ints
    slot_quota: Ints
    home_quota: Ints

    @property
    def num_ranks(self) -> int:
        """Return G."""
        return int(self.slot_expert.shape[2])

    @property
    def expert_load(self) -> Ints:
        """Return the tokens of each expert, ``[T, L, E]``: the sum of its quotas."""
        load: Ints = self.home_quota.copy()
        t, layer, rank, slot = np.nonzero(self.slot_expert >= 0)
        experts = self.slot_expert[t, layer, rank, slot]
        np.add.at(load, (t, layer, experts), self.slot_quota[t, layer, rank, slot])
        return load

    @property
    def before(self) -> Ints:
        """Return the tokens of each rank without replicas, ``[T, L, G]``."""
        return self._at_home(self.expert_load)

    @property
    def after(self) -> Ints:
        """Return the tokens of each rank under the plans, ``[T, L, G]``."""
        total: Ints = self._at_home(self.home_quota) + self.slot_quota.sum(axis=3)
        return total

    def _at_home(self, tokens: Ints) -> Ints:
        ranks = np.zeros((*tokens.shape[:2], self.num_ranks), np.int64)
        for rank in range(self.num_ranks):
            ranks[..., rank] = tokens[..., self.home == rank].sum(axis=-1)
        return ranks


def relative(loads: Ints, known: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return loads ``[T, L, G]`` over their mean; nan without a plan, 1 without tokens."""
    mean = loads.mean(axis=-1, keepdims=True)
    shares: NDArray[np.float64] = np.ones(loads.shape)
    np.divide(loads, mean, out=shares, where=mean > 0)
    shares[~known] = np.nan
    return shares


def imbalance(loads: Ints, known: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the largest load of a rank over the mean, ``[T, L]``; nan without a plan."""
    largest: NDArray[np.float64] = relative(loads, known).max(axis=-1)
    return largest


# ---- traces -------------------------------------------------------------------------------------


def plan_trace(
    trace: Trace,
    *,
    source: str,
    num_ranks: int,
    slots_per_rank: int,
    tokens_per_rank: int,
    target: float,
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
) -> LoadSeries:
    """Plan every step and layer of recorded routing.

    Args:
        trace: an open file.
        source: for the subtitle.
        num_ranks: G.
        slots_per_rank: S.
        tokens_per_rank: length of a rank's window, for files of tokens.
        target: as for :func:`plan_replicas`.
        steps: their numbers; None: all.
        layers: likewise.

    Raises:
        TraceError: the file has no such step or layer, or no whole step.
        InvalidArgumentError: a number is out of range.
    """
    total = trace.num_steps(num_ranks=num_ranks, tokens_per_rank=tokens_per_rank)
    steps = range(total) if steps is None else steps
    layers = range(trace.num_layers) if layers is None else layers
    shape = (len(steps), len(layers))
    if 0 in shape:
        raise InvalidArgumentError(
            f"{source} has {total} whole steps of {num_ranks} ranks and {tokens_per_rank} tokens"
            " per rank; expected at least one. Choose fewer ranks or tokens"
        )
    experts = trace.num_experts
    slots = np.full((*shape, num_ranks, slots_per_rank), -1, np.int64)
    slot_quota, home_quota = np.zeros_like(slots), np.zeros((*shape, experts), np.int64)
    topology = Topology.make(
        num_ranks=num_ranks, num_experts=experts, slots_per_rank=slots_per_rank
    )
    for i, step in enumerate(steps):
        for j, layer in enumerate(layers):
            load = trace.load(
                num_ranks=num_ranks, step=step, layer=layer, tokens_per_rank=tokens_per_rank
            )
            plan = plan_replicas(torch.from_numpy(load), topology=topology, target=target)
            assert plan.slot_quota is not None
            assert plan.home_quota is not None
            slots[i, j] = plan.slot_expert.numpy()
            slot_quota[i, j] = plan.slot_quota.numpy()
            home_quota[i, j] = plan.home_quota.numpy()
            show_progress(i * shape[1] + j + 1, shape[0] * shape[1], "plans")
    return LoadSeries(
        source=source,
        steps=np.array(steps, np.int64),
        layers=np.array(layers, np.int64),
        known=np.ones(shape, bool),
        home=contiguous_home(experts, num_ranks).astype(np.int64),
        slot_expert=slots,
        slot_quota=slot_quota,
        home_quota=home_quota,
    )


# ---- recordings ---------------------------------------------------------------------------------


def series_of(
    recordings: Sequence[Recording], *, source: str, num_layers: int | None = None
) -> LoadSeries:
    """Return the plans of a recorded run's transfers.

    Steps and layers are the microbatches and layers of saved plans. Of several transfers of one
    plan (forward and backward) the first is used, from any rank's file. Plans that were not saved
    are numbered in order, ``num_layers`` layers to a step.

    Args:
        recordings: of one run.
        source: for the subtitle.
        num_layers: layers per step of plans that were not saved; None: 1.

    Raises:
        InvalidArgumentError: no transfer has a plan with quotas, or ``num_layers`` is below 1.
    """
    if num_layers is not None and num_layers < 1:
        raise InvalidArgumentError(f"layers is {num_layers}; expected at least 1")
    place: dict[tuple[int, int], tuple[Recording, int]] = {}
    for recording, i in _transfers(recordings):
        call = recording.calls[i]
        key = (int(call["microbatch"]), int(call["layer"]))
        if key[1] < 0:
            key = divmod(len(place), num_layers or 1)
        if key not in place:
            place[key] = (recording, i)
    if not place:
        raise InvalidArgumentError(
            f"{source} has no replicate_experts call with quotas; expected plans on the CPU, with"
            " quotas"
        )
    steps, step_of = _numbered(step for step, _ in place)
    layers, layer_of = _numbered(layer for _, layer in place)
    first = recordings[0]
    shape = (len(steps), len(layers))
    slots = np.full((*shape, first.num_ranks, first.slots_per_rank), -1, np.int64)
    slot_quota, home_quota = np.zeros_like(slots), np.zeros((*shape, first.num_experts), np.int64)
    known = np.zeros(shape, bool)
    for (step, layer), (recording, i) in place.items():
        at = step_of(step), layer_of(layer)
        known[at] = True
        slots[at] = recording.slot_expert[i]
        slot_quota[at] = recording.slot_quota[i]
        home_quota[at] = recording.home_quota[i]
    return LoadSeries(
        source=source,
        steps=steps,
        layers=layers,
        known=known,
        home=first.home.astype(np.int64),
        slot_expert=slots,
        slot_quota=slot_quota,
        home_quota=home_quota,
    )


def _transfers(recordings: Sequence[Recording]) -> list[tuple[Recording, int]]:
    """Return every transfer with known quotas once, by epoch, as (recording, index)."""
    found: dict[int, tuple[Recording, int]] = {}
    for recording in recordings:
        calls = recording.calls
        wanted = (calls["operation"] == OPERATIONS.index("replicate_experts")) & (
            calls["known"] & Known.QUOTAS > 0
        )
        for i in np.flatnonzero(wanted).tolist():
            found.setdefault(int(calls["epoch"][i]), (recording, i))
    return [found[epoch] for epoch in sorted(found)]


def _numbered(values: Iterable[int]) -> tuple[Ints, Callable[[int], int]]:
    """Return the sorted distinct values, and a function from value to index."""
    array = np.unique(np.fromiter(values, np.int64))
    return array, {int(value): i for i, value in enumerate(array)}.__getitem__


# ---- the picture --------------------------------------------------------------------------------

TITLE = "Load per rank before and after replication"
_MAX_GROUPS = 16  # groups of columns with a label and a line each; of more, only every n-th


@plain_settings()
def draw_load(series: LoadSeries) -> Figure:
    """Return the picture: imbalance over steps and layers, and every rank's load as a colour.

    Columns are steps, each with its layers in order; or, if there are more steps than layers,
    layers, each with its steps.

    Raises:
        UnsupportedError: matplotlib is not installed.
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
    set_titles(figure, TITLE, describe_series(series))
    return figure


def describe_series(series: LoadSeries) -> str:
    """Return the subtitle: the source, and the numbers of ranks, experts, slots, steps, layers."""
    slots, experts = series.slot_expert.shape[3], len(series.home)
    lost = int((~series.known).sum())
    return (
        f"{series.source}: {count(series.num_ranks, 'rank')}, {count(experts, 'expert')},"
        f" {count(slots, 'slot')} per rank; {count(len(series.steps), 'step')} of"
        f" {count(len(series.layers), 'layer')}"
        + (f", {lost} of these plans not recorded" if lost else "")
    )


def _outer_first(values: NDArray[Any]) -> NDArray[Any]:
    """Return ``[T, L, ...]`` with the shorter of the two axes first, the outer one of columns."""
    return values.swapaxes(0, 1) if values.shape[0] > values.shape[1] else values


def _draw_imbalance(axis: Axes, before: NDArray[np.float64], after: NDArray[np.float64]) -> None:
    for values, text, colour in ((before, "before", ORANGE), (after, "after", BLUE)):
        outer, inner = values.shape
        label = f"{text}: mean {np.nanmean(values):.3f}, worst {np.nanmax(values):.3f}"
        at = np.arange(values.size, dtype=np.float64).reshape(values.shape)
        lines = values
        if outer > 1 and inner > 1:  # no line from one group of columns to the next
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
    add_legend(axis, ncols=2, handlelength=1.6)
    clean(axis)


def _ticks(top: float) -> list[float]:
    step = 0.5 if top <= 3 else 1.0 if top <= 8 else 2.0 if top <= 16 else float(np.ceil(top / 8))
    above = np.arange(1 + step, top + 1e-9, step)
    return [0.0, 0.5, 1.0, *above.tolist()]


def _label_columns(series: LoadSeries, axes: list[Axes]) -> None:
    """Label the outer axis of the columns, or the inner one if the outer has a single entry."""
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


# ---- the page -----------------------------------------------------------------------------------


def make_page(series: LoadSeries) -> str:
    """Return the HTML page; equal series give equal text."""
    template = resources.files("ultraep_comm.viz").joinpath("load.html").read_text("utf-8")
    text = json.dumps(page_data(series), separators=(",", ":"))
    # In a script element, "</script" and "<!--" are parsed as HTML even inside strings.
    return template.replace("@DATA@", text.replace("<", "\\u003c"))


def page_data(series: LoadSeries) -> dict[str, Any]:
    """Return the page's data: plans by step and layer, null without a plan."""
    before, after = series.before, series.after
    cells = [
        [
            {
                "before": before[t, layer].tolist(),
                "after": after[t, layer].tolist(),
                "slot_expert": series.slot_expert[t, layer].tolist(),
                "slot_quota": series.slot_quota[t, layer].tolist(),
                "home_quota": series.home_quota[t, layer].tolist(),
            }
            if series.known[t, layer]
            else None
            for layer in range(len(series.layers))
        ]
        for t in range(len(series.steps))
    ]
    return {
        "title": TITLE,
        "source": describe_series(series),
        "num_ranks": series.num_ranks,
        "steps": series.steps.tolist(),
        "layers": series.layers.tolist(),
        "home": series.home.tolist(),
        "cells": cells,
    }
