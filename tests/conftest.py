"""Fixtures and settings that all Python tests share."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "python"))
sys.path.insert(0, str(Path(__file__).parent))  # fuzz
import tiers
from cpp_build import CppBuild
from early_builds import EarlyBuilds, put_last, wanted_builds
from emulated_device import EmulatedDevice
from nn_model import Model
from ranks import RankPool
from tiers import cases

import ultraep_comm as uec
from ultraep_comm.engines.cuda import device as device_module
from ultraep_comm.engines.cuda import kernels as kernels_module
from ultraep_comm.engines.cuda import stages

# Tests give inductor a new cache. Into one it first builds programs that look for the CPU's vector
# units, and precompiled headers: 10 s, and nothing to do with the library.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"

# Tests run side by side: threads of torch would take their processors only to wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# --hypothesis-profile=long runs for about an hour instead of seconds.
settings.register_profile("long", deadline=None, max_examples=100_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="the second tier of tests too: all mutants, sanitizers, searches of every "
        "interleaving, more cases of every generator",
    )


@pytest.hookimpl(tryfirst=True)  # before --hypothesis-profile is applied
def pytest_configure(config: pytest.Config) -> None:
    tiers.choose(exhaustive=config.option.exhaustive)
    # Wall-clock deadlines fail on a busy machine. CI draws the same examples in every run.
    ci = {"derandomize": True, "database": None} if os.environ.get("CI") else {}
    settings.register_profile("tier", deadline=None, max_examples=cases(25, 100), **ci)
    settings.load_profile("tier")


# Modules whose tests run on both engines of the CPU: c10d does what the host engine does.
# Without --exhaustive only the quick ones do.
ON_BOTH_ENGINES = {
    "test_banks": True,
    "test_reroute_calls": True,
    "test_reduce": False,
    "test_ops": False,
    "test_nn": False,
    "test_compiled_banks": False,
    "test_inference_mode": False,
    "test_instances": True,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_quick = ON_BOTH_ENGINES.get(metafunc.module.__name__.rpartition(".")[2])
    if is_quick is None or metafunc.definition.get_closest_marker("gpu"):
        return
    if "ranks" in metafunc.fixturenames:  # processes of a pool, whose groups this does not reach
        return
    metafunc.fixturenames.append("default_engine")
    marks = () if is_quick else pytest.mark.exhaustive
    engines = ["host", pytest.param("c10d", marks=marks)]
    metafunc.parametrize("default_engine", engines, indirect=True)


@pytest.fixture
def default_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups of this process have an engine where a test names none."""
    made = uec.testing.new_loopback_groups

    def make(num_ranks: int, **options: Any) -> list[uec.Group]:
        return made(num_ranks, **{"engine": request.param, **options})

    if request.param != "host":
        monkeypatch.setattr(uec.testing, "new_loopback_groups", make)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run all tests in two processes, but tests named on the command line in this one."""
    option = config.option
    named = config.args_source == pytest.Config.ArgsSource.ARGS
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if named or is_worker or option.numprocesses is not None or option.usepdb or option.collectonly:
        return
    option.numprocesses, option.dist, option.loadscopereorder = 2, "loadfile", False


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """Folder of the recorded routing traces: $ULTRAEP_TRACES, or beside the repository."""
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
    """A factory of models from a seed; it closes their groups after the test."""
    made: list[Model] = []

    def make(seed: int, **options: Any) -> Model:
        made.append(Model(seed, **options))
        return made[-1]

    yield make
    for model in made:
        for group in model.groups:
            group.abort()
            group.close()


@pytest.fixture
def new_groups() -> Iterator[Callable[..., list[uec.Group]]]:
    """``uec.testing.new_loopback_groups``, whose groups are aborted and closed after the test."""
    made: list[uec.Group] = []

    def make(num_ranks: int, **options: Any) -> list[uec.Group]:
        made.extend(groups := uec.testing.new_loopback_groups(num_ranks, **options))
        return groups

    yield make
    for group in made:
        group.abort()
        group.close()


@pytest.fixture
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo and inductor without compiled code, which might be that of other operators."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def groups(request: pytest.FixtureRequest) -> Iterator[list[uec.Group]]:
    """The groups of the module's `make_groups`, aborted and closed after the test."""
    made = request.module.make_groups()
    yield made
    for group in made:
        group.abort()
        group.close()


