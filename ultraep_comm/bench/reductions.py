"""What ``reduce`` times: the library's modes, and what they are compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm.bench.grad_payload import MAIN, GradPayload, count_different
from ultraep_comm.bench.payload import SENTINEL, count_disturbed
from ultraep_comm.bench.transfers import cut_line, replicas_of
from ultraep_comm.gradients import BoundGrads
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan
from ultraep_comm.reduction import reduce_expert_grads

_BLOCK_BYTES = 256 << 10  # of gradients, added and cleared while they are in a cache


@dataclass(frozen=True, kw_only=True)
class Own:
    """Memory that a baseline adds to in place of main gradients: a range of a main's elements."""

    data: torch.Tensor
    expert: int
    segment: str
    begin: int


@dataclass(frozen=True, kw_only=True)
class GradStage:
    """What all reductions of a run share.

    Attributes:
        group: the group; weights in its slots, and gradients in empty ones, are full of SENTINEL.
        mains: this rank's main gradients ``{name: [M, elements]}``, full of SENTINEL.
        bound: the same, bound once.
        plan: the plan.
        zero: whether slots are cleared.
        own: more to fill with the values of main gradients.
    """

    group: Group
    mains: dict[str, torch.Tensor]
    bound: BoundGrads
    plan: Plan
    zero: bool
    own: list[Own] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Mark what no reduction may touch."""
        group = self.group
        for tensor in (*group.slots.values(), *group.slot_grads.values(), *self.mains.values()):
            tensor.view(torch.uint8).fill_(SENTINEL)

    def replicas(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield ``(expert, home, rank, slot)``, by ascending rank."""
        return replicas_of(self.plan)

    def ranks_of(self, expert: int) -> list[int]:
        """Return the ranks that hold replicas of an expert, ascending."""
        return [rank for e, _, rank, _ in self.replicas() if e == expert]

    def fill(self, payload: GradPayload, epoch: int) -> None:
        """Give the gradients of replicated experts here, in all instances, a new epoch's values."""
        me = self.group.rank
        replicated = {expert for expert, *_ in self.replicas()}
        for i, expert in enumerate(self.group.topology.mains(me).tolist()):
            for name, rows in self.mains.items() if expert in replicated else ():
                rows[i].copy_(payload.values(epoch=epoch, expert=expert, rank=MAIN, segment=name))
        for expert, _, rank, slot in self.replicas():
            for name, rows in self.group.slot_grads.items() if rank == me else ():
                rows[slot].copy_(payload.values(epoch=epoch, expert=expert, rank=me, segment=name))
        for own in self.own:
            main = payload.values(epoch=epoch, expert=own.expert, rank=MAIN, segment=own.segment)
            own.data.copy_(main[own.begin : own.begin + own.data.numel()])

    def count_wrong_mains(self, payload: GradPayload, epoch: int) -> int:
        """Compare this rank's main gradients with the definition; of other experts, with before."""
        wrong = 0
        for i, expert in enumerate(self.group.topology.mains(self.group.rank).tolist()):
            ranks = self.ranks_of(expert)
            for name, rows in self.mains.items():
                if not ranks:
                    wrong += count_disturbed(rows[i].cpu().view(torch.uint8).numpy())
                    continue
                wanted = payload.reduced(epoch=epoch, expert=expert, ranks=ranks, segment=name)
                wrong += count_different(rows[i].cpu(), wanted)
        return wrong

    def count_wrong_slots(self) -> int:
        """Return bytes that are not zero in slots that were cleared, or not as before in others."""
        wrong = 0
        for slots in self.group.slots.values():
            wrong += count_disturbed(slots.cpu().numpy())
        for slot, expert in enumerate(self.plan.slot_expert[self.group.rank].tolist()):
            for rows in self.group.slot_grads.values():
                data = rows[slot].cpu().view(torch.uint8).numpy()
                if expert < 0:
                    wrong += count_disturbed(data)
                elif self.zero:
                    wrong += int(np.count_nonzero(data))
        return wrong


class Reduction:
    """`reduce_expert_grads`, blocking, with gradients bound once."""

    def __init__(self, stage: GradStage, mode: str) -> None:
        """Reduce in ``mode``."""
        self.name, self._stage = mode, stage

    def run(self) -> None:
        """Reduce the plan's replicas."""
        stage = self._stage
        reduce_expert_grads(
            stage.bound, stage.plan, group=stage.group, mode=self.name, zero=stage.zero
        )

    def choose(self) -> str:
        """Return the mode that the library takes for this plan. Collective: makes a call."""
        stage = self._stage
        work = reduce_expert_grads(
            stage.bound, stage.plan, group=stage.group, mode=self.name, async_op=True
        )
        assert work is not None
        work.wait()
        return work.mode

    def count_wrong(self, payload: GradPayload, epoch: int) -> int:
        """Compare main gradients and slots."""
        return self._stage.count_wrong_mains(payload, epoch) + self._stage.count_wrong_slots()


