"""NVSHMEM itself: how it is found and initialised. No GPU and no NVSHMEM is needed."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ultraep_comm.fabrics.nvshmem import UID_BYTES, Runtime
from ultraep_comm.fabrics.nvshmem_library import LIBRARY, load_library


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder on sys.path, not site-packages, with NVSHMEM's library in it."""
    folder = tmp_path / "nvidia" / "nvshmem" / "lib"
    folder.mkdir(parents=True)
    (folder / LIBRARY).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(folder / LIBRARY)


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("loads", [False, True])
def test_the_library_is_the_wheels_wherever_that_is(
    wheel: str, monkeypatch: pytest.MonkeyPatch, is_loaded: bool, loads: bool
) -> None:
    """A second library is never loaded."""
    asked = []

    def load(name: str, mode: int) -> None:
        asked.append(name)
        if not (is_loaded if mode & os.RTLD_NOLOAD else loads):
            raise OSError("cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    load_library()
    assert asked == ([LIBRARY] if is_loaded else [LIBRARY, wheel])


def test_peers_addresses_and_one_registration_for_a_cubin() -> None:
    """Registering waits for the device, and a cubin stays loaded."""
    registered: list[str] = []
    runtime = Runtime.__new__(Runtime)
    runtime._registered = set()
    runtime._bindings = SimpleNamespace(ptr=lambda address, pe: 0 if pe == 2 else address + pe)
    runtime._core = SimpleNamespace(
        library_init=registered.append,
        NvshmemKernelObject=SimpleNamespace(from_handle=lambda library: f"object of {library}"),
    )
    assert [runtime.peer_address(0x1000, pe) for pe in range(3)] == [0x1000, 0x1001, 0]
    for library in (1, 1, 2):
        runtime.register(library)
    assert registered == ["object of 1", "object of 2"]


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("0", "0")])
def test_it_is_initialised_without_multicast(
    monkeypatch: pytest.MonkeyPatch, given: str | None, found: str
) -> None:
    """Unless the user says otherwise."""
    name, seen = "NVSHMEM_DISABLE_NVLS", []
    monkeypatch.setenv(name, "")  # which puts back what was there
    monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv(name, given)
    device = SimpleNamespace(set_current=lambda: None)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(Device=lambda index: device))
    unique = SimpleNamespace(_data=np.zeros(UID_BYTES, np.uint8))

    def init(**options: Any) -> None:
        seen.append((os.environ[name], options["rank"], options["nranks"], unique._data[5]))

    runtime = Runtime.__new__(Runtime)
    runtime._registered = ["a cubin"]
    runtime._core = SimpleNamespace(get_unique_id=lambda empty: unique, init=init)
    runtime.init(0, bytes(range(UID_BYTES)), 1, 3)
    assert seen == [(found, 1, 3, 5)]
    assert not runtime._registered  # another NVSHMEM knows of none
