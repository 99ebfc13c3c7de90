"""Session: the state that all calls on a group share, from creation to close."""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ultraep_comm import _core
from ultraep_comm.engines.base import Engine
from ultraep_comm.engines.options import Options
from ultraep_comm.engines.reports import failure_of
from ultraep_comm.errors import (
    GroupClosedError,
    InvalidArgumentError,
    PlanMismatchError,
    UltraEPError,
    UnsupportedError,
)
from ultraep_comm.fabrics import SharedRegion
from ultraep_comm.group.copies import Absent, Shared
from ultraep_comm.group.names import new_name
from ultraep_comm.group.saved_plans import PlanHandle, PlanStore
from ultraep_comm.plan.plan import Plan
from ultraep_comm.recording.recorder import Recorder
from ultraep_comm.system import watch_forks
from ultraep_comm.weights.binding import Binder, GradBinder

Held = deque[tuple[int, tuple[object, ...]]]
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Session(Shared):
    """One rank's state of a group, shared by ``Group`` and the calls.

    Attributes:
        name: the key by which operators find the group in this process.
        engine: executes calls, and has the group's memory.
        rank, topology: the engine's.
        segments: the tensors of an expert, by name.
        options: what the group was created with.
        device: where weights and slots are.
        num_local_experts: M.
        weights: binds main weights.
        grads: binds main gradients.
        plans: saved plans.
        filled_by: the plan or handle of the last transfer to each bank.
        recorder: records calls; None: recording is off.
        run: names this group in its recordings; the same on all ranks.
        on_close: called at the end of a close.
        state: "open", "closed" or "inherited".
        aborted: this rank itself aborted its calls, so close() does not raise their failure.
        first_error: the first error that this rank raised.
        process: id of the process that created the group.
    """

    def __init__(self, engine: Engine, options: Options) -> None:
        self.name = new_name()
        self.engine = engine
        self.rank = engine.rank
        self.topology = engine.topology
        self.options = options
        self.segments = dict(options.segments)
        self.device = engine.memory[0].local.device
        self.num_local_experts = engine.layout.num_local_experts[engine.rank]
        local_experts: dict[str, Any] = {
            "rank": self.rank,
            "num_local_experts": self.num_local_experts,
            "device": self.device,
            "put_addresses": engine.put_addresses,
        }
        self.weights = Binder(segments=self.segments, **local_experts)
        self.grads = GradBinder(segments=options.grads, **local_experts)
        self.plans = PlanStore(self.name, engine)
        self.filled_by: dict[int, Plan | PlanHandle] = {}
        self.recorder: Recorder | None = None
        self.run = ""
        self.on_close: Callable[[], object] | None = None
        self.state = "open"
        self.aborted = False
        self.first_error: Exception | None = None
        self.process = os.getpid()
        self._in_flight: Held = deque()
        self._captured: list[tuple[object, ...]] = []
        self._finalizer = weakref.finalize(self, _dispose, engine, self._in_flight, self.plans)
        watch_forks(self)
        _sessions.add(self)

    # ---- before a call --------------------------------------------------------------------

    def enter(self, operation: str) -> None:
        """Begin a collective call.

        Raises:
            GroupClosedError: the group is closed or failed earlier.
            UltraEPError: an earlier plan, reroute or save on the device found a fault. The peers'
                call fails too, as this rank does not join it.
        """
        if self.recorder is not None:
            self.recorder.enter()
        if not self.takes_calls:
            self.require_open(operation)
        if self.engine.raise_fault is None:
            return
        try:
            self.engine.raise_fault()
        except UltraEPError as error:
            self.reject(error)
            raise

    def require_open(self, operation: str) -> None:
        """Raise GroupClosedError unless the group takes calls."""
        if self.takes_calls:
            return
        self.require_own_process(operation)  # first: a forked child's engine may be deadlocked
        failed = self.engine.failed_epoch()
        reason = "is closed" if self.state == "closed" else f"failed in call {failed}"
        error = GroupClosedError(
            f"rank {self.rank}: {operation} on a group that {reason}; create a new group"
        )
        raise error from (self.first_error or self.failure(failed, "a call") if failed else None)

    def raise_fault(self, *, wait: bool = False) -> None:
        """Raise the error that an earlier launch found; see ``Engine.raise_fault``."""
        if self.engine.raise_fault is not None:
            self.engine.raise_fault(wait=wait)

    @property
    def takes_calls(self) -> bool:
        """Return whether the group is open, and no call is known to have failed."""
        return self.state == "open" and self.engine.failed_epoch() == 0

    def require_own_process(self, operation: str) -> None:
        """Raise GroupClosedError in a process that was forked from the group's."""
        if self.state == "inherited":
            raise GroupClosedError(
                f"rank {self.rank}: {operation} in process {os.getpid()}, on a group inherited from"
                f" process {self.process} by fork; create a new group here"
            )

    def refuse_capture(self, operation: str) -> None:
        """Raise UnsupportedError if the current stream is being captured into a CUDA graph."""
        if self.engine.is_capturing():
            raise UnsupportedError(
                f"rank {self.rank}: {operation} while the current stream is being captured into a"
                " CUDA graph; call it before or after the capture"
            )

    def add_main_weights(self, region: SharedRegion, offset: list[int]) -> None:
        """Let ``pull`` take main weights of a region; ``[segments]`` offsets, on every rank."""
        index = self.engine.add_region(region.bases, offset)
        self.weights.add_region([region.bases[self.rank] + at for at in offset], index)

    @contextmanager
    def allocating(self, *harmless: type[Exception]) -> Iterator[None]:
        """Let tensors of the group be made; abort it on failures except ``harmless`` ones."""
        try:
            with torch.inference_mode(False):  # as in new_group
                yield
        except harmless:
            raise
        except BaseException as error:  # Ctrl-C too
            if isinstance(error, Exception):
                self.first_error = error
            self.abort()  # peers may have the region that this rank lacks
            raise

    # ---- calls in flight ------------------------------------------------------------------

    def add_call(
        self,
        epoch: int,
        keep: tuple[object, ...],
        operation: str,
        mode: str = "",
        plan: Plan | None = None,
        tag: int = 0,
        expert_bytes: int = 0,
    ) -> None:
        """Keep ``keep`` alive until a submitted call has finished, and record the call.

        All but ``keep`` is for :meth:`Recorder.add`.
        """
        if epoch & _core.CUDA_CAPTURED:
            self._captured.append(keep)  # for replays, until the group is closed
            return
        if self.recorder is not None:
            self.recorder.add(epoch, operation, mode, plan, tag, expert_bytes)
        in_flight, engine = self._in_flight, self.engine
        in_flight.append((epoch, keep))  # before anything that may raise
        while in_flight and engine.failed_epoch() == 0 and engine.is_completed(in_flight[0][0]):
            in_flight.popleft()

    def explain(self, epoch: int, operation: str) -> UltraEPError:
        """Return the error of a call that failed, or did not run because an earlier one failed."""
        failed = self.engine.failed_epoch()
        if failed != 0 and failed < epoch and not epoch & _core.CUDA_CAPTURED:
            return GroupClosedError(
                f"rank {self.rank}: {operation} (call {epoch} on this group) did not run, because"
                f" call {failed} failed; create a new group"
            )
        report, names = self.engine.report(), tuple(self.segments)
        return failure_of(report, operation, self.rank, self.topology, names)

    def failure(self, epoch: int, operation: str) -> UltraEPError:
        """Return the error of :meth:`explain`, and remember the group's first one."""
        error = self.explain(epoch, operation)
        if not isinstance(error, GroupClosedError):
            self.first_error = self.first_error or error
        return error

    def reject(self, error: Exception) -> None:
        """Tell the peers that this rank's own input is bad, so that none waits for it.

        Does nothing during a capture, where no call runs.
        """
        if self.state == "open" and not self.engine.is_capturing():
            self.first_error = self.first_error or error
            self.engine.reject()

    @contextmanager
    def rejecting(self) -> Iterator[None]:
        """Enclose what a collective call of several does by itself; :meth:`reject` any error."""
        try:
            yield
        except Exception as error:  # of any type, also of the caller's own functions
            self.reject(error)
            raise

    def record_failure(self, error: BaseException) -> None:
        """Remember why submitting or waiting failed; after Ctrl-C, abort the group.

        The engine may have accepted the call before the signal came: nothing would keep the call's
        memory alive, and the peers would wait. During a capture no call runs.
        """
        if isinstance(error, Exception):
            if self.engine.failed_epoch() != 0:
                self.first_error = self.first_error or error
        elif not self.engine.is_capturing():
            self.abort()

    def fail(self, error: Exception) -> None:
        """Abort a group whose ranks may no longer be at the same call."""
        self.first_error = self.first_error or error
        self.engine.abort()

    def abort(self) -> None:
        """Fail the calls in flight; see ``Group.abort``."""
        if self.state == "open":
            self.aborted = True
            self.engine.abort()

    def start_recording(self, capacity: int, loads: bool) -> Recorder:
        """See ``Group.start_recording``."""
        if self.recorder is not None:
            raise InvalidArgumentError(
                f"rank {self.rank}: start_recording on a group that is being recorded already (by"
                " ULTRAEP_RECORD?); stop() that recorder first"
            )
        found = weakref.ref(self)  # a recorder may outlive its group

        def stop() -> None:
            if (alive := found()) is not None:
                alive.recorder = None

        self.recorder = Recorder(
            rank=self.rank,
            topology=self.topology,
            capacity=capacity,
            loads=loads,
            finished_at=self.engine.finished_at,
            moves=self.engine.slots_to_fill,
            on_stop=stop,
            failed_epoch=self.engine.failed_epoch,
            run=self.run,
        )
        return self.recorder

    # ---- the end --------------------------------------------------------------------------

    def end_with_process(self) -> None:
        """End a group that was not closed: calls that wait fail."""
        if self.on_close is not None:
            self.on_close()
        self._finalizer()

    def drop_engine(self) -> None:
        """Release all objects of the bindings.

        torch does not free the contexts of custom autograd functions, and all that these refer to,
        once the interpreter finalizes: the bindings would report leaks.
        """
        self.state = "closed"
        ended = Absent("the process is ending, and its groups are closed")
        self.engine = ended  # type: ignore[assignment]
        self.weights.put_addresses = self.grads.put_addresses = None  # bindings refer to these
        self.recorder = self.first_error = None  # a traceback refers to the engine
        self._captured.clear()

    def leave_to_parent(self) -> None:
        """Disable the group in a forked child. Called in the child."""
        if self.state == "open":
            self.state = "inherited"
        self._finalizer.detach()

    def close(self) -> None:
        """See ``Group.close``."""
        if self.state != "open":
            self.state = "closed"
            return
        self.refuse_capture("close()")
        self.state = "closed"
        engine = self.engine
        busy = self.plans.busy_error("the group was closed")
        try:
            engine.synchronize(engine.epoch)
        except BaseException:  # Ctrl-C while waiting for a peer
            engine.abort()
            raise
        finally:
            if self.recorder is not None:
                self.recorder.stop()
            peer = engine.close()
            engine.fabric.close()
            self.plans.close()
            self._in_flight.clear()
            self._captured.clear()
            self._finalizer.detach()
            if self.on_close is not None:
                self.on_close()  # last: it writes a file, and peers must not wait for that
        failed = engine.failed_epoch()
        if failed != 0 and self.first_error is None and not self.aborted:
            raise self.failure(failed, "a call that was not waited for")
        if peer >= 0:
            raise PlanMismatchError(
                f"rank {self.rank}: the last call of rank {peer} differs from this rank's, in which"
                " this rank had nothing to wait for. Make the same calls on every rank",
                rank=self.rank,
                peer=peer,
                epoch=engine.epoch,
            )
        if not self.aborted:
            self.raise_fault(wait=True)
            if busy is not None and failed == 0:
                raise busy


def _dispose(engine: Engine, held: Held, plans: PlanStore) -> None:
    """End a group that was not closed. Its memory outlives the calls, which write to it."""
    if not engine.is_completed(engine.epoch):
        engine.abort()  # no Work is left to wait for the call
    engine.close()
    engine.fabric.close()
    plans.close()
    held.clear()
    engine.memory.clear()


def _end_process() -> None:
    """End groups that were not closed, and wait for threads to return to the interpreter.

    A daemon thread may wait inside one of our calls, or a gloo thread may be about to release the
    tensors of the last collective. A thread that requests the GIL after finalization has begun
    aborts the process ("terminate called without an active exception"), hangs, or leaks everything
    that those tensors reference, such as an engine through an autograd graph.
    """
    sessions = list(_sessions)
    try:
        for session in sessions:
            session.end_with_process()
    finally:
        _core.drain_threads_at_exit(5.0)
        for session in sessions:
            session.drop_engine()


atexit.register(_end_process)
