"""Operating system helpers: whole files, fork hooks, and whether a process has ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol
from weakref import WeakSet

INTERRUPTED = 130  # exit status after Ctrl-C
FAILED = 2
MAX_JSON_BYTES = 64 << 20  # far more than any file of this library needs


def run_main(module: str) -> int:
    """Run a module's ``main()`` as a program; return its exit status.

    Ctrl-C, also during the import, and a standard output that is full or closed end the program
    without a traceback.
    """
    try:
        status: int = import_module(module).main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if not report_output(error):
            raise
        return FAILED
    return status


def report_output(error: Exception) -> bool:
    """Print one line if writing to standard output failed, and redirect it to /dev/null."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
        return False
    # At exit Python flushes the buffer, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    why = f"cannot be written: {error.strerror}"
    why = "was closed by its reader" if error.errno == errno.EPIPE else why
    print(f"error: standard output {why}", file=sys.stderr, flush=True)
    return True


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: it is not JSON, or is larger than 64 MiB; the text does not name the file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:  # may be a pipe or a device, whose size is not known in advance
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
    try:
        return json.loads(content)
    except UnicodeDecodeError as error:  # its own text may contain the whole file
        raise ValueError(f"byte {error.start} is not {error.encoding}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file whole or not at all: ``write`` fills a temporary file that replaces ``path``.

    On an error, a file that was at ``path`` is unchanged and the temporary file is removed.

    Raises:
        OSError: the file cannot be written; names ``path``.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; expected a file's name", str(path))
    part = path.parent / f".{secrets.token_hex(8)}.part"
    try:
        file = part.open("xb")  # with the permissions of any new file, unlike tempfile's
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
    """Return a private name of another library. All such uses go through here, to be found easily.

    Raises:
        AttributeError: this version of the library has no such name.
    """
    return getattr(thing, name)


def read_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as 3.4.5; 0 where it has no number."""
    major, minor = [*map(int, re.findall(r"\d+", text)), 0, 0][:2]
    return major, minor


class Inheritable(Protocol):
    """An object with resources that a forked child must not use."""

    def leave_to_parent(self) -> None:
        """Drop the parent's resources in this child. Must neither block nor notify a peer."""


_watched: WeakSet[Inheritable] = WeakSet()


def watch_forks(thing: Inheritable) -> None:
    """Call ``thing.leave_to_parent()`` in every child forked while ``thing`` is alive."""
    _watched.add(thing)


def _after_fork_in_child() -> None:
    failed: Exception | None = None
    for thing in list(_watched):
        try:
            thing.leave_to_parent()
        except Exception as error:  # the other objects have to drop theirs too
            failed = error
    if failed is not None:
        raise failed


os.register_at_fork(after_in_child=_after_fork_in_child)


class Process(NamedTuple):
    """A process, distinct from a later one with the same pid.

    Attributes:
        boot: id of the machine's current boot, and its name: machines that are cloned while they
            run share only the id; empty: unknown.
        namespace: id of its pid namespace; 0: unknown.
        pid: process id in that namespace.
        start: start time in clock ticks since boot; 0: unknown.
    """

    boot: str
    namespace: int
    pid: int
    start: int

    @classmethod
    def this(cls) -> Process:
        """Return the calling process."""
        start = _state_and_start(os.getpid())
        return cls(_named_boot(), pid_namespace(), os.getpid(), 0 if start is None else start[1])

    def is_here(self) -> bool:
        """Return whether its pid is of this machine and this pid namespace, as far as is known."""
        return self.boot == _named_boot() != "" and self.namespace == pid_namespace() != 0

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended; False unless it was here."""
        if not self.is_here():
            return False
        found = _state_and_start(self.pid)
        if found is None:  # ended, or hidden by /proc's mount options: ask with kill
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return True
            except OSError:
                pass
            return False
        state, start = found
        return state in "ZX" or (start != 0 and self.start not in (0, start))


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_BOOT_ID = _read_boot_id()  # at import: later there may be no file descriptor left


def boot_id() -> str:
    """Return the id of this machine's current boot; empty: unknown, as in a sandbox."""
    return _BOOT_ID


def _named_boot() -> str:
    boot = boot_id()
    return f"{boot} {os.uname().nodename}" if boot else ""


def pid_namespace() -> int:
    """Return the id of this process's pid namespace; 0: unknown."""
    try:
        return _pid_namespace(os.getpid())
    except OSError:
        return 0


@lru_cache(1)
def _pid_namespace(pid: int) -> int:
    """Return it for the calling process ``pid``: a forked child may be in a new namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Return a process's state and start time (0: unknown); None if it is not visible."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text[text.rindex(")") + 2 :].split()  # the command name may contain anything
        return fields[0], int(fields[19])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, IndexError):
        return ("R", 0)
