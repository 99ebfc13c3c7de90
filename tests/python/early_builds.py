"""Builds what the C++ tests need while the Python tests before them run."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest
from cpp_build import CppBuild


class EarlyBuilds:
    """A thread that builds presets one after another, at the lowest priority.

    It decides nothing: a test that needs a preset builds it too, which then has little left to do,
    and shows what went wrong.
    """

    def __init__(self, cpp: CppBuild, wanted: Sequence[tuple[str, ...]]) -> None:
        self._cpp = cpp
        self._wanted = wanted
        self._thread = threading.Thread(target=self._build, daemon=True)
        self._thread.start()

    def _build(self) -> None:
        for preset, *targets in self._wanted:
            self._cpp.build_early(preset, *targets)

    def stop(self) -> None:
        self._cpp.stop_early()
        self._thread.join()


def wanted_builds(items: Sequence[pytest.Item]) -> list[tuple[str, ...]]:
    """Return presets with their targets in the order in which tests will ask for them.

    Of several processes that run tests, only the first builds ahead.
    """
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        return []
    marks = [mark.args for item in items for mark in item.iter_markers("builds")]
    if marks and any(_rank(item) == 1 for item in items):
        marks.insert(
            0, ("cpu", "emulated_device")
        )  # needed by Python tests, long before the others
    return list(dict.fromkeys(marks))


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker("builds"):
        return 2
    return int("emulated_library" in getattr(item, "fixturenames", ()))


def put_last(items: list[pytest.Item]) -> None:
    """Move files whose tests need long builds behind all others."""
    latest: dict[object, int] = {}
    for item in items:
        latest[item.path] = max(latest.get(item.path, 0), _rank(item))
    items.sort(key=lambda item: latest[item.path])
