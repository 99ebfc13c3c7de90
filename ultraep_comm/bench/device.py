"""The replicate benchmark on GPUs, as every process runs it. bench/METRICS.md defines figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ultraep_comm.bench.device_report import Baselines, DeviceRun, FixedCosts, ModeRun
from ultraep_comm.bench.device_rounds import measure_rounds, slowest
from ultraep_comm.bench.device_sizes import TILE_BYTES, Announce, run_device_sizes
from ultraep_comm.bench.device_transfers import (
    DeviceCopy,
    DeviceMode,
    DeviceTransfer,
    NcclPointToPoint,
    RanksHere,
    StreamCopies,
)
from ultraep_comm.bench.figures import Times
from ultraep_comm.bench.gpu import Meter, own_gpu
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.traffic import Traffic, count_traffic
from ultraep_comm.plan import Plan
from ultraep_comm.planning import plan_replicas
from ultraep_comm.schedule import make_schedule

TIMED_CALLS = 3  # one more lines up the ranks; four can be under way without blocking the host
HOST_CALLS = 30


def run(settings: ReplicateSettings) -> int:
    """Measure; rank 0 prints. Return `run_device_sizes`' status.

    Raises:
        UltraEPError: there is no device, a group could not be made, or a transfer failed.
    """
    return run_on(own_gpu(), settings)


def run_on(meter: Meter, settings: ReplicateSettings) -> int:
    """Measure on a device: see :func:`run`."""
    return run_device_sizes(meter, settings, _measure_size)


def _measure_size(meter: Meter, settings: ReplicateSettings, announce: Announce) -> DeviceRun:
    loopback = settings.fabric == "loopback"
    here = settings.num_ranks if loopback else 1
    sweep = [meter.num_sms(given, here) for given in settings.num_sms or (None,)]
    payload = Payload(settings.seed, settings.segments)
    found: DeviceRun | None = None
    for num_sms in sweep:
        ranks = _make_ranks(meter, settings, settings.load, settings.segments, num_sms)
        plan = plan_replicas(torch.from_numpy(settings.load), group=ranks.groups[0])
        found = found or announce(ranks.groups[0], plan)
        baselines = _make_baselines(ranks, plan, settings) if found.baselines is None else []
        modes = [DeviceMode(ranks, plan, mode) for mode in settings.modes]
        chosen = [mode.choose() for mode in modes]
        times, wrong = _measure(settings, ranks, plan, payload, [*modes, *baselines])
        for m, mode in enumerate(settings.modes):
            found.modes.append(
                ModeRun(
                    mode=mode,
                    chosen=chosen[m],
                    num_sms=num_sms,
                    times=times[m],
                    wrong_bytes=int(wrong[m]),
                    traffic=_traffic(settings, plan, chosen[m]),
                    host_bound_us=slowest(
                        ranks.host_us(plan, mode, ranks.bound, HOST_CALLS), loopback
                    ),
                    host_unbound_us=slowest(
                        ranks.host_us(plan, mode, ranks.weights, HOST_CALLS), loopback
                    ),
                )
            )
        if found.baselines is None:
            found.baselines = Baselines(
                names=[x.name for x in baselines],
                times=times[len(modes) :],
                wrong_bytes=wrong[len(modes) :],
                copied=[x.num_bytes if isinstance(x, DeviceCopy) else 0 for x in baselines],
            )
            found.fixed = _fixed_costs(meter, settings, ranks, num_sms)
        ranks.close()
    assert found is not None
    return found


def _make_ranks(
    meter: Meter,
    settings: ReplicateSettings,
    load: NDArray[np.int32],
    segments: dict[str, int],
    num_sms: int,
) -> RanksHere:
    return RanksHere(
        meter,
        load,
        fabric=settings.fabric,
        slots=settings.slots,
        segments=segments,
        tile_bytes=settings.tile_bytes or TILE_BYTES,
        num_sms=num_sms,
    )


def _make_baselines(
    ranks: RanksHere, plan: Plan, settings: ReplicateSettings
) -> list[DeviceTransfer]:
    """Return what the modes are compared with, the copies of as many and of many bytes first."""
    meter = ranks.meter
    share = plan.num_replicas * settings.expert_bytes * len(ranks.groups) // settings.num_ranks
    made: list[DeviceTransfer] = [
        DeviceCopy(meter, "copy", max(share, 1)),
        DeviceCopy(meter, "big copy", meter.big_bytes),
    ]
    group = ranks.groups[0]
    if all(group._memory[1].bases):  # else some ranks are beyond load/store access
        made.append(StreamCopies(ranks, plan))
    nccl = None if ranks.loopback else _nccl_group()
    if nccl is not None:
        made.append(NcclPointToPoint(ranks, plan, nccl))
    return made


def _nccl_group() -> dist.ProcessGroup | None:
    """Return a process group of all ranks over NCCL; None: it cannot be, on some rank."""
    usable = dist.is_nccl_available() and torch.cuda.is_available()
    mine = torch.zeros(16, dtype=torch.uint8)
    if usable:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        text = str(getattr(properties, "uuid", torch.cuda.current_device())).replace("-", "")
        mine = torch.frombuffer(bytearray(bytes.fromhex(text.rjust(32, "0"))), dtype=torch.uint8)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    devices = {bytes(row.tolist()) for row in everybody}
    # NCCL has a rank on a GPU at most.
    if bytes(16) in devices or len(devices) < dist.get_world_size() or len(devices) < 2:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="nccl")
    return group


def _measure(
    settings: ReplicateSettings,
    ranks: RanksHere,
    plan: Plan,
    payload: Payload,
    transfers: Sequence[DeviceTransfer],
) -> tuple[list[Times], NDArray[np.int64]]:
    """Time transfers of one plan, interleaved; return their times, and wrong bytes."""

    def settle() -> None:
        ranks.meter.settle()
        if not ranks.loopback:
            dist.barrier()  # nobody fills what another one still copies from

    def time_us(run: Callable[[], None]) -> float:
        settle()
        took = ranks.meter.time_us(run, TIMED_CALLS, len(ranks.groups))
        settle()
        return took

    return measure_rounds(
        settings,
        transfers,
        payload,
        fill=lambda epoch: ranks.fill(plan, payload, epoch),
        time_us=time_us,
        loopback=ranks.loopback,
        label=f" of {format_size(settings.expert_bytes)}",
    )


def _traffic(settings: ReplicateSettings, plan: Plan, mode: str) -> Traffic:
    sizes, tile_bytes = list(settings.segments.values()), settings.tile_bytes or TILE_BYTES
    schedule = make_schedule(
        plan.slot_expert,
        home=plan.home,
        segment_bytes=sizes,
        tile_bytes=tile_bytes,
        mode=mode,
    )
    return count_traffic(
        schedule, num_ranks=settings.num_ranks, segment_bytes=sizes, tile_bytes=tile_bytes
    )


def hub_plan(load: NDArray[np.int32], slots: int) -> Plan | None:
    """Return a plan of one expert with two replicas, one of which is a hub; None: too few ranks."""
    num_ranks, num_experts = load.shape
    if num_ranks < 3 or slots < 1:
        return None
    table = torch.full((num_ranks, slots), -1, dtype=torch.int32)
    table[1, 0] = table[2, 0] = 0  # expert 0 is at home on rank 0
    return Plan.from_slots(table, num_experts=num_experts)


def _fixed_costs(
    meter: Meter, settings: ReplicateSettings, ranks: RanksHere, num_sms: int
) -> FixedCosts:
    """Time calls with nothing to move, and with one tile that goes through a hub."""
    nothing = torch.full((settings.num_ranks, settings.slots), -1, dtype=torch.int32)
    empty = Plan.from_slots(nothing, num_experts=settings.num_experts)
    loopback = ranks.loopback
    empty_us = _median(settings, ranks, empty)
    bound = slowest(ranks.host_us(empty, "push", ranks.bound, HOST_CALLS), loopback)
    unbound = slowest(ranks.host_us(empty, "push", ranks.weights, HOST_CALLS), loopback)
    tile_us = None
    plan = hub_plan(settings.load, settings.slots)
    if plan is not None:
        segments = {"w": settings.tile_bytes or TILE_BYTES}
        small = _make_ranks(meter, settings, settings.load, segments, num_sms)
        tile_us = _median(settings, small, plan)
        small.close()
    return FixedCosts(
        empty_us=empty_us, tile_us=tile_us, host_bound_us=bound, host_unbound_us=unbound
    )


def _median(settings: ReplicateSettings, ranks: RanksHere, plan: Plan) -> float:
    times = []
    for i in range(-settings.warmup, settings.iters):
        ranks.meter.settle()
        if not ranks.loopback:
            dist.barrier()
        took = ranks.meter.time_us(
            lambda: ranks.call(plan, "push", ranks.bound), TIMED_CALLS, len(ranks.groups)
        )
        if i >= 0:
            times.append(took)
    return slowest(float(np.median(times)), ranks.loopback)
