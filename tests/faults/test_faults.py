"""Faults of real processes: nobody hangs, nothing is corrupted, nothing leaks."""

from __future__ import annotations

import os

import pytest
from scene import Scene, judge
from scenes import SCENES

LONG = os.environ.get("ULTRAEP_FAULTS") == "long"


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_fault(scene: Scene) -> None:
    if scene.long and not LONG:
        pytest.skip("a rarer fault: ULTRAEP_FAULTS=long runs it")
    wrong = judge(scene, scene.run())
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
