"""GroupMemory: what a group takes on each rank, before it is created and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ultraep_comm import _core
from ultraep_comm.engines.options import ExpertSpec, Options
from ultraep_comm.plan.topology import IntsLike, Topology
from ultraep_comm.weights.binding import GradSpec
from ultraep_comm.weights.segments import Segment


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """Bytes of shared memory that a group has on each rank.

    Attributes:
        slots: of the slots of all banks.
        slot_grads: of their gradients.
        other: flags, loads, and what reductions add up in; in check mode also copies of the main
            weights. Main weights of ``group.empty_weights()`` are not included.
    """

    slots: int
    slot_grads: int
    other: int

    @property
    def total(self) -> int:
        """Return their sum."""
        return self.slots + self.slot_grads + self.other


def memory_of(
    layout: _core.EngineLayout,
    slots_per_rank: int,
    segments: Mapping[str, Segment],
    grads: Mapping[str, Segment],
    banks: int,
    grad_banks: int,
    check: bool,
) -> GroupMemory:
    """Return the memory of a layout."""
    slots = banks * slots_per_rank * sum(s.nbytes for s in segments.values())
    slot_grads = grad_banks * slots_per_rank * sum(s.nbytes for s in grads.values())
    total = layout.total_bytes + (layout.check_bytes if check else 0)
    return GroupMemory(slots=slots, slot_grads=slot_grads, other=total - slots - slot_grads)


def group_memory(
    num_ranks: int,
    *,
    num_experts: int,
    slots_per_rank: int,
    expert: ExpertSpec,
    home: IntsLike | None = None,
    grads: GradSpec = None,
    banks: int = 1,
    grad_banks: int = 1,
    tile_bytes: int | None = None,
    check: bool | None = None,
) -> GroupMemory:
    """Return what a group of these arguments would take on each rank. Allocates nothing.

    Args:
        num_ranks: G; the other arguments are those of :func:`new_group`.

    Raises:
        InvalidArgumentError: an argument is wrong.
    """
    options = Options(
        expert=expert,
        engine="auto",
        fabric="auto",
        timeout=None,
        num_sms=None,
        tile_bytes=tile_bytes,
        grads=grads,
        banks=banks,
        grad_banks=grad_banks,
        check=check,
    )
    topology = Topology.make(
        num_ranks=num_ranks, num_experts=num_experts, slots_per_rank=slots_per_rank, home=home
    )
    layout = _core.EngineLayout(options.config(topology, 0, 0.0, (0, 0, 0, 0, 100)))
    return memory_of(
        layout,
        topology.slots_per_rank,
        options.segments,
        options.grads,
        options.banks,
        options.grad_banks,
        options.check,
    )
