"""The recorder: a ring of a group's last calls, with their plans and times."""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.schedule import MODES
from ultraep_comm.plan.topology import Topology, as_int
from ultraep_comm.recording.file import (
    CALL,
    OPERATIONS,
    Known,
    Recording,
    physical_bytes,
    save_recording,
)

if TYPE_CHECKING:
    pass


CAPACITY = 1024
MAX_CAPACITY = 1 << 24
_PLACEMENT, _QUOTAS, _LOAD = (int(known) for known in Known)
_OPERATION = {name: i for i, name in enumerate(OPERATIONS)}


class Recorder:
    """A group's last calls. Made by ``group.start_recording``; a context manager that stops it.

    The ring is allocated at the start; a call copies its line and its plan into it. What is
    recorded of a call:

    - its operation, epoch, mode, the layer and microbatch of a handle, and bytes of an expert;
    - when the caller entered it, and when this rank's part of it was finished: the host engine
      notes that, also of calls that nobody has waited for. The CUDA engine's calls belong to
      streams, and have no end here;
    - which call was the first that failed: it and those after it have no end;
    - of a plan on the CPU its slots, quotas and load; of one on a device nothing, because reading
      it would synchronise.

    Calls that are captured into a CUDA graph are left out: the host does not see their replays. So
    are calls that an engine never got: rejected ones, and loads that the process group exchanges.
    One thread at a time may make calls, dump and stop, as with the group itself.
    """

    def __init__(
        self,
        *,
        rank: int,
        topology: Topology,
        capacity: int,
        loads: bool,
        finished_at: Callable[[int], int],
        on_stop: Callable[[], None],
        failed_epoch: Callable[[], int] = lambda: 0,
        run: str = "",
    ) -> None:
        count = as_int(capacity, "capacity")
        check_capacity(count, topology, loads=loads, what=f"rank {rank}: capacity")
        t = topology
        slots, experts = (count, t.num_ranks, t.slots_per_rank), t.num_experts
        # Filled, so that the memory is there before the first call.
        self._calls = np.full(count, -1, CALL)
        self._epochs, self._ends = self._calls["epoch"], self._calls["end_ns"]  # views
        self._slot_expert = np.full(slots, -1, np.int32)
        self._slot_quota = np.full(slots, 0, np.int32)
        self._home_quota = np.full((count, experts), 0, np.int32)
        self._load = np.full((count if loads else 0, t.num_ranks, experts), 0, np.int32)
        self._rank = rank
        self._topology = topology
        self._capacity = count
        self._loads = loads
        self._count = 0
        self._begin = 0
        self._unfinished: deque[tuple[int, int]] = deque()  # place in the ring, epoch
        self._finished_at = finished_at
        self._failed_epoch = failed_epoch
        self._run = run
        self._on_stop: Callable[[], None] | None = on_stop
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    @property
    def num_calls(self) -> int:
        """Return how many calls were made since the start, also of those that the ring has lost."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Return the bytes of the ring."""
        arrays = (self._calls, self._slot_expert, self._slot_quota, self._home_quota, self._load)
        return sum(array.nbytes for array in arrays)

    # ---- what the group calls ---------------------------------------------------------------

    def enter(self) -> None:
        """Note the time at which the caller entered a call."""
        self._begin = time.monotonic_ns()

    def add(
        self, epoch: int, operation: str, mode: str, plan: Plan | None, tag: int, expert_bytes: int
    ) -> None:
        """Note a call that an engine has taken.

        Args:
            epoch: of the call.
            operation: begins with its name.
            mode: that was chosen; "" or "auto": not known.
            plan: that it was made by, on the CPU; None: there is none, or it is on a device.
            tag: of the handle that was given; 0: none.
            expert_bytes: that it moves for each replica.
        """
        self._collect()
        i = self._count % self._capacity
        self._count += 1
        known = 0
        if plan is not None:
            known = self._copy_plan(i, plan)
        elif self._count > self._capacity:
            self._forget_plan(i)
        self._calls[i] = (
            _OPERATION[operation.partition(" ")[0]],
            MODES.get(mode, -1),
            epoch,
            (tag >> 32) - 1,
            tag & 0xFFFFFFFF if tag else -1,
            self._begin,
            -1,
            expert_bytes,
            known,
        )
        self._unfinished.append((i, epoch))

    def _copy_plan(self, i: int, plan: Plan) -> int:
        known = _PLACEMENT
        self._slot_expert[i] = plan.slot_expert.numpy()
        if plan.slot_quota is not None and plan.home_quota is not None:
            known |= _QUOTAS
            self._slot_quota[i] = plan.slot_quota.numpy()
            self._home_quota[i] = plan.home_quota.numpy()
        else:
            self._slot_quota[i] = self._home_quota[i] = 0
        if self._loads:
            if plan.load is not None:
                known |= _LOAD
                self._load[i] = plan.load.numpy()
            else:
                self._load[i] = 0
        return known

    def _forget_plan(self, i: int) -> None:
        self._slot_expert[i] = -1
        self._slot_quota[i] = self._home_quota[i] = 0
        if self._loads:
            self._load[i] = 0

    def _collect(self) -> None:
        """Note the ends of calls that have finished. Often enough that the engine knows them."""
        while self._unfinished:
            i, epoch = self._unfinished[0]
            end = self._finished_at(epoch)
            if end:
                if self._epochs[i] == epoch:
                    self._ends[i] = end
            elif len(self._unfinished) <= 8:
                return  # it may be under way
            self._unfinished.popleft()

    # ---- what users call --------------------------------------------------------------------

    def recording(self) -> Recording:
        """Return a copy of what the ring holds, oldest call first."""
        self._collect()
        kept = min(self._count, self._capacity)
        order: NDArray[np.int64] = np.arange(self._count - kept, self._count) % self._capacity
        return Recording(
            source=f"rank {self._rank}",
            run=self._run,
            rank=self._rank,
            machine=_machine(),
            epoch_ns=self._epoch_ns,
            num_calls=self._count,
            failed_epoch=self._failed_epoch(),
            home=self._topology.home,
            domain=self._topology.domain,
            calls=self._calls[order],
            slot_expert=self._slot_expert[order],
            slot_quota=self._slot_quota[order],
            home_quota=self._home_quota[order],
            load=self._load[order] if self._loads else self._load,
        )

    def dump(self, path: str | Path) -> Path:
        """Write what the ring holds to a file; :func:`load_recording` reads it. Local.

        Args:
            path: ``{rank}`` in it stands for the rank. A file that is there is replaced.

        Returns:
            The path with the rank.

        Raises:
            OSError: the file cannot be written.
        """
        target = Path(str(path).replace("{rank}", str(self._rank)))
        save_recording(self.recording(), target)
        return target

    def stop(self) -> None:
        """Record no more. What is in the ring stays. Harmless if it has stopped."""
        if self._on_stop is not None:
            self._collect()
            self._on_stop()
            self._on_stop = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._on_stop is None else "recording"
        return f"Recorder(rank={self._rank}, {self._count} calls, {state})"


