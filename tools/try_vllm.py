#!/usr/bin/env python3
"""vLLM's own tests of its EPLB, with its experts moved by ultraep_comm, on a CPU.

    python tools/try_vllm.py FOLDER [--json FILE]

FOLDER is the unpacked source distribution of vLLM, for its tests; docs/frameworks.md has the rest.
First comes :func:`prepare`. Ranks are forked, not spawned, which spares them minutes of imports.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

TESTS = ("test_eplb_fused_moe_layer.py", "test_eplb_execute.py")
ON_CUDA = "pipeline_parallel"  # has tensors on CUDA, and is not skipped without it
_MOVED = "TRY_VLLM_MOVED"  # names a file with a line for every layer of which experts have moved


def stand_in() -> None:
    """Replace the accelerator's streams, and load vLLM's plugins as vLLM's workers do."""
    import torch

    class Stream:
        def synchronize(self) -> None: ...

    cpu = torch.device("cpu")
    for name, fake in {
        "current_accelerator": lambda *_, **__: cpu,
        "device_count": lambda: 8,
        "current_stream": lambda *_: Stream(),
        "set_stream": lambda _: None,
        "set_device_index": lambda _: None,
    }.items():
        setattr(torch.accelerator, name, fake)

    from vllm.plugins import load_general_plugins  # type: ignore[import-not-found,unused-ignore]

    load_general_plugins()


def prepare() -> None:
    """Prepare a process of vLLM's tests: called by the sitecustomize.py that :func:`run` writes."""
    import torch

    torch.multiprocessing.set_start_method = lambda *_, **__: None  # Linux's default, fork, stays
    stand_in()
    from ultraep_comm.adapters.vllm.eplb import Mover

    execute = Mover.execute

    def counted(mover: Mover) -> None:
        before = mover.moved
        execute(mover)
        if mover.group.rank == 0 and mover.moved > before:
            with Path(os.environ[_MOVED]).open("a") as file:
                file.write(f"{mover.moved - before}\n")

    Mover.execute = counted  # type: ignore[method-assign]


def run(source: Path, folder: Path) -> dict[str, Any]:
    """Run the tests in an empty folder, and return the result."""
    package = folder / "tests" / "distributed"
    package.mkdir(parents=True)
    for path in (folder / "tests" / "__init__.py", package / "__init__.py"):
        path.touch()
    for name in (*TESTS, "eplb_utils.py"):
        shutil.copy(source / "tests" / "distributed" / name, package)
    # Not in the helper processes of multiprocessing, which are started with -c.
    customize = "import sys\n\nif '-c' not in sys.orig_argv:\n    import try_vllm\n\n"
    (folder / "sitecustomize.py").write_text(f"{customize}    try_vllm.prepare()\n")
    moved, report = folder / "moved", folder / "report.xml"
    moved.touch()
    environment = {
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).resolve().parent)]),
        "ULTRAEP_VLLM": "eplb",
        "VLLM_TARGET_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",  # a forked process has none of its parent's threads
        _MOVED: str(moved),
    }
    options = ["-q", f"--junit-xml={report}", "-p", "no:cacheprovider", "-k", f"not {ON_CUDA}"]
    command = [sys.executable, "-m", "pytest", *options]
    files = [f"tests/distributed/{name}" for name in TESTS]
    subprocess.run([*command, *files], cwd=folder, env=os.environ | environment, check=False)
    tests: dict[str, dict[str, int]] = {name.removesuffix(".py"): {} for name in TESTS}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child.tag for child in case if child.tag != "system-out"), "passed")
        counts = tests[case.attrib["classname"].rsplit(".", maxsplit=1)[-1]]
        counts[outcome] = counts.get(outcome, 0) + 1
    layers = [int(line) for line in moved.read_text().split()]
    return {
        "versions": {n: importlib.metadata.version(n) for n in ("vllm", "torch", "ultraep_comm")},
        "tests": tests,
        "layers_rearranged": len(layers),
        "experts_moved": sum(layers),
    }


def main() -> int:
    """Run the tests, print the result, and return 0 if all passed and experts have moved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(options.source.resolve(), Path(folder))
    print(", ".join(f"{name} {version}" for name, version in result["versions"].items()))
    for name, counts in result["tests"].items():
        print(f"{name}: " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    print(f"{result['experts_moved']} experts moved, in {result['layers_rearranged']} layers")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    failed = any(set(counts) - {"passed", "skipped"} for counts in result["tests"].values())
    return int(failed or not result["experts_moved"])


if __name__ == "__main__":
    sys.exit(main())
