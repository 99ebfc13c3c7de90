#!/usr/bin/env python3
"""vLLM's own tests of its EPLB, with its experts moved by ultraep_comm, on a CPU.

    python tools/try_vllm.py FOLDER [--json FILE]

FOLDER is the unpacked source distribution of vLLM, for its tests; docs/frameworks/vllm.md says what
to install. vLLM skips the tests that need CUDA, XPU or NIXL; two of the others use no communicator.
First comes :func:`prepare`. Ranks are forked, not spawned, which spares them minutes of imports.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import own_tests

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
    moved = folder / "moved"
    moved.touch()
    environment = {"ULTRAEP_VLLM": "eplb", "VLLM_TARGET_DEVICE": "cpu", _MOVED: str(moved)}
    files = [f"tests/distributed/{name}" for name in TESTS]
    tests = own_tests.run_tests(folder, files, f"not {ON_CUDA}", environment)
    layers = [int(line) for line in moved.read_text().split()]
    return {"tests": tests, "layers_rearranged": len(layers), "experts_moved": sum(layers)}


if __name__ == "__main__":
    sys.exit(own_tests.main(__doc__ or "", "vllm", run, "experts_moved"))
