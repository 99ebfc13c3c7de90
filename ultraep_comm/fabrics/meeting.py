"""Bootstrap: exchanges fixed-size byte records over a process group. Nothing is pickled.

A group is created in steps, each a collective of the process group. A rank that fails between two
steps reports it in its record of the next one, so that all ranks raise at the same step and the
process group stays usable. A rank that dies, or cannot take part in the next step, is detected by
its process or by a notice in the store, so that no rank waits until the process group's timeout.
One wait is not covered: the backend's before it returns a step's work, such as NCCL's communicator
setup in the first collective of a process group, which follows NCCL's own timeouts.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ultraep_comm.errors import BootstrapError
from ultraep_comm.system import Process, undocumented

MAX_TEXT = 256  # bytes
IFNAME = (
    "set GLOO_SOCKET_IFNAME (for NCCL, NCCL_SOCKET_IFNAME) to the network's interface on every rank"
)
_UNCONNECTED = ("refused", "connectFullMesh", "Connect timeout", "timed out connecting")
_READS = 16  # ranks to read from the store per poll: reading all of many ranks would overload it
_known_processes: WeakKeyDictionary[dist.ProcessGroup, dict[int, Process]] = WeakKeyDictionary()
# For each process group: its number among those with the same keys, and its creations so far.
_lives: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_creations: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def clip(text: str) -> bytes:
    """Return a text as UTF-8, cut to ``MAX_TEXT`` bytes at a character boundary."""
    return text.encode(errors="replace")[:MAX_TEXT].decode(errors="ignore").encode()


def _find_store(group: dist.ProcessGroup) -> Any:
    """Return the store of a process group; None if it cannot be found."""
    with suppress(Exception):  # another version of torch, or a process group outside WORLD
        return undocumented(dist.distributed_c10d, "_get_process_group_store")(group)
    with suppress(Exception):
        return undocumented(group, "get_group_store")()
    return None


class Notices:
    """The store's entries of one creation of a group, for all ranks of a process group.

    Every rank creates the same groups over a process group, so creations have equal numbers.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, process: Process) -> None:
        self._store = _find_store(group)
        self._rank = rank
        self._group = group
        self._round = self._count_creation()
        self._known = dict(_known_processes.get(group, {}))
        self._unknown = deque(r for r in range(group.size()) if r not in self._known)
        self._set(self._place(rank), f"{self._name}/{process.pack().hex()}")

    def leave(self) -> None:
        """Release the process group and its store; later calls do nothing."""
        self._store = None
        del self._group

    @property
    def store(self) -> Any:
        """The store; None: there is none that can be used."""
        return self._store

    def has_come(self, rank: int) -> bool:
        """Return whether a rank is known to have begun this creation."""
        return self._entry(rank)[0] >= self._round  # it may have begun the next one

    def learn(self, processes: Iterable[Process]) -> None:
        """Set all ranks' processes, as received in a step; the store is not read for them again."""
        self._known = {rank: p for rank, p in enumerate(processes) if p.pid > 0}
        self._unknown.clear()
        _known_processes[self._group] = self._known

    def processes(self) -> list[tuple[int, Process]]:
        """Return the known processes, by rank, after up to 16 more reads of the store."""
        for _ in range(min(_READS, len(self._unknown))):
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
            # Also of one that ended before it came to this creation; not of an earlier life.
            same_life = number[0] >= self._round[0]
            return Process.unpack(bytes.fromhex(record)) if same_life else None
        except ValueError:
            return None

    def _entry(self, rank: int) -> tuple[tuple[int, int], str]:
        """Return the last creation that a rank has begun, and the record of its process."""
        numbers, _, record = self._get(self._place(rank)).partition("/")
        life, _, creation = numbers.partition("-")
        if not (life.isdecimal() and creation.isdecimal()):
            return (-1, -1), record
        return (int(life), int(creation)), record

    def tell(self, rank: int, text: str, *, stuck: bool) -> None:
        """Publish a failure to all ranks, unless one of the same kind was published before.

        Args:
            rank: the rank that failed.
            text: why.
            stuck: steps in progress will not end; else the rank takes part in the next one.
        """
        if self._store is not None:
            try:
                self._store.compare_set(self._key(stuck), "", f"{rank}/{clip(text).hex()}")
            except Exception:  # the process that hosts the store has ended
                self._store = None

    def failure(self, *, stuck: bool) -> tuple[int, str] | None:
        """Return the rank that failed first, and why; None if no failure was published."""
        rank, _, text = self._get(self._key(stuck)).partition("/")
        try:
            return int(rank), bytes.fromhex(text).decode(errors="replace")
        except ValueError:
            return None

    def wait_in(self, step: int) -> None:
        """Publish that this rank waits in a step of the creation."""
        self._set(self._step(self._rank), str(step))

    def absent(self, step: int) -> list[int]:
        """Return the ranks that are not known to wait in a step, once this one does for a while."""
        if self._store is None:
            return []
        found = (self._get(self._step(r)) for r in range(self._group.size()))
        return [r for r, text in enumerate(found) if not text.isdecimal() or int(text) < step]

    def _step(self, rank: int) -> str:
        return f"ultraep_comm/step/{self._name}/{rank}"

    @staticmethod
    def _place(rank: int) -> str:
        return f"ultraep_comm/here/{rank}"

    def _key(self, stuck: bool) -> str:
        return f"ultraep_comm/{'stuck' if stuck else 'failed'}/{self._name}"

    @property
    def _name(self) -> str:
        return f"{self._round[0]}-{self._round[1]}"

    def _count_creation(self) -> tuple[int, int]:
        """Return the number of this creation, which is the same on all ranks.

        Process groups of the same name share keys, so their lives are counted in the store.
        Creations are counted here: a rank that once failed to reach the store would stay behind.
        """
        group = self._group
        _creations[group] = _creations.get(group, 0) + 1
        if group not in _lives and self._store is not None:
            try:
                _lives[group] = int(self._store.add(f"ultraep_comm/lives/{self._rank}", 1))
            except Exception:
                self._store = None
        return _lives.get(group, 0), _creations[group]

    def _set(self, key: str, value: str) -> None:
        if self._store is not None:
            try:
                self._store.set(key, value)
            except Exception:
                self._store = None

    def _get(self, key: str) -> str:
        """Return an entry, or "" if there is none. Does not wait for one."""
        if self._store is None:
            return ""
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except Exception:  # the process that hosts the store has ended, which others detect
            self._store = None
            return ""


