"""What ranks tell each other beside the process group, when that is stuck: who came, who failed.

A collective of the process group waits for every rank. One that has died, or left, would keep the
others there until the group's timeout. The store by which the ranks of a process group have found
each other is still there then, and holds two kinds of entries: the process of each rank that came,
and the first failure. Without a store nothing is told, and the process group's own errors remain.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ultraep_comm.fabrics.liveness import Process

MAX_TEXT = 256  # bytes
_rounds: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def clip(text: str) -> bytes:
    """Return a text's bytes, no more than fit, without a character cut in two."""
    return text.encode(errors="replace")[:MAX_TEXT].decode(errors="ignore").encode()


def _find_store(group: dist.ProcessGroup) -> Any:
    """Return the store of a process group. There is no public way to it; None: no way at all."""
    try:
        return dist.distributed_c10d._get_process_group_store(group)
    except Exception:  # another version of torch, or a process group without one
        return None


def _this_process() -> str:
    try:
        return Process.this().pack().hex()
    except OSError:  # no descriptor is left to find out; the next step says so
        return ""


class Notices:
    """The entries of one making, of all ranks of a process group.

    Every rank makes the same groups over a process group, so that their numbers agree.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._store = _find_store(group)
        self._rank = rank
        self._round = _rounds.get(group, 0) + 1
        _rounds[group] = self._round
        self._known: dict[int, Process] = {}
        self._set(self._place(rank), f"{self._round}/{_this_process()}")

    @property
    def works(self) -> bool:
        """Whether anything can be told."""
        return self._store is not None

    def has_come(self, rank: int) -> bool:
        """Return whether a rank has come to this making, as far as is known."""
        return self._get(self._place(rank)).partition("/")[0] == str(self._round)

    def process_of(self, rank: int) -> Process | None:
        """Return the process of a rank; None: not known."""
        if rank not in self._known:
            record = self._get(self._place(rank)).partition("/")[2]
            try:
                process = Process.unpack(bytes.fromhex(record))
            except ValueError:
                process = None
            if process is not None:
                self._known[rank] = process
        return self._known.get(rank)

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
        return f"ultraep_comm/{'stuck' if stuck else 'failed'}/{self._round}"

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
