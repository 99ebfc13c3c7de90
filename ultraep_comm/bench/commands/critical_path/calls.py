"""The calls from ids to filled slots, for all ranks of this process, and their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from ultraep_comm.bench.baselines import DeviceCopy
from ultraep_comm.bench.commands.critical_path import PathSettings
from ultraep_comm.bench.commands.critical_path.ids import Ids, count_ids
from ultraep_comm.bench.inside import (
    gather_and_plan_together,
    gather_together,
    launch_counts,
    put,
)
from ultraep_comm.bench.options import DEFAULT_TARGET
from ultraep_comm.bench.payload import count_unequal, count_wrong_plan
from ultraep_comm.bench.ranks import WeightRanks
from ultraep_comm.calls.gather import gather_and_plan, gather_load
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.calls.reroute import reroute
from ultraep_comm.group.group import Group
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """The expected results of one iteration, computed on the host.

    Attributes:
        ids: of every rank.
        load: int32 ``[G, E]``.
        plan: of that load.
        physical: physical ids of the ranks of this process.
    """

    ids: list[Ids]
    load: torch.Tensor
    plan: Plan
    physical: list[torch.Tensor]

    @classmethod
    def of(cls, ids: list[Ids], groups: Sequence[Group]) -> Expected:
        """Count, plan and reroute on the CPU."""
        load = torch.from_numpy(count_ids(ids, groups[0].topology.num_experts))
        plan = plan_replicas(load, group=groups[0])
        physical = [reroute(torch.from_numpy(ids[g.rank]), plan, group=g) for g in groups]
        return cls(ids=ids, load=load, plan=plan, physical=physical)


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The results of one run, an entry for each rank here; empty if the run does not make them."""

    loads: Sequence[torch.Tensor] = ()
    plans: Sequence[Plan] = ()
    physical: Sequence[torch.Tensor] = ()
    fills_slots: bool = False

    def count_wrong(self, expected: Expected) -> int:
        """Return how many integers differ from the host's. The device must be idle."""
        wrong = sum(count_unequal(load, expected.load) for load in self.loads)
        wrong += sum(count_wrong_plan(plan, expected.plan) for plan in self.plans)
        pairs = zip(self.physical, expected.physical, strict=False)
        return wrong + sum(count_unequal(found, right) for found, right in pairs)