MAGIC = b"UEPCOMM1"
VERSION = 2
DEFAULT_TIMEOUT = 1800.0
MOST_COST = 2**53
MAX_VALUES = 128
_FAILED, _ECHO = 1, 2
# magic, version, flags, rank, number of ranks, digest, machine and its length, token, address, pid
# with its namespace, boot and start, cost, text and its length, the step's values and their number
_RECORD = struct.Struct(f"<8sIIii Q 32sI 16s 16s iQ16sQ 5q {MAX_TEXT}sI {8 * MAX_VALUES}sI")
_POLL = 0.1  # seconds between polls of the ranks' processes and notices
_GRACE = 0.5  # seconds for a step to end, or for a death to show, after a rank has gone


class EchoError(BootstrapError):
    """Another rank's failure as this rank sees it; that rank's own error takes precedence."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The record that every rank sends to every other in one step.

    Attributes:
        digest: 64-bit digest of everything that must be equal on all ranks.
        machine: id of the machine and network namespace; peers with equal ids can connect.
        token: random; proves that a connection comes from this rank of this group.
        address: random; where this rank listens.
        pid: process id; 0: unknown. `Meeting` fills in this and the next three.
        pid_namespace: id of the pid namespace.
        boot: id of the machine's current boot.
        start: start time of the process, in clock ticks since boot.
        cost: the cost model's constants; rank 0's are used.
        values: the integers of a step that exchanges some, at most MAX_VALUES.
        error: why this rank cannot take part, cut to MAX_TEXT bytes; empty: it can.
        failed: the creation ends with this error on all ranks.
        echo: the error reports another rank's failure.
    """

    digest: int = 0
    machine: bytes = b""
    token: bytes = bytes(16)
    address: bytes = bytes(16)
    pid: int = 0
    pid_namespace: int = 0
    boot: bytes = bytes(16)
    start: int = 0
    cost: tuple[int, ...] = (0, 0, 0, 0, 0)
    values: tuple[int, ...] = ()
    error: str = ""
    failed: bool = False
    echo: bool = False

    def pack(self, rank: int, num_ranks: int) -> bytes:
        """Return the record's bytes."""
        text = clip(self.error)
        return _RECORD.pack(
            MAGIC,
            VERSION,
            _FAILED * self.failed | _ECHO * self.echo,
            rank,
            num_ranks,
            self.digest,
            self.machine,
            len(self.machine),
            self.token,
            self.address,
            self.pid,
            self.pid_namespace,
            self.boot,
            self.start,
            *self.cost,
            text,
            len(text),
            struct.pack(f"<{len(self.values)}q", *self.values),
            len(self.values),
        )

    @classmethod
    def unpack(cls, data: bytes, rank: int, num_ranks: int) -> Hello:
        """Read and check a peer's record.

        Raises:
            BootstrapError: it is invalid, of another version, or another rank's.
        """
        if len(data) != _RECORD.size or data[:8] != MAGIC:
            raise BootstrapError(
                f"rank {rank} sent data that is not a record of ultraep_comm; call new_group on"
                " every rank at the same point, with no other collective in between"
            )
        _, version, flags, own_rank, ranks, digest, machine, machine_bytes, *rest = _RECORD.unpack(
            data
        )
        if version != VERSION:
            raise BootstrapError(
                f"rank {rank} sent record version {version}; expected {VERSION}. Install the same"
                " version of ultraep_comm on every rank"
            )
        token, address, pid, pid_namespace, boot, start, *cost, text, text_bytes = rest[:-2]
        values, num_values = rest[-2:]
        wrong = [
            name
            for name, right in (
                ("flags", flags & ~(_FAILED | _ECHO) == 0),
                ("rank", own_rank == rank),
                ("num_ranks", ranks == num_ranks),
                ("machine", _is_padded(machine, machine_bytes)),
                ("pid", pid >= 0),
                ("cost", all(0 <= value <= MOST_COST for value in cost)),
                ("error", _is_padded(text, text_bytes) and _is_text(text[:text_bytes])),
                ("values", _is_padded(values, 8 * num_values)),
            )
            if not right
        ]
        if wrong:
            raise BootstrapError(
                f"rank {rank} sent a record whose field {wrong[0]} is invalid; expected the record"
                f" of rank {rank} of {num_ranks}. Call new_group on every rank at the same point"
            )
        return cls(
            digest=digest,
            machine=machine[:machine_bytes],
            token=token,
            address=address,
            pid=pid,
            pid_namespace=pid_namespace,
            boot=boot,
            start=start,
            cost=tuple(cost),
            values=struct.unpack_from(f"<{num_values}q", values),
            error=text[:text_bytes].decode(),
            failed=bool(flags & _FAILED),
            echo=bool(flags & _ECHO),
        )


