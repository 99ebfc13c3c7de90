"""The C++ tests, plain and under the sanitizers, and the installed CMake package."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

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
    for name in ("test_engine", "test_worklist", "publish_needs_delivered_1"):
        assert f" {name} " in text
    assert preset == "cpu" or " test_hostile " in text


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
