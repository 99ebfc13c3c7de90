"""Arrays of ``.npz`` files that anybody may have written: sizes are checked before memory is taken.

A header of some bytes can ask for any amount of memory, and a small compressed file can fill it.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.errors import UltraEPError

_CHUNK = 1 << 24
_TEXT = 200  # characters
# What damaged zip files and headers of arrays make the standard library and NumPy raise.
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,  # what is no bz2 stream, or an offset before the file's beginning
    RuntimeError,  # a zip file that says it is encrypted, or compressed otherwise
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


class ArrayFileError(UltraEPError, ValueError):
    """A file has no plain arrays, or none that could be read. The text does not name the file."""


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What a file says of an array; its bytes are as many as that takes."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]


class ArrayFile:
    """An open file. A context manager.

    Attributes:
        names: of its arrays, and of what else is in it.
    """

    def __init__(self, path: Path) -> None:
        """Open a file.

        Raises:
            ArrayFileError: it is no ``.npz`` file, or is larger unpacked than half of the memory.
            OSError: it cannot be read.
        """
        self._file: BinaryIO = path.open("rb")
        try:
            # A device such as /dev/zero would be read until memory is full, to find its end.
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise ArrayFileError("it is no regular file; expected an .npz file")
            if self._file.read(6) == b"\x93NUMPY":
                raise ArrayFileError("it is a single array; expected an .npz file")
            self._zip = zipfile.ZipFile(self._file)
            members = self._zip.infolist()
            total, most = sum(info.file_size for info in members), physical_bytes() // 2
            if total > most:
                raise ArrayFileError(
                    f"its arrays take {total} bytes; this machine's memory has room for {most}"
                )
        except ArrayFileError:
            self._file.close()
            raise
        except _DAMAGE as error:
            self._file.close()
            raise ArrayFileError(f"it is no .npz file: {_brief(error)}") from error
        self.names = [info.filename.removesuffix(".npy") for info in members]

    def header(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return dtype and shape of an array without reading it.

        Raises:
            ArrayFileError: it is damaged, or no plain array, or has other bytes than it says.
        """
        try:
            with self._zip.open(f"{name}.npy") as member:
                header = _read_header(member, self._zip.getinfo(f"{name}.npy").file_size)
        except _DAMAGE as error:
            raise _unreadable(name, error) from error
        return header.dtype, header.shape

    def read(self, name: str) -> NDArray[Any]:
        """Return an array.

        Raises:
            ArrayFileError: as :meth:`header`.
        """
        try:
            with self._zip.open(f"{name}.npy") as opened:
                member: Any = opened  # which has a method that its type does not
                header = _read_header(member, self._zip.getinfo(f"{name}.npy").file_size)
                flat = np.empty(math.prod(header.shape), header.dtype)
                # With its last byte the member compares its checksum.
                data = flat.view(np.uint8).data if flat.nbytes else memoryview(b"")
                at = 0
                while at < len(data):
                    count = member.readinto(data[at : at + _CHUNK])
                    if not count:
                        raise EOFError("it ends too early")
                    at += count
            return flat.reshape(header.shape, order="F" if header.fortran_order else "C")
        except _DAMAGE as error:
            raise _unreadable(name, error) from error

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._zip.close()
        self._file.close()


def physical_bytes() -> int:
    """Return how much memory the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _unreadable(name: str, error: Exception) -> ArrayFileError:
    if isinstance(error, ArrayFileError):
        return ArrayFileError(f"{name!r} {error}")
    return ArrayFileError(f"{name!r} is damaged: {_brief(error)}")


def _brief(error: Exception) -> str:
    """Return an error's text, which may quote a file's bytes, as far as a line has room."""
    text = str(error)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."


def _read_header(member: Any, num_bytes: int) -> _Header:
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise ArrayFileError(f"has a header of version {version}; expected 1.0 or 2.0")
    read = np.lib.format.read_array_header_1_0
    if version == (2, 0):
        read = np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(member)
    if dtype.hasobject or dtype.subdtype is not None:
        raise ArrayFileError(
            f"has dtype {dtype}; expected plain values, no Python objects and no arrays"
        )
    said, there = math.prod(shape) * dtype.itemsize, num_bytes - member.tell()
    if any(length < 0 for length in shape) or said != there:
        raise ArrayFileError(
            f"says that it is {dtype} {list(shape)}, which is {said} bytes; it has {there}"
        )
    return _Header(shape=shape, fortran_order=fortran_order, dtype=dtype)
