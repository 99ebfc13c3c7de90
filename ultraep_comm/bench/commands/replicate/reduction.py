"""``replicate --op reduce``: the ranks that reduce gradients, and what they are compared with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm.bench.baselines import cut_line, exchange, group_of, holders_of
from ultraep_comm.bench.clock import Meter
from ultraep_comm.bench.commands.replicate import ReplicateSettings
from ultraep_comm.bench.inside import slot_grad_address
from ultraep_comm.bench.measure import Transfer
from ultraep_comm.bench.payload import (
    MAIN,
    SENTINEL,
    GradPayload,
    count_different,
    count_disturbed,
)
from ultraep_comm.bench.ranks import Ranks, main_index, replicas_of
from ultraep_comm.bench.traffic import Traffic, count_reduction_traffic
from ultraep_comm.calls.reduce import reduce_expert_grads
from ultraep_comm.engines.options import HOST_TILE_BYTES
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import Plan

_BLOCK_BYTES = 256 << 10  # of gradients, added and cleared in a cache


@dataclass(frozen=True, kw_only=True)
class HomeRange:
    """Private memory of a baseline for a range of an expert's gradients at home."""

    data: torch.Tensor
    expert: int
    segment: str
    begin: int


class GradRanks(Ranks):
    """Ranks that call `reduce_expert_grads`. For some attributes see `ReplicateRanks`.

    Slots, gradients of empty slots, and gradients at home of experts without replicas are filled
    with SENTINEL and must keep it.

    Attributes:
        at_home: gradients at home of each rank here, ``{name: [M, elements]}``.
        grad_dtype: of the slots.
        ranges: of a baseline, to fill with the values of gradients at home.
    """

    # One call at a time: a second one would add the same slot gradients again.
    calls, lined_up = 1, True

    def __init__(self, meter: Meter, settings: ReplicateSettings, num_sms: int | None) -> None:
        """Create the groups; allocate and bind gradients at home. Collective, but in loopback."""
        elements, dtype = settings.elements, getattr(torch, settings.main_dtype)
        self.grad_dtype: torch.dtype = getattr(torch, settings.grad_dtype)
        self._settings = settings
        super().__init__(
            meter,
            num_ranks=settings.num_ranks,
            num_experts=settings.num_experts,
            slots=settings.slots,
            fabric=settings.fabric,
            # Weights are not moved, so one byte stands for each element.
            expert={name: ((count,), torch.uint8) for name, count in elements.items()},
            grads=self.grad_dtype,
            tile_bytes=settings.tile_bytes,
            num_sms=num_sms,
        )
        self.at_home = [
            {
                name: torch.empty((group.num_local_experts, n), dtype=dtype, device=group.device)
                for name, n in elements.items()
            }
            for group in self.groups
        ]
        self._bound = [g.bind_grads(m) for g, m in zip(self.groups, self.at_home, strict=True)]
        self.ranges = list[HomeRange]()
        for group, at_home in zip(self.groups, self.at_home, strict=True):
            for tensor in (*group.slots.values(), *group.slot_grads.values(), *at_home.values()):
                tensor.view(torch.uint8).fill_(SENTINEL)

    def make_payload(self) -> GradPayload:
        """Return the expected gradients."""
        settings = self._settings
        return GradPayload(
            settings.seed,
            settings.elements,
            settings.num_experts,
            grad_dtype=self.grad_dtype,
            main_dtype=getattr(torch, settings.main_dtype),
        )

    def baselines(self, plan: Plan) -> list[Transfer]:
        """Return what users do today, and the machine's own rate; on a device none.

        Isend/irecv over gloo, and plain adding or, without shared memory, reductions.
        """
        if self._settings.engine == "cuda":
            return []
        shared = self._settings.engine == "host"
        return [GlooReduction(self, plan), (CopyAdd if shared else GroupReduction)(self, plan)]

    def traffic(self, plan: Plan, mode: str) -> Traffic:
        """Return the bytes that a call moves."""
        settings = self._settings
        return count_reduction_traffic(
            plan,
            mode,
            segment_bytes=list(settings.segments.values()),
            tile_bytes=settings.tile_bytes or HOST_TILE_BYTES,
            grad_bytes=settings.grad_bytes,
            main_bytes=settings.main_bytes,
        )

    def _call_one(
        self, i: int, plan: Plan, mode: str, *, bound: bool, async_op: bool
    ) -> Work | None:
        return reduce_expert_grads(
            self._bound[i] if bound else self.at_home[i],
            plan,
            group=self.groups[i],
            mode=mode,
            async_op=async_op,
        )

    def fill(self, plan: Plan, payload: GradPayload, epoch: int) -> None:
        """Write the gradients of an epoch to all instances here of replicated experts."""
        replicas = list(replicas_of(plan))
        replicated = {expert for expert, *_ in replicas}
        for group, at_home in zip(self.groups, self.at_home, strict=True):
            for expert, i in main_index(group).items():
                for name, rows in at_home.items() if expert in replicated else ():
                    at = {"epoch": epoch, "expert": expert, "rank": MAIN}
                    rows[i].copy_(payload.values(**at, segment=name))
            for expert, _, rank, slot in replicas:
                for name, rows in group.slot_grads.items() if rank == group.rank else ():
                    at = {"epoch": epoch, "expert": expert, "rank": rank}
                    rows[slot].copy_(payload.values(**at, segment=name))
        for own in self.ranges:
            main = payload.values(epoch=epoch, expert=own.expert, rank=MAIN, segment=own.segment)
            own.data.copy_(main[own.begin : own.begin + own.data.numel()])

    def count_wrong(
        self, plan: Plan, payload: GradPayload, epoch: int, *, any_order: bool = False
    ) -> int:
        """Return the wrong bytes of gradients at home and slots on these ranks.

        ``any_order``: sums may be rounded as additions in any order and the slots' dtype are.
        """
        wrong = self.count_wrong_slots(plan)
        for group, at_home in zip(self.groups, self.at_home, strict=True):
            for expert, i in main_index(group).items():
                ranks = [rank for e, _, rank, _ in replicas_of(plan) if e == expert]
                for name, rows in at_home.items():
                    found = rows[i].cpu()
                    if not ranks:
                        wrong += count_disturbed(found.view(torch.uint8).numpy())
                        continue
                    at = {"epoch": epoch, "expert": expert}
                    wanted = payload.reduced(**at, ranks=ranks, segment=name)
                    if any_order:
                        wrong += count_far(found, wanted, len(ranks), self.grad_dtype)
                    else:
                        wrong += count_different(found, wanted)
        return wrong

    def count_wrong_slots(self, plan: Plan) -> int:
        """Return the nonzero bytes of cleared slots, and the changed bytes of other slots."""
        wrong = 0
        for group in self.groups:
            wrong += sum(count_disturbed(slots.cpu().numpy()) for slots in group.slots.values())
            for slot, expert in enumerate(plan.slot_expert[group.rank].tolist()):
                for rows in group.slot_grads.values():
                    data = rows[slot].cpu().view(torch.uint8).numpy()
                    if expert < 0:
                        wrong += count_disturbed(data)
                    else:
                        wrong += int(np.count_nonzero(data))
        return wrong


