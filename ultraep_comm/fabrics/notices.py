"""What ranks tell each other beside the process group, when that is stuck: who came, who failed.

A collective of the process group waits for every rank. One that has died, or left, would keep the
others there until the group's timeout. The store by which the ranks of a process group have found
each other is still there then, and holds two kinds of entries: the process of each rank that came,
and the first failure. Without a store nothing is told, and the process group's own errors remain.

The store ends with the rank that hosts it. So the ranks tell each other their processes in their
first step too, and from then on deaths are seen without it, in later makings as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ultraep_comm.fabrics.liveness import Process

MAX_TEXT = 256  # bytes
_ASK = 16  # ranks per look that the store is asked for: all of many ranks would clog it
_met: WeakKeyDictionary[dist.ProcessGroup, dict[int, Process]] = WeakKeyDictionary()
# Of each process group: its number among those that had the same entries, and makings so far.
_lives: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_makings: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def clip(text: str) -> bytes:
    """Return a text's bytes, no more than fit, without a character cut in two."""
    return text.encode(errors="replace")[:MAX_TEXT].decode(errors="ignore").encode()


def _find_store(group: dist.ProcessGroup) -> Any:
    """Return the store of a process group. There is no public way to it; None: no way at all."""
    try:
        return dist.distributed_c10d._get_process_group_store(group)
    except Exception:  # another version of torch, or a process group without one
        return None


def this_process() -> Process | None:
    """Return the calling process; None: no descriptor is left to find out, as a step will say."""
    try:
        return Process.this()
    except OSError:
        return None


class Notices:
    """The entries of one making, of all ranks of a process group.

    Every rank makes the same groups over a process group, so that their numbers agree.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, process: Process | None) -> None:
        self._store = _find_store(group)
        self._rank = rank
        self._group = group
        self._round = self._count_making()
        self._known = dict(_met.get(group, {}))
        self._unknown = deque(r for r in range(group.size()) if r not in self._known)
        own = "" if process is None else process.pack().hex()
        self._set(self._place(rank), f"{self._name}/{own}")

    @property
    def works(self) -> bool:
        """Whether anything can be told."""
        return self._store is not None

    def has_come(self, rank: int) -> bool:
        """Return whether a rank has come to this making, as far as is known."""
        return self._entry(rank)[0] >= self._round  # it may have gone on to the next

    def learn(self, processes: Iterable[Process]) -> None:
        """Take what all ranks have said of themselves in a step: the store is asked no more."""
        self._known = {rank: p for rank, p in enumerate(processes) if p.pid > 0}
        self._unknown.clear()
        _met[self._group] = self._known

    def processes(self) -> list[tuple[int, Process]]:
        """Return the ranks' processes, by rank, as far as they are known."""
        for _ in range(min(_ASK, len(self._unknown))):
            rank = self._unknown.popleft()
            process = self._read(rank)
            if process is None:
                self._unknown.append(rank)
            else:
                self._known[rank] = process
        return sorted(self._known.items())

    def _read(self, rank: int) -> Process | None:
        number, record = self._entry(rank)
        try:
            return Process.unpack(bytes.fromhex(record)) if number >= self._round else None
        except ValueError:
            return None

    def _entry(self, rank: int) -> tuple[tuple[int, int], str]:
        """Return the making that a rank has come to last, and its process's record."""
        numbers, _, record = self._get(self._place(rank)).partition("/")
        life, _, making = numbers.partition("-")
        if not (life.isdecimal() and making.isdecimal()):
            return (-1, -1), record
        return (int(life), int(making)), record

    def tell(self, rank: int, text: str, *, stuck: bool) -> None:
        """Tell all ranks which one failed, unless another failure of the kind was told before.

        Args:
            rank: the one that failed.
            text: why.
            stuck: steps that have begun will not end; else the rank takes part in the next one.
        """
        if self._store is not None:
            try:
                self._store.compare_set(self._key(stuck), "", f"{rank}/{clip(text).hex()}")
            except Exception:  # the store's own process has ended: nobody can be told
                self._store = None

    def failure(self, *, stuck: bool) -> tuple[int, str] | None:
        """Return the rank that failed first, and why; None: nobody has told."""
        rank, _, text = self._get(self._key(stuck)).partition("/")
        try:
            return int(rank), bytes.fromhex(text).decode(errors="replace")
        except ValueError:
            return None

    @staticmethod
    def _place(rank: int) -> str:
        return f"ultraep_comm/here/{rank}"

    def _key(self, stuck: bool) -> str:
        return f"ultraep_comm/{'stuck' if stuck else 'failed'}/{self._name}"

    @property
    def _name(self) -> str:
        return f"{self._round[0]}-{self._round[1]}"

    def _count_making(self) -> tuple[int, int]:
        """Return the number of this making, which is the same on all ranks.

        Lives are counted in the store: a later process group of the same name has the same entries.
        Makings are not: a rank that cannot reach the store in one would be behind for ever.
        """
        group = self._group
        _makings[group] = _makings.get(group, 0) + 1
        if group not in _lives and self._store is not None:
            try:
                _lives[group] = int(self._store.add(f"ultraep_comm/lives/{self._rank}", 1))
            except Exception:
                self._store = None
        return _lives.get(group, 0), _makings[group]

    def _set(self, key: str, value: str) -> None:
        if self._store is not None:
            try:
                self._store.set(key, value)
            except Exception:
                self._store = None

    def _get(self, key: str) -> str:
        """Return an entry; empty: there is none. Never waits for one."""
        if self._store is None:
            return ""
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except Exception:  # its host has ended; that rank's end is seen by other means
            self._store = None
            return ""
