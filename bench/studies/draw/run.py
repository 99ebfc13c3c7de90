"""The picture of a file's records: the first one tells which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from studies.draw import DrawSettings
from studies.draw.bound import draw_bound, read_model, read_result
from studies.draw.frontier import draw_frontier, read_point
from studies.draw.paths import draw_paths, read_path
from studies.draw.steady import draw_steady, read_panel
from ultraep_comm.bench.report import Report
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.viz.style import save, short

# What reads a record, as a list of figures, and what draws these, by the record's operation.
KINDS: dict[str, tuple[Callable[..., list[Any]], Callable[..., Any]]] = {
    "plan_against": (read_point, draw_frontier),
    "critical_path": (read_path, draw_paths),
    "steady": (read_panel, draw_steady),
    "model": (read_model, draw_bound),
}


def run(settings: DrawSettings, report: Report) -> int:
    """Write the picture; return the exit status.

    Raises:
        InvalidArgumentError: the file has records of several kinds, or invalid ones.
        UnsupportedError: matplotlib is not installed.
    """
    draw, figures = read_figures(settings.records, str(settings.file))
    save(draw(figures, source=short(settings.file.name)), settings.out)
    report.show(str(settings.out))
    return 0


def read_figures(records: Sequence[Any], source: str) -> tuple[Callable[..., Any], list[Any]]:
    """Return what draws the records of a file, and the figures to draw.

    Raises:
        InvalidArgumentError: as `run` does; the text names the source and the record.
    """
    kinds, figures = [], []
    for i, record in enumerate(records):
        try:
            kinds.append(KINDS.get(record.get("op"), (read_result, draw_bound)))
            if kinds[i] != kinds[0]:
                raise ValueError("of another kind than the first record")
            figures += kinds[i][0](record)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{source}: record {i} cannot be drawn: {error!r:.200}; expected one of against,"
                " steady, model or critical_path.py, or with size, mode, fan_out and over_bound"
            ) from None
    return kinds[0][1], figures
