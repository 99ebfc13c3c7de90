"""The schedule of a rack's plan, in each mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rack import EXPERT_BYTES, IMBALANCES, G, S, make_plan

from ultraep_comm import _core


@pytest.mark.benchmark(group="schedule")
@pytest.mark.parametrize("imbalance", IMBALANCES)
@pytest.mark.parametrize("mode", _core.Mode, ids=["push", "pull", "direct"])
def test_schedule(benchmark: Callable, imbalance: float, mode: _core.Mode) -> None:
    plan = make_plan(imbalance)
    schedule = benchmark(
        _core.make_schedule,
        slot_expert=plan.slot_expert.flatten().tolist(),
        home=plan.home.tolist(),
        domain=[0] * G,
        slots_per_rank=S,
        allow_cross_domain=False,
        segment_bytes=list(EXPERT_BYTES),
        tile_bytes=64 << 10,
        mode=mode,
        may_pull=True,
        cost=[80_000, 60_000, 300_000, 10_000_000, G],
    )
    assert schedule["mode"] == mode
