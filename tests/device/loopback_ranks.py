"""The ranks of a group on any engine: weights, calls, and a check of every byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from ranks import (
    clear_slots,
    fill_weights,
    group_here,
    loopback,
    make_weights,
    random_plan,
    start_all,
    wrong_bytes,
)
from stage_cases import assert_same

import ultraep_comm as uec
from ultraep_comm import Segment
from ultraep_comm.bench import inside
from ultraep_comm.engines.cuda import device
from ultraep_comm.group.group import is_on_device

Weights = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
Slots = list[list[int]]
LONG = 500_000_000  # cycles: some tenths of a second
EMULATED_SMS = 16  # of emulated_device


def put(group: uec.Group, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the group's device; the copy is complete.

    On the emulated device torch writes at once, so a copy under way could undo what a test writes.
    """
    found = inside.put(group, tensor)
    if is_on_device(found, group):
        device.find_device().synchronize_stream()
    return found


def finish(group: uec.Group) -> None:
    """Wait for the group's device, if it has one."""
    if is_on_device(inside.put(group, torch.zeros(1)), group):
        device.find_device().synchronize()


def load_of(ids: Sequence[torch.Tensor] | torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the load, int32 ``[G, E]``, of each rank's ids; -1 is padding."""
    rows = [torch.bincount(own.flatten() + 1, minlength=num_experts + 1)[1:] for own in ids]
    return torch.stack(rows).int()


def put_plan(group: uec.Group, plan: uec.Plan) -> uec.Plan:
    """Return a copy on the group's device, without a load."""
    return uec.Plan(slot_expert=put(group, plan.slot_expert), home=put(group, plan.home))


def critical_path(
    group: uec.Group,
    ids: torch.Tensor,
    weights: Any,
    *,
    at_once: bool = False,
    async_op: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, uec.Plan, torch.Tensor]:
    """Make a rank's calls from ids to slots; return load, plan and physical ids."""
    if at_once:
        plan = uec.gather_and_plan(ids, group=group)
        assert plan.load is not None
        load = plan.load
    else:
        load = uec.gather_load(ids, group=group)
        plan = uec.plan_replicas(load, group=group)
    work = uec.replicate_experts(weights, plan, group=group, async_op=async_op, **options)
    physical = uec.reroute(ids, plan, group=group)
    if work is not None:
        work.wait()
    return load, plan, physical


def hold(engine: str) -> None:
    """Keep the current stream busy for a few tenths of a second."""
    if engine == "cuda":
        torch.cuda._sleep(LONG)
    else:
        found: Any = device.find_device()
        found.delay(300_000)


def at_odd_offsets(group: uec.Group, first: int, gap: int) -> dict[str, list[torch.Tensor]]:
    """Return weights as views into one flat buffer of bytes, from ``first`` on, ``gap`` apart.

    Further apart where their type needs it.
    """
    count = group.num_local_experts
    size = first + count * sum(s.nbytes + gap + 8 for s in group.segments.values())
    flat = torch.zeros(size, dtype=torch.uint8, device=group.device)
    weights: dict[str, list[torch.Tensor]] = {}
    for name, segment in group.segments.items():
        weights[name] = []
        for _ in range(count):
            first += -first % segment.dtype.itemsize
            weights[name].append(segment.view(flat.narrow(0, first, segment.nbytes), 1)[0])
            first += segment.nbytes + gap
    return weights


class Ranks:
    """All ranks, or this process's. Calls are made by this thread (async) or by one for each."""

    def __init__(
        self,
        engine: str,
        num_ranks: int,
        segments: Mapping[str, int | Segment],
        *,
        num_experts: int,
        slots: int = 2,
        **options: Any,
    ) -> None:
        expert = {
            name: Segment((size,), torch.uint8) if isinstance(size, int) else size
            for name, size in segments.items()
        }
        self.engine = engine
        if engine == "emulated":
            most = max(1, EMULATED_SMS // num_ranks)
            options["num_sms"] = min(options.get("num_sms") or most, most)
        self.num_experts, self.num_slots = num_experts, slots
        options = {"timeout": 30.0, **options}
        options |= {"num_experts": num_experts, "slots_per_rank": slots, "expert": expert}
        if engine == "processes":
            self.groups = [uec.new_group(group_here(num_ranks), engine="host", **options)]
        elif engine in ("shm", "nvshmem", "torch"):  # a fabric: each rank has a process
            made = "host" if engine == "shm" else "cuda"
            self.groups = [uec.new_group(engine=made, fabric=engine, **options)]
        else:
            options["engine"] = "cuda" if engine == "emulated" else engine
            self.groups = uec.testing.new_loopback_groups(num_ranks, **options)
        self.epoch = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for group in self.groups:
            if kind is not None:
                group.abort()
            group.close()

    def plan(self, slots: Slots) -> uec.Plan:
        home = self.groups[0].topology.home.tolist()
        num_ranks = self.groups[0].num_ranks
        rows = torch.tensor(slots, dtype=torch.int32).view(num_ranks, self.num_slots)
        return uec.Plan.from_slots(rows, num_experts=self.num_experts, home=home)

    def plans(self, seeds: range) -> list[uec.Plan]:
        shape = self.groups[0].num_ranks, self.num_experts, self.num_slots
        home = self.groups[0].topology.home.tolist()
        hard = [self.plan(slots) for slots in hard_slots(*shape, home)]
        return hard + [random_plan(seed, *shape, home) for seed in seeds]

    def synchronize(self) -> None:
        """Wait for the emulated device, whose streams do not order torch's own operations."""
        if self.engine == "emulated":
            device.find_device().synchronize()

    def finish(self) -> None:
        """Wait for the device, if there is one."""
        if self.engine in ("cuda", "emulated", "nvshmem", "torch"):
            device.find_device().synchronize()

    def shared(self) -> list[dict[str, torch.Tensor]]:
        """Return weights that peers can address."""
        return [group.empty_weights() for group in self.groups]

    def stacked(self) -> list[dict[str, torch.Tensor]]:
        return [make_weights(group) for group in self.groups]

    def start(
        self, weights: Sequence[Any], plan: uec.Plan | list[uec.Plan], **options: Any
    ) -> list[uec.Work]:
        given = {g.rank: own for g, own in zip(self.groups, weights, strict=True)}
        return start_all(self.groups, given, plan, **options)

    def call(
        self,
        weights: Sequence[Any],
        plan: uec.Plan | list[uec.Plan],
        *,
        blocking: bool = False,
        **options: Any,
    ) -> list[uec.Work]:
        """Call on every rank; return what an asynchronous call does. A list has plans by rank."""
        if blocking:
            loopback(len(self.groups), lambda r: self._call(weights[r], plan, r, **options))
            return []
        works = self.start(weights, plan, **options)
        for work in works:
            work.wait()
        return works

    def _call(self, weights: Any, plan: Any, index: int, **options: Any) -> None:
        group = self.groups[index]
        own = plan[group.rank] if isinstance(plan, list) else plan
        uec.replicate_experts(weights, own, group=group, **options)

    def fill(self, weights: Sequence[Weights]) -> int:
        """Fill all weights with the bytes of a new epoch, and all slots with SENTINEL."""
        self.synchronize()
        self.epoch += 1
        for group, own in zip(self.groups, weights, strict=True):
            fill_weights(group, own, self.epoch)
            clear_slots(group)
        return self.epoch

    def wrong(self, plan: uec.Plan, names: Sequence[str] | None = None) -> list[int]:
        """Return the number of wrong bytes in every rank's slots, including empty ones and gaps."""
        self.synchronize()
        return [wrong_bytes(group, plan, self.epoch, names=names) for group in self.groups]

    def check_path(self, ids: Sequence[torch.Tensor] | torch.Tensor, found: Sequence[Any]) -> int:
        """Compare all that :func:`critical_path` made with the host's; return the replicas.

        Args:
            ids: of each of the group's ranks.
            found: what the calls of this process's ranks returned.
        """
        self.finish()
        load = load_of(ids, self.num_experts)
        expected = uec.plan_replicas(load, group=self.groups[0])
        for group, (gathered, plan, physical) in zip(self.groups, found, strict=True):
            assert torch.equal(gathered.cpu(), load)
            assert_same(plan, expected)
            own = uec.reroute(ids[group.rank], expected, group=group)
            assert torch.equal(physical.cpu(), own)
        assert not any(self.wrong(expected))
        return expected.num_replicas

    def replicate(
        self,
        weights: Sequence[Any],
        plan: uec.Plan,
        *,
        names: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        """Fill, call, and compare every byte."""
        self.fill(weights)
        given = weights
        if names is not None:
            options["segments"] = names
            given = [{name: own[name] for name in names} for own in weights]
        self.call(given, plan, **options)
        assert self.wrong(plan, names) == [0] * len(self.groups), (plan.slot_expert, options)


def hard_slots(num_ranks: int, num_experts: int, slots: int, home: Sequence[int]) -> list[Slots]:
    """Return edge cases: no replicas, full plans, chains, rings, hubs that wait for each other."""
    ranks = range(num_ranks)
    local_experts = [[e for e in range(num_experts) if home[e] == r] for r in ranks]
    away = [[e for e in range(num_experts) if home[e] != r] for r in ranks]

    def neighbours(rank: int) -> list[int]:
        return sorted({(rank + 1) % num_ranks, (rank - 1) % num_ranks} - {rank})

    def fit(rows: list[list[int]]) -> Slots:
        return [(row + [-1] * slots)[:slots] for row in rows]

    return [
        fit([[] for _ in ranks]),
        fit([[e for e in (0,) if home[e] != r] for r in ranks]),  # one expert everywhere
        fit([[e for e in (0, 1, num_experts - 1) if home[e] != r] for r in ranks]),
        fit([local_experts[r - 1][:slots] if num_ranks > 1 else [] for r in ranks]),  # a ring
        fit([away[r] if r == num_ranks - 1 else [] for r in ranks]),  # one rank takes all
        fit([away[r][::-1] for r in ranks]),  # full
        # Each rank is a home, and a hub of its neighbours' experts.
        fit([[e for o in neighbours(r) for e in local_experts[o][:1]] for r in ranks]),
    ]
