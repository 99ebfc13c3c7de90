"""What tests of the device need: a GPU and kernels for it, or a reason to skip."""

from __future__ import annotations

import pytest
import torch
from gpu import give_up, missing


@pytest.fixture
def gpu() -> torch.device:
    """The device, with kernels for it."""
    if missing():
        give_up(missing())
    return torch.device("cuda", torch.cuda.current_device())


def _prepare(request: pytest.FixtureRequest) -> str:
    if request.param != "host":
        request.getfixturevalue("gpu" if request.param == "cuda" else request.param)
    return str(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated", "host"])
def engine(request: pytest.FixtureRequest) -> str:
    """The kernels on a GPU, the same kernels on the CPU, and the host engine."""
    return _prepare(request)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated"])
def streams(request: pytest.FixtureRequest) -> str:
    """An engine with streams."""
    return _prepare(request)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "host"])
def process_engine(request: pytest.FixtureRequest) -> str:
    """An engine whose ranks are processes."""
    return _prepare(request)
