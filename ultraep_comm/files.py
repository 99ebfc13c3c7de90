"""Files that are whole or not there."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Have ``write`` fill a temporary file beside ``path``, and give it that name at the end.

    Whatever goes wrong, a file that was at ``path`` before stays as it was, and no other is left.

    Raises:
        OSError: it cannot be written; names ``path``.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; expected a file's name", str(path))
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from None
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # as of an ordinary new file; a temporary one is private
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
