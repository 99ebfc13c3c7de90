"""The ranks of this process: all of a loopback group, or one."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ultraep_comm.bench.clock import DeviceClock, Meter
from ultraep_comm.bench.inside import put
from ultraep_comm.bench.measure import add_up
from ultraep_comm.bench.payload import SENTINEL, Payload, count_disturbed
from ultraep_comm.calls.gather import gather_load
from ultraep_comm.calls.replicate import replicate_experts
from ultraep_comm.fabrics.rendezvous import Rendezvous
from ultraep_comm.fabrics.shm import machine_id
from ultraep_comm.group.create import new_group
from ultraep_comm.group.group import Group
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import Plan
from ultraep_comm.testing import new_loopback_groups

TIMED_CALLS = 3  # and one that lines up the ranks: the host blocks if more than 4 are pending
TILE_BYTES = 32 << 10  # default on a device
_HOST_CALLS = 30


class Ranks(abc.ABC):
    """The groups of these ranks, and the collective that they call.

    Attributes:
        meter: of their device.
        loopback: all ranks are in this process.
        groups: one for each rank here.
        nothing: a plan without replicas.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        num_ranks: int,
        num_experts: int,
        slots: int,
        fabric: str,
        **more: Any,
    ) -> None:
        """Create the groups; ``more`` goes to ``new_group``. Collective, but in loopback."""
        options = {
            **{"num_experts": num_experts, "slots_per_rank": slots, "engine": meter.engine},
            **(_domains(num_ranks) if meter.engine == "c10d" else {}),
            **more,
        }
        self.meter, self.loopback = meter, fabric == "loopback"
        self.groups: list[Group] = (
            new_loopback_groups(num_ranks, **options)
            if self.loopback
            else [new_group(fabric=fabric if meter.engine == "cuda" else "auto", **options)]
        )
        nothing = torch.full((num_ranks, slots), -1, dtype=torch.int32)
        self.nothing = Plan.from_slots(nothing, num_experts=num_experts)
        self._padding = put(self.groups[0], torch.full((1, 1), -1))

    @abc.abstractmethod
    def _call_one(
        self, i: int, plan: Plan, mode: str, *, bound: bool, async_op: bool
    ) -> Work | None:
        """Call for group ``i``, with tensors bound before or unbound ones."""

    def start(self, plan: Plan, mode: str, *, bound: bool = True) -> list[Work]:
        """Start one call of every rank here."""
        return self.start_each([plan] * len(self.groups), mode, bound=bound)

    def start_each(self, plans: Sequence[Plan], mode: str, *, bound: bool = True) -> list[Work]:
        """Start one call of every rank here, each with its own copy of the plan."""
        works = [
            self._call_one(i, plan, mode, bound=bound, async_op=True)
            for i, plan in enumerate(plans)
        ]
        return [work for work in works if work is not None]

    def call(self, plan: Plan, mode: str) -> None:
        """Make one call of every rank here; on a device, in the order of the current stream."""
        if not self.loopback:
            self._call_one(0, plan, mode, bound=True, async_op=False)
            return
        for work in self.start(plan, mode):
            work.wait()

    def choose(self, plan: Plan, mode: str) -> str:
        """Return the mode that the library chooses. Collective: makes a call."""
        works = self.start(plan, mode)
        for work in works:
            work.synchronize()
        return works[0].mode

    def host_us(self, plan: Plan, mode: str, *, bound: bool = True) -> float:
        """Return the median host time of one rank's call."""
        times = []
        for _ in range(_HOST_CALLS):
            self.meter.synchronize()
            start = time.perf_counter_ns()
            works = self.start(plan, mode, bound=bound)
            times.append((time.perf_counter_ns() - start) / 1e3 / len(self.groups))
            for work in works:
                work.synchronize()
        return float(np.median(times))

    def line_up(self) -> None:
        """Enqueue a barrier: on one GPU an empty call, on several `gather_load` of padding.

        (On several, a call with an empty plan is no barrier: a rank with nothing to move does not
        wait for the others.)
        """
        if self.loopback:
            self.call(self.nothing, "auto")
        else:
            gather_load(self._padding, group=self.groups[0])

    def clock(self, calls: int = TIMED_CALLS, *, lined_up: bool = False) -> DeviceClock:
        """Return a clock for ``calls`` in a row, after `line_up` or one untimed call."""
        line_up = self.line_up if lined_up else None
        here = len(self.groups)
        return DeviceClock(self.meter, here, calls, loopback=self.loopback, line_up=line_up)

    def close(self) -> None:
        """Close the groups."""
        for group in self.groups:
            group.close()


def _domains(num_ranks: int) -> dict[str, Any]:
    """Return arguments of a group that may span machines. Collective.

    Each machine is a domain. If none has two ranks all are in one, and experts are handed on over
    the links between machines, which are all alike.
    """
    if len(set(Rendezvous(None).exchange(machine_id()))) == num_ranks:
        return {"domains": [0] * num_ranks}
    return {"allow_cross_domain": True}