TOOL_CHAIN = pytest.StashKey[CppBuild]()
EARLY_BUILDS = pytest.StashKey[EarlyBuilds]()


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that try more cases as `exhaustive` when the second tier runs.

    And set up `default_engine`, of which pytest forgets in `pytest_generate_tests`.
    """
    if "default_engine" in getattr(getattr(item, "callspec", None), "params", ()):
        names: list[str] = item.fixturenames  # type: ignore[attr-defined]
        if "default_engine" not in names:
            names.insert(0, "default_engine")
    of_hypothesis = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    if item.config.option.exhaustive and (of_hypothesis or item.get_closest_marker("cases")):
        item.add_marker("exhaustive")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.exhaustive:
        rest = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=rest)
    put_last(items)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    if items and hasattr(config := items[0].config, "workeroutput"):
        config.workeroutput["deselected"] = config.workeroutput.get("deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Report the deselected tests once: every worker deselects the same ones."""
    reporter = node.config.pluginmanager.getplugin("terminalreporter")
    reporter.stats["deselected"] = [SimpleNamespace()] * getattr(node, "workeroutput", {}).get(
        "deselected", 0
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = wanted_builds(session.items)
    if not wanted or session.config.option.collectonly:
        return
    with contextlib.suppress(pytest.skip.Exception):  # the tests that need it skip
        session.config.stash[TOOL_CHAIN] = CppBuild()
        session.config.stash[EARLY_BUILDS] = EarlyBuilds(session.config.stash[TOOL_CHAIN], wanted)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if EARLY_BUILDS in session.config.stash:
        session.config.stash[EARLY_BUILDS].stop()


SUMMARY = "summary"  # a test's property


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A function that prints a line after all tests, also from a worker process."""
    return lambda line: request.node.user_properties.append((SUMMARY, line))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for kind in terminalreporter.stats.values() for r in kind]
    calls = [r for r in reports if getattr(r, "when", None) == "call"]
    lines = [line for r in calls for key, line in r.user_properties if key == SUMMARY]
    if not lines:
        return
    terminalreporter.section("what tests found")
    for line in lines:
        terminalreporter.write_line(line)
    caught = ["caught" in line for line in lines if re.match(r"mutant \w+: ", line)]
    if caught:
        terminalreporter.write_line(f"{len(caught)} mutants, {sum(caught)} caught")


@pytest.fixture(scope="session")
def cpp(pytestconfig: pytest.Config) -> CppBuild:
    """The C++ tool chain; skips where there is none."""
    return pytestconfig.stash.get(TOOL_CHAIN, None) or CppBuild()


@pytest.fixture(scope="session")
def emulated_library(cpp: CppBuild) -> Path:
    """The emulated device as a library."""
    return cpp.build("cpu", "emulated_device") / "tests" / "libemulated_device.so"


@pytest.fixture
def emulated(emulated_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """A device on the CPU that groups of the CUDA engine use."""
    device = EmulatedDevice(emulated_library)
    monkeypatch.setattr(device_module, "find_device", lambda: device)
    monkeypatch.setattr(kernels_module, "load_kernels", lambda device, nvshmem: device.kernels)
    gather = stages.gather_gradient

    def gather_behind_launches(grad: torch.Tensor, instances: torch.Tensor) -> torch.Tensor:
        device.synchronize()  # torch's own operations ignore its streams
        return gather(grad, instances)

    monkeypatch.setattr(stages, "gather_gradient", gather_behind_launches)
    return device


@pytest.fixture(scope="session")
def cubins(request: pytest.FixtureRequest) -> Path:
    """Folder of the device kernels: $ULTRAEP_CUBINS, or the preset `cuda`, built once."""
    named = os.environ.get("ULTRAEP_CUBINS")
    if named:
        assert list(Path(named).glob("*.cubin")), f"ULTRAEP_CUBINS={named} has no cubins"
        return Path(named)
    cpp: CppBuild = request.getfixturevalue("cpp")
    return cpp.cubins()
