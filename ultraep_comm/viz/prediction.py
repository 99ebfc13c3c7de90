"""The one place that asks the model for a transfer's timeline."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from typing import Any

from ultraep_comm.errors import UnsupportedError
from ultraep_comm.plan import Plan
from ultraep_comm.viz.chart import WIDTH, Chart, chart_timeline

_MODEL = "ultraep_comm.model"
_WIDTHS = 400  # pauses of less than this part of a transfer are too short for a picture
_LANES = 6  # of a rank, in a picture


def predict_charts(
    plan: Plan, expert_bytes: int, *, machine: str, mode: str, source: str, width: float = WIDTH
) -> tuple[Chart, Chart]:
    """Return the charts of one transfer as the model predicts it: for a picture, and in full.

    Args:
        plan: of the transfer.
        expert_bytes: W.
        machine: a name that the model knows.
        mode: of the transfer, or "auto".
        source: what the plan is, for the subtitle.
        width: of the picture in inches.

    Raises:
        UltraEPError: the model refuses the machine, the mode or the plan.
        UnsupportedError: this installation has no model.
    """
    if importlib.util.find_spec(_MODEL) is None:
        raise UnsupportedError(
            f"this installation has no {_MODEL}; draw recorded calls instead, without --predict"
        )
    model: Any = importlib.import_module(_MODEL)
    found = model.predict(plan, expert_bytes, machine, mode, timeline=True)
    subtitle = (
        f"{source}, predicted for {machine}, mode {found.mode}: {found.time_us:,.1f} us,"
        f" {found.over_bound:.3f} of the bound"
    )
    text: dict[str, Any] = {
        "title": "One transfer, rank by rank",
        "subtitle": subtitle,
        "marks": {f"bound, {found.bound_us:,.1f} us": float(found.bound_us)},
    }
    drawn = chart_timeline(found.timeline, **text, gap_us=found.time_us / _WIDTHS, max_lanes=_LANES)
    return replace(drawn, width=width), chart_timeline(found.timeline, **text)
