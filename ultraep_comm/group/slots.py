"""SlotSet: the slots of a bank in the group's memory, and main instances directly before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch.utils._pytree import register_pytree_node

from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.fabrics import Place, SharedRegion
from ultraep_comm.group.session import Session
from ultraep_comm.weights.segments import Segment, with_own_storage


class SlotSet:
    """A set of slots for the weights of experts, or for their gradients.

    Attributes:
        slots: ``{name: [S, *shape]}``, views of them.

    Args:
        session: of the group.
        segments: by name.
        offsets: ``[segments]``: of the slots in the group's memory.
        places: ``[segments]``: of slots in other memory that is laid out like a set's.
        num_bytes: of such memory.
        allocate: makes it, where slots are host memory.
    """

    def __init__(
        self,
        session: Session,
        segments: Mapping[str, Segment],
        *,
        offsets: Sequence[int],
        places: Sequence[int],
        num_bytes: int,
        allocate: Callable[[int], SharedRegion],
    ) -> None:
        self._session = session
        self._segments = segments
        self._offsets = offsets
        self._places = places
        self._num_bytes = num_bytes
        self._allocate = allocate
        self._is_taken = False
        count = session.topology.slots_per_rank
        self.slots = own_views(session.engine.memory[0].local, offsets, count, segments)

    def take(self) -> tuple[SharedRegion, list[int], dict[str, torch.Tensor]]:
        """Return memory for mains that the slots follow, and where each segment's mains begin.

        At first that is the room before the slots themselves; then it is other memory, in which the
        slots appear once more. Also returns views ``[M + S, *shape]`` of both.

        Raises:
            UnsupportedError, OutOfSharedMemoryError: as ``Engine.share_slots``.
        """
        session, segments = self._session, self._segments
        mains, count = session.num_local_experts, session.topology.slots_per_rank
        region, at = session.engine.memory[0], self._offsets
        if self._is_taken:
            start, page = region.bases[session.rank], session.engine.layout.instance_align
            sizes = [count * segment.nbytes for segment in segments.values()]
            shown = [
                Place(to, start + offset, -(-size // page) * page)
                for to, offset, size in zip(self._places, at, sizes, strict=True)
                if size
            ]
            region = session.engine.share_slots(self._allocate, self._num_bytes, shown)
            session.engine.memory.append(region)
            at = self._places
        self._is_taken = True
        begins = [
            offset - mains * segment.nbytes
            for offset, segment in zip(at, segments.values(), strict=True)
        ]
        with torch.inference_mode(False):  # as in new_group
            return region, begins, own_views(region.local, begins, mains + count, segments)


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
