"""Timelines: what every rank does when in a modelled transfer, as an array of spans."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


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
        ("begin_us", np.float64),  # since the start of the call
        ("end_us", np.float64),
        ("bytes", np.int64),
    ]
)
