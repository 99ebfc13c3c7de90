"""Data flows one way: what each module may import, and what an import or install brings along."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ultraep_comm"

# counts -> load -> plan -> schedule -> engine -> work. A module imports only modules above it. What
# annotations alone need is imported under TYPE_CHECKING, and is free.
PYTHON_ORDER = [
    "_core",
    "rank_states",
    "errors",
    "forks",
    "registry",
    "env",
    "files",
    "calibration",
    "cuda",
    "cuda.cubins",
    "cuda.device",
    "cuda.kernels",
    "topology",
    "reach",
    "rerouter",
    "planner",
    "costs",
    "plan",
    "plan_store",
    "tracing",
    "planning",
    "rerouting",
    "segments",
    "selections",
    "cuda.weights",
    "gradients",
    "schedule",
    "timeline",
    "model.machine",
    "model.bound",
    "model.prediction",
    "model.published",
    "model",
    "npz",
    "recording",
    "recorder",
    "options",
    "fabrics",
    "fabrics.liveness",
    "fabrics.notices",
    "fabrics.bootstrap",
    "fabrics.connections",
    "fabrics.loopback",
    "fabrics.shm",
    "fabrics.nvshmem",
    "fabrics.symmetric",
    "loads",
    "engines",
    "rank_weights",
    "cuda.engine",
    "cuda.stages",
    "refusals",
    "reports",
    "slot_check",
    "failures",
    "work",
    "health",
    "group",
    "hosting",
    "cuda.making",
    "creation",
    "plan_calls",
    "tracing_calls",
    "collectives",
    "reduction",
    "ops",
    "",  # the package itself
    "nn.hooks",
    "nn.traced",
    "nn.experts",
    "nn",
    "bench",
    "viz",
]

PROGRAMS = ("bench", "viz")  # of several modules each, which are run and not imported

CPP_ORDER = [
    "host/process.hpp",
    "core/common.hpp",
    "core/team.hpp",
    "core/scratch.hpp",
    "core/digest.hpp",
    "core/mains.hpp",
    "core/counts.hpp",
    "core/crew.hpp",
    "core/probe.hpp",
    "core/sorted_load.hpp",
    "core/packed_probe.hpp",
    "core/pool_search.hpp",
    "core/search.hpp",
    "core/planner.hpp",
    "core/shares.hpp",
    "core/reroute.hpp",
    "core/share_table.hpp",
    "core/validate.hpp",
    "core/tiles.hpp",
    "core/gradients.hpp",
    "core/schedule.hpp",
    "core/cost.hpp",
    "core/reduce_schedule.hpp",
    "core/layout.hpp",
    "core/protocol.hpp",
    "core/worklist.hpp",
    "core/reduce_worklist.hpp",
    "core/ring.hpp",
    "core/team.hpp",
    "core/stream.hpp",
    "core/call_arrays.hpp",
    "core/prepare.hpp",
    "core/prepare_reduce.hpp",
    "core/ring.hpp",
    "core/claimer.hpp",
    "core/fetcher.hpp",
    "core/storer.hpp",
    "core/worker.hpp",
    "core/reducer.hpp",
    "core/call.hpp",
    "core/failure.hpp",
    "core/gather.hpp",
    "core/storer.hpp",
    "core/call_arrays.hpp",
    "core/prepare.hpp",
    "core/fetcher.hpp",
    "core/worker.hpp",
    "host/health.hpp",
    "host/doorbell.hpp",
    "host/copy.hpp",
    "host/copy.cc",
    "host/add.hpp",
    "host/add.cc",
    "host/adder.hpp",
    "host/backoff.hpp",
    "host/policies.hpp",
    "host/config.hpp",
    "host/config.cc",
    "host/prepared.hpp",
    "host/slot_check.hpp",
    "host/slot_check.cc",
    "host/config.hpp",
    "host/engine.hpp",
    "host/engine.cc",
    "host/execute.cc",
    "host/config.cc",
    "cuda/config.hpp",
    "cuda/reroute_args.hpp",
    "cuda/load_args.hpp",
    "cuda/args.hpp",
    "cuda/block.hpp",
    "cuda/plan_block.hpp",
    "cuda/load_block.hpp",
    "cuda/driver.hpp",
    "cuda/tables.hpp",
    "cuda/launcher.hpp",
    "cuda/launcher.cc",
    "cuda/engine.hpp",
    "cuda/engine.cc",
    "cuda/stages.hpp",
    "cuda/stages.cc",
    "model/machine.hpp",
    "model/world.hpp",
    "model/policies.hpp",
    "model/simulation.hpp",
    "model/relays.hpp",
    "model/transfer.hpp",
]


def stage_of(module: str) -> str:
    """Return the entry of PYTHON_ORDER that a module of the package belongs to."""
    name = module.removeprefix("ultraep_comm").removeprefix(".")
    return name.split(".")[0] if name.split(".")[0] in PROGRAMS else name


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or any(path.with_suffix(end).exists() for end in (".py", ".pyi"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every module that is imported when the code runs, also inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if base.startswith("ultraep_comm") and is_module(inner) else base
        else:
            yield from imports(node)


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_module_imports_only_stages_before_it(path: Path) -> None:
    stage = stage_of(module_name(path))
    assert stage in PYTHON_ORDER, f"give {path.name} its place in PYTHON_ORDER"
    for name in imports(ast.parse(path.read_text())):
        if name.split(".")[0] != "ultraep_comm":
            continue
        imported = stage_of(name)
        if stage == imported and stage in PROGRAMS:
            continue
        assert imported in PYTHON_ORDER, f"{path.name} imports {name}, which has no place"
        assert PYTHON_ORDER.index(imported) < PYTHON_ORDER.index(stage), (
            f"{path.name} imports {name}, a later stage"
        )


def test_every_stage_exists() -> None:
    for stage in PYTHON_ORDER:
        assert is_module(f"ultraep_comm.{stage}".rstrip(".")), stage
    for file in CPP_ORDER:
        assert (ROOT / "src" / file).exists(), file


def cpp_files(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / "src" / folder).rglob("*") if p.suffix in {".hpp", ".cc"})


@pytest.mark.parametrize(
    "path",
    cpp_files("core") + cpp_files("host") + cpp_files("cuda") + cpp_files("model"),
    ids=lambda p: f"{p.parent.name}/{p.name}",
)
def test_header_includes_only_headers_before_it(path: Path) -> None:
    own = f"{path.parent.name}/{path.name}"
    assert own in CPP_ORDER, f"give {own} its place in CPP_ORDER"
    for included in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE):
        assert included in CPP_ORDER, f"{own} includes {included}, which has no place"
        assert CPP_ORDER.index(included) < CPP_ORDER.index(own), f"{own} includes {included}"


@pytest.mark.parametrize("path", cpp_files("core"), ids=lambda p: p.name)
def test_core_is_header_only_and_free_of_platforms(path: Path) -> None:
    assert path.suffix == ".hpp"
    text = path.read_text()
    system = re.findall(r"^\s*#\s*include\s*<([^>]+)>", text, re.MULTILINE)
    assert set(system) <= {"cstddef", "cstdint"}, system  # no CUDA, no threads, no operating system
    assert not re.search(r'#\s*include\s*"(host|cuda)/', text)
    assert text.count("#pragma once") == 1


def modules_after_import(statement: str) -> set[str]:
    text = subprocess.run(
        [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return set(text.split())


def test_import_brings_only_what_is_needed() -> None:
    loaded = modules_after_import("import ultraep_comm")
    assert "ultraep_comm.errors" in loaded
    extra = {name for name in loaded if re.match(r"ultraep_comm\.(bench|viz)", name)}
    assert not extra
    # torch itself may bring some of these along; the package adds none of them.
    added = loaded - modules_after_import("import torch, torch.distributed")
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
        for key in ("test", "lint", "examples", "viz", "model", "cuda12", "cuda13")
    }
    wanted = requirements("project", "dependencies") + [r for key in extras for r in extras[key]]
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


def test_build_requirements_are_pinned_where_they_stand() -> None:
    # No constraints file applies to them.
    (for_cuda,) = re.findall(
        r"^build\.requires = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    (nvshmem,) = ast.literal_eval(for_cuda)
    for requirement in [*requirements("build-system", "requires"), nvshmem]:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9.]+", requirement), f"a pin: {requirement}"
    # NVSHMEM's host library may be later than the device library in the cubins, never earlier.
    name, version = nvshmem.split("==")
    assert f"{name}>={version},<4" in requirements("project.optional-dependencies", "cuda13")
    assert nvshmem in (ROOT / "constraints.txt").read_text().splitlines()
