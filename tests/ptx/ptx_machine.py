"""Runs device programs over the machine that executes PTX, and measures on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cpp_build import ROOT, CppBuild

HERE = Path(__file__).parent
RACE_FREE, VIOLATED, TRAPPED = 0, 43, 44  # exit statuses; others are a program's own
PROGRAMS = [
    "save",
    "plan",
    "load",
    "load_plan",
    "reroute",
    "replicate",
    "banks",
    "reduce",
    "scenarios",
]


def line_of(file: str, text: str) -> int:
    """Return the number of the only line of a file of src/ that contains the text."""
    lines = (ROOT / "src" / file).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line]
    return number


def holes() -> str:
    """Return where kernels copy memory that has holes: what lies there nobody reads."""
    places = {
        "call_block.hpp": ["to[i] = from[i];", "&word, __builtin_assume_aligned(at, 8)"],
        "call.cuh": ["own[k] = ptx::load_global("],
        "prepare.cuh": ["put_header(shared, i, reinterpret_cast<"],
    }
    return ",".join(
        f"{file}:{line_of(f'cuda/device/{file}', text)}"
        for file, texts in places.items()
        for text in texts
    )


@dataclass(frozen=True)
class Outcome:
    status: int
    text: str


class PtxMachine:
    """The machine's library, the kernels as compiled, and the programs that launch them."""

    def __init__(self, cpp: CppBuild) -> None:
        if shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
            pytest.skip("no nvcc: the kernels cannot be compiled to PTX")
        self._cpp = cpp
        self.folder = cpp.build("cpu", "ptx", "ptx_kernels_90") / "tests"
        self.library = self.folder / "ptx" / "libptx_machine.so"

    def build(self, preset: str, *targets: str) -> Path:
        return self._cpp.build(preset, *targets)

    def kernels(self) -> Path:
        """Return the compiled kernels."""
        return self.folder / "ptx" / "kernels_90.ptx"

    def with_example(self) -> Path:
        """Return these and examples/slot_by_slot, of which the program "ready" needs both."""
        folder = self.build("cpu", "ptx", "ptx_example_90") / "tests" / "ptx"
        return folder / "example_90.ptx"

    def run(
        self,
        command: Sequence[str | Path],
        kernels: Path | None = None,
        *,
        seed: int = 1,
        few: bool = True,
        timeout: float = 240,
        **environment: str,
    ) -> Outcome:
        """Run a program with the machine in place of the emulated device."""
        done = subprocess.run(
            command,
            env=os.environ
            | {
                "UEC_PTX_MACHINE": str(self.library),
                "UEC_PTX": str(kernels or self.kernels()),
                "UEC_PTX_SEED": str(seed),
                "UEC_PTX_HOLES": holes(),
                "ASAN_OPTIONS": "detect_leaks=0",  # what the machine keeps is found at its end
            }
            | ({"UEC_FEW_CASES": "1"} if few else {})
            | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        return Outcome(done.returncode, done.stdout + done.stderr)

    def run_program(self, name: str, kernels: Path | None = None, **options: object) -> Outcome:
        """Run one of PROGRAMS."""
        return self.run([self.folder / f"test_device_{name}"], kernels, **options)  # type: ignore[arg-type]
