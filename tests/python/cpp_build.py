"""CMake, Ninja and ctest as the C++ tests use them."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def find_program(name: str, module: str, folder: str) -> str:
    """Return the tool of the environment's package, wherever its scripts went, or of PATH."""
    try:
        found = shutil.which(name, path=getattr(importlib.import_module(module), folder))
    except ImportError:
        found = None
    found = found or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: pip install -c constraints.txt -e '.[test]'")
    return found


def run(command: Sequence[str | Path], *, check: bool = True, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}"
    return done.stdout


def can_fix_addresses() -> bool:
    if shutil.which("setarch") is None:
        return False
    return (
        subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False).returncode == 0
    )


class CppBuild:
    """Presets of this repository, each in its folder under build/, which later runs only update."""

    def __init__(self) -> None:
        if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++")):
            pytest.skip("no C++ compiler: install one, or name it in CXX")
        self.cmake = find_program("cmake", "cmake", "CMAKE_BIN_DIR")
        self.ninja = find_program("ninja", "ninja", "BIN_DIR")
        self.ctest_program = shutil.which("ctest", path=str(Path(self.cmake).parent)) or "ctest"
        self.num_jobs = str(len(os.sched_getaffinity(0)))
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by preset
        self._built: set[tuple[str, ...]] = set()
        self._early: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def _commands(self, preset: str, *targets: str) -> list[list[str]]:
        only = ["--target", *targets] if targets else []
        return [
            [self.cmake, "--preset", preset, f"-DCMAKE_MAKE_PROGRAM={self.ninja}"],
            [self.cmake, "--build", "--preset", preset, "--parallel", self.num_jobs, *only],
        ]

    def build(self, preset: str, *targets: str) -> Path:
        """Build targets, or everything, once in this session, and return the folder."""
        folder = ROOT / "build" / preset
        if (preset, *targets) not in self._built:
            with self._locks[preset]:  # perhaps an early build ends first
                for command in self._commands(preset, *targets):
                    run(command)
            self._built.add((preset, *targets))
        return folder

    def build_early(self, preset: str, *targets: str) -> None:
        """Build with what other programs leave of the cores, until it fails or is stopped."""
        with self._locks[preset]:
            for command in self._commands(preset, *targets):
                if self._stopped:
                    return
                self._early = subprocess.Popen(
                    ["nice", "-n", "19", *command],
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                if self._early.wait() != 0:
                    return

    def stop_early(self) -> None:
        self._stopped = True
        if self._early is not None:
            self._early.terminate()

    def cubins(self) -> Path:
        """Build the cubins; skip where there is no nvcc or NVSHMEM, unless ULTRAEP_CUDA is ON."""
        wanted = "ON" if os.environ.get("ULTRAEP_CUDA") == "ON" else "AUTO"
        text = run(
            [
                self.cmake,
                "--preset",
                "cuda",
                f"-DCMAKE_MAKE_PROGRAM={self.ninja}",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DULTRAEP_CUDA={wanted}",
            ]
        )
        found_nothing = re.search("CUDA: no cubins: (.*)", text)
        if found_nothing:
            pytest.skip(found_nothing[1])
        run([self.cmake, "--build", "--preset", "cuda", "--parallel", self.num_jobs])
        return ROOT / "build" / "cuda" / "cubins"

    def ctest(self, preset: str, *options: str, check: bool = True) -> str:
        # g++ 12's ThreadSanitizer does not start where the kernel randomises more address bits than
        # it knows of.
        fixed_addresses = ["setarch", "-R"] if preset == "tsan" and can_fix_addresses() else []
        # Leaks are failures too; a report ends the test at once.
        return run(
            [
                *fixed_addresses,
                self.ctest_program,
                "--preset",
                preset,
                "--no-tests=error",
                *options,
            ],
            check=check,
            TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1",
            ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1",
            UBSAN_OPTIONS="print_stacktrace=1",
        )
