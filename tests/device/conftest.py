"""What tests of the device need: a GPU and kernels for it, or a reason to skip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpp_build import CppBuild
from emulated_device import EmulatedDevice
from gpu import give_up, missing

from ultraep_comm.engines.cuda import device, kernels


@pytest.fixture
def gpu() -> torch.device:
    """The device, with kernels for it."""
    if missing():
        give_up(missing())
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def emulation(cpp: CppBuild) -> Path:
    """The library that runs the kernels on the CPU."""
    return cpp.build("cpu", "emulated_device") / "tests" / "libemulated_device.so"


def _prepare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    if request.param == "emulated":
        emulated = EmulatedDevice(request.getfixturevalue("emulation"))
        monkeypatch.setattr(device, "find_device", lambda: emulated)
        monkeypatch.setattr(kernels, "load_kernels", lambda device, nvshmem: emulated.kernels)
    return str(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated", "host"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels on a GPU, the same kernels on the CPU, or the host engine: one test for all."""
    return _prepare(request, monkeypatch)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An engine with streams."""
    return _prepare(request, monkeypatch)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "host"])
def process_engine(request: pytest.FixtureRequest) -> str:
    """An engine whose ranks are processes."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    return str(request.param)
