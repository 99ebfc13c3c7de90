"""Programs with one broken rule each: all of them have to be caught."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

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
DEVICE = names("tests/device/mutants.cmake", "ultraep_add_device_mutant")


def test_mutants_are_many() -> None:
    assert len(SIMULATED) >= 15
    assert len(CORE) >= 15
    assert len(HOST) >= 10
    assert len(CUDA) >= 5
    assert len(DEVICE) >= 50


def run_mutants(cpp: CppBuild, preset: str) -> str:
    """Build and run all mutants of a preset, side by side, and return what they printed."""
    cpp.build(preset, "mutants")
    options = ("--parallel", cpp.num_jobs, "--tests-regex", "^mutant_", "--verbose")
    return cpp.ctest(preset, *options, check=False)  # each test looks for its own line


@pytest.fixture(scope="module")
def simulated(cpp: CppBuild) -> str:
    return run_mutants(cpp, "mutants")


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
    number = re.search(rf"Start +(\d+): mutant_{name}$", text, re.M)
    own = re.findall(rf"^{number[1]}: .*", text, re.M) if number else [text]
    assert found, "\n".join(own)
    with capsys.disabled():
        print(f"\n{found.group()}", end="")
    return found.group()


@pytest.mark.builds("mutants", "mutants")
@pytest.mark.timeout(1800)  # the first builds and runs all
@pytest.mark.parametrize("name", SIMULATED)
def test_mutant_is_caught(
    simulated: str,
    table: list[tuple[str, str, str]],
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = result_line(name, simulated, capsys)
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
@pytest.mark.builds("cpu")
@pytest.mark.timeout(900)
def test_nothing_is_caught_where_no_rule_is_broken(cpp: CppBuild) -> None:
    program = cpp.build("cpu") / "tests/simulation/test_hostile"
    done = subprocess.run(
        [program, "--mutant", "none"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "mutant none: survived" in done.stdout


@pytest.fixture(scope="module")
def sanitized(cpp: CppBuild) -> str:
    return run_mutants(cpp, "tsan")


# That each program passes where nothing is broken is test_cpp_tests_pass's.
@pytest.mark.slow
@pytest.mark.builds("tsan", "mutants")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CORE + HOST + CUDA + DEVICE)
def test_sanitized_mutant_is_caught(
    sanitized: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "caught (by " in result_line(name, sanitized, capsys)
