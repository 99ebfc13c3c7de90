"""The recorder: a ring buffer of a group's last calls, with their plans and times."""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path

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
from ultraep_comm.system import boot_id

CAPACITY = 1024
MAX_CAPACITY = 1 << 24
_PLACEMENT, _QUOTAS, _LOAD = (int(known) for known in Known)
_OPERATION = {name: i for i, name in enumerate(OPERATIONS)}


class Recorder:
    """Records a group's last calls. Returned by ``group.start_recording``; a context manager.

    The ring is allocated at the start; each call copies its data and its plan into it:

    - operation, epoch, mode, layer and microbatch of a handle, and bytes of an expert;
    - when the caller entered the call, and when this rank's part of it finished, waited for or not.
      Calls of the CUDA engine are stream-ordered and have no end;
    - the first call that failed; it and later ones have no end;
    - slots, quotas and load of a plan on the CPU, and which slots the call moves (on the CUDA
      engine: which it was planned to). Plans on a device are not recorded, as reading them would
      synchronise.

    Calls captured into a CUDA graph are not recorded: the host does not see their replays. Neither
    are calls that do not reach the engine: rejected ones, and loads exchanged by the process group.
    Like the group, a recorder must not be used by two threads at the same time.
    """

    def __init__(
        self,
        *,
        rank: int,
        topology: Topology,
        capacity: int,
        loads: bool,
        finished_at: Callable[[int], int] | None,
        on_stop: Callable[[], None],
        moves: Callable[[], NDArray[np.bool_]] | None = None,
        failed_epoch: Callable[[], int] = lambda: 0,
        run: str = "",
    ) -> None:
        count = as_int(capacity, "capacity")
        check_capacity(count, topology, loads=loads, what=f"rank {rank}: capacity")
        t = topology
        slots, experts = (count, t.num_ranks, t.slots_per_rank), t.num_experts
        # Filled rather than empty: the first calls must not take page faults.
        self._calls = np.full(count, -1, CALL)
        self._epochs, self._ends = self._calls["epoch"], self._calls["end_ns"]  # views of the ring
        self._slot_expert = np.full(slots, -1, np.int32)
        self._kept = np.full(slots, False, np.bool_)
        self._slot_quota = np.full(slots, 0, np.int32)
        self._home_quota = np.full((count, experts), 0, np.int32)
        self._load = np.full((count if loads else 0, t.num_ranks, experts), 0, np.int32)
        self._rank = rank
        self._topology = topology
        self._capacity = count
        self._loads = loads
        self._count = 0
        self._begin = 0
        self._unfinished: deque[tuple[int, int]] = deque()  # index in the ring, epoch
        self._finished_at = finished_at
        self._moves = moves
        self._failed_epoch = failed_epoch
        self._run = run
        self._on_stop: Callable[[], None] | None = on_stop
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    @property
    def num_calls(self) -> int:
        """Return the number of calls since the start, overwritten ones included."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Return the bytes of the ring."""
        slots = (self._slot_expert, self._slot_quota, self._kept)
        arrays = (self._calls, *slots, self._home_quota, self._load)
        return sum(array.nbytes for array in arrays)

    # ---- what the group calls ---------------------------------------------------------------

    def enter(self) -> None:
        """Record the time at which the caller entered a call."""
        self._begin = time.monotonic_ns()

    def add(
        self, epoch: int, operation: str, mode: str, plan: Plan | None, tag: int, expert_bytes: int
    ) -> None:
        """Record a submitted call, and its plan if that is on the CPU.

        ``operation`` starts with the operation's name. Mode "" or "auto": not known; tag 0: no
        handle.
        """
        self._collect()
        i = self._count % self._capacity
        self._count += 1
        # In the first round of the ring there is nothing to clear.
        has_row = plan is not None or self._count > self._capacity
        known = self._copy_plan(i, plan) if has_row else 0
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

    def _copy_plan(self, i: int, plan: Plan | None) -> int:
        """Copy a plan into the ring, clear what it lacks, and return what is known of it."""
        known = 0
        if plan is None:
            self._slot_expert[i] = -1
        else:
            known |= _PLACEMENT
            self._slot_expert[i] = plan.slot_expert.numpy()
            moves = self._moves() if self._moves and plan.reuse else None
            if moves is None and plan.reuse and plan.slots_to_fill is not None:
                # As planned: the host does not know the call's own.
                moves = plan.slots_to_fill.numpy()
            self._kept[i] = False if moves is None else ~moves
        if plan is not None and plan.slot_quota is not None and plan.home_quota is not None:
            known |= _QUOTAS
            self._slot_quota[i] = plan.slot_quota.numpy()
            self._home_quota[i] = plan.home_quota.numpy()
        else:
            self._slot_quota[i] = self._home_quota[i] = 0
        if self._loads and plan is not None and plan.load is not None:
            known |= _LOAD
            self._load[i] = plan.load.numpy()
        elif self._loads:
            self._load[i] = 0
        return known

    def _collect(self) -> None:
        """Record the ends of finished calls, before the engine forgets them."""
        while self._unfinished:
            i, epoch = self._unfinished[0]
            end = self._finished_at(epoch) if self._finished_at else 0
            if end:
                if self._epochs[i] == epoch:
                    self._ends[i] = end
            elif len(self._unfinished) <= 8:
                return  # it may still be in flight
            self._unfinished.popleft()

    # ---- what users call --------------------------------------------------------------------

    def recording(self) -> Recording:
        """Return a copy of the ring, oldest call first."""
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
            moves=(self._slot_expert[order] >= 0) & ~self._kept[order],
            slot_quota=self._slot_quota[order],
            home_quota=self._home_quota[order],
            load=self._load[order] if self._loads else self._load,
        )

    def dump(self, path: str | Path) -> Path:
        """Write the ring to a file for :func:`load_recording`. Local.

        Args:
            path: ``{rank}`` in it stands for the rank. An existing file is replaced.

        Returns:
            The path with the rank.

        Raises:
            OSError: the file cannot be written.
        """
        target = Path(str(path).replace("{rank}", str(self._rank)))
        save_recording(self.recording(), target)
        return target

    def stop(self) -> None:
        """Stop recording. The ring keeps its contents. Stopping twice is harmless."""
        if self._on_stop is not None:
            self._collect()
            self._on_stop()
            self._on_stop = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._on_stop is None else "recording"
        return f"Recorder(rank={self._rank}, {self._count} calls, {state})"


