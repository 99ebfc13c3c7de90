"""A command that measures one plan on the CPU, size by size, as every rank runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ultraep_comm.bench.figures import check_gated
from ultraep_comm.bench.gate import exit_code
from ultraep_comm.bench.outputs import write_outputs
from ultraep_comm.bench.placement import gather_places
from ultraep_comm.bench.report import Measurement, SizeRun, make_document
from ultraep_comm.bench.report_table import ResultTable, format_header, make_table
from ultraep_comm.bench.settings import ReplicateSettings, each_size
from ultraep_comm.creation import new_group
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan
from ultraep_comm.planning import plan_replicas

Sized = TypeVar("Sized", bound=ReplicateSettings)


def run_one_plan(
    settings: Sized,
    measure: Callable[[Sized, Group, Plan], list[Measurement]],
    *,
    grads: torch.dtype | None = None,
) -> int:
    """Make a group and the plan for every size, measure, and report. Collective; rank 0 prints.

    Args:
        settings: of the command.
        measure: times what the command is about, for one size. Collective.
        grads: as for ``new_group``.

    Returns:
        The exit status, 1: wrong bytes, 3: the gate is not met.

    Raises:
        UltraEPError: a group could not be made, or a call failed.
    """
    torch.set_num_threads(1)
    wrong, speaks, header = 0, False, ""
    table: ResultTable | None = None
    records: list[dict[str, Any]] = []
    baselines: list[dict[str, Any]] = []
    places: list[dict[str, Any]] = []
    for one, num_sms in (
        (one, count) for one in each_size(settings) for count in settings.num_sms or (None,)
    ):
        with new_group(
            num_experts=one.num_experts,
            slots_per_rank=one.slots,
            expert=one.expert,
            grads=grads,
            tile_bytes=one.tile_bytes,
            num_sms=num_sms,
            engine=one.engine,
        ) as group:
            speaks = group.rank == 0
            plan = plan_replicas(torch.from_numpy(one.load), group=group)
            check_gated(plan, bool(settings.gate))
            if not places:
                places = gather_places(group)
                header = format_header(settings, plan, places)
                if speaks:
                    print(header, flush=True)
            *modes, user, machine = measure(one, group, plan)
            run = SizeRun(
                settings=one, plan=plan, num_sms=num_sms, modes=modes, user=user, machine=machine
            )
            found, compared = run.records(settings.gate), run.baselines()
            records += found
            baselines += compared
            wrong += run.wrong_bytes
            table = table or make_table(settings, [user.mode, machine.mode])
            if speaks:
                print(table.add([*found, *compared]), flush=True)
    if speaks:
        document = make_document(settings, records, baselines, places, header)
        write_outputs(document, json_path=settings.json, csv_path=settings.csv)
    return exit_code(settings.gate, records, wrong, speaks=speaks)
