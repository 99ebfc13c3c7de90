"""SlotSet: the slots of a bank in the group's memory, and local experts directly before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch.utils._pytree import register_pytree_node

from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.fabrics import Place, SharedRegion
from ultraep_comm.group.session import Session
from ultraep_comm.weights.segments import Segment, with_own_storage


@dataclass(kw_only=True)
class SlotSet:
    """A set of slots for the weights of experts, or for their gradients.

    Attributes:
        session: of the group.
        segments: by name.
        offsets: ``[segments]``: of the slots in the group's memory.
        places: ``[segments]``: of slots in other memory that is laid out like a set's.
        num_bytes: of such memory.
        allocate: makes it, where slots are host memory.
        slots: ``{name: [S, *shape]}``, views of them.
    """

    session: Session
    segments: Mapping[str, Segment]
    offsets: Sequence[int]
    places: Sequence[int]
    num_bytes: int
    allocate: Callable[[int], SharedRegion]
    slots: dict[str, torch.Tensor] = field(init=False)
    _is_taken: bool = False

    def __post_init__(self) -> None:
        count = self.session.topology.slots_per_rank
        storage = self.session.engine.memory[0].local
        self.slots = own_views(storage, self.offsets, count, self.segments)

    def take(self) -> tuple[SharedRegion, list[int], dict[str, torch.Tensor]]:
        """Return memory for local experts before the slots, and where those of a segment begin.

        At first that is the room before the slots themselves; then it is other memory, to which the
        slots are mapped too. Also returns views ``[M + S, *shape]`` of both.

        Raises:
            UnsupportedError, OutOfSharedMemoryError: as ``Engine.share_slots``.
        """
        session, segments = self.session, self.segments
        num_local, count = session.num_local_experts, session.topology.slots_per_rank
        region, at = session.engine.memory[0], self.offsets
        if self._is_taken:
            start, page = region.bases[session.rank], session.engine.layout.instance_align
            sizes = [count * segment.nbytes for segment in segments.values()]
            aliases = [
                Place(to, start + offset, -(-size // page) * page)
                for to, offset, size in zip(self.places, at, sizes, strict=True)
                if size
            ]
            region = session.engine.share_slots(self.allocate, self.num_bytes, aliases)
            session.engine.memory.append(region)
            at = self.places
        self._is_taken = True
        begins = [
            offset - num_local * segment.nbytes
            for offset, segment in zip(at, segments.values(), strict=True)
        ]
        with torch.inference_mode(False):  # as in new_group
            return region, begins, own_views(region.local, begins, num_local + count, segments)


class _Views(dict[str, torch.Tensor]):
    """Tensors by segment; says which there are where another is asked for."""

    def __missing__(self, name: str) -> NoReturn:
        hint = "" if self else "; slot gradients need a group created with grads="
        raise InvalidArgumentError(f"there is no segment {name!r}; expected {list(self)}{hint}")


# What torch.vmap, torch.utils.checkpoint and others look into, as into a dict.
register_pytree_node(
    _Views,
    lambda views: (list(views.values()), list(views)),
    lambda values, names: _Views(zip(names, values, strict=True)),
)


def own_views(
    storage: torch.Tensor, offsets: Sequence[int], count: int, segments: Mapping[str, Segment]
) -> dict[str, torch.Tensor]:
    """Return :func:`views` that do not show their storage's other bytes."""
    found = views(storage, offsets, count, segments)
    return _Views((name, with_own_storage(view)) for name, view in found.items())


def views(
    storage: torch.Tensor, offsets: Sequence[int], count: int, segments: Mapping[str, Segment]
) -> dict[str, torch.Tensor]:
    """Return ``{name: [count, *shape]}`` at some offsets of a storage, uint8."""
    return {
        name: segment.view(storage.narrow(0, offset, count * segment.nbytes), count)
        for (name, segment), offset in zip(segments.items(), offsets, strict=True)
    }
