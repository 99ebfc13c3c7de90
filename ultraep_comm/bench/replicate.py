"""The replicate benchmark, as every rank runs it. bench/METRICS.md says what the figures mean."""

from __future__ import annotations

from typing import Any

from ultraep_comm.bench.interleaved import Transfer, measure
from ultraep_comm.bench.one_plan import run_one_plan
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.report import Measurement
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.transfers import LibraryMode, PlainCopy, PointToPoint, Stage
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan


def run(settings: ReplicateSettings) -> int:
    """Measure on an initialised process group; rank 0 prints. Return `run_one_plan`'s status.

    Raises:
        UltraEPError: the group could not be made, or a transfer failed.
    """
    return run_one_plan(settings, _measure)


def _measure(settings: ReplicateSettings, group: Group, plan: Plan) -> list[Measurement]:
    stage = Stage(group=group, weights=group.empty_weights(), plan=plan)
    modes = [LibraryMode(stage, mode) for mode in settings.modes]
    transfers: list[Transfer[Any]] = [*modes, PointToPoint(stage), PlainCopy(stage)]
    payload = Payload(settings.seed, settings.segments)
    label = f" of {format_size(settings.expert_bytes)}"
    return measure(settings, stage, payload, transfers, label=label)
