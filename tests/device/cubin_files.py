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
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "cuda" / "cubins"

# nvlink counts for sm_90, and for no later architecture, the 1 KiB at the start of shared memory
# that the system takes from a kernel that uses any.
RESERVED_SHARED = {90: 1024}


class Resources(NamedTuple):
    """Of one kernel, linked: with everything that it calls in NVSHMEM's device library."""

    registers: int
    stack: int
    shared: int  # static bytes, without those that the launch asks for


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


def spills(cubin: Path) -> dict[str, int]:
    """Return the bytes that each compiled function spills, without NVSHMEM's own functions."""
    found = re.findall(
        r"Function properties for (\w+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads",
        report(cubin),
    )
    return {
        name: int(stores) + int(loads)
        for name, stores, loads in found
        if not re.match(r"_Z\d+nvshmem", name)
    }


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
