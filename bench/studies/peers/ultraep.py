"""UltraEP's quota planner, as `ultraep_comm.bench.published` reads it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from studies.peers.placement import Ints, Placed, at_home
from ultraep_comm.bench.published import plan_published


def tokens_ultraep(load: Ints, home: NDArray[np.int32], num_ranks: int, slots: int) -> Placed:
    """Return the plan of a load ``[E]`` with the published settings, in one domain."""
    slot_expert, slot_quota, home_quota = plan_published(
        load, slots_per_rank=slots, home=home, domain=np.zeros(num_ranks, np.int32)
    )
    tokens = at_home(home_quota.astype(np.int64), home, num_ranks)
    rank, slot = np.nonzero(slot_expert >= 0)
    np.add.at(tokens, (rank, slot_expert[rank, slot]), slot_quota[rank, slot])
    return Placed(tokens)
