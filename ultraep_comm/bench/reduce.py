"""The reduce benchmark, as every rank runs it. bench/METRICS.md says what the figures mean."""

from __future__ import annotations

from typing import Any

import torch

from ultraep_comm.bench.grad_payload import GradPayload
from ultraep_comm.bench.interleaved import Transfer, measure
from ultraep_comm.bench.one_plan import run_one_plan
from ultraep_comm.bench.reduce_settings import ReduceSettings
from ultraep_comm.bench.reductions import CopyAdd, GlooReduction, GradStage, Reduction
from ultraep_comm.bench.report import Measurement
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan


def run(settings: ReduceSettings) -> int:
    """Measure on an initialised process group; rank 0 prints. Return `run_one_plan`'s status.

    Raises:
        UltraEPError: the group could not be made, or a reduction failed.
    """
    return run_one_plan(settings, _measure, grads=settings.grad_dtype)


def _measure(settings: ReduceSettings, group: Group, plan: Plan) -> list[Measurement]:
    stage = make_stage(settings, group, plan)
    modes = [Reduction(stage, mode) for mode in settings.modes]
    transfers: list[Transfer[Any]] = [*modes, GlooReduction(stage), CopyAdd(stage)]
    label = f" of {format_size(settings.expert_bytes)}"
    return measure(settings, stage, make_payload(settings), transfers, label=label)


def make_stage(settings: ReduceSettings, group: Group, plan: Plan) -> GradStage:
    """Allocate and bind main gradients where slots are, and mark what must not change."""
    mains = {
        name: torch.empty((group.num_mains, n), dtype=settings.main_dtype, device=group.device)
        for name, n in settings.elements.items()
    }
    bound = group.bind_grads(mains)
    return GradStage(group=group, mains=mains, bound=bound, plan=plan, zero=settings.zero)


def make_payload(settings: ReduceSettings) -> GradPayload:
    """Return what all gradients of a run are."""
    return GradPayload(
        settings.seed,
        settings.elements,
        settings.num_experts,
        grad_dtype=settings.grad_dtype,
        main_dtype=settings.main_dtype,
    )
