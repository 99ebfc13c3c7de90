"""The library's environment variables, all read here. An argument overrides its variable.

NVSHMEM and torch read their own; `disable_multicast` and `without_multicast` set one of each.

| variable             | argument of new_group | meaning                                       |
|----------------------|-----------------------|-----------------------------------------------|
| ULTRAEP_TIMEOUT      | timeout               | seconds for every wait; 0: no limit           |
| ULTRAEP_NUM_SMS      | num_sms               | workers per rank: threads, or blocks on a GPU |
| ULTRAEP_TILE_BYTES   | tile_bytes            | unit of the transfer, a power of two          |
| ULTRAEP_CHECK        | check                 | 1: check every transfer; 0: do not            |
| ULTRAEP_CUBINS       | none                  | folder of cubins to use instead of the        |
|                      |                       | installed ones                                |
| ULTRAEP_CALIBRATION  | none                  | file of `bench calibrate`; rank 0 reads it,   |
|                      |                       | and mode="auto" uses its constants            |
| ULTRAEP_RECORD       | none                  | folder: every group records its calls, as     |
|                      |                       | start_recording() does, and writes them to a  |
|                      |                       | file there when it closes or the process ends |
| ULTRAEP_RECORD_CALLS | none                  | calls that such a recording holds, 1024       |
| ULTRAEP_VLLM         | none                  | "eplb": vLLM's EPLB moves experts by the      |
|                      |                       | library; "batch": replicas for each batch     |
| ULTRAEP_SGLANG       | none                  | "eplb": SGLang's EPLB moves experts by the    |
|                      |                       | library; "batch": replicas for each batch     |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from ultraep_comm.errors import InvalidArgumentError

T = TypeVar("T", int, float, Path)


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


# The values of variables as the table has them; None: not set.
timeout = partial(_read, "ULTRAEP_TIMEOUT", float)
num_sms = partial(_read, "ULTRAEP_NUM_SMS", int)
tile_bytes = partial(_read, "ULTRAEP_TILE_BYTES", int)
cubins = partial(_read, "ULTRAEP_CUBINS", Path)
calibration = partial(_read, "ULTRAEP_CALIBRATION", Path)
record_folder = partial(_read, "ULTRAEP_RECORD", Path)
record_calls = partial(_read, "ULTRAEP_RECORD_CALLS", int)


def check() -> bool | None:
    """Return whether transfers are checked, or None."""
    value = _read("ULTRAEP_CHECK", int)
    if value not in (None, 0, 1):
        raise InvalidArgumentError(
            f"environment variable ULTRAEP_CHECK={value}; expected 1 to check transfers, or 0"
        )
    return None if value is None else value == 1


def _mode(name: str) -> str | None:
    text = os.environ.get(name)
    if text not in (None, "", "eplb", "batch"):
        raise InvalidArgumentError(
            f"environment variable {name}={text!r}; expected 'eplb', 'batch', or nothing"
        )
    return text or None


vllm = partial(_mode, "ULTRAEP_VLLM")
sglang = partial(_mode, "ULTRAEP_SGLANG")


def gloo_interface() -> str | None:
    """Return the interface that gloo is to use, as torch reads it, or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def driver_variables() -> dict[str, str]:
    """Return the variables of CUDA and NVSHMEM that change what a GPU offers, as far as set."""
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "NVSHMEM_SYMMETRIC_SIZE")
    return {name: os.environ[name] for name in names if name in os.environ}


def disable_multicast() -> None:
    """Disable NVLink multicast in NVSHMEM, unless the user has set it. Call before its init."""
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")


@contextmanager
def without_multicast() -> Iterator[None]:
    """Disable NVLink multicast in torch's symmetric memory meanwhile, unless the user has set it.

    torch reads the variable at each rendezvous; other code's memory is left alone.
    """
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    given = name in os.environ
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if not given:
            del os.environ[name]
