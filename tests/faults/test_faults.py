"""Faults of real processes: no rank hangs, nothing is corrupted, nothing leaks."""

from __future__ import annotations

import os

import pytest
from scene import Scene, judge
from scenes import SCENES
from tiers import sampled

LONG = os.environ.get("ULTRAEP_FAULTS") == "long"


@pytest.mark.parametrize(
    "scene", sampled(SCENES, lambda s: LONG or not s.long), ids=lambda scene: scene.name
)
def test_fault(scene: Scene) -> None:
    wrong = judge(scene, scene.run())
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
