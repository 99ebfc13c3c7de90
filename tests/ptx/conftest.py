"""The PTX machine, built once."""

from __future__ import annotations

import pytest
from cpp_build import CppBuild
from ptx_machine import PtxMachine


@pytest.fixture(scope="session")
def machine(cpp: CppBuild) -> PtxMachine:
    """The machine with the kernels; skips where there is no nvcc."""
    return PtxMachine(cpp)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave to the second tier what needs the compiled kernels: that alone takes two minutes."""
    if "machine" in getattr(item, "fixturenames", ()):
        item.add_marker("exhaustive")
