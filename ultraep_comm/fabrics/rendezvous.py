"""Rendezvous: ranks exchange JSON records over the store of a process group. Nothing is pickled.

A group is created in steps, to each of which every rank gives a record. A step has one outcome,
which the store decides: that all ranks have joined it, or the first failure. So either all ranks
continue, or all raise in the same step, and the process group stays usable. A rank that fails
anywhere makes its failure the outcome of its current step, or of the next one. A rank that dies is
detected by its process, by any rank of its machine, so that no rank waits until the timeout.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ultraep_comm.errors import BootstrapError, UnsupportedError, first_line
from ultraep_comm.system import Process, undocumented

IFNAME = (
    "set GLOO_SOCKET_IFNAME (for NCCL, NCCL_SOCKET_IFNAME) to the network's interface on every rank"
)
DEFAULT_TIMEOUT = 1800.0
_COMPLETE = "complete"  # the outcome of a step that all ranks have joined
_POLL = 0.1  # seconds between checks whether the other ranks are alive
_GRACE = 0.5  # seconds for a peer's own report of its failure, or its death, to show
_SHOW = 0.2  # seconds for the others to see a failure: the store may end with this process
_READS = 16  # ranks to look up per check: asking for all of many ranks would overload the store


class PeerFailureError(BootstrapError):
    """Another rank's failure as this rank sees it; that rank's own report takes precedence."""


class _Members:
    """What is known of the ranks of a process group, for all groups that are created over it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        store, rank = _find_store(group), group.rank()
        if store is None:
            raise UnsupportedError(
                f"rank {rank}: the process group has no store, over which its ranks could exchange"
                " records; create it by init_process_group with store= or init_method="
            )
        # Process groups of the same name share keys, so the store counts their incarnations.
        incarnation = store.add(f"ultraep_comm/incarnation/{rank}", 1)
        self.store: Any = PrefixStore(f"ultraep_comm/{incarnation}", store)
        self.store.set(f"process/{rank}", json.dumps(Process.this()))
        self.created = 0
        self.processes: dict[int, Process] = {}
        self._unknown = deque(range(group.size()))
        self._stale: list[tuple[Any, str]] = []  # keys of this rank's last step, and their store

    def replace_stale(self, keys: list[tuple[Any, str]]) -> None:
        """Delete the keys of the last step: that all ranks are in the next one, they have read."""
        for store, key in self._stale:
            store.delete_key(key)
        self._stale = keys

    def find_processes(self, number: int) -> None:
        """Look up as many ranks whose processes are not known yet."""
        for _ in range(min(number, len(self._unknown))):
            rank = self._unknown.popleft()
            key = f"process/{rank}"
            if self.store.check([key]):
                self.processes[rank] = Process(*json.loads(self.store.get(key)))
            else:
                self._unknown.append(rank)

    def find_dead(self) -> tuple[int, str] | None:
        """Return a rank whose process is known to have ended, and a text that says so."""
        for rank, process in sorted(self.processes.items()):
            if process.has_ended():
                return rank, f"its process (pid {process.pid}) has ended"
        return None


_members: WeakKeyDictionary[dist.ProcessGroup, _Members] = WeakKeyDictionary()


def _find_store(group: dist.ProcessGroup) -> Any:
    """Return the store of a process group; None if it cannot be found."""
    with suppress(Exception):  # another version of torch, or a process group outside WORLD
        return undocumented(dist.distributed_c10d, "_get_process_group_store")(group)
    with suppress(Exception):
        return undocumented(group, "get_group_store")()
    return None


def _record_device(group: dist.ProcessGroup) -> torch.device:
    """Return where tensors have to be that a process group sends: the CPU, if it can."""
    cpu = torch.device("cpu")
    try:
        undocumented(group, "_get_backend")(cpu)
    except RuntimeError:
        return torch.device("cuda")
    return cpu


