"""Runs CMake, Ninja and ctest for the C++ tests."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tiers import cases

ROOT = Path(__file__).resolve().parents[2]
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)  # of pytest, in all its processes


def find_program(name: str, module: str, folder: str) -> str:
    """Return the tool from the environment's package, wherever its scripts are, or from PATH."""
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
    """The presets of this repository, built in build/<preset> and only updated by later runs."""

    def __init__(self) -> None:
        if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++")):
            pytest.skip("no C++ compiler: install one, or name it in CXX")
        self.cmake = find_program("cmake", "cmake", "CMAKE_BIN_DIR")
        self.ninja = find_program("ninja", "ninja", "BIN_DIR")
        self.ctest_program = shutil.which("ctest", path=str(Path(self.cmake).parent)) or "ctest"
        self.num_jobs = str(len(os.sched_getaffinity(0)))
        self._early: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def _commands(self, preset: str, *targets: str) -> list[list[str]]:
        # Not by way of `cmake --build`, which would leave ninja running when it is stopped.
        return [
            [self.cmake, "--preset", preset, f"-DCMAKE_MAKE_PROGRAM={self.ninja}"],
            [self.ninja, "-C", f"build/{preset}", "-j", self.num_jobs, *targets],
        ]

    @contextmanager
    def _alone(self, preset: str, *, wait: bool) -> Iterator[bool]:
        """Lock the preset's build against other threads and processes of this pytest run.

        Without ``wait``, false where another has it locked.
        """
        (ROOT / "build").mkdir(exist_ok=True)
        with (ROOT / "build" / f"{preset}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open

    def _stamp(self, preset: str, *targets: str) -> Path:
        """Return the file that names the pytest run in which the targets were last built."""
        name = hashlib.sha256(" ".join(targets).encode()).hexdigest()[:16]
        return ROOT / "build" / preset / f"built-{name}"

    def _is_built(self, preset: str, *targets: str) -> bool:
        stamp = self._stamp(preset, *targets)
        return stamp.exists() and stamp.read_text() == RUN

    def build(self, preset: str, *targets: str) -> Path:
        """Build targets, or everything, once in this pytest run, and return the folder."""
        # An early build may have made them, and be busy with the next ones already.
        while not self._is_built(preset, *targets):
            with self._alone(preset, wait=False) as alone:
                if alone and not self._is_built(preset, *targets):
                    for command in self._commands(preset, *targets):
                        run(command)
                    self._stamp(preset, *targets).write_text(RUN)
            if not alone:
                self._take_over(preset)
                time.sleep(0.1)
        return ROOT / "build" / preset

    def build_early(self, preset: str, *targets: str) -> None:
        """Build at the lowest priority until it fails or is stopped."""
        with self._alone(preset, wait=True):
            self._early_process(preset).unlink(missing_ok=True)  # of a run that was killed
            for command in self._commands(preset, *targets):
                if self._stopped:
                    return
                self._early = subprocess.Popen(
                    ["nice", "-n", "19", *command],
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                self._early_process(preset).write_text(str(self._early.pid))
                status = self._early.wait()
                self._early_process(preset).unlink()
                if status != 0:
                    return
            self._stamp(preset, *targets).write_text(RUN)

    def _early_process(self, preset: str) -> Path:
        """Return the file with the process of an early build, for as long as it runs."""
        return ROOT / "build" / f"{preset}.early"

    def _take_over(self, preset: str) -> None:
        """Stop an early build, which beside busy tests may get no processor; what it made stays."""
        with suppress(OSError, ValueError):  # it has just ended, or is another test's
            os.kill(int(self._early_process(preset).read_text()), signal.SIGTERM)

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
        # A mutant is caught by all of a test's cases.
        few = {"UEC_FEW_CASES": "1"} if preset == "cpu" and cases(1, 0) else {}
        # g++ 12's ThreadSanitizer does not start where the kernel randomises more address bits than
        # it knows of.
        fixed_addresses = ["setarch", "-R"] if "tsan" in preset and can_fix_addresses() else []
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
            **few,
            TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1",
            ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1",
            UBSAN_OPTIONS="print_stacktrace=1",
        )
