"""Many transfers and many groups: faults that only show after a while."""

from __future__ import annotations

import os

import pytest
from lives import lives_scene
from scene import Scene, judge
from soak import soak_scene
from tiers import cases

LONG = os.environ.get("ULTRAEP_FAULTS") == "long"
TRANSFERS = 10_000 if LONG else cases(200, 2_000)
GROUPS = 1_000 if LONG else cases(60, 500)


@pytest.mark.cases
@pytest.mark.timeout(3600 if TRANSFERS > 200 else 300)
@pytest.mark.parametrize(
    "scene",
    [soak_scene(TRANSFERS, seed=20), lives_scene(GROUPS)],
    ids=["transfers by random plans", "groups opened and closed"],
)
def test_nothing_is_wrong_after_many(scene: Scene) -> None:
    outcome = scene.run()
    wrong = judge(scene, outcome)
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    assert all(report.figures for report in outcome.reports.values())
