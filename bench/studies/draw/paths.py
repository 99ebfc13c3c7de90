"""Critical paths: a row for each, its parts one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.draw.records import read_records
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.viz.charts import Bar, Chart
from ultraep_comm.viz.style import short
from ultraep_comm.viz.timeline import draw_timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("gather", "plan", "schedule", "transfer")  # in the order in which they run
_MAX_US = 1e9
_ROUNDING_US = 0.3  # of the parts and the total, each to a tenth
_WIDTH = 10.0  # inches
Row = tuple[str, list[float], float]  # name, microseconds of each part, total


def load_paths(path: Path) -> list[Row]:
    """Return the rows of a file that ``bench/recipes/critical_path.py`` has written.

    Raises:
        InvalidArgumentError: the file has other content; the text names the file and the record.
        OSError: the file cannot be read.
    """
    rows = []
    for row, place in read_records(path, "critical_path", "bench/recipes/critical_path.py", _parse):
        _, parts, total = row
        apart = abs(sum(parts) - total)
        if not (all(0 <= us <= _MAX_US for us in parts) and apart <= _ROUNDING_US):
            raise InvalidArgumentError(
                f"{place} has us {parts} and total_us {total}; expected parts from 0 to"
                f" {_MAX_US:g} that add up to the total"
            )
        rows.append(row)
    return rows


def _parse(record: Mapping[str, Any]) -> Row:
    name = f"{record['machine']}, {record['mode']}, max(k, in) {record['busiest']}"
    return name, [float(record["us"][part]) for part in PARTS], float(record["total_us"])


def draw_paths(rows: list[Row], *, source: str) -> Figure:
    """Return the picture.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    bars = []
    for i, (_, parts, _) in enumerate(rows):
        begins = itertools.accumulate(parts, initial=0.0)
        for kind, begin, us in zip(PARTS, begins, parts, strict=False):
            times = {"begin_us": begin, "end_us": begin + us}
            bars.append(Bar(rank=i, lane=0, kind=kind, **times, label=f"{us:.1f}", details={}))
    return draw_timeline(
        Chart(
            title="From counts to filled slots",
            subtitle=f"{source}; max(k, in): experts sent or slots filled by the busiest rank",
            num_ranks=len(rows),
            bars=bars,
            width=_WIDTH,
            rows=[f"{short(name)}: {total:,.1f} us" for name, _, total in rows],
        )
    )
