"""What ``validate`` prints and writes. bench/METRICS.md has the formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ultraep_comm.bench.figures import rate
from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.placement import format_places
from ultraep_comm.bench.report import describe_run
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import format_table
from ultraep_comm.bench.validate_settings import PlannedCase, ValidateSettings
from ultraep_comm.calibration import MeasuredCosts


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A plan, measured and predicted.

    Attributes:
        case: the plan.
        took: the mode that the library took, and that is predicted.
        calls: in a row.
        times_us: of each round.
        measured_us: their statistic.
        predicted_us: by the model.
    """

    case: PlannedCase
    took: str
    calls: int
    times_us: Sequence[float]
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """Return predicted over measured, less 1: below 0 the transfer took longer."""
        return self.predicted_us / self.measured_us - 1

    def record(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return {
            "op": "validate",
            "mode": self.case.mode,
            "chosen": self.took,
            "expert_bytes": self.case.expert_bytes,
            "replicas": self.case.replicas,
            "imports": self.case.imports,
            "filling": [" ".join(f"{h}/{n}" for h, n in row) for row in self.case.filling],
            "calls": self.calls,
            "time_us": {
                "min": float(np.min(self.times_us)),
                "p50": float(np.median(self.times_us)),
                "max": float(np.max(self.times_us)),
            },
            "measured_us": self.measured_us,
            "predicted_us": self.predicted_us,
            "error": self.error,
        }


def median_error(found: Sequence[Predicted]) -> float:
    """Return the median over plans of the error's size."""
    return float(np.median([abs(one.error) for one in found]))


def worst_error(found: Sequence[Predicted]) -> float:
    """Return the largest."""
    return max(abs(one.error) for one in found)


def format_validation_header(
    settings: ValidateSettings, places: Sequence[dict[str, Any]], load_average: Sequence[float]
) -> str:
    """Return what a reader must know before the figures."""
    sizes = settings.sizes
    lines = [
        *describe_run("validate"),
        *format_places(places, engine="host", fabric=settings.fabric),
        f"{settings.plans} plans, experts of {format_size(sizes[0])} to {format_size(sizes[-1])},"
        f" {settings.slots} slots, seed {settings.seed}; sources are in no cache",
        f"{settings.iters} rounds of all measurements, shuffled; {settings.statistic} of measured"
        " and of calibrated times",
        f"other load: load average {load_average[0]:.2f} before, {load_average[-1]:.2f} after",
    ]
    return "\n".join(f"# {line}" for line in lines)


_COLUMNS = (
    ("mode", ""),
    ("size", ""),
    ("imports", "of ranks"),
    ("bytes", "MB"),
    ("measured", "us"),
    ("predicted", "us"),
    ("error", "%"),
    ("measured", "GB/s"),
)


def format_validation(
    settings: ValidateSettings, costs: MeasuredCosts, found: Sequence[Predicted]
) -> str:
    """Return the calibration, a row for each plan, and the errors."""
    figures = ", ".join(f"{k} {v:.4g}" for k, v in asdict(costs).items() if isinstance(v, float))
    rows = []
    for one in found:
        case = one.case
        moved = case.replicas * case.expert_bytes
        mode = case.mode if case.mode == one.took else f"{case.mode} ({one.took})"
        rows.append(
            (
                mode,
                format_size(case.expert_bytes),
                "+".join(map(str, case.imports)),
                f"{moved / 1e6:.2f}",
                f"{one.measured_us:.1f}",
                f"{one.predicted_us:.1f}",
                f"{100 * one.error:+.1f}",
                f"{rate(moved, one.measured_us):.2f}",
            )
        )
    lines = [
        f"# calibrated: {figures}",
        format_table(list(zip(*_COLUMNS, strict=True)), rows),
        f"# error: median {100 * median_error(found):.1f}%, worst {100 * worst_error(found):.1f}%,"
        f" of {len(found)} plans",
    ]
    if settings.max_error is not None:
        missed = median_error(found) > settings.max_error
        verdict = "not met" if missed else "met"
        lines.append(f"# gate {verdict}: median error at most {100 * settings.max_error:g}%")
    return "\n".join(lines)


def make_validation_document(
    settings: ValidateSettings,
    costs: MeasuredCosts,
    times: Mapping[str, Sequence[float]],
    found: Sequence[Predicted],
    places: Sequence[dict[str, Any]],
    load_average: Sequence[float],
) -> dict[str, Any]:
    """Return everything that the run knows."""
    names = ("num_ranks", "plans", "sizes", "slots", "iters", "statistic", "seed")
    gate = None
    if settings.max_error is not None:
        met = median_error(found) <= settings.max_error
        gate = {"max_error": settings.max_error, "met": met}
    return {
        "records": [one.record() for one in found],
        "median_error": median_error(found),
        "worst_error": worst_error(found),
        "calibration": asdict(costs),
        "calibration_times_us": {
            name: {"min": float(np.min(us)), "p50": float(np.median(us)), "max": float(np.max(us))}
            for name, us in times.items()
        },
        "wrong_bytes": 0,  # else there is no document
        "load_average": {"before": load_average[0], "after": load_average[-1]},
        "machine": describe_machine(),
        "topology": list(places),
        "commit": find_commit(),
        "gate": gate,
        "settings": {name: getattr(settings, name) for name in names},
    }
