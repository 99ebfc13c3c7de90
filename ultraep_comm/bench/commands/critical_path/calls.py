"""The ids of an iteration, and the calls from ids to filled slots with their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.bench.baselines import DeviceCopy
from ultraep_comm.bench.commands.critical_path import PathSettings
from ultraep_comm.bench.inside import gather_together, launch_counts, put
from ultraep_comm.bench.loads import generate_load
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
Ids = NDArray[np.int64]
BIG_COPY, HOST_PLAN = "big copy", "host plan"
POPULARITY_TOKENS = 1 << 24  # of a generated load; enough for smooth shares


def expert_shares(settings: PathSettings, iteration: int) -> NDArray[np.float64]:
    """Return the probabilities ``[G, E]`` of experts, by source.

    Without a trace all sources are alike, and each iteration has other hot experts. With a trace
    each iteration takes the next step, cyclically.
    """
    g, e = settings.num_ranks, settings.num_experts
    if settings.trace is None:
        load = generate_load(
            num_ranks=g,
            num_experts=e,
            imbalance=settings.imbalance or 1.0,
            num_tokens=POPULARITY_TOKENS,
            seed=settings.seed + iteration,
        )
        load = np.broadcast_to(load.sum(axis=0), (g, e))
    else:
        window = {"num_ranks": g, "tokens_per_rank": settings.tokens}
        step = iteration % settings.trace.num_steps(**window)
        load = settings.trace.load(step=step, layer=settings.layer, **window)
    shares = load.astype(np.float64)
    shares[shares.sum(axis=1) == 0] = 1.0  # a source without tokens
    normalised: NDArray[np.float64] = shares / shares.sum(axis=1, keepdims=True)
    return normalised


def draw_ids(settings: PathSettings, iteration: int) -> list[Ids]:
    """Return ids ``[T, k]`` for each rank, drawn independently."""
    shape = (settings.tokens, settings.topk)
    return [
        np.random.default_rng([settings.seed, iteration, rank]).choice(
            settings.num_experts, size=shape, p=row
        )
        for rank, row in enumerate(expert_shares(settings, iteration))
    ]


def count_ids(ids: Sequence[Ids], num_experts: int) -> NDArray[np.int32]:
    """Return the load ``[G, E]``."""
    rows = [np.bincount(own.ravel(), minlength=num_experts) for own in ids]
    return np.stack(rows).astype(np.int32)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """One of the sequences of calls to time.

    Attributes:
        name: of its row.
        run: enqueues it on the current stream.
        is_whole: it goes from ids to filled slots.
        is_graph: the host makes one call for all ranks here.
        is_async: the host does not wait in it.
        copy: the copy to check, of a plain copy.
        counts: kernels and copies, if they cannot be counted in a run.
    """

    name: str
    run: Callable[[], Found]
    is_whole: bool = False
    is_graph: bool = False
    is_async: bool = True
    copy: DeviceCopy | None = None
    counts: tuple[int, int] | None = None


class PathCalls:
    """Ranks with ids, loads and plans on the device."""

    def __init__(self, ranks: WeightRanks, settings: PathSettings) -> None:
        self._ranks, self._meter, self._settings = ranks, ranks.meter, settings
        self.groups = ranks.groups
        load = torch.zeros(settings.num_ranks, settings.num_experts, dtype=torch.int32)
        ids = torch.zeros((settings.tokens, settings.topk), dtype=torch.int64)
        self._ids = [put(group, ids.clone()) for group in self.groups]
        self._loads = [put(group, load.clone()) for group in self.groups]
        self._plans: list[Plan] = []

    def prepare(self, iteration: int) -> Expected:
        """Put fresh ids on the device, and load and plan for variants that start there."""
        expected = Expected.of(draw_ids(self._settings, iteration), self.groups)
        for r, group in enumerate(self.groups):
            self._ids[r].copy_(torch.from_numpy(expected.ids[group.rank]))
            self._loads[r].copy_(expected.load)
        self._plans = self.plan(self._loads)
        self._meter.synchronize()
        return expected

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
        return gather_together(self.groups, self._ids)[0]

    def plan(self, loads: Sequence[torch.Tensor]) -> list[Plan]:
        """Plan on every rank."""
        return self._each(lambda r: plan_replicas(loads[r], group=self.groups[r]))

    def gather_and_plan(self, *, at_once: bool = True) -> tuple[list[torch.Tensor], list[Plan]]:
        """Count, exchange and plan, in one launch or in two; return loads and plans."""
        if not at_once:
            loads = self.gather()
            return loads, self.plan(loads)
        if self._ranks.loopback:
            return gather_together(self.groups, self._ids, DEFAULT_TARGET)
        plan = gather_and_plan(self._ids[0], group=self.groups[0])
        return ([] if plan.load is None else [plan.load]), [plan]

    def reroute(self, plans: Sequence[Plan]) -> list[torch.Tensor]:
        """Reroute every rank's ids."""
        return self._each(lambda r: reroute(self._ids[r], plans[r], group=self.groups[r]))

    def transfer(self, plans: Sequence[Plan]) -> list[Work]:
        """Start to fill slots."""
        return self._ranks.start_each(plans, self._settings.mode)

    def fill_slots(self, plans: Sequence[Plan]) -> None:
        """Fill slots, in the order of the current stream."""
        if self._ranks.loopback:
            for work in self.transfer(plans):
                work.wait()
        else:
            self._ranks.call(plans[0], self._settings.mode)

    # ---- what is timed ----------------------------------------------------------------------

    def path(self, *, at_once: bool = False, rerouted: bool = False) -> Found:
        """From ids to filled slots, and with a reroute during the transfer to physical ids.

        The recommended sequence is ``at_once`` and ``rerouted``.
        """
        loads, plans = self.gather_and_plan(at_once=at_once)
        if not rerouted:
            self.fill_slots(plans)
            return Found(loads=loads, plans=plans, fills_slots=True)
        works = self.transfer(plans)
        physical = self.reroute(plans)
        for work in works:
            work.wait()
        return Found(loads=loads, plans=plans, physical=physical, fills_slots=True)

    def _only_gather_and_plan(self) -> Found:
        loads, plans = self.gather_and_plan()
        return Found(loads=loads, plans=plans)

    def _only_transfer(self) -> Found:
        self.fill_slots(self._plans)
        return Found(fills_slots=True)

    def planned_on_host(self) -> Found:
        """From ids to filled slots, with the load copied to the CPU and planned there.

        Plans once for all ranks of this process, since separate processes would plan concurrently.
        """
        loads = self.gather()
        plan = plan_replicas(self._meter.read(loads[0]), group=self.groups[0])
        self.fill_slots([plan] * len(self.groups))
        return Found(loads=loads, plans=[plan], fills_slots=True)

    def captured(self, name: str, call: Callable[[], Found]) -> Variant:
        """Return a graph of a call, which must have run once before."""
        kept: list[Found] = []
        before = launch_counts(self.groups[0])
        replay = self._meter.capture(lambda: kept.append(call()))
        kernels, copies = np.subtract(launch_counts(self.groups[0]), before).tolist()

        def run() -> Found:
            replay()
            return kept[0]

        return Variant(name=name, run=run, is_whole=True, is_graph=True, counts=(kernels, copies))

    def variants(self) -> list[Variant]:
        """Return all variants. Collective: runs some."""
        paths = {
            how: functools.partial(self.path, at_once="once" in how, rerouted="reroute" in how)
            for how in ("", " at once", " + reroute", " at once + reroute")
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
            *(Variant(name=f"path{how}", run=call, is_whole=True) for how, call in paths.items()),
            *(self.captured(f"graph{how}", call) for how, call in paths.items()),
            Variant(name=HOST_PLAN, run=self.planned_on_host, is_whole=True, is_async=False),
        ]
        if self._ranks.loopback:
            copy = DeviceCopy(self._meter, BIG_COPY, self._meter.big_bytes)

            def run() -> Found:
                copy.run()
                return Found()

            made.append(Variant(name=BIG_COPY, run=run, copy=copy, counts=(0, 0)))
        return made
