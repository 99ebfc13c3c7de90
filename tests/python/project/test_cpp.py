"""The C++ tests, plain and under the sanitizers, and the installed CMake package."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import cpp_build
import pytest
from cpp_build import ROOT, CppBuild, run


@pytest.fixture
def built(cpp: CppBuild, request: pytest.FixtureRequest) -> CppBuild:
    """The tool chain, with all of the test's preset built."""
    (mark,) = request.node.iter_markers("builds")
    cpp.build(*mark.args)
    return cpp


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param("cpu", marks=[pytest.mark.cases, pytest.mark.builds("cpu")]),
        pytest.param("tsan", marks=[pytest.mark.exhaustive, pytest.mark.builds("tsan")]),
        pytest.param("asan", marks=[pytest.mark.exhaustive, pytest.mark.builds("asan")]),
    ],
)
def test_cpp_tests_pass(built: CppBuild, preset: str) -> None:
    options = ("--parallel", built.num_jobs)
    left_out = ("--exclude-regex", "^test_hostile$") if preset == "cpu" else ()
    text = built.ctest(preset, *options, *left_out)
    # Where each can find something, and test_hostile has a test of its own.
    for name, presets in {
        "test_engine": ("cpu", "tsan", "asan"),
        "test_races": ("cpu", "asan"),
        "unmutated_host_test_races": ("tsan",),
        "test_worklist": ("cpu", "asan"),
        "publish_needs_delivered_1": ("cpu",),
        "test_hostile": ("asan",),
    }.items():
        assert (f" {name} " in text) == (preset in presets)
    assert len(set(re.findall(r" unmutated_\w+ ", text))) == (32 if preset == "tsan" else 0)


class Waiting(CppBuild):
    """A tool chain whose early builds never end, and whose others have nothing to do."""

    def _commands(self, preset: str, *targets: str) -> list[list[str]]:
        return [["true"] if targets else ["sleep", "600"]]


@pytest.mark.timeout(60)
def test_a_test_takes_an_early_build_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has the lowest priority, and beside two busy tests takes longer than any limit."""
    monkeypatch.setattr(cpp_build, "ROOT", tmp_path)
    (tmp_path / "build/some").mkdir(parents=True)
    cpp = Waiting()
    early = threading.Thread(target=cpp.build_early, args=("some",))
    early.start()
    while not (tmp_path / "build/some.early").exists():
        time.sleep(0.01)
    assert cpp.build("some", "a target") == tmp_path / "build/some"
    early.join()


def test_who_goes_without_thread_sanitizer_starts_no_threads() -> None:
    """Nor does anything that its source includes."""
    cmake = (ROOT / "tests/CMakeLists.txt").read_text()
    waiting = [
        ROOT / "tests" / source
        for source in re.findall(r"^ultraep_add_test\(\w+ (\S+) SEQUENTIAL\)", cmake, re.M)
    ]
    waiting += [*(ROOT / "tests/simulation").glob("*.cc"), *(ROOT / "tests/fuzz").glob("*.cc")]
    assert len(waiting) > 20
    seen: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        text = file.read_text()
        assert not re.search(r"std::(j?thread|async)\b|\bpthread", text), file
        for name in re.findall(r'^#include "(.*)"', text, re.M):
            places = (ROOT / "src" / name, ROOT / "tests" / name, file.parent / name)
            waiting += [next(place for place in places if place.exists())]


@pytest.mark.builds("cpu")
@pytest.mark.cases
@pytest.mark.timeout(900)
def test_the_protocol_holds_under_a_hostile_memory(
    built: CppBuild, say: Callable[[str], None]
) -> None:
    text = built.ctest("cpu", "--tests-regex", "^test_hostile$", "--verbose")
    # How much of the protocol was tried: part of the result.
    tried = re.findall(r"^\d+: ((?:every schedule|named cases|random cases).*)$", text, re.M)
    assert len(tried) >= 5
    assert not any("not all" in line for line in tried)
    for line in tried:
        say(line)


@pytest.mark.builds("cpu")
@pytest.mark.timeout(300)
def test_another_project_finds_the_package(built: CppBuild, tmp_path: Path) -> None:
    cpp, folder = built, ROOT / "build/cpu"
    prefix, consumer = tmp_path / "prefix", tmp_path / "consumer"
    run([cpp.cmake, "--install", folder, "--prefix", prefix, "--component", "dev"])
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_MAKE_PROGRAM={cpp.ninja}", "-GNinja"]
    run([cpp.cmake, "-S", ROOT / "tests/consumer", "-B", consumer, *options])
    run([cpp.cmake, "--build", consumer])
    run([consumer / "schedule"])
    assert run([consumer / "replicate"]) == "replicated\n"
    # Nothing installed points back into the source tree.
    for file in prefix.rglob("*.cmake"):
        assert str(ROOT) not in file.read_text()
