"""The table of faults: the survivors' errors and times."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from cast import Outcome
from scene import Scene, judge, times

from ultraep_comm.bench.table import Column

# The attempts in which a fault is detected; others come before or after.
FIRST = ("call", "new_group", "empty_weights", "calls", "soak", "lives")
COLUMNS = (
    Column("fault", "", "fault"),
    Column("survivors get", "", "survivors"),
    Column("p50", "s", "time_to_error_s.p50", ".3f"),
    Column("max", "s", "time_to_error_s.max", ".3f"),
    Column("within", "s", "within_s"),
    Column("runs", "", "runs"),
    Column("unexpected", "", "num_unexpected"),
)


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

    def record(self) -> dict[str, Any]:
        """Return the row for a result file."""
        return {
            "op": "fault",
            "fault": self.scene.name,
            "item": self.scene.item,
            "ranks": self.scene.size,
            "runs": self.runs,
            "kinds": dict(self.kinds),
            "survivors": ", ".join(f"{n} {kind}" for kind, n in self.kinds.most_common()),
            "time_to_error_s": {
                "p50": statistics.median(self.seconds) if self.seconds else None,
                "max": max(self.seconds, default=None),
            },
            "within_s": self.within,
            "limit_s": self.scene.limit,
            "unexpected": self.wrong,
            "num_unexpected": len(self.wrong),
            "figures": self.figures,
        }
