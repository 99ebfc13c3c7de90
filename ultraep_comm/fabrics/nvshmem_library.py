"""NVSHMEM's host library: where it is, and loading it. Needs neither torch nor nvshmem4py."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

LIBRARY = "libnvshmem_host.so.3"


def find_library() -> Path | None:
    """Return the wheel's host library in any folder of ``sys.path``; None: there is none."""
    paths = (Path(folder) / "nvidia" / "nvshmem" / "lib" / LIBRARY for folder in sys.path)
    return next((path for path in paths if path.is_file()), None)


def load_library() -> None:
    """Load the wheel's host library from any folder of ``sys.path``.

    nvshmem4py searches site-packages only. If nothing is found here, or the library cannot be
    loaded, nvshmem4py searches next and reports the error.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return  # loaded already, for instance by torch; a second copy would have separate state
    path = find_library()
    if path is not None:
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_LAZY)