def _loads_of(plans: Sequence[Plan]) -> list[torch.Tensor]:
    return [plan.load for plan in plans if plan.load is not None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """One of the sequences of calls to time.

    Attributes:
        name: of its row.
        run: enqueues it on the current stream.
        is_graph: the host makes one call for all ranks here.
        is_async: the host does not wait in it.
        copy: the copy to check, of a plain copy.
        counts: kernels and copies, if they cannot be counted in a run.
    """

    name: str
    run: Callable[[], Found]
    is_graph: bool = False
    is_async: bool = True
    copy: DeviceCopy | None = None
    counts: tuple[int, int] | None = None


class PathCalls:
    """Ranks with ids, loads and plans on the device."""

    def __init__(self, ranks: WeightRanks, settings: PathSettings) -> None:
        self._ranks, self._meter, self._mode = ranks, ranks.meter, settings.mode
        self.groups = ranks.groups
        shape = (settings.tokens, settings.topk)
        load = torch.zeros(settings.num_ranks, settings.num_experts, dtype=torch.int32)
        ids = torch.zeros(shape, dtype=torch.int64)
        self._ids = [put(group, ids.clone()) for group in self.groups]
        self._loads = [put(group, load.clone()) for group in self.groups]
        self._plans: list[Plan] = []

    def prepare(self, expected: Expected) -> None:
        """Put an iteration's ids on the device, and load and plan for variants that start there."""
        for r, group in enumerate(self.groups):
            self._ids[r].copy_(torch.from_numpy(expected.ids[group.rank]))
            self._loads[r].copy_(expected.load)
        self._plans = self.plan(self._loads)

    # ---- calls ------------------------------------------------------------------------------

    def _each(self, call: Callable[[int], T]) -> list[T]:
        """Call for every rank here; if there are several, each on a separate stream."""
        if len(self.groups) == 1:
            return [call(0)]
        found: dict[int, T] = {}

        def keep(rank: int) -> None:
            found[rank] = call(rank)

        self._meter.spread([functools.partial(keep, r) for r in range(len(self.groups))])
        return [found[r] for r in range(len(self.groups))]

    def gather(self) -> list[torch.Tensor]:
        """Count and exchange."""
        if not self._ranks.loopback:
            return [gather_load(self._ids[0], group=self.groups[0])]
        return gather_together(self.groups, self._ids)

    def gather_and_plan(self) -> list[Plan]:
        """Count, exchange and plan in one launch."""
        if not self._ranks.loopback:
            return [gather_and_plan(self._ids[0], group=self.groups[0])]
        return gather_and_plan_together(self.groups, self._ids, DEFAULT_TARGET)

    def plan(self, loads: Sequence[torch.Tensor]) -> list[Plan]:
        """Plan on every rank."""
        return self._each(lambda r: plan_replicas(loads[r], group=self.groups[r]))

    def reroute(self, plans: Sequence[Plan]) -> list[torch.Tensor]:
        """Reroute every rank's ids."""
        return self._each(lambda r: reroute(self._ids[r], plans[r], group=self.groups[r]))

    def transfer(self, plans: Sequence[Plan]) -> list[Work]:
        """Start to fill slots."""
        return self._ranks.start_each(plans, self._mode)

    def fill_slots(self, plans: Sequence[Plan]) -> None:
        """Fill slots, in the order of the current stream."""
        if self._ranks.loopback:
            for work in self.transfer(plans):
                work.wait()
        else:
            self._ranks.call(plans[0], self._mode)

    # ---- what is timed ----------------------------------------------------------------------

    def path(self) -> Found:
        """From ids to filled slots."""
        loads = self.gather()
        plans = self.plan(loads)
        self.fill_slots(plans)
        return Found(loads=loads, plans=plans, fills_slots=True)

    def path_at_once(self) -> Found:
        """The same, with one launch up to the plans."""
        plans = self.gather_and_plan()
        self.fill_slots(plans)
        return Found(loads=_loads_of(plans), plans=plans, fills_slots=True)

    def _only_gather_and_plan(self) -> Found:
        plans = self.gather_and_plan()
        return Found(loads=_loads_of(plans), plans=plans)

    def path_and_reroute(self) -> Found:
        """From ids to filled slots and physical ids, with the reroute during the transfer."""
        loads = self.gather()
        plans = self.plan(loads)
        return self._transfer_and_reroute(loads, plans)

    def path_at_once_and_reroute(self) -> Found:
        """The same, with one launch up to the plans: the recommended sequence."""
        plans = self.gather_and_plan()
        return self._transfer_and_reroute(_loads_of(plans), plans)

    def _transfer_and_reroute(self, loads: list[torch.Tensor], plans: list[Plan]) -> Found:
        works = self.transfer(plans)
        physical = self.reroute(plans)
        for work in works:
            work.wait()
        return Found(loads=loads, plans=plans, physical=physical, fills_slots=True)

    def planned_on_host(self) -> Found:
        """From ids to filled slots, with the load copied to the CPU and planned there.

        Plans once for all ranks of this process, since separate processes would plan concurrently.
        """
        loads = self.gather()
        plan = plan_replicas(self._meter.read(loads[0]), group=self.groups[0])
        self.fill_slots([plan] * len(self.groups))
        return Found(loads=loads, plans=[plan], fills_slots=True)

    def _only_transfer(self) -> Found:
        self.fill_slots(self._plans)
        return Found(fills_slots=True)

    def captured(self, name: str, call: Callable[[], Found]) -> Variant:
        """Return a graph of a call, which must have run once before."""
        kept: list[Found] = []
        before = launch_counts(self.groups[0])
        replay = self._meter.capture(lambda: kept.append(call()))
        kernels, copies = np.subtract(launch_counts(self.groups[0]), before).tolist()

        def run() -> Found:
            replay()
            return kept[0]

        return Variant(name=name, run=run, is_graph=True, counts=(kernels, copies))

    def variants(self) -> list[Variant]:
        """Return all variants. Collective: runs some."""
        paths = {
            "": self.path,
            " at once": self.path_at_once,
            " + reroute": self.path_and_reroute,
            " at once + reroute": self.path_at_once_and_reroute,
        }
        for call in paths.values():
            call()
            self._meter.synchronize()
        made = [
            Variant(name="gather_load", run=lambda: Found(loads=self.gather())),
            Variant(name="plan_replicas", run=lambda: Found(plans=self.plan(self._loads))),
            Variant(name="gather_and_plan", run=self._only_gather_and_plan),
            Variant(name="replicate_experts", run=self._only_transfer),
            Variant(name="reroute", run=lambda: Found(physical=self.reroute(self._plans))),
            *(Variant(name=f"path{how}", run=call) for how, call in paths.items()),
            *(self.captured(f"graph{how}", call) for how, call in paths.items()),
            Variant(name="host plan", run=self.planned_on_host, is_async=False),
        ]
        if self._ranks.loopback:
            copy = DeviceCopy(self._meter, "big copy", self._meter.big_bytes)

            def run() -> Found:
                copy.run()
                return Found()

            made.append(Variant(name=copy.name, run=run, copy=copy, counts=(0, 0)))
        return made