class GlooReduction:
    """What users do today: isend and irecv of every replica's gradients to the home rank.

    The home rank adds them in the library's order, and slots are cleared.
    """

    name = "gloo"

    def __init__(self, ranks: GradRanks, plan: Plan) -> None:
        """Prepare the operations and private receive buffers."""
        self._ranks, self._plan = ranks, plan
        self._operations: list[dist.P2POp] = []
        self._clears: list[torch.Tensor] = []
        (group,), (at_home,) = ranks.groups, ranks.at_home
        received: dict[tuple[int, str], list[torch.Tensor]] = {}
        for expert, home, rank, slot in replicas_of(plan):
            for name, rows in group.slot_grads.items():
                if rank == group.rank:
                    sent = rows[slot]
                    self._clears.append(sent)
                    self._operations.append(dist.P2POp(dist.isend, sent.view(torch.uint8), home))
                elif home == group.rank:
                    buffer = torch.zeros_like(rows[0])
                    received.setdefault((expert, name), []).append(buffer)
                    self._operations.append(dist.P2POp(dist.irecv, buffer.view(torch.uint8), rank))
        index = main_index(group)
        self._sums = [(at_home[name][index[e]], buffers) for (e, name), buffers in received.items()]

    def run(self) -> None:
        """Send and receive everything, wait, add and clear."""
        exchange(self._operations)
        for main, buffers in self._sums:
            total = buffers[0].float()  # no copy of fp32
            for buffer in buffers[1:]:
                total.add_(buffer)
            if main.dtype == torch.float32:
                main.add_(total)
            else:
                main.copy_(total.add_(main))
        for sent in self._clears:
            sent.zero_()

    def count_wrong(self, payload: GradPayload, epoch: int) -> int:
        """Return the wrong bytes of gradients at home and slots."""
        return self._ranks.count_wrong(self._plan, payload, epoch)


