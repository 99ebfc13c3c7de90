"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
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
    part = path.parent / f".{secrets.token_hex(8)}.part"
    try:
        file = part.open("xb")  # with the rights of any new file
    except OSError as error:
        raise _named(error, path) from None
    try:
        with file:
            write(file)
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink()
        if isinstance(error, OSError):
            raise _named(error, path) from error
        raise


def _named(error: OSError, path: Path) -> OSError:
    text = error.strerror or str(error)
    return OSError(error.errno or errno.EIO, f"cannot be written: {text}", str(path))
