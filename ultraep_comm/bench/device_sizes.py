"""A command that measures one plan on GPUs, size by size, as every process runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ultraep_comm.bench.device_report import (
    DeviceRun,
    make_device_document,
    make_device_records,
)
from ultraep_comm.bench.device_table import DeviceTable, format_device_header
from ultraep_comm.bench.figures import check_gated
from ultraep_comm.bench.gate import exit_code
from ultraep_comm.bench.gpu import Meter
from ultraep_comm.bench.outputs import write_outputs
from ultraep_comm.bench.placement import gather_places
from ultraep_comm.bench.settings import ReplicateSettings, each_size
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan

TILE_BYTES = 32 << 10
Sized = TypeVar("Sized", bound=ReplicateSettings)
Announce = Callable[[Group, Plan], DeviceRun]  # to be called once, when the plan is known


def run_device_sizes(
    meter: Meter, settings: Sized, measure: Callable[[Meter, Sized, Announce], DeviceRun]
) -> int:
    """Measure every size and report; rank 0 prints. Collective, but in loopback.

    Args:
        meter: of the device.
        settings: of the command.
        measure: measures one size. Collective.

    Returns:
        The exit status, 1: wrong bytes, 3: the gate is not met.

    Raises:
        UltraEPError: a group could not be made, or a call failed.
    """
    loopback = settings.fabric == "loopback"
    settings = dataclasses.replace(settings, tile_bytes=settings.tile_bytes or TILE_BYTES)
    speaks = loopback or dist.get_rank() == 0
    table = DeviceTable(settings)
    places: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    runs = []
    for one in each_size(settings):

        def announce(group: Group, plan: Plan, one: Sized = one) -> DeviceRun:
            check_gated(plan, bool(settings.gate))
            found = DeviceRun(settings=one, plan=plan, device=meter.describe())
            if not places:
                places.extend(gather_places(group, device=found.device, loopback=loopback))
                if speaks:
                    print(format_device_header(settings, found, places), flush=True)
            return found

        run = measure(meter, one, announce)
        runs.append(run)
        found = make_device_records(run)
        records += found
        if speaks:
            print(table.add(run, found), flush=True)
    if speaks:
        document = make_device_document(settings, runs, records, places)
        write_outputs(document, json_path=settings.json, csv_path=settings.csv)
    wrong = sum(run.wrong_bytes for run in runs)
    return exit_code(settings.gate, records, wrong, speaks=speaks)