def check_capacity(capacity: int, topology: Topology, *, loads: bool, what: str) -> None:
    """Raise InvalidArgumentError for a ring of no calls, or of more than could be held."""
    if not 1 <= capacity <= MAX_CAPACITY:
        raise InvalidArgumentError(f"{what} is {capacity}; expected 1 to {MAX_CAPACITY} calls")
    t = topology
    numbers = 2 * t.num_ranks * t.slots_per_rank + t.num_experts
    numbers += t.num_ranks * t.num_experts if loads else 0
    num_bytes, most = capacity * (CALL.itemsize + 4 * numbers), physical_bytes() // 2
    if num_bytes > most:
        raise InvalidArgumentError(
            f"{what} is {capacity}, which takes {num_bytes} bytes; expected at most half of this"
            f" machine's memory, {most} bytes: fewer calls{', or loads=False' if loads else ''}"
        )


def new_run() -> bytes:
    """Return 16 bytes that name a group of a run: when it was made, and a random number."""
    return time.time_ns().to_bytes(8, "big") + secrets.token_bytes(8)


def name_run(run: bytes) -> str:
    """Return the name of such bytes: names sort by time."""
    seconds = int.from_bytes(run[:8], "big") // 10**9
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds)) + f"-{run[8:12].hex()}"


def _machine() -> str:
    """Name this boot of this machine: ranks where it is the same have one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename[:64]


def prepare_folder(folder: Path, capacity: int, topology: Topology) -> None:
    """Make the folder of recordings, before a group is made whose calls go there.

    Raises:
        InvalidArgumentError: it cannot be made or written to, or so many calls cannot be held.
    """
    check_capacity(capacity, topology, loads=True, what="ULTRAEP_RECORD_CALLS")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise InvalidArgumentError(
            f"ULTRAEP_RECORD is {folder}: {problem}; expected a folder for recordings"
        )


def dump_at_end(recorder: Recorder, path: Path, process: int) -> None:
    """Write a recording, unless this is a fork of the process that made it.

    A file that cannot be written is a warning: closing a group has worked all the same.
    """
    if os.getpid() != process:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorder.dump(path)
    except (OSError, MemoryError) as error:
        warnings.warn(f"the recording of a group is lost: {error}", stacklevel=3)
