"""The picture of a file's records: the first one tells which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from studies.draw import DrawSettings
from studies.draw.bound import draw_bound, load_results
from studies.draw.frontier import draw_frontier, load_points
from studies.draw.paths import draw_paths, load_paths
from studies.draw.steady import draw_steady, load_panels
from ultraep_comm.bench.report import Report
from ultraep_comm.viz.style import load_records, save_png, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(settings: DrawSettings, report: Report) -> int:
    """Write the picture; return the exit status.

    Raises:
        InvalidArgumentError: the file has records of several kinds, or invalid ones.
        UnsupportedError: matplotlib is not installed.
    """
    save_png(_draw(settings), settings.out)
    report.show(str(settings.out))
    return 0


def _draw(settings: DrawSettings) -> Figure:
    first, source = load_records(settings.file)[0], short(settings.file.name)
    op = first.get("op") if isinstance(first, dict) else None
    if op == "plan_against":
        return draw_frontier(load_points(settings.file), source=source)
    if op == "critical_path":
        return draw_paths(load_paths(settings.file), source=source)
    if op == "steady":
        return draw_steady(load_panels(settings.file), source=source)
    return draw_bound(load_results(settings.file), source=source)
