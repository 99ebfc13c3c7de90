"""A command that measures one plan on the CPU, as every rank runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ultraep_comm.bench.report import Measurement, format_header, format_results, write_json
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.creation import new_group
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan
from ultraep_comm.planning import plan_replicas


def run_one_plan(
    settings: ReplicateSettings,
    measure: Callable[[Group, Plan], list[Measurement]],
    *,
    grads: torch.dtype | None = None,
) -> int:
    """Make the group and the plan, measure, and report. Collective; rank 0 prints.

    Args:
        settings: of the command.
        measure: times what the command is about. Collective.
        grads: as for ``new_group``.

    Returns:
        The exit code, 1: wrong bytes.

    Raises:
        UltraEPError: the group could not be made, or a call failed.
    """
    torch.set_num_threads(1)
    with new_group(
        num_experts=settings.num_experts,
        slots_per_rank=settings.slots,
        expert=settings.expert,
        grads=grads,
        tile_bytes=settings.tile_bytes,
        num_sms=settings.num_sms[0] if settings.num_sms else None,
        engine=settings.engine,
    ) as group:
        plan = plan_replicas(torch.from_numpy(settings.load), group=group)
        if group.rank == 0:
            print(format_header(settings, plan), flush=True)
        measured = measure(group, plan)
        if group.rank == 0:
            print(format_results(settings, plan, measured), flush=True)
            if settings.json is not None:
                write_json(settings.json, settings, plan, measured)
    return 1 if any(m.wrong_bytes for m in measured) else 0
