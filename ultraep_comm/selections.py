"""Which segments a transfer moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ultraep_comm.errors import InvalidArgumentError, InvalidWeightsError
from ultraep_comm.segments import BoundWeights, Segment


@dataclass(frozen=True)
class Selection:
    """Segments to transfer: indices, int32 ascending, where those are, as bits, and their bytes."""

    indices: np.ndarray
    address: int
    count: int
    bits: int
    nbytes: int


class Selections:
    """Checks a rank's ``segments=``, and keeps what they mean.

    Args:
        rank: this rank.
        segments: the group's.
    """

    def __init__(self, rank: int, segments: Mapping[str, Segment]) -> None:
        self._rank = rank
        self._names = tuple(segments)
        self._nbytes = [segment.nbytes for segment in segments.values()]
        self._found: dict[tuple[str, ...] | None, Selection] = {}

    def find(self, segments: Sequence[str] | None) -> Selection:
        """Return the segments to transfer; None: all.

        Raises:
            InvalidArgumentError: not a sequence of known names, each once, at least one.
        """
        if segments is not None and (
            isinstance(segments, str)
            or not isinstance(segments, Sequence)
            or not all(isinstance(s, str) for s in segments)
        ):
            raise InvalidArgumentError(
                f"rank {self._rank}: segments is {segments!r}; expected a sequence of names"
            )
        key = None if segments is None else tuple(segments)
        found = self._found.get(key)
        if found is not None:
            return found
        names = self._names if key is None else key
        unknown = [name for name in names if name not in self._names]
        if unknown or not names or len(set(names)) != len(names):
            raise InvalidArgumentError(
                f"rank {self._rank}: segments={key} is not a selection of {list(self._names)};"
                " expected known names, each once, at least one"
            )
        indices = np.array(sorted(self._names.index(n) for n in names), np.int32)
        bits = sum(1 << int(i) for i in indices)
        nbytes = sum(self._nbytes[i] for i in indices)
        chosen = Selection(indices, indices.ctypes.data, len(indices), bits, nbytes)
        self._found[key] = chosen
        return chosen

    def require(self, bound: BoundWeights, chosen: Selection) -> None:
        """Raise InvalidWeightsError if weights lack a segment to transfer."""
        if len(bound.names) == len(self._names):
            return
        wanted = [self._names[i] for i in chosen.indices]
        missing = [name for name in wanted if name not in bound.names]
        if missing:
            raise InvalidWeightsError(
                f"rank {self._rank}: weights lack segment {missing[0]!r}; expected"
                f" {wanted}, or choose with segments="
            )
