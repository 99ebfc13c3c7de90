"""The table of faults: the survivors' errors and times."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cast import Outcome
from scene import Scene, judge, times

from ultraep_comm.bench.table import format_table

# The attempts in which a fault is detected; others come before or after.
FIRST = ("call", "new_group", "empty_weights", "calls", "soak", "lives")
HEADERS = ("fault", "survivors get", "p50 s", "max s", "within s", "runs", "unexpected")


@dataclass(kw_only=True)
class Row:
    """All runs of one scene."""

    scene: Scene
    runs: int = 0
    seconds: list[float] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> list[str]:
        """Add one run; return its deviations from the scene."""
        self.runs += 1
        wrong = judge(self.scene, outcome)
        self.wrong += wrong
        for _, event, seconds in times(outcome):
            if event.name in self.shown:
                self.kinds[event.kind] += 1
                self.seconds.append(seconds)
        self.figures += [r.figures for r in outcome.reports.values() if r.figures]
        return wrong

    @property
    def shown(self) -> tuple[str, ...]:
        """Return the attempts that the row reports."""
        named = [name for name in FIRST if name in self.scene.expect]
        return tuple(named) or ("close",)

    @property
    def within(self) -> float:
        """Return the seconds that the slowest of them may take."""
        return max(
            expect.within
            for name in self.shown
            for expect in self.scene.expect.get(name, {}).values()
        )

    def cells(self) -> tuple[str, ...]:
        gets = ", ".join(
            kind.removesuffix("Error") + (f" {n}" if len(self.kinds) > 1 else "")
            for kind, n in self.kinds.most_common()
        )
        times_ = (f"{statistics.median(self.seconds):.3f}", f"{max(self.seconds):.3f}")
        shown = times_ if self.seconds else ("-", "-")
        return (
            self.scene.name,
            gets.replace("ok", "success"),
            *shown,
            f"{self.within:g}",
            str(self.runs),
            str(len(self.wrong)),
        )

    def record(self) -> dict[str, Any]:
        """Return the row for a result file."""
        return {
            "op": "fault",
            "fault": self.scene.name,
            "item": self.scene.item,
            "ranks": self.scene.size,
            "runs": self.runs,
            "kinds": dict(self.kinds),
            "time_to_error_s": {
                "p50": statistics.median(self.seconds) if self.seconds else None,
                "max": max(self.seconds, default=None),
            },
            "within_s": self.within,
            "limit_s": self.scene.limit,
            "unexpected": self.wrong,
            "figures": self.figures,
        }


def render(rows: Iterable[Row]) -> None:
    """Print the table, with rich if it is installed, else as aligned text."""
    rows = list(rows)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # an optional dependency
        print(format_table([HEADERS], [row.cells() for row in rows]))
        return
    console = Console()
    if not console.is_terminal:
        print(format_table([HEADERS], [row.cells() for row in rows]))
        return
    table = Table(*HEADERS[:2])
    for header in HEADERS[2:]:
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(*row.cells(), style="red" if row.wrong else "")
    console.print(table)
