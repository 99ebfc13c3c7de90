"""Meeting the peers: fixed-size byte records over a process group. Nothing is pickled.

Making a group is a row of steps, each a collective of the process group. A rank that fails between
two of them says so in its record of the next, and so all ranks raise at the same step, and the
process group can be used again. A rank that dies, or cannot take part in the next step, is known
from its process or from a notice, and nobody waits for it until the process group's timeout. Only
what the backend does before it returns a step's work is not watched: NCCL's setting up of its
communicator, in the first collective of a process group, waits for all ranks by NCCL's own rules.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ultraep_comm.errors import BootstrapError
from ultraep_comm.system import Process, undocumented

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
        return undocumented(dist.distributed_c10d, "_get_process_group_store")(group)
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

    def leave(self) -> None:
        """Keep neither the process group nor its store: nothing is told any more."""
        self._store = None
        del self._group

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


MAGIC = b"UEPCOMM1"
VERSION = 2
DEFAULT_TIMEOUT = 1800.0
MOST_COST = 2**53
MAX_VALUES = 128
_FAILED, _ECHO = 1, 2
# magic, version, flags, rank, number of ranks, digest, machine and its length, token, address, pid
# with its namespace, boot and start, cost, text and its length, the step's values and their number
_RECORD = struct.Struct(f"<8sIIii Q 32sI 16s 16s iQ16sQ 5q {MAX_TEXT}sI {8 * MAX_VALUES}sI")
_LOOK = 0.1  # seconds between two looks at the ranks' processes and notices
_GRACE = 0.5  # seconds in which a step may still end, or a death be seen, once a rank has gone


class EchoError(BootstrapError):
    """What a rank sees of another rank's failure: that one's own error says more."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What every rank tells every other before a group exists.

    Attributes:
        digest: 64 bits over everything that must be equal on all ranks.
        machine: names the machine and network namespace: peers with equal values can connect.
        token: random, proves a connection to be from this rank of this group.
        address: random, where this rank listens.
        pid: process id, 0: not told. It and the next three are filled in by a meeting.
        pid_namespace: in which it counts.
        boot: names the boot of the machine.
        start: when the process began, in clock ticks since the boot.
        cost: the cost model's constants, used from rank 0.
        values: of a step that exchanges numbers, at most MAX_VALUES.
        error: why this rank cannot take part, shortened; empty: it can.
        failed: the making ends with this error, for all.
        echo: the error is what this rank saw of another's.
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
        """Read a peer's record, field by field.

        Raises:
            BootstrapError: it is not one of this version, or not of this rank.
        """
        if len(data) != _RECORD.size or data[:8] != MAGIC:
            raise BootstrapError(
                f"rank {rank} sent no record of ultraep_comm; call new_group on every rank at the"
                " same point, with no other collective of the process group between"
            )
        _, version, flags, own_rank, ranks, digest, machine, machine_bytes, *rest = _RECORD.unpack(
            data
        )
        if version != VERSION:
            raise BootstrapError(
                f"rank {rank} sent record version {version}, this rank has {VERSION}; install the"
                " same version of ultraep_comm everywhere"
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
                f"rank {rank} sent a record with a bad {wrong[0]}; expected that of rank {rank} of"
                f" {num_ranks}. Call new_group on every rank at the same point"
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


class Meeting:
    """The caller's process group, used to exchange records."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise BootstrapError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group"
                " first, or use new_loopback_groups for ranks in one process"
            )
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup):
            raise BootstrapError(
                f"rank {dist.get_rank()} is not a member of the process group;"
                " call new_group on its members only"
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        self._process = this_process()
        self._notices = Notices(group, self.rank, self._process)
        self._broken: BootstrapError | None = None  # the process group takes no more steps
        self._end: tuple[int, str] | None = None  # the first that was seen to end; others follow
        self._depth = 0  # of makings
        self._open = False  # the peers are still to take a step with this rank
        self._left: object = None  # the step in which this rank has said that it failed

    @property
    def timeout(self) -> float:
        """Return the process group's timeout in seconds."""
        try:
            backend = undocumented(self.group, "_get_backend")(self._device)
            value = undocumented(backend.options, "_timeout")
        except (AttributeError, RuntimeError):
            return DEFAULT_TIMEOUT
        return value.total_seconds() if isinstance(value, timedelta) else DEFAULT_TIMEOUT

    def leave(self) -> None:
        """Let go of the process group: its threads end when the caller destroys it."""
        # In a making the peers are still to be told why this rank fails.
        if self._depth > 0 or not hasattr(self, "group"):
            return
        self._broken = BootstrapError(f"rank {self.rank}: the group is closed")
        self._left = None
        self._notices.leave()
        del self.group

    # ---- steps ----------------------------------------------------------------------------

    @contextmanager
    def making(self) -> Iterator[None]:
        """Surround a row of steps: an exception that ends it here, Ctrl-C too, is told to all."""
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
        """Tell the peers of a failure that they do not know of, without waiting for them."""
        if not self._open or self._broken is not None:
            return
        self._open = False
        text = str(error) or type(error).__name__
        try:
            record = self._record(Hello(error=text, failed=True))
            # They find it in their next step, be it now or later; this rank is not there any more.
            self._left = self._start(record)
        except RuntimeError:  # the process group has failed, which its other ranks see too
            pass
        self._notices.tell(self.rank, text, stuck=False)

    def _record(self, hello: Hello) -> torch.Tensor:
        mine = self._process
        if mine is not None:
            hello = replace(
                hello,
                pid=mine.pid,
                pid_namespace=mine.namespace,
                boot=mine.boot,
                start=mine.start,
            )
        return torch.frombuffer(bytearray(hello.pack(self.rank, self.num_ranks)), dtype=torch.uint8)

    def _start(self, mine: torch.Tensor) -> tuple[Any, torch.Tensor]:
        mine = mine.to(self._device)
        everybody = torch.empty(
            (self.num_ranks, *mine.shape), dtype=mine.dtype, device=self._device
        )
        return dist.all_gather(list(everybody), mine, group=self.group, async_op=True), everybody

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Give this rank's tensor to all and return everybody's ``[G, *shape]``, on the CPU.

        Raises:
            BootstrapError: a rank left the process group, or failed before it came here.
        """
        if self._broken is not None:
            raise self._broken
        try:
            work, everybody = self._start(mine)
            self._await(work)
            work.wait()
        except BootstrapError:
            raise
        except RuntimeError as error:
            self._diagnose(error)
        return everybody.cpu()

    def _await(self, work: Any) -> None:
        """Return when a step has ended, or raise once it is known that it never will."""
        pause, looked = 2e-5, time.monotonic()
        failure: BootstrapError | None = None
        while not work.is_completed():
            time.sleep(pause)
            pause = min(1.5 * pause, 0.01)
            now = time.monotonic()
            if now - looked < (_LOOK if failure is None else _GRACE):
                continue
            if failure is not None:
                self._break(failure)
            looked = now
            # A rank may have ended after it did its part: then the step ends in a moment.
            failure = self._find_failure(in_step=True)

    def _diagnose(self, error: RuntimeError) -> NoReturn:
        """Say which rank the process group failed for."""
        end = time.monotonic() + _GRACE
        while (failure := self._find_failure(in_step=True)) is None and time.monotonic() < end:
            time.sleep(0.01)
        if failure is not None:
            # If this process ends of it, all others have seen who was the first.
            time.sleep(3 * _LOOK)
        if failure is None:
            absent = [r for r in range(self.num_ranks) if not self._notices.has_come(r)]
            who = f"; not seen here: ranks {absent}" if absent and self._notices.works else ""
            failure = BootstrapError(
                f"rank {self.rank}: the process group failed; has a rank left it?{who}"
                f" ({str(error).splitlines()[0]})",
                failed_rank=absent[0] if who and len(absent) == 1 else -1,
            )
        failure.__cause__ = error
        self._break(failure)

    def _break(self, failure: BootstrapError) -> NoReturn:
        """End all steps, here and at the peers."""
        self._broken = failure
        self._open = False
        rank = self.rank if failure.failed_rank < 0 else failure.failed_rank
        self._notices.tell(rank, str(failure).rpartition(" failed: ")[2], stuck=True)
        raise failure

    def _find_failure(self, *, in_step: bool) -> BootstrapError | None:
        """Return why a wait for the peers is in vain: a rank has died, or told that it failed.

        None: nothing is known. ``in_step``: a rank that failed and lives takes its part in the step
        after this one, and says so there.
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
            f"rank {self.rank}: no group was made, because rank {rank} failed: {text}",
            failed_rank=rank,
        )

    def raise_failure(self) -> None:
        """Raise if a rank is known to have failed or died: for waits between two steps.

        Raises:
            EchoError: as the text says.
        """
        failure = self._find_failure(in_step=False)
        if failure is not None:
            raise EchoError(str(failure), failed_rank=failure.failed_rank)

    def gather_ints(self, *values: int, least: int = 0, most: int = 2**31 - 1) -> list[list[int]]:
        """Give integers to all and return everybody's, by rank: as many from each.

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
        """Give this rank's record to all and return everybody's, by rank.

        Args:
            hello: the record.
            error: why this rank cannot go on; then all raise.

        Raises:
            BootstrapError: a rank has failed, or left the process group, or sent something else.
        """
        if error is not None:
            if self._broken is not None:
                raise error
            text = str(error) or type(error).__name__
            echo = isinstance(error, EchoError)
            hello = replace(hello, error=text, failed=True, echo=echo)
            # Peers that wait for this rank between two steps, at their connections, hear it now.
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
        self._open = False  # all know
        if error is not None and not hello.echo:
            raise error
        first = next((rank for rank in failed if not hellos[rank].echo), None)
        if first is not None:
            raise self._blame(first, hellos[first].error) from error
        if isinstance(error, EchoError):
            raise BootstrapError(str(error), failed_rank=error.failed_rank) from error
        raise self._blame(failed[0], hellos[failed[0]].error)

    def agree(self, error: Exception | None, *, last: bool = False) -> None:
        """Return if no rank has an error; else raise on all: its own, or the first peer's.

        Args:
            error: this rank's, or None.
            last: no step of this making follows: the group exists once this one has ended.

        Raises:
            BootstrapError: a peer could not take part.
        """
        if last and self._depth <= 1:
            self._open = False
        self.exchange(Hello(), error)


def check_same_arguments(hellos: list[Hello]) -> None:
    """Raise BootstrapError on every rank if one has called with other arguments."""
    for rank, hello in enumerate(hellos):
        if hello.digest != hellos[0].digest:
            raise BootstrapError(
                f"rank {rank} called new_group with other arguments than rank 0: num_experts,"
                " slots_per_rank, home, domains, expert, tile_bytes, check, engine,"
                " fabric and allow_cross_domain must be equal on every rank"
            )
