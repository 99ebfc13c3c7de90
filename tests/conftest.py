"""Fixtures and settings that all Python tests share."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "python"))
sys.path.insert(0, str(Path(__file__).parent))  # fuzz
from cpp_build import CppBuild
from early_builds import EarlyBuilds, put_last, wanted_builds
from emulated_device import EmulatedDevice
from nn_model import Model
from ranks import RankPool

from ultraep_comm.cuda import device as device_module
from ultraep_comm.cuda import kernels as kernels_module

# Wall-clock deadlines fail on a busy machine. CI draws the same examples in every run.
settings.register_profile("desk", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
# --hypothesis-profile=long: for an hour or so instead of seconds.
settings.register_profile("long", deadline=None, max_examples=100_000)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """Folder of the recorded routing traces: $ULTRAEP_TRACES, else beside the repository."""
    named = os.environ.get("ULTRAEP_TRACES")
    default = Path(__file__).resolve().parents[1].parent / "shared" / "traces"
    folder = Path(named) if named else default
    if not folder.is_dir():
        pytest.skip(f"no routing traces: {folder} does not exist (set ULTRAEP_TRACES)")
    return folder


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight processes with a gloo process group of every size."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def models() -> Iterator[Callable[..., Model]]:
    """What makes models of a seed, whose groups it closes in the end."""
    made: list[Model] = []

    def make(seed: int, **options: Any) -> Model:
        made.append(Model(seed, **options))
        return made[-1]

    yield make
    for model in made:
        for group in model.groups:
            group.abort()
            group.close()


TOOL_CHAIN = pytest.StashKey[CppBuild]()
EARLY_BUILDS = pytest.StashKey[EarlyBuilds]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_last(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = wanted_builds(session.items)
    if not wanted or session.config.option.collectonly:
        return
    with contextlib.suppress(pytest.skip.Exception):  # the tests say so
        session.config.stash[TOOL_CHAIN] = CppBuild()
        session.config.stash[EARLY_BUILDS] = EarlyBuilds(session.config.stash[TOOL_CHAIN], wanted)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if EARLY_BUILDS in session.config.stash:
        session.config.stash[EARLY_BUILDS].stop()


@pytest.fixture(scope="session")
def cpp(pytestconfig: pytest.Config) -> CppBuild:
    """The C++ tool chain; skips where there is none."""
    return pytestconfig.stash.get(TOOL_CHAIN, None) or CppBuild()


@pytest.fixture(scope="session")
def emulated_library(cpp: CppBuild) -> Path:
    """The emulated device as a library."""
    return cpp.build("cpu", "emulated_device") / "tests" / "libemulated_device.so"


@pytest.fixture
def emulated(emulated_library: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    """A device on the CPU, which groups of the CUDA engine find."""
    device = EmulatedDevice(emulated_library)
    monkeypatch.setattr(device_module, "find_device", lambda: device)
    monkeypatch.setattr(kernels_module, "load_kernels", lambda device, nvshmem: device.kernels)
    return device


@pytest.fixture(scope="session")
def cubins(request: pytest.FixtureRequest) -> Path:
    """Folder of the device kernels: $ULTRAEP_CUBINS, else of the preset `cuda`, built once."""
    named = os.environ.get("ULTRAEP_CUBINS")
    if named:
        assert list(Path(named).glob("*.cubin")), f"ULTRAEP_CUBINS={named} has no cubins"
        return Path(named)
    cpp: CppBuild = request.getfixturevalue("cpp")
    return cpp.cubins()
