"""The C++ tests, plain and under the sanitizers, and the installed CMake package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cpp_build import ROOT, CppBuild, run


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param("cpu", marks=pytest.mark.builds("cpu")),
        pytest.param("tsan", marks=[pytest.mark.slow, pytest.mark.builds("tsan")]),
        pytest.param("asan", marks=[pytest.mark.slow, pytest.mark.builds("asan")]),
    ],
)
def test_cpp_tests_pass(cpp: CppBuild, preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    cpp.build(preset)
    # Mutants have tests of their own.
    text = cpp.ctest(preset, "--parallel", cpp.num_jobs, "--label-exclude", "mutant", "--verbose")
    for name in ("test_engine", "test_worklist", "test_hostile", "publish_needs_delivered_1"):
        assert f" {name} " in text
    if preset != "cpu":
        return
    # How much of the protocol was tried: part of the result.
    tried = re.findall(r"^\d+: ((?:every schedule|named cases|random cases).*)$", text, re.M)
    assert len(tried) >= 5
    assert not any("not all" in line for line in tried)
    with capsys.disabled():
        print("", *tried, sep="\n")


@pytest.mark.builds("cpu")
@pytest.mark.timeout(300)
def test_another_project_finds_the_package(cpp: CppBuild, tmp_path: Path) -> None:
    built = cpp.build("cpu")
    prefix, consumer = tmp_path / "prefix", tmp_path / "consumer"
    run([cpp.cmake, "--install", built, "--prefix", prefix, "--component", "dev"])
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_MAKE_PROGRAM={cpp.ninja}", "-GNinja"]
    run([cpp.cmake, "-S", ROOT / "tests/consumer", "-B", consumer, *options])
    run([cpp.cmake, "--build", consumer])
    run([consumer / "schedule"])
    assert run([consumer / "replicate"]) == "replicated\n"
    # Nothing installed points back into the source tree.
    for file in prefix.rglob("*.cmake"):
        assert str(ROOT) not in file.read_text()
