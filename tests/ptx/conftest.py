"""The PTX machine, built once."""

from __future__ import annotations

import pytest
from cpp_build import CppBuild
from ptx_machine import PtxMachine


@pytest.fixture(scope="session")
def machine(cpp: CppBuild) -> PtxMachine:
    """The machine with the kernels; skips where there is no nvcc."""
    return PtxMachine(cpp)
