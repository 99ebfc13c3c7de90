"""Programs with one broken rule each: all of them have to be caught."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpp_build import ROOT, CppBuild


def names(file: str, function: str) -> list[str]:
    """Return the mutants of a CMake file, without those that only add to the one before."""
    found = re.findall(rf"^{function}\((\w+) ", (ROOT / file).read_text(), re.M)
    return list(dict.fromkeys(found))


SIMULATED = names("tests/simulation/mutants.cmake", "mutant")
CORE = names("tests/core/mutants.cmake", "ultraep_add_core_mutant")
HOST = names("tests/host/mutants.cmake", "ultraep_add_host_mutant")
CUDA = names("tests/cuda/mutants.cmake", "ultraep_add_cuda_mutant")


def test_mutants_are_many() -> None:
    assert len(SIMULATED) >= 15
    assert len(CORE) >= 15
    assert len(HOST) >= 10
    assert len(CUDA) >= 5


@pytest.fixture(scope="module")
def simulated(cpp: CppBuild) -> Path:
    return cpp.build("mutants")


@pytest.fixture(scope="module")
def table(pytestconfig: pytest.Config) -> Iterator[list[tuple[str, str, str]]]:
    """Rows of mutant, property and schedules, printed at the end."""
    rows: list[tuple[str, str, str]] = []
    yield rows
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        print(f"\n\n{'mutant':<44}{'caught by':<34}{'schedules':>9}")
        for row in rows:
            print(f"{row[0]:<44}{row[1]:<34}{row[2]:>9}")


def result_line(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Print the line that says what became of a mutant, and return it."""
    found = re.search(rf"mutant {name}: (?:caught|survived).*", text)
    assert found, text
    with capsys.disabled():
        print(f"\n{found.group()}", end="")
    return found.group()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SIMULATED)
def test_mutant_is_caught(
    cpp: CppBuild,
    simulated: Path,
    table: list[tuple[str, str, str]],
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulated.is_dir()
    line = result_line(name, cpp.ctest("mutants", "--tests-regex", f"^mutant_{name}$"), capsys)
    caught = re.match(rf"mutant {name}: caught: (.*?); (\d+) schedules; \"(.*?)\"", line)
    assert caught, line
    table.append((name, caught[1], caught[2]))
    examples = {
        "blocked_hub_item_first": "counter-example",
        "blocked_home_item_first": "counter-example of sums",
    }
    if name in examples:
        assert caught[3] == examples[name]
        assert caught[1] == "deadlock or lost wake-up"


# Else what is caught above could be something that is wrong without any mutant.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_caught_where_no_rule_is_broken(cpp: CppBuild) -> None:
    program = cpp.build("cpu") / "tests/simulation/test_hostile"
    done = subprocess.run(
        [program, "--mutant", "none"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "mutant none: survived" in done.stdout


@pytest.fixture(scope="module")
def sanitized(cpp: CppBuild) -> Path:
    return cpp.build("tsan")


# That each program passes where nothing is broken is test_cpp_tests_pass's.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CORE + HOST + CUDA)
def test_sanitized_mutant_is_caught(
    cpp: CppBuild, sanitized: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sanitized.is_dir()
    text = cpp.ctest("tsan", "--tests-regex", f"^mutant_{name}$", "--verbose")
    assert "caught (by " in result_line(name, text, capsys)
