"""Timeline: what every rank does when in a modelled transfer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Span(IntEnum):
    """Kinds of spans."""

    CALL = 0
    """The whole call."""
    STORE = 1
    """The rank stores bytes of an expert to ``peer``, from its own memory or loaded ones."""
    LOAD = 2
    """The rank loads bytes from ``peer``."""
    WAIT = 3
    """The rank waits for ``peer``; -1: for any of several."""


SPAN = np.dtype(
    [
        ("rank", np.int32),
        ("kind", np.int32),  # a Span
        ("peer", np.int32),  # -1: none
        ("expert", np.int32),  # -1: none
        ("piece", np.int32),  # index into the rank's worklist; -1: none
        ("begin_us", np.float64),
        ("end_us", np.float64),
        ("bytes", np.int64),
    ]
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Spans of one transfer.

    Attributes:
        num_ranks: G.
        spans: ``[N]`` of :data:`SPAN`, by rank and begin; microseconds since the call's start.
    """

    num_ranks: int
    spans: NDArray[np.void]
