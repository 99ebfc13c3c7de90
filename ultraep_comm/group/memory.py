"""GroupMemory: what a group takes on each rank, before it is created and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ultraep_comm import _core
from ultraep_comm.engines.options import GroupConfig, Options


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """Bytes of shared memory that a group has on each rank.

    Attributes:
        slots: of the slots of all banks.
        slot_grads: of their gradients.
        local_experts: room for main weights and gradients before the slots, in a group with
            ``instances=True``.
        other: flags, loads, the scratch of reductions, and padding; in check mode also copies of
            the main weights. Not included: main weights of ``group.empty_weights()``, and of
            further ``empty_instances()`` of a bank.
    """

    slots: int
    slot_grads: int
    local_experts: int
    other: int

    @property
    def total(self) -> int:
        """Return their sum."""
        return self.slots + self.slot_grads + self.local_experts + self.other


def memory_of(layout: _core.EngineLayout, slots_per_rank: int, options: Options) -> GroupMemory:
    """Return the memory of a layout."""
    weights = options.banks * sum(s.nbytes for s in options.segments.values())
    gradients = options.grad_banks * sum(s.nbytes for s in options.grads.values())
    slots, slot_grads = slots_per_rank * weights, slots_per_rank * gradients
    before_slots = layout.max_local_experts if layout.instance_align else 0
    local_experts = before_slots * (weights + gradients)
    total = layout.total_bytes + (layout.check_bytes if options.check else 0)
    other = total - slots - slot_grads - local_experts
    return GroupMemory(slots=slots, slot_grads=slot_grads, local_experts=local_experts, other=other)


def group_memory(num_ranks: int, **arguments: Any) -> GroupMemory:
    """Return what a group of these arguments would take on each rank. Allocates nothing.

    Args:
        num_ranks: G.
        arguments: those of :func:`new_group`. With ``instances=True`` the CUDA engine takes up to
            4 MiB more for each segment and bank: its pages are larger.

    Raises:
        InvalidArgumentError: an argument is wrong.
    """
    config = GroupConfig(**arguments)
    options, topology = Options(config), config.topology(num_ranks)
    layout = _core.EngineLayout(options.config(topology, 0, 0.0, (0, 0, 0, 0, 100)))
    return memory_of(layout, topology.slots_per_rank, options)
