"""Figures and published examples of plans that tests share."""

from __future__ import annotations

import ultraep_comm as uec

# The example of EPLB's README: 12 experts in 4 groups, 16 rows, 2 nodes of 4 ranks. Load and result
# of both layers.
EPLB_WEIGHT = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
EPLB_ROWS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]

# The example in UltraEP's header: two ranks with two masters and a slot each.
ROWS = [2, 1, 3, 0, 3, 1]
PLACES = [[3, -1], [1, 5], [0, -1], [4, 2]]
QUOTA = [[7, 0], [2, 6], [1, 0], [5, 4]]
ULTRAEP = {"num_ranks": 2, "num_experts": 4, "logical_to_physical": PLACES, "quota": QUOTA}


def rank_tokens(plan: uec.Plan) -> list[int]:
    """The tokens that each rank computes."""
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    tokens = plan.slot_quota.sum(dim=1).long()
    return tokens.index_add(0, plan.home.long(), plan.home_quota.long()).tolist()
