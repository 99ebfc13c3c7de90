"""What tests of the device need: a GPU and kernels for it, or a reason to skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import give_up, missing
from ranks import MAX_RANKS, run_here


@pytest.fixture
def gpu() -> torch.device:
    """The device, with kernels for it."""
    if missing():
        give_up(missing())
    return torch.device("cuda", torch.cuda.current_device())


def _prepare(request: pytest.FixtureRequest) -> str:
    if request.param in ("cuda", "emulated"):
        request.getfixturevalue("gpu" if request.param == "cuda" else "emulated")
    return str(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated", "host"])
def engine(request: pytest.FixtureRequest) -> str:
    """The kernels on a GPU, the same kernels on the CPU, and the host engine."""
    return _prepare(request)


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated", "host", "processes"]
)
def any_engine(request: pytest.FixtureRequest) -> str:
    """These, and the host engine in processes, of which each runs the test as one of the ranks."""
    return _prepare(request)


@pytest.fixture(
    params=[
        pytest.param("cuda", marks=pytest.mark.gpu),
        "emulated",
        "host",
        "c10d",
    ]
)
def loopback_engine(request: pytest.FixtureRequest) -> str:
    """Every engine, its ranks in this process."""
    return _prepare(request)


QUICK_ON_C10D = ("test_gpu_loads", "test_gpu_banks")


def pytest_itemcollected(item: Any) -> None:
    """Leave what takes long on the c10d engine to the second tier."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if parameters.get("loopback_engine") == "c10d" and item.module.__name__ not in QUICK_ON_C10D:
        item.add_marker("exhaustive")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a test of processes in each of the pool's."""
    if getattr(pyfuncitem, "callspec", None) is None:
        return None
    if pyfuncitem.callspec.params.get("any_engine") != "processes":
        return None
    options = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if options.get("num_ranks", 0) > MAX_RANKS:
        pytest.skip(f"{MAX_RANKS} processes at most")
    pool = pyfuncitem._request.getfixturevalue("ranks")
    pool.run(MAX_RANKS, run_here, pyfuncitem.obj, options, timeout=250)
    return True


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated"])
def streams(request: pytest.FixtureRequest) -> str:
    """An engine with streams."""
    return _prepare(request)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "host"])
def process_engine(request: pytest.FixtureRequest) -> str:
    """An engine whose ranks are processes."""
    return _prepare(request)
