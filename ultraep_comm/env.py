"""Environment variables, read here and nowhere else. An argument always wins over a variable.

NVSHMEM has its own; one of them is set here, if it is not.

| variable             | argument of new_group | meaning                                       |
|----------------------|-----------------------|-----------------------------------------------|
| ULTRAEP_TIMEOUT      | timeout               | seconds for every wait; 0: no limit           |
| ULTRAEP_NUM_SMS      | num_sms               | workers per rank: threads, or blocks on a GPU |
| ULTRAEP_TILE_BYTES   | tile_bytes            | unit of the transfer, a power of two          |
| ULTRAEP_CHECK        | check                 | 1: every transfer is checked; 0: not          |
| ULTRAEP_CUBINS       | none                  | folder of cubins to use instead of the        |
|                      |                       | installed ones                                |
| ULTRAEP_CALIBRATION  | none                  | file of `bench calibrate`; rank 0 reads it,   |
|                      |                       | and mode="auto" goes by its figures           |
| ULTRAEP_RECORD       | none                  | folder: every group records its calls as by   |
|                      |                       | start_recording(), and writes them to a file  |
|                      |                       | there when it is closed, or at the end        |
| ULTRAEP_RECORD_CALLS | none                  | how many calls such a recording holds, 1024   |
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ultraep_comm.errors import InvalidArgumentError

T = TypeVar("T", int, float)


def _read(name: str, convert: Callable[[str], T]) -> T | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return convert(text)
    except ValueError:
        raise InvalidArgumentError(
            f"environment variable {name}={text!r} is not a number; unset it or correct it"
        ) from None


def timeout() -> float | None:
    """Seconds for every wait, or None."""
    return _read("ULTRAEP_TIMEOUT", float)


def num_sms() -> int | None:
    """Workers per rank, or None."""
    return _read("ULTRAEP_NUM_SMS", int)


def tile_bytes() -> int | None:
    """Tile size in bytes, or None."""
    return _read("ULTRAEP_TILE_BYTES", int)


def check() -> bool | None:
    """Whether transfers are checked, or None."""
    value = _read("ULTRAEP_CHECK", int)
    if value not in (None, 0, 1):
        raise InvalidArgumentError(
            f"environment variable ULTRAEP_CHECK={value}; expected 1 to check transfers, or 0"
        )
    return None if value is None else value == 1


def cubins() -> Path | None:
    """Folder of the device kernels, or None."""
    text = os.environ.get("ULTRAEP_CUBINS")
    return Path(text) if text else None


def calibration() -> Path | None:
    """File with measured costs, or None."""
    text = os.environ.get("ULTRAEP_CALIBRATION")
    return Path(text) if text else None


def record_folder() -> Path | None:
    """Folder that every group's recording goes to, or None."""
    text = os.environ.get("ULTRAEP_RECORD")
    return Path(text) if text else None


def record_calls() -> int | None:
    """Calls that such a recording holds, or None."""
    return _read("ULTRAEP_RECORD_CALLS", int)


def do_without_multicast() -> None:
    """Tell NVSHMEM, which reads it where it is initialised, unless the user has."""
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
