"""The picture of steps: how many experts each layer moves in each step, by way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from studies.draw.records import figure
from ultraep_comm.viz.style import INK, clean, count, new_figure, plain_settings, set_titles, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Panel(NamedTuple):
    """One way with one number of slots."""

    way: str
    slots: int
    moves: NDArray[np.int64]  # [steps, layers], experts moved
    imbalance: float  # the exact plans' mean


def read_panel(record: Mapping[str, Any]) -> list[Panel]:
    """Return the panel of a record of ``steady``."""
    moves = np.array(record["moves_by_step"], dtype=np.int64)
    if moves.ndim != 2 or not moves.size or moves.min() < 0:
        raise ValueError(f"moves_by_step has shape {moves.shape}; expected [steps, layers], from 0")
    slots, imbalance = int(figure(record, "slots")), figure(record, "imbalance.mean", 1)
    return [Panel(short(str(record["way"])), slots, moves, imbalance)]


@plain_settings()
def draw_steady(panels: list[Panel], *, source: str) -> Figure:
    """Return the picture: a row for each number of slots, a column for each way.

    A square is a layer in a step, darker the more it moves; white: nothing.
    """
    ways = list(dict.fromkeys(p.way for p in panels))
    slots = list(dict.fromkeys(p.slots for p in panels))
    most = max(int(p.moves.max()) for p in panels)
    picture = new_figure(max(7.5, 3.4 * len(ways)), 1.9 + 2.1 * len(slots))
    axes = picture.subplots(len(slots), len(ways), squeeze=False, sharex=True, sharey=True)
    for axis in axes.ravel():
        axis.set_axis_off()  # until there is something to show
    for panel in panels:
        moves = panel.moves
        axis = axes[slots.index(panel.slots), ways.index(panel.way)]
        axis.set_axis_on()
        name = f"{panel.way} {panel.slots}"
        limits = {"vmin": 0, "vmax": max(most, 1)}
        shown = axis.imshow(moves.T, cmap="Blues", aspect="auto", gid=name, **limits)
        axis.set_title(
            f"{panel.way}, {count(panel.slots, 'slot')}: {moves.mean():.2f} moves,"
            f" {(moves == 0).mean():.0%} nothing",
            loc="left",
            fontsize=9.5,
            color=INK,
        )
        clean(axis)
    for axis in axes[:, 0]:
        axis.set_ylabel("layer")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    bar = picture.colorbar(shown, ax=axes.ravel().tolist(), shrink=0.8, pad=0.01)
    bar.set_label("experts moved")
    bar.outline.set_visible(False)
    set_titles(
        picture,
        "What each layer moves, step after step",
        f"{source}: plans of imbalance {np.mean([p.imbalance for p in panels]):.3f} on average;"
        " the first step is not shown",
    )
    return picture