class Rendezvous:
    """The steps of one creation of a group, over the caller's process group.

    Every rank creates the same groups over a process group, so creations have equal numbers.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, *, limit: float | None = None
    ) -> None:
        """Begin; ``limit``: of each step in seconds, 0 or None: the process group's timeout."""
        self.limit = limit
        if process_group is None and not dist.is_initialized():
            raise BootstrapError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group"
                " first, or use new_loopback_groups for ranks in one process"
            )
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup):
            who = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
            raise BootstrapError(
                f"{who} is not a member of the process group ({group!r}); call new_group on its"
                " members only"
            )
        # Of the object itself: it may be outside WORLD, as those of elastic jobs are.
        self.group = group
        self.rank = group.rank()
        self.num_ranks = group.size()
        self._depth = 0  # nesting of failure_scope()
        self._passed = 0  # steps that all ranks have joined
        self._failure: tuple[int, str] | None = None  # that ended the steps, as far as it is known
        try:
            if group not in _members:
                _members[group] = _Members(group)
            self._members = _members[group]
        except UnsupportedError:
            raise
        except Exception as error:  # of any type, by the kind of store
            raise self._without_store(error) from error
        self._members.created += 1
        self.store: Any = PrefixStore(str(self._members.created), self._members.store)

    @property
    def timeout(self) -> float:
        """Return the process group's timeout in seconds."""
        try:
            backend = undocumented(self.group, "_get_backend")(_record_device(self.group))
            value = undocumented(backend.options, "_timeout")
        except (AttributeError, RuntimeError):
            return DEFAULT_TIMEOUT
        return value.total_seconds() if isinstance(value, timedelta) else DEFAULT_TIMEOUT

    @property
    def processes(self) -> Mapping[int, Process]:
        """Return the ranks' processes; all of them after a step."""
        return self._members.processes

    def leave(self) -> None:
        """Release the process group, so that its threads end when the caller destroys it."""
        # Inside failure_scope() the peers still have to learn why this rank failed.
        if self._depth == 0:
            for name in ("group", "store", "_members"):
                vars(self).pop(name, None)

    # ---- steps ----------------------------------------------------------------------------

    @contextmanager
    def failure_scope(self) -> Iterator[None]:
        """Enclose steps, and what ranks do between them: any exception ends them on all ranks.

        Raises:
            BootstrapError: in place of `PeerFailureError`; names the rank that failed first.
        """
        self._depth += 1
        try:
            yield
        except PeerFailureError as error:
            if self._depth > 1:
                raise
            found, end = None, time.monotonic() + _GRACE
            with suppress(Exception):  # there is no store any more: what this rank saw has to do
                while (found := self._find_failure()) is None and time.monotonic() < end:
                    time.sleep(0.01)
            if found is None:
                peer = error.failed_rank
                found = self._fail(self.rank if peer < 0 else peer, str(error))
            time.sleep(_SHOW)
            raise self._blame(*found) from error
        except BaseException as error:  # Ctrl-C too
            if self._depth == 1:
                self._fail(self.rank, str(error) or type(error).__name__)
                time.sleep(_SHOW)
            raise
        finally:
            self._depth -= 1

    def exchange(self, record: Any = None) -> list[Any]:
        """Give a record, which JSON can say, to all ranks; return theirs, by rank. Collective.

        Raises:
            BootstrapError: a rank failed, or its process has ended, or it did not join in time.
        """
        text = json.dumps(record)
        with self.failure_scope():
            try:
                return self._exchange(text)
            except BootstrapError:
                raise
            except Exception as error:  # of any type, by the kind of store
                raise self._without_store(error) from error

    def raise_if_any_failed(self) -> None:
        """Return once all ranks have come here; raise if one has failed before. Collective."""
        self.exchange()

    def _exchange(self, text: str) -> list[Any]:
        step = self._passed + 1
        self.store.set(f"{step}/{self.rank}", text)
        if self.store.add(f"{step}/joined", 1) == self.num_ranks:
            self._decide(step, _COMPLETE)
        limit = self.limit or self.timeout
        if not self.wait_for(lambda: self.store.check([f"{step}/outcome"]), limit):
            absent = [
                r for r in range(self.num_ranks) if not self.store.check([f"{step}/{r}"])
            ] or [self.rank]
            raise PeerFailureError(
                f"ranks {absent} did not join this collective within {limit:g} s (timeout=,"
                " ULTRAEP_TIMEOUT); expected every rank. Look for an earlier error there, or raise"
                " the limit",
                failed_rank=absent[0],
            )
        self._raise_failure()
        texts = self.store.multi_get([f"{step}/{r}" for r in range(self.num_ranks)])
        self._members.find_processes(self.num_ranks)
        done = [f"{step}/{self.rank}"]
        if self.rank == 0:
            done += [f"{step}/joined", f"{step}/outcome"]
        self._members.replace_stale([(self.store, key) for key in done])
        self._passed = step
        return [json.loads(text) for text in texts]

    def wait_for(self, done: Callable[[], bool], limit: float = 0.0) -> bool:
        """Poll until something is done; return False if it is not within ``limit`` seconds.

        Raises:
            PeerFailureError: a rank is known to have failed or died.
        """
        start = polled = time.monotonic()
        pause = 2e-4
        while not done():
            time.sleep(pause)
            pause = min(1.5 * pause, 0.01)
            if (now := time.monotonic()) - polled > _POLL:
                polled = now
                self._raise_failure()
                if limit and now - start > limit:
                    return False
        return True

    def _raise_failure(self) -> None:
        """Raise PeerFailureError if a rank is known to have failed or died."""
        try:
            failure = self._find_failure()
        except Exception as error:  # of any type, by the kind of store
            raise self._without_store(error) from error
        if failure is not None:
            raise PeerFailureError(failure[1], failed_rank=failure[0])

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """All-gather a tensor over the process group itself; return ``[G, *shape]`` on the CPU.

        For what is exchanged in every call.

        Raises:
            BootstrapError: a rank left the process group, or failed.
        """
        mine = mine.to(_record_device(self.group))
        gathered = mine.new_empty((self.num_ranks, *mine.shape))
        try:
            work = self.group.allgather([list(gathered)], [mine])
            self.wait_for(work.is_completed)
            work.wait()
        except BootstrapError:
            raise
        except RuntimeError as error:
            raise BootstrapError(
                f"rank {self.rank}: the process group failed; has a rank left it? ({error})"
            ) from error
        return gathered.cpu()

    # ---- outcomes -------------------------------------------------------------------------

    def _decide(self, step: int, outcome: str) -> str:
        """Return the outcome of a step, which is the given one unless it had one before."""
        found: bytes = self.store.compare_set(f"{step}/outcome", "", outcome)
        return found.decode()

    def _find_failure(self) -> tuple[int, str] | None:
        """Return the rank that failed in the step under way, or since the last, and why."""
        if self._failure is not None:
            return self._failure
        step = self._passed + 1
        found = ""
        if self.store.check([f"{step}/outcome"]):
            found = self.store.get(f"{step}/outcome").decode()
        else:
            self._members.find_processes(_READS)
            if (dead := self._members.find_dead()) is not None:
                found = self._decide(step, json.dumps(dead))
        self._failure = None if found in ("", _COMPLETE) else _read_failure(found)
        return self._failure

    def _fail(self, rank: int, text: str) -> tuple[int, str]:
        """End the step under way or the next one, and return by which rank's failure, and why."""
        own, failure = json.dumps([rank, text]), (rank, text)
        with suppress(Exception):  # there is no store any more, which the others see too
            found = self._decide(self._passed + 1, own)
            if found == _COMPLETE:  # though this rank has not seen it
                found = self._decide(self._passed + 2, own)
            failure = _read_failure(found)
        return failure

    def _blame(self, rank: int, text: str) -> BootstrapError:
        return BootstrapError(
            f"rank {self.rank}: cannot continue, because rank {rank} failed: {text}",
            failed_rank=rank,
        )

    def _without_store(self, error: Exception) -> BootstrapError:
        """Return the error of a rank that cannot reach the store."""
        members = _members.get(self.group)
        end = time.monotonic() + _GRACE
        while members is not None and time.monotonic() < end:
            if (dead := members.find_dead()) is not None:
                return self._blame(*dead)
            time.sleep(0.01)
        return BootstrapError(
            f"rank {self.rank}: the process group's store cannot be reached; has the process ended"
            f" that hosts it, or has this one too many files open (ulimit -n)?"
            f" ({first_line(error)})"
        )


def _read_failure(outcome: str) -> tuple[int, str]:
    rank, text = json.loads(outcome)
    return rank, text


def check_same_arguments(arguments: Sequence[Mapping[str, Any]]) -> None:
    """Raise BootstrapError on every rank if a rank passed another argument; names it."""
    for rank, other in enumerate(arguments):
        for name, first in arguments[0].items():
            if other.get(name) != first:
                what, own, theirs = _find_difference(name, first, other.get(name))
                raise BootstrapError(
                    f"rank {rank} called new_group with {what}={theirs!r}, and rank 0 with"
                    f" {what}={own!r}; expected the same on every rank",
                    failed_rank=rank,
                )


def _find_difference(name: str, first: Any, other: Any) -> tuple[str, Any, Any]:
    """Return the part in which two values differ, and what each has there."""
    if isinstance(first, dict) and isinstance(other, dict) and first.keys() == other.keys():
        keys: Any = first
    elif isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        keys = range(len(first))
    else:
        return name, first, other
    key = next(key for key in keys if first[key] != other[key])
    return _find_difference(f"{name}[{key!r}]", first[key], other[key])
