"""The ranks of a group on any engine: weights, calls, and a check of every byte."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from ranks import group_here, loopback, raw, start_all

import ultraep_comm as uec
from ultraep_comm import Segment
from ultraep_comm.bench import inside
from ultraep_comm.bench.payload import SENTINEL, Payload
from ultraep_comm.engines.cuda import device
from ultraep_comm.group.group import is_on_device, session_of

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


def hold(engine: str) -> None:
    """Keep the current stream busy for a few tenths of a second."""
    if engine == "cuda":
        torch.cuda._sleep(LONG)
    else:
        found: Any = device.find_device()
        found.delay(300_000)


class Rank:
    """One rank's weights and slots."""

    def __init__(self, group: uec.Group, payload: Payload) -> None:
        self.group = group
        self.payload = payload
        self.local_experts = group.topology.local_experts(group.rank).tolist()

    def content(self, name: str, epoch: int, expert: int) -> torch.Tensor:
        data = np.empty(self.group.segments[name].nbytes, np.uint8)
        self.payload.fill(data, epoch=epoch, expert=expert, segment=name)
        return torch.from_numpy(data)

    def stacked(self) -> dict[str, torch.Tensor]:
        """Return weights as stacked tensors."""
        weights = {}
        for name, segment in self.group.segments.items():
            size = len(self.local_experts) * segment.nbytes
            storage = torch.zeros(size, dtype=torch.uint8, device=self.group.device)
            weights[name] = segment.view(storage, len(self.local_experts))
        return weights

    def at_odd_offsets(self, first: int, gap: int) -> dict[str, list[torch.Tensor]]:
        """Weights as views into one flat buffer of bytes, from ``first`` on, ``gap`` apart.

        Further apart where their type needs it.
        """
        sizes = [
            s.nbytes + gap + 8 for s in self.group.segments.values() for _ in self.local_experts
        ]
        flat = torch.zeros(first + sum(sizes), dtype=torch.uint8, device=self.group.device)
        weights: dict[str, list[torch.Tensor]] = {}
        for name, segment in self.group.segments.items():
            weights[name] = []
            for _ in self.local_experts:
                first += -first % segment.dtype.itemsize
                weights[name].append(segment.view(flat.narrow(0, first, segment.nbytes), 1)[0])
                first += segment.nbytes + gap
        return weights

    def fill(self, weights: Weights, epoch: int) -> None:
        for name, segment in self.group.segments.items():
            for i, expert in enumerate(self.local_experts):
                raw(weights[name][i], segment).copy_(self.content(name, epoch, expert))

    def slots(self) -> torch.Tensor:
        """Symmetric memory from the first slot on, gaps between segments too."""
        return (
            session_of(self.group)
            .engine.memory[0]
            .local[session_of(self.group).engine.layout.slots_base :]
        )

    def expected(self, plan: uec.Plan, epoch: int, names: Sequence[str] | None) -> np.ndarray:
        """What the slots must hold, if they were SENTINEL before the call."""
        group, base = self.group, session_of(self.group).engine.layout.slots_base
        image = np.full(self.slots().numel(), SENTINEL, np.uint8)
        for name, start in zip(
            group.segments, session_of(group).engine.layout.slot_offset, strict=True
        ):
            if names is not None and name not in names:
                continue
            size = group.segments[name].nbytes
            for slot, expert in enumerate(plan.slot_expert[group.rank].tolist()):
                if expert >= 0:
                    at = start - base + slot * size
                    image[at : at + size] = self.content(name, epoch, expert)
        return image


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
        payload = Payload(len(segments), {name: s.nbytes for name, s in expert.items()})
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
        self.ranks = [Rank(group, payload) for group in self.groups]
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
        chosen = [*hard_slots(*shape, home), *(random_slots(s, *shape, home) for s in seeds)]
        return [self.plan(slots) for slots in chosen]

    def synchronize(self) -> None:
        """Wait for the emulated device, whose streams do not order torch's own operations."""
        if self.engine == "emulated":
            device.find_device().synchronize()

    def finish(self) -> None:
        """Wait for the device, if there is one."""
        if self.engine in ("cuda", "emulated", "nvshmem", "torch"):
            device.find_device().synchronize()

    def hold(self) -> None:
        """Do :func:`hold` for this engine."""
        hold(self.engine)

    def shared(self) -> list[dict[str, torch.Tensor]]:
        """Return weights that peers can address."""
        return [group.empty_weights() for group in self.groups]

    def stacked(self) -> list[dict[str, torch.Tensor]]:
        return [rank.stacked() for rank in self.ranks]

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
        for rank, own in zip(self.ranks, weights, strict=True):
            rank.fill(own, self.epoch)
            rank.slots().fill_(SENTINEL)
        return self.epoch

    def wrong(self, plan: uec.Plan, names: Sequence[str] | None = None) -> list[int]:
        """Return the number of wrong bytes in every rank's slots, including empty ones and gaps."""
        self.synchronize()
        return [
            int((r.slots().cpu().numpy() != r.expected(plan, self.epoch, names)).sum())
            for r in self.ranks
        ]

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
        assert self.wrong(plan, names) == [0] * len(self.ranks), (plan.slot_expert, options)


def random_slots(
    seed: int, num_ranks: int, num_experts: int, slots: int, home: Sequence[int]
) -> Slots:
    """Return a legal plan: any expert in any slot, not at its home and not twice on a rank."""
    draw = random.Random(seed)
    hot = [draw.randrange(num_experts) for _ in range(2)]
    plan = []
    for rank in range(num_ranks):
        legal = [e for e in range(num_experts) if home[e] != rank]
        draw.shuffle(legal)
        legal.sort(key=lambda e: e not in hot and draw.random() < 0.5)
        row = [e if draw.random() < 0.8 else -1 for e in legal[:slots]]
        plan.append(row + [-1] * (slots - len(row)))
    return plan


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
