"""Instances: memory in which a rank's main instances lie directly before the slots of a bank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ultraep_comm.fabrics import Place, SharedRegion
from ultraep_comm.group.session import Session
from ultraep_comm.weights.segments import Segment


class Instances:
    """Memory for one tensor of all instances of each segment, of weights or of gradients.

    Args:
        session: of the group.
        segments: by name.
        slot_offset: ``[sets, segments]``, flattened: of the slots in the group's memory.
        places: ``[segments]``: of slots in other memory that is laid out like that of a set.
        num_bytes: of such memory.
        allocate: makes it, where slots are host memory.
    """

    def __init__(
        self,
        session: Session,
        segments: Mapping[str, Segment],
        *,
        slot_offset: Sequence[int],
        places: Sequence[int],
        num_bytes: int,
        allocate: Callable[[int], SharedRegion],
    ) -> None:
        self._session = session
        self._nbytes = [segment.nbytes for segment in segments.values()]
        self._slot_offset = slot_offset
        self._places = places
        self._num_bytes = num_bytes
        self._allocate = allocate
        self._taken: set[int] = set()

    def take(self, index: int) -> tuple[SharedRegion, list[int]]:
        """Return memory for mains that a set's slots follow, and where each segment's mains begin.

        At first that is the room before the slots themselves; then it is other memory, in which the
        slots appear once more.

        Raises:
            UnsupportedError, OutOfSharedMemoryError: as ``Engine.share_slots``.
        """
        session, count = self._session, len(self._nbytes)
        region, at = (
            session.engine.memory[0],
            self._slot_offset[index * count : (index + 1) * count],
        )
        if index in self._taken:
            start, page = region.bases[session.rank], session.engine.layout.instance_align
            sizes = [session.topology.slots_per_rank * nbytes for nbytes in self._nbytes]
            shown = [
                Place(to, start + offset, -(-size // page) * page)
                for to, offset, size in zip(self._places, at, sizes, strict=True)
                if size
            ]
            region = session.engine.share_slots(self._allocate, self._num_bytes, shown)
            session.engine.memory.append(region)
            at = self._places
        self._taken.add(index)
        mains = session.num_local_experts
        return region, [
            offset - mains * nbytes for offset, nbytes in zip(at, self._nbytes, strict=True)
        ]