class WeightRanks(Ranks):
    """Ranks that call `replicate_experts`. Slots are initially filled with SENTINEL.

    Attributes:
        weights: main weights of each rank here, by `Group.empty_weights`.
        bound: the same weights, bound.
    """

    def __init__(self, meter: Meter, *, segments: Mapping[str, int], **more: Any) -> None:
        """Create groups and weights for experts of ``segments``, ``{name: bytes}``. See `Ranks`."""
        expert = {name: ((size,), torch.uint8) for name, size in segments.items()}
        super().__init__(meter, expert=expert, **more)
        self.weights = [group.empty_weights() for group in self.groups]
        self.bound = [g.bind(w) for g, w in zip(self.groups, self.weights, strict=True)]
        self.mark_slots()

    def _call_one(
        self, i: int, plan: Plan, mode: str, *, bound: bool, async_op: bool
    ) -> Work | None:
        given = self.bound[i] if bound else self.weights[i]
        return replicate_experts(given, plan, group=self.groups[i], mode=mode, async_op=async_op)

    def mark_slots(self) -> None:
        """Fill all slots with SENTINEL."""
        for slots in (slots for group in self.groups for slots in group.slots.values()):
            slots.fill_(SENTINEL)

    def touch_weights(self) -> None:
        """Write to all weights, so that their pages are allocated."""
        for stacked in (stacked for own in self.weights for stacked in own.values()):
            stacked.fill_(1)

    def fill(self, plan: Plan, payload: Payload, epoch: int) -> None:
        """Write the bytes of an epoch to the main instances here that the plan replicates."""
        replicated = set(plan.slot_expert[plan.slot_expert >= 0].tolist())
        for group, own in zip(self.groups, self.weights, strict=True):
            for i, expert in enumerate(group.topology.local_experts(group.rank).tolist()):
                for name, stacked in own.items() if expert in replicated else ():
                    where = {"epoch": epoch, "expert": expert, "segment": name}
                    if stacked.device.type == "cpu":
                        payload.fill(stacked[i].numpy(), **where)
                    else:
                        data = np.empty(stacked[i].numel(), np.uint8)
                        payload.fill(data, **where)
                        stacked[i].copy_(torch.from_numpy(data))

    def check(self, plan: Plan, mode: str, payload: Payload, epoch: int) -> int:
        """Make one call with fresh bytes; return the wrong bytes of all ranks.

        Collective, but in loopback.
        """
        clock = self.clock()
        self.mark_slots()
        self.fill(plan, payload, epoch)
        clock.synchronize()
        self.call(plan, mode)
        clock.synchronize()
        wrong = np.array([self.count_wrong(plan, payload, epoch)])
        return int(add_up(wrong, self.loopback)[0])

    def count_wrong(self, plan: Plan, payload: Payload, epoch: int) -> int:
        """Return the wrong bytes in slots here: not the payload, or in empty slots not SENTINEL."""
        wrong = 0
        for group in self.groups:
            for slot, expert in enumerate(plan.slot_expert[group.rank].tolist()):
                for name, slots in group.slots.items():
                    data = slots[slot].cpu().numpy()
                    if expert < 0:
                        wrong += count_disturbed(data)
                    else:
                        wrong += payload.count_wrong(data, epoch=epoch, expert=expert, segment=name)
        return wrong


def replicas_of(plan: Plan) -> Iterator[tuple[int, int, int, int]]:
    """Yield ``(expert, home, rank, slot)`` of a plan, by ascending rank and slot."""
    home = plan.home.tolist()
    for rank, row in enumerate(plan.slot_expert.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0:
                yield expert, home[expert], rank, slot


def main_index(group: Group) -> dict[int, int]:
    """Return ``{expert: index among this rank's mains}``."""
    return {expert: i for i, expert in enumerate(group.topology.local_experts(group.rank).tolist())}


# ---- plans of one shape -------------------------------------------------------------------------
# Calls in a row rotate over plans with different experts, so that sources are not in a cache. In a
# model, too, the other layers have evicted a layer's weights before they are copied again.

COLD_BYTES = 64 << 20  # more than the caches of a core
_MAX_EXPERTS = 256  # of a rank

# For each rank, the experts in its slots as (home rank, index among its mains); at most S entries.
Filling = Sequence[Sequence[tuple[int, int]]]


def count_experts(expert_bytes: int, in_a_turn: int) -> int:
    """Return the experts that a rank needs to exceed its caches, a multiple of ``in_a_turn``."""
    wanted = min(-(-COLD_BYTES // expert_bytes), _MAX_EXPERTS)
    return max(1, -(-wanted // in_a_turn)) * in_a_turn


def make_turns(filling: Filling, *, slots: int, experts: int, in_a_turn: int) -> list[Plan]:
    """Return plans that fill the same slots with different experts of the same home ranks.

    Args:
        filling: of the first plan, with indices below ``in_a_turn``.
        slots: S.
        experts: of each rank, a multiple of ``in_a_turn``.
        in_a_turn: added to the indices from one plan to the next.
    """
    num_ranks = len(filling)
    plans = []
    for first in range(0, experts, in_a_turn):
        table = torch.full((num_ranks, slots), -1, dtype=torch.int32)
        for rank, row in enumerate(filling):
            for slot, (home, number) in enumerate(row):
                table[rank, slot] = home * experts + first + number
        plans.append(Plan.from_slots(table, num_experts=num_ranks * experts))
    return plans


def link_plan(num_ranks: int, links: Sequence[tuple[int, int]], slots: int = 1) -> Plan:
    """Return the plan that copies, over each link, the expert of its source to its destination."""
    filling = [[(a, 0) for a, b in links if b == rank] for rank in range(num_ranks)]
    return make_turns(filling, slots=slots, experts=1, in_a_turn=1)[0]