def _is_padded(field: bytes, length: int) -> bool:
    return length <= len(field) and not any(field[length:])


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def record_device(group: dist.ProcessGroup) -> torch.device:
    """Return where tensors have to be that a process group sends: the CPU, if it can."""
    cpu = torch.device("cpu")
    try:
        undocumented(group, "_get_backend")(cpu)
    except RuntimeError:
        return torch.device("cuda")
    return cpu


class Meeting:
    """Exchanges records over the caller's process group."""

    def __init__(
        self, process_group: dist.ProcessGroup | None, *, limit: float | None = None
    ) -> None:
        """Begin; ``limit``: of each step in seconds, 0 or None: the process group's timeout."""
        self.limit = limit
        self._steps = 0  # that this rank has begun
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
        self._device = record_device(group)
        self._process = Process.this()
        self._notices = Notices(group, self.rank, self._process)
        self._broken: BootstrapError | None = None  # the process group takes no more steps
        self._end: tuple[int, str] | None = None  # the first rank that was seen to end, and why
        self._cause: BootstrapError | None = None  # this rank's error, which it reports in a step
        self._depth = 0  # nesting of making()
        self._open = False  # the peers expect another step with this rank
        self._last_step: object = None  # keeps the step alive in which this rank reported failure

    @property
    def timeout(self) -> float:
        """Return the process group's timeout in seconds."""
        try:
            backend = undocumented(self.group, "_get_backend")(self._device)
            value = undocumented(backend.options, "_timeout")
        except (AttributeError, RuntimeError):
            return DEFAULT_TIMEOUT
        return value.total_seconds() if isinstance(value, timedelta) else DEFAULT_TIMEOUT

    @property
    def store(self) -> Any:
        """Return the process group's store; None if it has none."""
        return self._notices.store

    def leave(self) -> None:
        """Release the process group, so that its threads end when the caller destroys it."""
        # Inside making() the peers still have to learn why this rank failed.
        if self._depth > 0 or not hasattr(self, "group"):
            return
        self._broken = BootstrapError(f"rank {self.rank}: the group is closed")
        self._last_step = None
        self._notices.leave()
        del self.group

    # ---- steps ----------------------------------------------------------------------------

    @contextmanager
    def making(self) -> Iterator[None]:
        """Enclose a sequence of steps; reports any exception in it, Ctrl-C too, to all ranks."""
        self._depth += 1
        if self._depth == 1:
            self._open = True
        try:
            yield
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._depth -= 1

    def _give_up(self, error: BaseException) -> None:
        """Report a failure to the peers without waiting for them, unless they know of it."""
        if not self._open or self._broken is not None:
            return
        self._open = False
        text = str(error) or type(error).__name__
        try:
            record = self._record(Hello(error=text, failed=True))
            # The peers read it in their next step, now or later; this rank does not wait for it.
            self._last_step = self._start(record)
        except RuntimeError:  # the process group has failed, which the other ranks see too
            pass
        self._notices.tell(self.rank, text, stuck=False)

    def _record(self, hello: Hello) -> torch.Tensor:
        mine = self._process
        hello = replace(
            hello,
            pid=mine.pid,
            pid_namespace=mine.namespace,
            boot=mine.boot,
            start=mine.start,
        )
        return torch.frombuffer(bytearray(hello.pack(self.rank, self.num_ranks)), dtype=torch.uint8)

    def _start(self, mine: torch.Tensor) -> tuple[Any, torch.Tensor]:
        self._steps += 1
        mine = mine.to(self._device)
        gathered = torch.empty((self.num_ranks, *mine.shape), dtype=mine.dtype, device=self._device)
        return self.group.allgather([list(gathered)], [mine]), gathered

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """All-gather a tensor; return ``[G, *shape]`` on the CPU.

        Raises:
            BootstrapError: a rank left the process group, or failed before this step.
        """
        if self._broken is not None:
            raise self._broken
        try:
            work, gathered = self._start(mine)
            self._await(work)
            work.wait()
        except BootstrapError:
            raise
        except RuntimeError as error:
            self._diagnose(error)
        return gathered.cpu()

    def _await(self, work: Any) -> None:
        """Return when a step has ended; raise once it is known that it never will."""
        pause, polled = 2e-5, time.monotonic()
        start = polled
        failure: BootstrapError | None = None
        while not work.is_completed():
            time.sleep(pause)
            pause = min(1.5 * pause, 0.01)
            now = time.monotonic()
            if now - polled < (_POLL if failure is None else _GRACE):
                continue
            if failure is not None:
                self._break(failure)
            if polled == start:
                self._notices.wait_in(self._steps)
            polled = now
            # A rank may have ended after its part of the step, which then still ends in time.
            failure = self._find_failure(in_step=True)
            if failure is None and self.limit and now - start > self.limit:
                absent = self._notices.absent(self._steps)
                self._break(
                    BootstrapError(
                        f"rank {self.rank}: ranks {absent or 'unknown'} did not join this"
                        f" collective within {self.limit:g} s (timeout=, ULTRAEP_TIMEOUT); expected"
                        " every rank. Look for an earlier error there, or raise the limit",
                        failed_rank=absent[0] if len(absent) == 1 else -1,
                    )
                )

    def _diagnose(self, error: RuntimeError) -> NoReturn:
        """Raise an error that names the rank by which the process group failed."""
        end = time.monotonic() + _GRACE
        while (failure := self._find_failure(in_step=True)) is None and time.monotonic() < end:
            time.sleep(0.01)
        if failure is not None:
            # Let all others see which rank was first, in case this process ends by the error.
            time.sleep(3 * _POLL)
        if failure is None and self._cause is not None:
            failure = self._cause  # the peers are stuck in what this rank failed in
        if failure is None:
            text = str(error).splitlines()[0]
            absent = [r for r in range(self.num_ranks) if not self._notices.has_come(r)]
            who = (
                f"; not in new_group: ranks {absent}"
                if absent and self._notices.store is not None
                else ""
            )
            failure = BootstrapError(
                f"rank {self.rank}: the process group could not connect; {IFNAME} ({text})"
                if any(sign in text for sign in _UNCONNECTED)
                else f"rank {self.rank}: the process group failed; has a rank left it?{who}"
                f" ({text})",
                failed_rank=absent[0] if who and len(absent) == 1 else -1,
            )
        if failure is not self._cause:
            failure.__cause__ = error
        self._break(failure)

    def _break(self, failure: BootstrapError) -> NoReturn:
        """End all steps, on this rank and on the peers."""
        self._broken = failure
        self._open = False
        rank = self.rank if failure.failed_rank < 0 else failure.failed_rank
        self._notices.tell(rank, str(failure).rpartition(" failed: ")[2], stuck=True)
        raise failure

    def _find_failure(self, *, in_step: bool) -> BootstrapError | None:
        """Return why a wait for the peers cannot end: a rank died or reported a failure; else None.

        ``in_step``: ignore failed ranks that are alive, which report the failure in a step.
        """
        if self._end is None:
            self._end = self._notices.failure(stuck=True)
        found = self._end
        if found is None and not in_step:
            found = self._notices.failure(stuck=False)
        for rank, process in self._notices.processes() if found is None else ():
            if process.has_ended():
                found = self._end = rank, f"its process (pid {process.pid}) has ended"
                break
        if found is None:
            return None
        return self._blame(*found)

    def _blame(self, rank: int, text: str) -> BootstrapError:
        return BootstrapError(
            f"rank {self.rank}: cannot continue, because rank {rank} failed: {text}",
            failed_rank=rank,
        )

    def raise_failure(self) -> None:
        """Raise if a rank is known to have failed or died; for waits between two steps.

        Raises:
            EchoError: names the rank.
        """
        failure = self._find_failure(in_step=False)
        if failure is not None:
            raise EchoError(str(failure), failed_rank=failure.failed_rank)

    def gather_ints(self, *values: int, least: int = 0, most: int = 2**31 - 1) -> list[list[int]]:
        """All-gather integers, the same number from each rank; return them by rank.

        Raises:
            BootstrapError: a rank left, or sent a value below ``least`` or above ``most``.
        """
        rows: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for start in range(0, len(values), MAX_VALUES):
            part = values[start : start + MAX_VALUES]
            for rank, hello in enumerate(self.exchange(Hello(values=part))):
                rows[rank].extend(hello.values)
                bad = [value for value in hello.values if not least <= value <= most]
                if bad or len(hello.values) != len(part):
                    raise BootstrapError(
                        f"rank {self.rank}: rank {rank} sent {bad or hello.values}; expected"
                        f" {len(part)} values from {least} to {most}. Call new_group on every rank"
                        " at the same point",
                        failed_rank=rank,
                    )
        return rows

    def exchange(self, hello: Hello, error: Exception | None = None) -> list[Hello]:
        """All-gather one record per rank; return them by rank.

        Args:
            hello: this rank's record.
            error: why this rank cannot continue; all ranks then raise.

        Raises:
            BootstrapError: a rank failed, left the process group, or sent something else.
        """
        if error is not None:
            if self._broken is not None:
                raise error
            text = str(error) or type(error).__name__
            echo = isinstance(error, EchoError)
            self._cause = error if isinstance(error, BootstrapError) and not echo else None
            hello = replace(hello, error=text, failed=True, echo=echo)
            # Peers may be waiting for this rank's connection instead of for this step.
            self._notices.tell(self.rank, text, stuck=False)
        data = bytes(self.gather(self._record(hello)).numpy())
        size = _RECORD.size
        hellos = [
            Hello.unpack(data[r * size : (r + 1) * size], r, self.num_ranks)
            for r in range(self.num_ranks)
        ]
        self._notices.learn(
            Process(peer.boot, peer.pid_namespace, peer.pid, peer.start) for peer in hellos
        )
        failed = [rank for rank, peer in enumerate(hellos) if peer.failed]
        if not failed:
            return hellos
        self._open = False  # all ranks know of the failure
        if error is not None and not hello.echo:
            raise error
        first = next((rank for rank in failed if not hellos[rank].echo), None)
        if first is not None:
            raise self._blame(first, hellos[first].error) from error
        if isinstance(error, EchoError):
            raise BootstrapError(str(error), failed_rank=error.failed_rank) from error
        raise self._blame(failed[0], hellos[failed[0]].error)

    def begin(self, error: Exception | None) -> None:
        """Begin steps outside of a creation, or tell the peers that begin them why not."""
        with self.making():
            if error is not None:
                raise error
            self.agree(None, last=True)

    def agree(self, error: Exception | None, *, last: bool = False) -> None:
        """Return if no rank has an error; else raise this rank's own error, or the first peer's.

        Args:
            error: this rank's error, or None.
            last: this is the last step of the creation: the group exists once it has ended.

        Raises:
            BootstrapError: a peer failed.
        """
        if last and self._depth <= 1:
            self._open = False
        self.exchange(Hello(), error)


def check_same_arguments(hellos: list[Hello]) -> None:
    """Raise BootstrapError on every rank if a rank passed other arguments."""
    for rank, hello in enumerate(hellos):
        if hello.digest != hellos[0].digest:
            raise BootstrapError(
                f"rank {rank} called new_group with other arguments than rank 0; num_experts,"
                " slots_per_rank, home, domains, expert, tile_bytes, check, engine,"
                " fabric and allow_cross_domain must be equal on every rank"
            )
