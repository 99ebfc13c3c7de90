"""The two tiers of tests: the first tries a part of what the second tries in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

_exhaustive = False


def choose(*, exhaustive: bool) -> None:
    """Set which tier runs, before test modules are imported."""
    global _exhaustive
    _exhaustive = exhaustive


def cases(few: int, many: int) -> int:
    """Return how many cases a generator should try: ``many`` with ``--exhaustive``."""
    return many if _exhaustive else few


def sampled(values: Iterable[Any], first: Callable[[Any], bool]) -> list[ParameterSet]:
    """Return values to parametrize with; the first tier runs those that ``first`` accepts."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if first(value) else pytest.mark.exhaustive,
        )
        for value in values
    ]
