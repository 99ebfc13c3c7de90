#!/usr/bin/env python3
"""Loads each kernel of the library in FOLDER, which was built there, as a group does.

python tools/hour/load_kernels.py FOLDER [--stand-in]     # --stand-in: in the driver's place
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ultraep_comm
from ultraep_comm import _core
from ultraep_comm.engines.cuda.device import find_device
from ultraep_comm.engines.cuda.kernels import (
    INFO_HEADER,
    INFO_MAGIC,
    cubin_folder,
    load_kernels,
)

ROOT = Path(__file__).resolve().parents[2]


def stand_in() -> Any:
    """Return a device whose driver has the kernels that are in the cubin, and runs nothing."""
    sys.path[1:1] = [str(ROOT / "tests/python/engines"), str(ROOT / "tests/python")]
    from test_cuda_device import KERNEL, device_of, fake_driver

    driver, loaded = fake_driver([]), bytearray()

    def load(data: bytes, *_: Any) -> tuple[int, int]:
        loaded[:] = data
        return 0, 7

    def find(library: int, name: bytes) -> tuple[int, int]:
        return (0, KERNEL) if b"\0" + name + b"\0" in loaded else (500, 0)

    driver.cuLibraryLoadData, driver.cuLibraryGetKernel = load, find
    device = device_of(driver)
    device.compute_capability, device.cuda_major = (9, 0), 13
    device._loaded = {}  # noqa: SLF001
    return device


def info_alone() -> Path:
    """Return a cubin without kernels."""
    info = (_core.CUDA_KERNELS_VERSION, 13, 0, 3, 4, 90, _core.CUDA_LAYOUT_HASH)
    made = Path(tempfile.mkdtemp()) / "ultraep_comm-sm_90.cubin"
    made.write_bytes(INFO_HEADER.pack(INFO_MAGIC, *info))
    return made


def main() -> int:
    """Load them; 1: this is another library."""
    folder, here = Path(sys.argv[1]).resolve(), Path(_core.__file__).resolve()
    if folder not in here.parents or folder not in Path(ultraep_comm.__file__).resolve().parents:
        print(f"run pip uninstall ultraep_comm: it is {here}, not that of {folder}")
        return 1
    device = stand_in() if "--stand-in" in sys.argv else find_device()
    names = list(json.loads((ROOT / "tests/device/budget.json").read_text()))
    if "--stand-in" in sys.argv and not cubin_folder().exists():
        import os

        os.environ["ULTRAEP_CUBINS"] = str(info_alone().parent)
        names = []
    kernels = load_kernels(device, None)
    for name in names:
        kernels.handle(name, 0)
    print(f"{here}: {len(names)} kernels loaded" if names else f"{here}: no cubin is built here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
