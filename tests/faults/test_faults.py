"""Faults of real processes: no rank hangs, nothing is corrupted, nothing leaks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from scene import TOO_LATE, Scene, judge
from scenes import SCENES
from tiers import sampled

LONG = os.environ.get("ULTRAEP_FAULTS") == "long"


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[list[str]]]]:
    """What is wrong with each scene that is asked for, by name. Three play at a time: they wait."""
    tests = [t for t in request.session.items if isinstance(t, pytest.Function)]
    scenes = [t.callspec.params["scene"] for t in tests if t.originalname == "test_fault"]
    with ThreadPoolExecutor(3) as stages:
        yield {scene.name: stages.submit(lambda s=scene: judge(s, s.run())) for scene in scenes}
        stages.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "scene", sampled(SCENES, lambda s: LONG or not s.long), ids=lambda scene: scene.name
)
def test_fault(scene: Scene, verdicts: dict[str, Future[list[str]]]) -> None:
    wrong = verdicts[scene.name].result()
    for _ in range(2):
        # Scenes beside it and other tests may keep its processes from a core: what was only late is
        # played again, and what is slow is late again.
        if wrong and all(TOO_LATE in each for each in wrong):
            wrong = judge(scene, scene.run())
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
