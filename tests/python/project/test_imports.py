"""Data flows one way: what each module may import, and what an import or install brings along."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


# torch itself may bring some of what is unwanted along.
ADDED = """
import sys, torch, torch.distributed
before = {*sys.modules}
import ultraep_comm
print(*{*sys.modules} - before)
"""


def test_import_brings_only_what_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True, check=True)
    added = done.stdout.split()
    assert "ultraep_comm.errors" in added
    assert not [name for name in added if re.match(r"ultraep_comm\.(bench|viz)", name)]
    roots = {name.split(".")[0] for name in added}
    unwanted = {"scipy", "matplotlib", "hypothesis", "pytest", "nvshmem", "cuda", "multiprocessing"}
    assert not roots & unwanted


def project_section(name: str) -> str:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf"^\[{re.escape(name)}\]$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, name
    return found.group(1)


def requirements(section: str, key: str) -> list[str]:
    found = re.search(rf"^{key} = (\[.*?\])$", project_section(section), re.MULTILINE | re.DOTALL)
    assert found, key
    return [str(entry) for entry in ast.literal_eval(found.group(1))]


def package_of(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return name.group().lower().replace("_", "-")


def test_dependencies_are_torch_and_numpy() -> None:
    assert {package_of(r) for r in requirements("project", "dependencies")} == {"torch", "numpy"}


def test_pins_stand_only_in_constraints() -> None:
    extras = {
        key: requirements("project.optional-dependencies", key)
        for key in (
            *("test", "lint", "viz", "bench"),
            *("transformers", "megatron", "cuda12", "cuda13"),
        )
    }
    wanted = requirements("project", "dependencies") + requirements("build-system", "requires")
    wanted += [r for key in extras for r in extras[key]]
    for requirement in wanted:
        # Only what belongs to a major version of CUDA or NVSHMEM has an upper bound.
        upper = r"(,<[0-9]+)?" if re.match("cuda-python|nvidia-nvshmem", requirement) else ""
        assert re.fullmatch(rf"[A-Za-z0-9._-]+>=[0-9.]+{upper}", requirement), (
            f"a lower bound: {requirement}"
        )
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    for pin in pins:
        assert re.match(r"[A-Za-z0-9._-]+==[0-9][^;]*(;.*)?$", pin), pin
    # cuda-python has a version for every major version of CUDA; a pin can name only one.
    assert {package_of(r) for r in wanted} - {"cuda-python"} == {package_of(pin) for pin in pins}


def test_the_nvshmem_that_cubins_are_built_with_is_pinned() -> None:
    # No constraints file applies to build requirements.
    (for_cuda,) = re.findall(
        r"^build\.requires = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    (nvshmem,) = ast.literal_eval(for_cuda)
    name, version = nvshmem.split("==")
    # NVSHMEM's host library may be later than the device library in the cubins, never earlier.
    assert f"{name}>={version},<4" in requirements("project.optional-dependencies", "cuda13")
    assert nvshmem in (ROOT / "constraints.txt").read_text().splitlines()