def check_capacity(capacity: int, topology: Topology, *, loads: bool, what: str) -> None:
    """Raise InvalidArgumentError for a ring without calls, or larger than half of the memory."""
    if not 1 <= capacity <= MAX_CAPACITY:
        raise InvalidArgumentError(f"{what} is {capacity}; expected 1 to {MAX_CAPACITY} calls")
    t = topology
    slots = t.num_ranks * t.slots_per_rank
    numbers = 2 * slots + t.num_experts
    numbers += t.num_ranks * t.num_experts if loads else 0
    num_bytes = capacity * (CALL.itemsize + 4 * numbers + slots)
    max_bytes = physical_bytes() // 2
    if num_bytes > max_bytes:
        raise InvalidArgumentError(
            f"{what} is {capacity}, which takes {num_bytes} bytes; expected at most {max_bytes},"
            f" half of this machine's memory: fewer calls{', or loads=False' if loads else ''}"
        )


def new_run() -> str:
    """Return a new name for a group of a run; names sort by time."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + f"-{secrets.token_hex(4)}"


def _machine() -> str:
    """Return a name for this boot of this machine; ranks with the same share a monotonic clock."""
    return boot_id() or os.uname().nodename[:64]


def prepare_folder(folder: Path, capacity: int, topology: Topology) -> None:
    """Create the folder for recordings, before the group is created.

    Raises:
        InvalidArgumentError: the folder cannot be created or written to, or the capacity is out of
            range.
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
    """Write a recording, unless this is a forked child of the process that recorded it.

    If the file cannot be written, this only warns: the group has been closed.
    """
    if os.getpid() != process:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorder.dump(path)
    except (OSError, MemoryError) as error:
        warnings.warn(f"the recording of a group is lost: {error}", stacklevel=3)
