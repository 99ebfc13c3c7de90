"""The replicate benchmark, as every rank runs it. bench/METRICS.md says what the figures mean."""

from __future__ import annotations

from typing import Any

import torch

from ultraep_comm.bench.interleaved import Transfer, measure
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.report import Measurement, format_header, format_results, write_json
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.bench.transfers import LibraryMode, PlainCopy, PointToPoint, Stage
from ultraep_comm.creation import new_group
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan
from ultraep_comm.planning import plan_replicas


def run(settings: ReplicateSettings) -> int:
    """Measure on an initialised process group; rank 0 prints. Return the exit code, 1: wrong bytes.

    Raises:
        UltraEPError: the group could not be made, or a transfer failed.
    """
    torch.set_num_threads(1)
    with new_group(
        num_experts=settings.num_experts,
        slots_per_rank=settings.slots,
        expert=settings.expert,
        tile_bytes=settings.tile_bytes,
        num_sms=settings.num_sms[0] if settings.num_sms else None,
        engine=settings.engine,
    ) as group:
        plan = plan_replicas(torch.from_numpy(settings.load), group=group)
        if group.rank == 0:
            print(format_header(settings, plan), flush=True)
        measured = _measure(settings, group, plan)
        if group.rank == 0:
            print(format_results(settings, plan, measured), flush=True)
            if settings.json is not None:
                write_json(settings.json, settings, plan, measured)
    return 1 if any(m.wrong_bytes for m in measured) else 0


def _measure(settings: ReplicateSettings, group: Group, plan: Plan) -> list[Measurement]:
    stage = Stage(group=group, weights=group.empty_weights(), plan=plan)
    modes = [LibraryMode(stage, mode) for mode in settings.modes]
    transfers: list[Transfer[Any]] = [*modes, PointToPoint(stage), PlainCopy(stage)]
    return measure(settings, stage, Payload(settings.seed, settings.segments), transfers)