class GlooReduction:
    """What a user would do today: every replica's gradients travel home by isend and irecv.

    There they are added up as the library adds them, and slots are cleared.
    """

    name = "gloo"

    def __init__(self, stage: GradStage) -> None:
        """Make the operations, and the private buffers to receive into."""
        self._stage = stage
        self._operations: list[dist.P2POp] = []
        self._sums: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._clears: list[torch.Tensor] = []
        group = stage.group
        mains = {e: i for i, e in enumerate(group.topology.mains(group.rank).tolist())}
        received: dict[tuple[int, str], list[torch.Tensor]] = {}
        for expert, home, rank, slot in stage.replicas():
            for name, rows in group.slot_grads.items():
                if rank == group.rank:
                    sent = rows[slot]
                    self._clears.append(sent)
                    self._operations.append(dist.P2POp(dist.isend, sent.view(torch.uint8), home))
                elif home == group.rank:
                    buffer = torch.zeros_like(rows[0])
                    received.setdefault((expert, name), []).append(buffer)
                    self._operations.append(dist.P2POp(dist.irecv, buffer.view(torch.uint8), rank))
        for (expert, name), buffers in received.items():
            self._sums.append((stage.mains[name][mains[expert]], buffers))

    def run(self) -> None:
        """Send and receive everything, wait, add and clear."""
        if self._operations:
            for work in dist.batch_isend_irecv(self._operations):
                work.wait()
        for main, buffers in self._sums:
            total = buffers[0].float()  # itself, if it is fp32
            for buffer in buffers[1:]:
                total.add_(buffer)
            if main.dtype == torch.float32:
                main.add_(total)
            else:
                main.copy_(total.add_(main))
        for sent in self._clears if self._stage.zero else ():
            sent.zero_()

    def count_wrong(self, payload: GradPayload, epoch: int) -> int:
        """Compare main gradients and slots."""
        return self._stage.count_wrong_mains(payload, epoch) + self._stage.count_wrong_slots()


class CopyAdd:
    """The machine's rate of adding: as many additions, spread evenly over the ranks.

    One for every replica's gradients, out of slots in shared memory and into memory of one's own,
    and clearing them. The gradients of all replicas lie in a line, cut into equal parts.
    """

    name = "copy+add"

    def __init__(self, stage: GradStage) -> None:
        """Find this rank's part, and allocate what it is added to."""
        self._stage, group = stage, stage.group
        ranks = np.flatnonzero(group.topology.domain == group.topology.domain[group.rank]).tolist()
        pieces = [
            (expert, rank, slot, segment)
            for expert, _, rank, slot in stage.replicas()
            if rank in ranks
            for segment in range(len(group.slot_grads))
        ]
        names, rows = list(group.slot_grads), list(group.slot_grads.values())
        sizes = [rows[segment][0].nbytes for *_, segment in pieces]
        main_dtype = next(iter(stage.mains.values())).dtype
        self._checks: list[tuple[Own, int]] = []
        self._blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        grad_dtype = rows[0].dtype
        self._cast = torch.empty(_BLOCK_BYTES // grad_dtype.itemsize, dtype=torch.float32)
        for piece, low, high in cut_line(sizes, ranks.index(group.rank), len(ranks)):
            expert, rank, slot, segment = pieces[piece]
            at = group._layout.grad_offset[segment] + slot * sizes[piece] + low
            source = _view(group._region.bases[rank] + at, high - low, grad_dtype)
            own = Own(
                data=torch.zeros(source.numel(), dtype=main_dtype),
                expert=expert,
                segment=names[segment],
                begin=low // grad_dtype.itemsize,
            )
            stage.own.append(own)
            self._checks.append((own, rank))
            step = self._cast.numel()
            for begin in range(0, source.numel(), step):
                part = slice(begin, begin + step)
                self._blocks.append((own.data[part], source[part]))

    def run(self) -> None:
        """Add and clear this rank's part, block by block."""
        zero = self._stage.zero
        for main, source in self._blocks:
            if main.dtype == source.dtype:
                main.add_(source)
            else:
                main.add_(self._cast[: source.numel()].copy_(source))
            if zero:
                source.zero_()

    def count_wrong(self, payload: GradPayload, epoch: int) -> int:
        """Compare what was added to, and slots."""
        wrong = self._stage.count_wrong_slots()
        for own, rank in self._checks:
            wanted = payload.reduced(
                epoch=epoch, expert=own.expert, ranks=[rank], segment=own.segment
            )
            wrong += count_different(own.data, wanted[own.begin : own.begin + own.data.numel()])
        return wrong


def _view(address: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory of this process as a tensor."""
    data = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(data)).view(dtype)
