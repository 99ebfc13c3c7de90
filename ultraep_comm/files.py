"""Files that are whole or not there, and JSON files that anybody may have written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 64 << 20  # far more than any of ours has


def read_json(path: Path) -> Any:
    """Return what a JSON file has.

    Raises:
        ValueError: it has none, or is larger than 64 MiB; the text does not name the file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:  # a pipe or a device too, which does not say how large it is
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
    try:
        return json.loads(content)
    except UnicodeDecodeError as error:  # whose own text may hold the whole file
        raise ValueError(f"byte {error.start} is no {error.encoding}") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


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
