"""Which ranks have load/store access to each other, and the domains that follow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ultraep_comm.errors import UnsupportedError
from ultraep_comm.topology import IntArray


def find_domains(reaches: Sequence[Sequence[int]]) -> IntArray:
    """Return ``[G]`` domains, numbered by their first ranks. The same on every rank.

    Args:
        reaches: ``[G][G]``, non-zero where the row's rank has load/store access to the column's.

    Raises:
        UnsupportedError: access is not mutual, or not the same for all ranks of a domain.
    """
    reach = np.array(reaches) != 0
    num_ranks = len(reach)
    domain = np.full(num_ranks, -1, np.int32)
    for first in range(num_ranks):
        if domain[first] < 0:
            domain[reach[first] & (domain < 0)] = domain.max() + 1
            domain[first] = domain.max() if reach[first, first] else domain.max() + 1
    same = domain[:, None] == domain[None, :]
    odd = np.argwhere((same != reach) & ~np.eye(num_ranks, dtype=bool))
    if len(odd):
        a, b = odd[0]
        has = "has" if reach[a, b] else "has no"
        raise UnsupportedError(
            f"the ranks' access to each other's memory makes no domains: rank {a} {has} load/store"
            f" access to rank {b}, other than the ranks beside it. Give domains=, with ranks that"
            " all reach each other in each"
        )
    return domain


def check_domains(domain: IntArray, reaches: Sequence[Sequence[int]]) -> None:
    """Check domains that the caller gave. The same result on every rank.

    Raises:
        UnsupportedError: ranks of one domain do not reach each other's memory.
    """
    reach = np.array(reaches) != 0
    np.fill_diagonal(reach, True)
    missing = np.argwhere((domain[:, None] == domain[None, :]) & ~reach)
    if len(missing):
        a, b = missing[0]
        raise UnsupportedError(
            f"rank {a} has no load/store access to rank {b}, which is in the same domain"
            f" {domain[a]}. Leave domains=None to have them found, or look why peer access is off:"
            " nvidia-smi topo -p2p r, container isolation, IMEX channels between machines"
        )