class GroupReduction:
    """`torch.distributed.reduce` of every segment of every replicated expert, to its home.

    All start at once, in the order of experts on every rank, in process groups of the home and the
    replicas. The sums have the slots' dtype and gloo's order; slots are cleared.
    """

    name = "reduce"

    def __init__(self, ranks: GradRanks, plan: Plan) -> None:
        """Create the process groups and, where gloo may not write to gradients, buffers.

        Collective.
        """
        self._ranks, self._plan = ranks, plan
        self._jobs: list[tuple[torch.Tensor, int, dist.ProcessGroup]] = []
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients at home, buffer
        self._slots: list[torch.Tensor] = []  # gloo writes to them
        (group,), (at_home,) = ranks.groups, ranks.at_home
        index = main_index(group)
        slot_of = {expert: slot for expert, _, r, slot in replicas_of(plan) if r == group.rank}
        for expert, home, holders in holders_of(plan):
            members = group_of(holders)
            for name, rows in group.slot_grads.items() if group.rank in holders else ():
                if group.rank == home:
                    data = at_home[name][index[expert]]
                    if data.dtype != rows.dtype:
                        self._sums.append((data, torch.zeros_like(rows[0])))
                        data = self._sums[-1][1]
                else:
                    data = rows[slot_of[expert]]
                    self._slots.append(data)
                self._jobs.append((data, home, members))

    def run(self) -> None:
        """Reduce everything, wait, add and clear."""
        for _, buffer in self._sums:
            buffer.zero_()
        works = [dist.reduce(data, home, group=g, async_op=True) for data, home, g in self._jobs]
        for work in works:
            work.wait()
        for main, buffer in self._sums:
            main.add_(buffer)
        for sent in self._slots:
            sent.zero_()

    def count_wrong(self, payload: GradPayload, epoch: int) -> int:
        """Return the wrong bytes of gradients at home, up to rounding, and of slots."""
        return self._ranks.count_wrong(self._plan, payload, epoch, any_order=True)


def count_far(
    data: torch.Tensor, wanted: torch.Tensor, replicas: int, grad_dtype: torch.dtype
) -> int:
    """Return the bytes of values that differ by more than the rounding of their additions.

    Terms are below 2, sums below twice the number of terms, and an addition rounds by half an eps.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (grad_dtype, data.dtype))
    far = (data.float() - wanted.float()).abs() > 2 * (replicas + 1) ** 2 * eps
    return int(far.sum()) * data.itemsize


class CopyAdd:
    """The machine's rate of adding: the same additions, spread evenly over the ranks.

    Every replica's gradients are added from the slot in shared memory to private memory, and
    cleared. The concatenated gradients of all replicas are cut into equal parts.
    """

    name = "copy+add"

    def __init__(self, ranks: GradRanks, plan: Plan) -> None:
        """Find this rank's part, and allocate the memory to add to."""
        self._ranks, self._plan = ranks, plan
        (group,), (at_home,) = ranks.groups, ranks.at_home
        domain = group.topology.domain
        here = np.flatnonzero(domain == domain[group.rank]).tolist()
        pieces = [
            (expert, rank, slot, segment)
            for expert, _, rank, slot in replicas_of(plan)
            if rank in here
            for segment in range(len(group.slot_grads))
        ]
        names, rows = list(group.slot_grads), list(group.slot_grads.values())
        sizes = [rows[segment][0].nbytes for *_, segment in pieces]
        main_dtype, grad_dtype = next(iter(at_home.values())).dtype, rows[0].dtype
        self._checks: list[tuple[HomeRange, int]] = []
        self._blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._cast = torch.empty(_BLOCK_BYTES // grad_dtype.itemsize, dtype=torch.float32)
        for piece, low, high in cut_line(sizes, here.index(group.rank), len(here)):
            expert, rank, slot, segment = pieces[piece]
            at = slot_grad_address(group, rank, slot, segment, sizes[piece]) + low
            source = _view(at, high - low, grad_dtype)
            own = HomeRange(
                data=torch.zeros(source.numel(), dtype=main_dtype),
                expert=expert,
                segment=names[segment],
                begin=low // grad_dtype.itemsize,
            )
            ranks.ranges.append(own)
            self._checks.append((own, rank))
            step = self._cast.numel()
            for begin in range(0, source.numel(), step):
                part = slice(begin, begin + step)
                self._blocks.append((own.data[part], source[part]))

    def run(self) -> None:
        """Add and clear this rank's part, block by block."""
        for main, source in self._blocks:
            if main.dtype == source.dtype:
                main.add_(source)
            else:
                main.add_(self._cast[: source.numel()].copy_(source))
            source.zero_()

    def count_wrong(self, payload: GradPayload, epoch: int) -> int:
        """Return the wrong bytes of the sums and of slots."""
        wrong = self._ranks.count_wrong_slots(self._plan)
        for own, rank in self._checks:
            at = {"epoch": epoch, "expert": own.expert}
            wanted = payload.reduced(**at, ranks=[rank], segment=own.segment)
            wrong += count_different(own.data, wanted[own.begin : own.begin + own.data.numel()])
        return wrong


def _view(address: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Wrap memory of this process as a tensor."""
    data = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(data)).view(dtype)
