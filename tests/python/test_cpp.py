"""The C++ tests, plain and under the sanitizers, and the installed CMake package."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def program(name: str, module: str, folder: str) -> str:
    """Return the tool of the environment's package, wherever its scripts went, or of PATH."""
    try:
        found = shutil.which(name, path=getattr(importlib.import_module(module), folder))
    except ImportError:
        found = None
    found = found or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: pip install -c constraints.txt -e '.[test]'")
    return found


@pytest.fixture(scope="module")
def cmake() -> str:
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++")):
        pytest.skip("no C++ compiler: install one, or name it in CXX")
    return program("cmake", "cmake", "CMAKE_BIN_DIR")


@pytest.fixture(scope="module")
def ninja() -> str:
    return program("ninja", "ninja", "BIN_DIR")


def run(command: Sequence[str | Path], **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}"
    return done.stdout


def num_jobs() -> str:
    return str(len(os.sched_getaffinity(0)))


def can_fix_addresses() -> bool:
    if shutil.which("setarch") is None:
        return False
    return (
        subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False).returncode == 0
    )


def build(cmake: str, ninja: str, preset: str) -> None:
    """Configure and build a preset in its folder under build/, which later runs only update."""
    run([cmake, "--preset", preset, f"-DCMAKE_MAKE_PROGRAM={ninja}"])
    run([cmake, "--build", "--preset", preset, "--parallel", num_jobs()])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "preset",
    [
        "cpu",
        pytest.param("tsan", marks=pytest.mark.slow),
        pytest.param("asan", marks=pytest.mark.slow),
    ],
)
def test_cpp_tests_pass(cmake: str, ninja: str, preset: str) -> None:
    build(cmake, ninja, preset)
    ctest = shutil.which("ctest", path=str(Path(cmake).parent)) or "ctest"
    # g++ 12's ThreadSanitizer does not start where the kernel randomises more address bits than it
    # knows of.
    fixed_addresses = ["setarch", "-R"] if preset == "tsan" and can_fix_addresses() else []
    # Leaks are failures too; a report ends the test at once.
    text = run(
        [*fixed_addresses, ctest, "--preset", preset, "--parallel", num_jobs(), "--no-tests=error"],
        TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1",
        ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1",
        UBSAN_OPTIONS="print_stacktrace=1",
    )
    for name in ("test_engine", "test_worklist", "publish_needs_delivered_1"):
        assert f" {name} " in text


@pytest.mark.timeout(300)
def test_another_project_finds_the_package(cmake: str, ninja: str, tmp_path: Path) -> None:
    build(cmake, ninja, "cpu")
    prefix, consumer = tmp_path / "prefix", tmp_path / "consumer"
    run([cmake, "--install", ROOT / "build/cpu", "--prefix", prefix, "--component", "dev"])
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-GNinja"]
    run([cmake, "-S", ROOT / "tests/consumer", "-B", consumer, *options])
    run([cmake, "--build", consumer])
    run([consumer / "schedule"])
    assert run([consumer / "replicate"]) == "replicated\n"
    # Nothing installed points back into the source tree.
    for file in prefix.rglob("*.cmake"):
        assert str(ROOT) not in file.read_text()
