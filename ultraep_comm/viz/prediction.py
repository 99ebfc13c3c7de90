"""The one place that asks the model for a transfer's timeline."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ultraep_comm.errors import UltraEPError, UnsupportedError
from ultraep_comm.plan import Plan
from ultraep_comm.viz.chart import Chart, chart_timeline

_MODEL = "ultraep_comm.model"


def predict_chart(plan: Plan, expert_bytes: int, *, machine: str, mode: str, source: str) -> Chart:
    """Return the chart of one transfer as the model predicts it.

    Args:
        plan: of the transfer.
        expert_bytes: W.
        machine: a name that the model knows.
        mode: of the transfer, or "auto".
        source: what the plan is, for the subtitle.

    Raises:
        UltraEPError: the model refuses the machine, the mode or the plan.
        UnsupportedError: this installation has no model.
    """
    if importlib.util.find_spec(_MODEL) is None:
        raise UnsupportedError(
            f"this installation has no {_MODEL}; draw recorded calls instead, without --machine"
        )
    model: Any = importlib.import_module(_MODEL)
    try:
        prediction = model.predict(plan, expert_bytes, machine=machine, mode=mode)
    except ValueError as error:
        if isinstance(error, UltraEPError):
            raise
        raise UnsupportedError(str(error)) from None
    subtitle = (
        f"{source}; predicted for {machine}, mode {mode}: {prediction.time_us:,.1f} us,"
        f" {prediction.over_bound:.3f} of the bound"
    )
    bound = float(prediction.bound_us)
    return chart_timeline(
        prediction.timeline,
        title="One transfer, rank by rank",
        subtitle=subtitle,
        marks={f"bound, {bound:,.1f} us": bound},
    )
