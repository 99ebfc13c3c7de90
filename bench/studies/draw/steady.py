"""The picture of steps: how many experts each layer moves in each step, by way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from studies.draw.records import read_records
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.viz.style import (
    INK,
    clean,
    count,
    new_figure,
    plain_settings,
    set_titles,
    short,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 1 << 20  # moves, and layers times steps


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """One way with one number of slots.

    Attributes:
        way: its name.
        slots: S.
        moves: int ``[steps, layers]``, experts moved.
        imbalance: the exact plans' mean.
    """

    way: str
    slots: int
    moves: NDArray[np.int64]
    imbalance: float


def load_panels(path: Path) -> list[Panel]:
    """Read the records of ``steady --json``; raises as `read_records` does."""
    found = read_records(path, "steady", "steady", _panel)
    for panel, place in found:
        moves = panel.moves
        if moves.ndim != 2 or not 0 < moves.size <= _MOST or moves.min() < 0 or moves.max() > _MOST:
            raise InvalidArgumentError(
                f"{place} has moves_by_step of shape {moves.shape}; expected [steps, layers], and"
                f" values from 0 to {_MOST}"
            )
    return [panel for panel, _ in found]


def _panel(record: Mapping[str, Any]) -> Panel:
    return Panel(
        way=short(str(record["way"])),
        slots=int(record["slots"]),
        moves=np.array(record["moves_by_step"], dtype=np.int64),
        imbalance=float(record["imbalance"]["mean"]),
    )


@plain_settings()
def draw_steady(panels: list[Panel], *, source: str) -> Figure:
    """Return the picture: a row for each number of slots, a column for each way.

    A square is a layer in a step, darker the more it moves; white: nothing.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    ways = list(dict.fromkeys(p.way for p in panels))
    slots = list(dict.fromkeys(p.slots for p in panels))
    most = max(int(p.moves.max()) for p in panels)
    figure = new_figure(max(7.5, 3.4 * len(ways)), 1.9 + 2.1 * len(slots))
    axes = figure.subplots(len(slots), len(ways), squeeze=False, sharex=True, sharey=True)
    shown = None
    for row, number in enumerate(slots):
        for column, way in enumerate(ways):
            axis = axes[row, column]
            own = [p for p in panels if (p.slots, p.way) == (number, way)]
            if not own:
                axis.set_axis_off()
                continue
            moves = own[-1].moves
            shown = axis.imshow(
                moves.T,
                cmap="Blues",
                vmin=0,
                vmax=max(most, 1),
                aspect="auto",
                gid=f"{way} {number}",
            )
            axis.set_title(
                f"{way}, {count(number, 'slot')}: {moves.mean():.2f} moves,"
                f" {(moves == 0).mean():.0%} nothing",
                loc="left",
                fontsize=9.5,
                color=INK,
            )
            if column == 0:
                axis.set_ylabel("layer")
            if row == len(slots) - 1:
                axis.set_xlabel("step")
            clean(axis)
    if shown is not None:
        bar = figure.colorbar(shown, ax=axes.ravel().tolist(), shrink=0.8, pad=0.01)
        bar.set_label("experts moved")
        bar.outline.set_visible(False)
    set_titles(
        figure,
        "What each layer moves, step after step",
        f"{source}: plans of imbalance {np.mean([p.imbalance for p in panels]):.3f} on average;"
        " the first step is not shown",
    )
    return figure
