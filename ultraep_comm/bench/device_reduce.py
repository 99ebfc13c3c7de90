"""The reduce benchmark on GPUs, as every process runs it. bench/METRICS.md defines figures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm.bench.device import HOST_CALLS, TIMED_CALLS
from ultraep_comm.bench.device_report import Baselines, DeviceRun, FixedCosts, ModeRun
from ultraep_comm.bench.device_rounds import measure_rounds, padding_id, slowest
from ultraep_comm.bench.device_sizes import TILE_BYTES, Announce, run_device_sizes
from ultraep_comm.bench.device_transfers import DeviceCopy
from ultraep_comm.bench.gpu import Meter, own_gpu
from ultraep_comm.bench.grad_payload import GradPayload
from ultraep_comm.bench.reduce import make_payload, make_stage
from ultraep_comm.bench.reduce_settings import ReduceSettings
from ultraep_comm.bench.reductions import GradStage
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.traffic import count_reduction_traffic
from ultraep_comm.collectives import gather_load
from ultraep_comm.creation import new_group, new_loopback_groups
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan
from ultraep_comm.planning import plan_replicas
from ultraep_comm.reduction import reduce_expert_grads
from ultraep_comm.work import Work


def run(settings: ReduceSettings) -> int:
    """Measure; rank 0 prints. Return `run_device_sizes`' status.

    Raises:
        UltraEPError: there is no device, a group could not be made, or a reduction failed.
    """
    return run_on(own_gpu(), settings)


def run_on(meter: Meter, settings: ReduceSettings) -> int:
    """Measure on a device: see :func:`run`."""
    return run_device_sizes(meter, settings, _measure_size)


def _measure_size(meter: Meter, settings: ReduceSettings, announce: Announce) -> DeviceRun:
    loopback = settings.fabric == "loopback"
    here = settings.num_ranks if loopback else 1
    payload = make_payload(settings)
    found: DeviceRun | None = None
    for num_sms in [meter.num_sms(given, here) for given in settings.num_sms or (None,)]:
        groups = _make_groups(meter, settings, num_sms)
        plan = plan_replicas(torch.from_numpy(settings.load), group=groups[0])
        found = found or announce(groups[0], plan)
        ranks = ReducingRanks(meter, settings, groups, plan)
        modes = [DeviceReduction(ranks, mode) for mode in settings.modes]
        share = plan.num_replicas * settings.expert_bytes * here // settings.num_ranks
        copies = [
            DeviceCopy(meter, "copy", max(share, 1)),
            DeviceCopy(meter, "big copy", meter.big_bytes),
        ]
        baselines = copies if found.baselines is None else []
        chosen = [mode.choose() for mode in modes]
        times, wrong = measure_rounds(
            settings,
            [*modes, *baselines],
            payload,
            fill=partial(ranks.fill, payload),
            time_us=partial(ranks.time_us, calls=1),  # a second would add what is left in slots
            loopback=loopback,
            label=f" of {format_size(settings.expert_bytes)}",
        )
        for m, mode in enumerate(modes):
            found.modes.append(
                ModeRun(
                    mode=mode.name,
                    chosen=chosen[m],
                    num_sms=num_sms,
                    times=times[m],
                    wrong_bytes=int(wrong[m]),
                    traffic=count_reduction_traffic(
                        plan,
                        chosen[m],
                        segment_bytes=list(settings.segments.values()),
                        tile_bytes=settings.tile_bytes or TILE_BYTES,
                        grad_bytes=settings.grad_dtype.itemsize,
                        main_bytes=settings.main_dtype.itemsize,
                        zero=settings.zero,
                    ),
                    host_bound_us=slowest(ranks.host_us(plan, mode.name), loopback),
                    host_unbound_us=slowest(ranks.host_us(plan, mode.name, bound=False), loopback),
                )
            )
        if found.baselines is None:
            found.baselines = Baselines(
                names=[x.name for x in baselines],
                times=times[len(modes) :],
                wrong_bytes=wrong[len(modes) :],
                copied=[x.num_bytes for x in baselines],
            )
            empty_us = [
                ranks.time_us(ranks.reduce_nothing, TIMED_CALLS) for _ in range(settings.iters)
            ]
            found.fixed = FixedCosts(
                empty_us=slowest(float(np.median(empty_us)), loopback),
                tile_us=None,
                host_bound_us=slowest(ranks.host_us(ranks.nothing, "pull"), loopback),
                host_unbound_us=slowest(
                    ranks.host_us(ranks.nothing, "pull", bound=False), loopback
                ),
            )
        for group in groups:
            group.close()
    assert found is not None
    return found


def _make_groups(meter: Meter, settings: ReduceSettings, num_sms: int) -> list[Group]:
    """Make the groups of all ranks in this process. Collective."""
    options: dict[str, Any] = {
        "num_experts": settings.num_experts,
        "slots_per_rank": settings.slots,
        "expert": settings.expert,
        "grads": settings.grad_dtype,
        "engine": meter.engine,
        "tile_bytes": settings.tile_bytes,
        "num_sms": num_sms,
    }
    if settings.fabric == "loopback":
        return new_loopback_groups(settings.num_ranks, **options)
    return [new_group(fabric=settings.fabric if meter.engine == "cuda" else "auto", **options)]


class ReducingRanks:
    """The ranks of this process: all of a loopback group, or one."""

    def __init__(
        self, meter: Meter, settings: ReduceSettings, groups: Sequence[Group], plan: Plan
    ) -> None:
        """Allocate main gradients."""
        self.meter, self.loopback = meter, settings.fabric == "loopback"
        self.plan, self._zero = plan, settings.zero
        self.stages: list[GradStage] = [make_stage(settings, group, plan) for group in groups]
        self.nothing = Plan.from_slots(
            torch.full((settings.num_ranks, settings.slots), -1, dtype=torch.int32),
            num_experts=settings.num_experts,
        )
        self._padding = padding_id(groups[0])

    def fill(self, payload: GradPayload, epoch: int) -> None:
        """Give the gradients of every rank here a new epoch's values."""
        for stage in self.stages:
            stage.fill(payload, epoch)

    def submit(self, plan: Plan, mode: str, *, bound: bool = True) -> list[Work]:
        """Start one call of every rank here, with gradients bound before or in the call."""
        works = [
            reduce_expert_grads(
                s.bound if bound else s.mains,
                plan,
                group=s.group,
                mode=mode,
                zero=self._zero,
                async_op=True,
            )
            for s in self.stages
        ]
        return [work for work in works if work is not None]

    def call(self, plan: Plan, mode: str) -> None:
        """Enqueue one call of every rank here, behind the current stream and before the rest."""
        if not self.loopback:
            (stage,) = self.stages
            reduce_expert_grads(stage.bound, plan, group=stage.group, mode=mode, zero=self._zero)
            return
        for work in self.submit(plan, mode):
            work.wait()

    def reduce_nothing(self) -> None:
        """Enqueue a call with nothing to reduce."""
        self.call(self.nothing, "pull")

    def line_up(self) -> None:
        """Enqueue what no rank leaves before all have come to it; of one GPU, a call."""
        if self.loopback:
            self.reduce_nothing()
        else:
            gather_load(self._padding, group=self.stages[0].group)

    def time_us(self, run: Any, calls: int) -> float:
        """Return the device's time of a call, behind one that lines up the ranks."""
        self.settle()
        took = self.meter.time_us(run, calls, len(self.stages), line_up=self.line_up)
        self.settle()
        return took

    def settle(self) -> None:
        """Wait for the device, and for other ranks."""
        self.meter.settle()
        if not self.loopback:
            dist.barrier()

    def host_us(self, plan: Plan, mode: str, *, bound: bool = True) -> float:
        """Return the median time that a call keeps the host, for one rank."""
        times = []
        for _ in range(HOST_CALLS):
            self.meter.settle()
            start = time.perf_counter_ns()
            works = self.submit(plan, mode, bound=bound)
            times.append((time.perf_counter_ns() - start) / 1e3 / len(self.stages))
            for work in works:
                work.synchronize()
        return float(np.median(times))


class DeviceReduction:
    """`reduce_expert_grads` of all ranks here."""

    def __init__(self, ranks: ReducingRanks, mode: str) -> None:
        """Reduce in ``mode``."""
        self.name, self._ranks = mode, ranks

    def run(self) -> None:
        """Reduce the plan's replicas."""
        self._ranks.call(self._ranks.plan, self.name)

    def choose(self) -> str:
        """Return the mode that the library takes for this plan. Collective: makes a call."""
        works = self._ranks.submit(self._ranks.plan, self.name)
        for work in works:
            work.synchronize()
        return works[0].mode

    def count_wrong(self, payload: GradPayload, epoch: int) -> int:
        """Compare main gradients and slots."""
        return sum(
            stage.count_wrong_mains(payload, epoch) + stage.count_wrong_slots()
            for stage in self._ranks.stages
        )
