"""Figures of plans that the tests of formats compare."""

from __future__ import annotations

import ultraep_comm as uec


def rank_tokens(plan: uec.Plan) -> list[int]:
    """The tokens that each rank computes."""
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    tokens = plan.slot_quota.sum(dim=1).long()
    return tokens.index_add(0, plan.home.long(), plan.home_quota.long()).tolist()
