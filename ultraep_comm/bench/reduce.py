"""The reduce benchmark, as every rank runs it. bench/METRICS.md says what the figures mean."""

from __future__ import annotations

from typing import Any

import torch

from ultraep_comm.bench.grad_payload import GradPayload
from ultraep_comm.bench.interleaved import Transfer, measure
from ultraep_comm.bench.reduce_settings import ReduceSettings
from ultraep_comm.bench.reductions import CopyAdd, GlooReduction, GradStage, Reduction
from ultraep_comm.bench.report import Measurement, format_header, format_results, write_json
from ultraep_comm.creation import new_group
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan
from ultraep_comm.planning import plan_replicas


def run(settings: ReduceSettings) -> int:
    """Measure on an initialised process group; rank 0 prints. Return the exit code, 1: wrong bytes.

    Raises:
        UltraEPError: the group could not be made, or a reduction failed.
    """
    torch.set_num_threads(1)
    with new_group(
        num_experts=settings.num_experts,
        slots_per_rank=settings.slots,
        expert=settings.expert,
        grads=settings.grad_dtype,
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


def _measure(settings: ReduceSettings, group: Group, plan: Plan) -> list[Measurement]:
    stage = make_stage(settings, group, plan)
    modes = [Reduction(stage, mode) for mode in settings.modes]
    transfers: list[Transfer[Any]] = [*modes, GlooReduction(stage), CopyAdd(stage)]
    return measure(settings, stage, make_payload(settings), transfers)


def make_stage(settings: ReduceSettings, group: Group, plan: Plan) -> GradStage:
    """Allocate main gradients where the group's slots are, and mark what must not change."""
    mains = {
        name: torch.empty((group.num_mains, n), dtype=settings.main_dtype, device=group.device)
        for name, n in settings.elements.items()
    }
    return GradStage(group=group, mains=mains, plan=plan, zero=settings.zero)


def make_payload(settings: ReduceSettings) -> GradPayload:
    """Return what all gradients of a run are."""
    return GradPayload(
        settings.seed,
        settings.elements,
        settings.num_experts,
        grad_dtype=settings.grad_dtype,
        main_dtype=settings.main_dtype,
    )
