"""Processes of the ranks: who they are, and whether they still live."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

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
