"""All ranks of a size on one GPU: what the planner's benchmark cannot time on a single one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ultraep_comm import _core
from ultraep_comm.bench.gpu import Meter
from ultraep_comm.bench.plan_settings import PlanSize
from ultraep_comm.collectives import replicate_experts
from ultraep_comm.creation import new_loopback_groups
from ultraep_comm.cuda import device
from ultraep_comm.plan import Plan
from ultraep_comm.planning import plan_objective

CALLS = 3  # in a row: four can be under way without blocking the host
FIELDS = ("slot_expert", "slot_quota", "home_quota")
EXPERT = {"w": ((16,), torch.uint8)}  # next to nothing to move
_EMPTY = 255


@dataclass(frozen=True, kw_only=True)
class RanksTimes:
    """Of one load, in microseconds.

    Attributes:
        device_us: a transfer of tiny experts, its plan on the device.
        host_us: the same with the plan on the CPU, and so its schedule from there.
        at_once_us: of `gather_and_plan`, replayed; None: it is not one launch here.
        wrong_values: of slots, loads and plans.
    """

    device_us: float
    host_us: float
    at_once_us: float | None
    wrong_values: int


class AllRanks:
    """A loopback group of a size, with a block for each rank."""

    def __init__(self, size: PlanSize) -> None:
        """Make the group, and weights that tell experts apart."""
        self.groups = new_loopback_groups(
            size.num_ranks,
            num_experts=size.num_experts,
            slots_per_rank=size.slots_per_rank,
            home=size.home,
            domains=size.domain,
            expert=EXPERT,
            engine="cuda",
            num_sms=1,
        )
        self._bound = []
        for group in self.groups:
            weights = group.empty_weights()
            mains = torch.from_numpy(group.topology.mains(group.rank) % _EMPTY).to(torch.uint8)
            weights["w"].copy_(mains[:, None].expand(weights["w"].shape))
            self._bound.append(group.bind(weights))

    @classmethod
    def of(cls, size: PlanSize) -> AllRanks | None:
        """Return them; None: the device, or a launch, has no block for each."""
        most = min(device.find_device().num_sms, _core.CUDA_MAX_LAUNCH_RANKS)
        return cls(size) if size.num_ranks <= most else None

    def measure(
        self,
        meter: Meter,
        load: torch.Tensor,
        plan: Plan,
        ids: Sequence[torch.Tensor],
        target: float,
    ) -> RanksTimes:
        """Time calls with the host's plan of a load for a target, and check what they leave.

        ``ids`` are what each rank's row of the load counts, int64, on the CPU.
        """
        stages = self.groups[0]._stages
        assert stages is not None  # those of a CUDA group
        there = Plan(
            slot_expert=stages.put(plan.slot_expert),
            home=stages.home,
            slot_quota=stages.put(plan.slot_quota),  # type: ignore[arg-type]
            home_quota=stages.put(plan.home_quota),  # type: ignore[arg-type]
        )
        times, wrong = [], 0
        for given in (there, plan):
            for group in self.groups:
                group.slots["w"].fill_(_EMPTY)
            meter.settle()
            run = self._replicating(given)
            times.append(meter.time_us(run, CALLS, len(self.groups)))
            meter.settle()
            wrong += self._wrong_slots(plan)
        at_once_us = None
        if self.groups[0]._device_engine.plans_at_once:
            own = [stages.put(i) for i in ids]
            made: list[Plan] = []
            self._gather_and_plan(own, target, made)  # what has to be there before a capture, is
            meter.settle()
            # As many events as ranks go with a call of all, if it is not captured.
            replay = meter.capture(lambda: self._gather_and_plan(own, target, made))
            at_once_us = meter.time_us(replay, CALLS, len(self.groups))
            meter.settle()
            for found in made:
                assert found.load is not None
                wrong += differ(found.load, load)
                wrong += sum(differ(getattr(found, n), getattr(plan, n)) for n in FIELDS)
        return RanksTimes(
            device_us=times[0], host_us=times[1], at_once_us=at_once_us, wrong_values=wrong
        )

    def close(self) -> None:
        """Close the group."""
        for group in self.groups:
            group.close()

    def _replicating(self, plan: Plan) -> Callable[[], None]:
        def run() -> None:
            works = [
                replicate_experts(bound, plan, group=group, async_op=True)
                for group, bound in zip(self.groups, self._bound, strict=True)
            ]
            for work in works:
                assert work is not None
                work.wait()

        return run

    def _gather_and_plan(
        self, ids: Sequence[torch.Tensor], target: float, made: list[Plan]
    ) -> None:
        """Call every rank before the first waits for the launch, which the last one makes."""
        works = []
        made.clear()
        for own, group in zip(ids, self.groups, strict=True):
            t, stages = group.topology, group._stages
            assert stages is not None
            assert group._device is not None
            load = group._device.empty((t.num_ranks, t.num_experts), torch.int32)
            memory, plan = stages.plan_memory(load)
            objective = plan_objective(target, None, group)
            epoch = group._device_engine.gather_and_plan(own, load, memory, stages.core, *objective)
            works.append(group._submitted(epoch, (own, load, memory), "gather_and_plan", ""))
            made.append(plan)
        for work in works:
            work.wait()

    def _wrong_slots(self, plan: Plan) -> int:
        table = plan.slot_expert
        expected = torch.where(table < 0, _EMPTY, table % _EMPTY).to(torch.uint8)
        return sum(
            differ(group.slots["w"], expected[group.rank][:, None].expand(-1, 16))
            for group in self.groups
        )


def ids_of(load: torch.Tensor) -> list[torch.Tensor]:
    """Return int64 ``[N, 1]`` for each row of a load: what it counts, in the order of experts."""
    experts = np.arange(load.shape[1])
    return [torch.from_numpy(np.repeat(experts, row)[:, None]) for row in load.numpy()]


def differ(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many values are different."""
    return int((found.cpu() != expected).sum())
