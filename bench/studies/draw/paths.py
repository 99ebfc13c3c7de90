"""Critical paths: a row for each, its parts one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from studies.draw.records import figure
from ultraep_comm.viz.charts import Bar, Chart
from ultraep_comm.viz.style import short
from ultraep_comm.viz.timeline import draw_timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("gather", "plan", "schedule", "transfer")  # in the order in which they run
_WIDTH = 10.0  # inches
Row = tuple[str, list[float]]  # its name, and the microseconds of each part


def read_path(record: Mapping[str, Any]) -> list[Row]:
    """Return the row of a record that ``bench/recipes/critical_path.py`` has written."""
    name = short(f"{record['machine']}, {record['mode']}, max(k, in) {record['busiest']}")
    total = figure(record, "total_us")
    return [(f"{name}: {total:,.1f} us", [figure(record, f"us.{part}") for part in PARTS])]


def draw_paths(rows: list[Row], *, source: str) -> Figure:
    """Return the picture."""
    bars = []
    for i, (_, parts) in enumerate(rows):
        begins = itertools.accumulate(parts, initial=0.0)
        for kind, begin, us in zip(PARTS, begins, parts, strict=False):
            bars.append(
                Bar(rank=i, lane=0, kind=kind, begin_us=begin, end_us=begin + us, label=f"{us:.1f}")
            )
    chart = Chart(
        title="From counts to filled slots",
        subtitle=f"{source}; max(k, in): experts sent or slots filled by the busiest rank",
        num_ranks=len(rows),
        bars=bars,
        rows=[name for name, _ in rows],
    )
    return draw_timeline(chart, width=_WIDTH)
