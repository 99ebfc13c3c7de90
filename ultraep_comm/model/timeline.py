"""What happened when, on every rank, in one transfer: of a model, or as recorded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Span(IntEnum):
    """What a rank did for some time."""

    CALL = 0
    """The call, from its start to its end."""
    STORE = 1
    """Bytes of an expert left this rank's memory, or passed through it, to ``peer``."""
    LOAD = 2
    """Bytes came from ``peer``, loaded by this rank."""
    WAIT = 3
    """Nothing could be done before ``peer`` had done something; -1: any of several."""


SPAN = np.dtype(
    [
        ("rank", np.int32),
        ("kind", np.int32),  # a Span
        ("peer", np.int32),  # -1: none
        ("expert", np.int32),  # -1: none
        ("piece", np.int32),  # of the rank's list of work; -1: none
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
