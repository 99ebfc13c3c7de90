"""vLLM's own tests of its EPLB, with its experts moved by ultraep_comm.

They are in vLLM's source distribution. vLLM skips those that need CUDA, XPU or NIXL; two of the
others use no communicator. First comes :func:`prepare`. Ranks are forked, not spawned, which spares
them minutes of imports.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from frameworks.own_tests import failures, run_tests
from frameworks.table import Case

TESTS = ("test_eplb_fused_moe_layer.py", "test_eplb_execute.py")
ON_CUDA = "pipeline_parallel"  # has tensors on CUDA, and is not skipped without it
_MOVED = (
    "ULTRAEP_TESTS_MOVED"  # names a file with a line for every layer of which experts have moved
)


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


def run(case: Case, source: Path, folder: Path) -> dict[str, Any]:
    """Run the tests in an empty folder."""
    package = folder / "tests" / "distributed"
    package.mkdir(parents=True)
    for path in (folder / "tests" / "__init__.py", package / "__init__.py"):
        path.touch()
    for name in (*TESTS, "eplb_utils.py"):
        shutil.copy(source / "tests" / "distributed" / name, package)
    # Not in the helper processes of multiprocessing, which are started with -c.
    (folder / "sitecustomize.py").write_text(
        "import sys\n\nif '-c' not in sys.orig_argv:\n"
        "    from frameworks import vllm_tests\n\n    vllm_tests.prepare()\n"
    )
    lines = folder / "moved"
    lines.touch()
    environment = {"ULTRAEP_VLLM": "eplb", "VLLM_TARGET_DEVICE": "cpu", _MOVED: str(lines)}
    files = [f"tests/distributed/{name}" for name in TESTS]
    tests = run_tests(folder, files, f"not {ON_CUDA}", environment)
    layers = [int(line) for line in lines.read_text().split()]
    moved = sum(layers)
    found = {"tests": tests, "layers_rearranged": len(layers), "experts_moved": moved}
    return found | {"failed": failures(tests, moved)}
