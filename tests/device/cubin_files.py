"""The cubins of the preset `cuda`, and what can be read from them without a GPU.

python tests/device/cubin_files.py [folder]      # what budget.json has to allow
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "cuda" / "cubins"

# nvlink counts for sm_90, and for no later architecture, the 1 KiB at the start of shared memory
# that the system takes from a kernel that uses any.
RESERVED_SHARED = {90: 1024}

SAVING = 48  # instructions among which a function saves registers, and as many that restore them


class Resources(NamedTuple):
    """Of one kernel, linked: with everything that it calls in NVSHMEM's device library."""

    registers: int
    stack: int  # bytes of a thread, with those of the functions that are called
    shared: int  # static bytes, without those that the launch asks for


class Frame(NamedTuple):
    """Of one function, as compiled: bytes of a thread, without the functions that it calls."""

    stack: int
    stores: int  # that spill
    loads: int


def architecture(cubin: Path) -> int:
    named = re.fullmatch(r"ultraep_comm-sm_(\d+)\.cubin", cubin.name)
    assert named, cubin
    return int(named[1])


def resources(cubin: Path) -> dict[str, Resources]:
    """Return what nvlink reported of each kernel when the cubin was built."""
    reserved = RESERVED_SHARED.get(architecture(cubin), 0)
    return {
        kernel: Resources(int(registers), int(stack), max(int(shared) - reserved, 0))
        for kernel, registers, stack, shared in re.findall(
            r"nvlink info\s*: Function properties for '(\w+)':\n"
            r"nvlink info\s*: used (\d+) registers,.*? (\d+) stack, (\d+) bytes smem",
            report(cubin),
        )
    }


def frames(cubin: Path) -> dict[str, Frame]:
    """Return the frame of each compiled function, without NVSHMEM's own functions."""
    found = re.findall(
        r"Function properties for (\w+)\n"
        r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        report(cubin),
    )
    return {
        name: Frame(*map(int, numbers))
        for name, *numbers in found
        if not re.match(r"_Z\d+nvshmem", name)
    }


def saved_bytes(instructions: Sequence[str]) -> int:
    """Return the bytes that a function stores to its stack first and loads from there last.

    Those are its caller's registers: each goes back to where it came from.
    """
    end = next(i for i, line in enumerate(instructions) if re.match(r"RET\b", line))
    first, last = instructions[:SAVING], instructions[max(end - SAVING, 0) : end]
    at, register = r"\[R1(?P<at>\+0x[0-9a-f]+)?\]", r"(?P<register>R\d+)"
    stored = _words(rf"STL(\.(?P<bits>\d+))? {at}, {register}$", first)
    loaded = _words(rf"LDL(\.(?P<bits>\d+))? {register}, {at}$", last)
    return sum(stored[place] for place in stored.keys() & loaded.keys())


def _words(pattern: str, instructions: Sequence[str]) -> dict[tuple[str, str], int]:
    """Return the bytes of each pair of register and place in the stack."""
    matches = (re.match(pattern, line) for line in instructions)
    return {(m["register"], m["at"] or ""): int(m["bits"] or 32) // 8 for m in matches if m}


def report(cubin: Path) -> str:
    """Return what ptxas and nvlink said of a cubin; the preset leaves it beside each."""
    return cubin.with_suffix(".resources.txt").read_text()


def cuda_tool(name: str) -> str:
    """Return a program of the environment's wheels, of PATH, or of the toolkit's usual place.

    Without it the test skips, but fails where cubins are what is being built.
    """
    namespace = importlib.util.find_spec("nvidia")
    wheels = namespace.submodule_search_locations if namespace else None
    folders = [f"{wheel}/cu13/bin" for wheel in wheels or []]
    folders += [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        give_up = pytest.fail if os.environ.get("ULTRAEP_CUDA") == "ON" else pytest.skip
        give_up(f"no {name}: see docs/building.md, CUDA")
    assert found is not None
    return found


def disassemble(cubin: Path, program: str) -> dict[str, list[str]]:
    """Return the instructions of every function, in order, without addresses and labels."""
    text = subprocess.run(
        [program, "--print-code", cubin], capture_output=True, text=True, check=True
    ).stdout
    code: dict[str, list[str]] = {}
    for name, body in re.findall(
        r'^\s*\.section\s+\.text\.([^,]+),"ax"(.*?)(?=^\s*\.section|\Z)', text, re.M | re.S
    ):
        code[name] = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+([^;]*?)\s*;", body, re.M)
    return code


def main() -> None:
    """Print the largest use over all architectures: what budget.json would have to allow."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT
    used: dict[str, Resources] = {}
    for cubin in sorted(folder.glob("*.cubin")):
        for kernel, values in resources(cubin).items():
            used[kernel] = Resources(*map(max, values, used.get(kernel, values)))
    rows = [f'  "{kernel}": {json.dumps(used[kernel]._asdict())}' for kernel in sorted(used)]
    print("{\n" + ",\n".join(rows) + "\n}")


if __name__ == "__main__":
    main()
