"""What pictures of several panels share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ultraep_comm.viz.style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, SKY, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Look = tuple[str, str]  # colour and marker
# Of names that have no look of their own, in order of appearance.
_MORE = [("#8c6d00", "P"), (MUTED, "X"), (SKY, "*"), (ORANGE, "p"), (INK, "h"), ("#F0E442", "<")]
_MORE += [(BLUE, "d"), (GREEN, "H"), (PURPLE, ">")]


def find_looks(names: Iterable[str], own: dict[str, Look]) -> dict[str, Look]:
    """Return the looks of all names, first of those that have their own."""
    found = dict.fromkeys(names)
    others = [name for name in found if name not in own]
    known = {name: look for name, look in own.items() if name in found}
    return known | {name: _MORE[i % len(_MORE)] for i, name in enumerate(others)}


def make_panels(
    number: int, columns: int, size: tuple[float, float, float], x: str, y: str, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels; ``size`` in inches: of a panel, and of what is above all.

    Those of the last row have the label ``x``, those of the first column ``y``.
    """
    columns = min(columns, number)
    rows = -(-number // columns)
    figure = new_figure(max(7.5, size[0] * columns), size[2] + size[1] * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True, **options).ravel())
    for axis in panels[number:]:
        axis.remove()
    for i, axis in enumerate(panels[:number]):
        if i % columns == 0:
            axis.set_ylabel(y)
        if i + columns >= number:
            axis.set_xlabel(x)
            axis.tick_params(labelbottom=True)
    return figure, panels[:number]
