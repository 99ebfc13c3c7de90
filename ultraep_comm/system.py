"""What the operating system gives: whole files, forks, and processes that live or have ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from weakref import WeakSet

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


def undocumented(thing: object, name: str) -> Any:
    """Return what another library has under a name that it may change: all uses are listed by this.

    Raises:
        AttributeError: this version of it has no such name.
    """
    return getattr(thing, name)


class Inheritable(Protocol):
    """What a forked child puts out of use."""

    def leave_to_parent(self) -> None:
        """Give up in this process what belongs to its parent. Must not block or tell anybody."""


_watched: WeakSet[Inheritable] = WeakSet()


def watch_forks(thing: Inheritable) -> None:
    """Have ``thing.leave_to_parent()`` called in every child that is forked while it lives."""
    _watched.add(thing)


def _in_child() -> None:
    failed: Exception | None = None
    for thing in list(_watched):
        try:
            thing.leave_to_parent()
        except Exception as error:  # the others hold their parent's descriptors all the same
            failed = error
    if failed is not None:
        raise failed


os.register_at_fork(after_in_child=_in_child)


_RECORD = struct.Struct("<16sQiQ")  # boot, pid namespace, pid, start


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with the same number.

    Attributes:
        boot: names the boot of the machine.
        namespace: of process numbers; equal ones see each other.
        pid: its number there.
        start: when it began, in clock ticks since the boot.
    """

    boot: bytes
    namespace: int
    pid: int
    start: int

    @classmethod
    def this(cls) -> Process:
        """Return the calling process."""
        start = _state_and_start(os.getpid())
        return cls(boot_id(), pid_namespace(), os.getpid(), 0 if start is None else start[1])

    def pack(self) -> bytes:
        """Return its record."""
        return _RECORD.pack(self.boot, self.namespace, self.pid, self.start)

    @classmethod
    def unpack(cls, data: bytes) -> Process | None:
        """Return the process of a record; None: it is none."""
        if len(data) != _RECORD.size:
            return None
        process = cls(*_RECORD.unpack(data))
        return process if process.pid > 0 else None

    def has_ended(self) -> bool:
        """Return whether it is known to have ended; of other machines nothing is known."""
        try:
            if self.boot != boot_id() or not self.namespace == pid_namespace() != 0:
                return False
        except OSError:
            return False
        found = _state_and_start(self.pid)
        if found is None:  # gone, or hidden: then a signal cannot be sent either
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return True
            except OSError:
                pass
            return False
        state, start = found
        return state in "ZX" or (start != 0 and self.start not in (0, start))


@lru_cache(1)
def boot_id() -> bytes:
    """Name this boot of this machine."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return bytes.fromhex(text.replace("-", ""))


def pid_namespace() -> int:
    """Name the namespace of process numbers; 0: it cannot be told."""
    try:
        return _pid_namespace(os.getpid())
    except OSError:
        return 0


@lru_cache(1)
def _pid_namespace(pid: int) -> int:
    """Return it for the calling process ``pid``: a child may be the first of a new namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Return a process's state and start, 0: not known; None: there is no such process to see."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
        return fields[0], int(fields[19])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, IndexError):
        return ("R", 0)
