"""The stub that type checkers read is the one that nanobind makes of the module."""

from __future__ import annotations

from pathlib import Path

import pytest
from nanobind.stubgen import StubGen

from ultraep_comm import _core

STUB = Path(__file__).resolve().parents[3] / "ultraep_comm" / "_core.pyi"


def test_the_stub_is_that_of_the_module() -> None:
    made = StubGen(_core)
    made.put(_core)
    if made.get() != STUB.read_text():
        pytest.fail("_core.pyi is not of this _core; its first lines say how to make it anew")
