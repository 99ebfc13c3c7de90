"""Loads of ranks before and after replication, by step and layer: as a picture or an HTML page.

They come from a trace or a recording. The page is one self-contained HTML file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
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
from ultraep_comm.plan.topology import Topology
from ultraep_comm.recording.file import OPERATIONS, Known, Recording
from ultraep_comm.viz import style
from ultraep_comm.viz.style import FAINT, INK, MUTED, clean, count, plain_settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ints = NDArray[np.int64]
Quotas = tuple[NDArray[np.int32], ...]  # slot_expert, slot_quota and home_quota of a plan


@dataclass(frozen=True, eq=False)
class LoadSeries:
    """The plans of T steps and L layers, with their quotas."""

    source: str  # where the loads come from, for a subtitle
    steps: Ints  # [T], their numbers
    layers: Ints  # [L], likewise
    known: NDArray[np.bool_]  # [T, L], whether there is a plan; if not, it is empty
    home: Ints  # [E]
    slot_expert: Ints  # [T, L, G, S]
    slot_quota: Ints  # [T, L, G, S] tokens
    home_quota: Ints  # [T, L, E] tokens

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


def _stack(
    plans: Mapping[tuple[int, int], Quotas], home: NDArray[np.int32], source: str
) -> LoadSeries:
    """Return the series of plans by step and layer, of which there is at least one."""
    steps, at_step = np.unique([step for step, _ in plans], return_inverse=True)
    layers, at_layer = np.unique([layer for _, layer in plans], return_inverse=True)
    shape = (len(steps), len(layers))
    known = np.zeros(shape, bool)
    known[at_step, at_layer] = True
    stacked = []
    for arrays, empty in zip(zip(*plans.values(), strict=True), (-1, 0, 0), strict=True):
        stacked.append(np.full((*shape, *arrays[0].shape), empty, np.int64))
        stacked[-1][at_step, at_layer] = arrays
    return LoadSeries(source, steps, layers, known, home.astype(np.int64), *stacked)


def plan_trace(
    trace: Trace,
    *,
    source: str,
    num_ranks: int,
    slots_per_rank: int,
    tokens_per_rank: int,
    target: float,
) -> LoadSeries:
    """Plan every step and layer of recorded routing, whose ranks have windows of tokens.

    Raises:
        TraceError: the file has impossible loads.
        InvalidArgumentError: the file has no whole step, or a number is out of range.
    """
    steps = trace.num_steps(num_ranks=num_ranks, tokens_per_rank=tokens_per_rank)
    if not steps:
        raise InvalidArgumentError(
            f"{source} has no whole step of {num_ranks} ranks and {tokens_per_rank} tokens per"
            " rank; choose fewer ranks or tokens"
        )
    topology = Topology.make(
        num_ranks=num_ranks, num_experts=trace.num_experts, slots_per_rank=slots_per_rank
    )
    plans: dict[tuple[int, int], Quotas] = {}
    for step, layer in itertools.product(range(steps), range(trace.num_layers)):
        load = trace.load(
            num_ranks=num_ranks, step=step, layer=layer, tokens_per_rank=tokens_per_rank
        )
        plan = plan_replicas(torch.from_numpy(load), topology=topology, target=target)
        assert plan.slot_quota is not None
        assert plan.home_quota is not None
        quotas = (plan.slot_expert, plan.slot_quota, plan.home_quota)
        plans[step, layer] = tuple(part.numpy() for part in quotas)
        show_progress(len(plans), steps * trace.num_layers, "plans")
    return _stack(plans, topology.home, source)


def series_of(recordings: Sequence[Recording], *, source: str, num_layers: int = 1) -> LoadSeries:
    """Return the plans of a recorded run's transfers.

    Steps and layers are the microbatches and layers of saved plans. Of several transfers of one
    plan (forward and backward) the first is used, from any rank's file. Plans that were not saved
    are numbered in order, ``num_layers`` layers to a step.

    Raises:
        InvalidArgumentError: no transfer has a plan with quotas.
    """
    transfers: dict[int, tuple[Recording, int]] = {}  # by epoch, those with known quotas
    for recording in recordings:
        calls = recording.calls
        wanted = calls["operation"] == OPERATIONS.index("replicate_experts")
        for i in np.flatnonzero(wanted & (calls["known"] & Known.QUOTAS > 0)).tolist():
            transfers.setdefault(int(calls["epoch"][i]), (recording, i))
    plans: dict[tuple[int, int], Quotas] = {}
    for _, (recording, i) in sorted(transfers.items()):
        call = recording.calls[i]
        place = int(call["microbatch"]), int(call["layer"])
        if place[1] < 0:
            place = divmod(len(plans), num_layers)
        quotas = (recording.slot_expert, recording.slot_quota, recording.home_quota)
        plans.setdefault(place, tuple(part[i] for part in quotas))
    if not plans:
        raise InvalidArgumentError(
            f"{source} has no replicate_experts call with quotas; expected plans on the CPU, with"
            " quotas"
        )
    return _stack(plans, recordings[0].home, source)


# ---- the picture --------------------------------------------------------------------------------

TITLE = "Load per rank before and after replication"
_MAX_GROUPS = 16  # groups of columns with a label and a line each; of more, only every n-th


@plain_settings()
def draw_load(series: LoadSeries) -> Figure:
    """Return the picture: imbalance over steps and layers, and every rank's load as a colour.

    Columns are steps, each with its layers in order; or, if there are more steps than layers,
    layers, each with its steps.
    """
    figure = style.new_figure(11, 7.6)
    axes = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [1.15, 1, 1]})
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    known = series.known
    columns = [_outer_first(relative(loads, known)) for loads in (series.before, series.after)]
    _draw_imbalance(axes[0], *(shares.max(axis=-1) for shares in columns))
    colours = LinearSegmentedColormap.from_list("load", style.DIVERGING)
    shares = [part.reshape(-1, series.num_ranks) for part in columns]
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
    step = 0.5 if top <= 3 else 1.0 if top <= 8 else 2.0 if top <= 16 else np.ceil(top / 8)
    bar.set_ticks([0.0, 0.5, *np.arange(1.0, top + 1e-9, step)])
    bar.ax.spines[:].set_visible(False)
    _label_columns(series, list(axes))
    figure.align_ylabels()
    style.set_titles(figure, TITLE, describe_series(series))
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
    for values, text, colour in ((before, "before", style.ORANGE), (after, "after", style.BLUE)):
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
    style.add_legend(axis, ncols=2, handlelength=1.6)
    clean(axis)


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
    """Return the HTML page, with every plan as data; equal series give equal text."""
    names = ("before", "after", "slot_expert", "slot_quota", "home_quota")
    parts = {name: getattr(series, name) for name in names}

    def cell(at: tuple[int, int]) -> dict[str, Any] | None:
        return {k: part[at].tolist() for k, part in parts.items()} if series.known[at] else None

    steps, layers = series.known.shape
    data = {
        "title": TITLE,
        "source": describe_series(series),
        "num_ranks": series.num_ranks,
        "steps": series.steps.tolist(),
        "layers": series.layers.tolist(),
        "home": series.home.tolist(),
        "cells": [[cell((t, layer)) for layer in range(layers)] for t in range(steps)],
    }
    template = resources.files("ultraep_comm.viz").joinpath("load.html").read_text("utf-8")
    text = json.dumps(data, separators=(",", ":"))
    # In a script element, "</script" and "<!--" are parsed as HTML even inside strings.
    return template.replace("@DATA@", text.replace("<", "\\u003c"))
