"""Work: the handle of a submitted call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from ultraep_comm import _core
from ultraep_comm.engines.options import as_seconds
from ultraep_comm.errors import (
    InvalidArgumentError,
    TransferTimeoutError,
    UltraEPError,
    UnsupportedError,
)
from ultraep_comm.group.session import Session
from ultraep_comm.plan.topology import as_int


class Work:
    """A call on a group, like torch.distributed's ``Work``.

    When the call has finished, this rank's filled slots are complete, no peer reads its main
    weights any more, and its own sends are delivered: no barrier is needed before or after.

    If the call was captured into a CUDA graph, only :meth:`wait` can be used, in the capture.

    Attributes:
        mode: the chosen transfer mode; if the device chooses, the requested one.
        epoch: the call's number on its group; 0: it has completed in a compiled function.
    """

    def __init__(
        self,
        session: Session,
        epoch: int,
        operation: str,
        mode: str,
        filled: torch.Tensor | None = None,
    ) -> None:
        self.mode = mode
        self._filled = filled
        self._session = session
        self.epoch = epoch
        self._operation = operation

    def wait(
        self, timeout: timedelta | float | None = None, *, slots: Sequence[int] | None = None
    ) -> None:
        """Order everything that follows after the call, or after its filling of some slots.

        On the host and c10d engines this blocks until the call has finished. On the CUDA engine the
        current stream waits, not the host; a failure that is not known yet surfaces in
        :meth:`synchronize`, :meth:`exception` or the next call on the group. Only ranks that share
        a launch (``new_loopback_groups``) block until all of them have called.

        Args:
            timeout: where this blocks: at most so long, a timedelta or seconds; then the call
                continues, and can be waited for again. None or 0: as long as the call takes, which
                the group's ``timeout`` limits.
            slots: of this rank, of the plan's bank: wait until these may be read, while the call
                goes on. What they held before the call is there at once. None: the call has
                finished.

        Raises:
            TransferTimeoutError: the call has not finished within ``timeout``; or, as every other
                TransferError, it failed: the subclass and the text say how.
            InvalidArgumentError: the call does not fill such a slot; or a timeout out of range.
        """
        engine = self._session.engine
        wanted = None if slots is None else [self._filled_slot(slot) for slot in slots]
        if timeout is not None and (limit := as_seconds(timeout)) and engine.wait_blocks:
            self._poll(limit, wanted)
        if wanted is None:
            self._finish(engine.wait)
        else:
            self._finish(lambda epoch: engine.wait(epoch, wanted))

    def _poll(self, limit: float, slots: list[int] | None) -> None:
        """Return once the call has finished, or filled the slots; raise after ``limit`` seconds."""
        session, engine, epoch = self._session, self._session.engine, self.epoch
        session.require_own_process(f"waiting for a {self._operation}")
        end, pause = time.monotonic() + limit, 1e-5
        waits_for: Sequence[int | None] = [None] if slots is None else slots
        while not all(engine.is_completed(epoch, slot) for slot in waits_for):
            if time.monotonic() >= end:
                raise TransferTimeoutError(
                    f"rank {session.rank}: {self._operation} (call {epoch} on this group) has not"
                    f" finished within {limit:g} s, the timeout of this wait. The call continues:"
                    " wait again, or see group.health() for what it waits for",
                    rank=session.rank,
                    epoch=epoch,
                )
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def slot_ready(self, slot: int) -> bool:
        """Return whether a slot of this rank may be read, without blocking; as for :meth:`wait`.

        The CUDA engine says so once the whole call has finished.

        Raises:
            InvalidArgumentError: the call does not fill such a slot.
        """
        self._require_readable("slot_ready()")
        return self._session.engine.is_completed(self.epoch, self._filled_slot(slot))

    def _filled_slot(self, slot: int) -> int:
        """Return a slot that the call's plan has an expert in, on this rank."""
        rank, index = self._session.rank, as_int(slot, "slot")
        if self._filled is None:
            raise InvalidArgumentError(
                f"rank {rank}: slot {index} of a {self._operation}; expected a replicate_experts"
                " with a plan that the host knows: other calls are waited for as a whole"
            )
        experts = self._filled[rank].tolist()
        if not 0 <= index < len(experts) or experts[index] < 0:
            filled = [s for s, expert in enumerate(experts) if expert >= 0]
            raise InvalidArgumentError(
                f"rank {rank}: slot {index} of a {self._operation}, whose plan fills the slots"
                f" {filled} of this rank; expected one of them"
            )
        return index

    def synchronize(self) -> None:
        """Block until the call has finished.

        Raises:
            TransferError: the call failed; the subclass and the text say how.
        """
        self._require_readable("synchronize()")
        self._finish(self._session.engine.synchronize)

    def _require_readable(self, what: str) -> None:
        """Raise for a call of a graph, and in a forked child."""
        if self.epoch & _core.CUDA_CAPTURED:
            raise UnsupportedError(
                f"rank {self._session.rank}: {what} of a {self._operation} that is part of a CUDA"
                " graph and runs in every replay; synchronize with the stream of the replay. The"
                " next call on the group raises its failure"
            )
        self._session.require_own_process(f"{what} of a {self._operation}")

    def _finish(self, wait: Callable[[int], bool]) -> None:
        self._session.require_own_process(f"waiting for a {self._operation}")
        try:
            done = wait(self.epoch)
        except BaseException:
            self._session.aborted = True  # by Ctrl-C: close() must not raise the call's failure too
            raise
        if not done:
            raise self._session.failure(self.epoch, self._operation)

    def is_completed(self) -> bool:
        """Return whether the call has finished or failed, without blocking."""
        self._require_readable("is_completed()")
        return self._session.engine.is_completed(self.epoch)

    def exception(self) -> UltraEPError | None:
        """Return the error if the call failed, else None; does not wait for the call."""
        self._require_readable("exception()")
        failed = self._session.engine.failed_epoch()
        if failed == 0 or failed > self.epoch:
            return None
        return self._session.failure(self.epoch, self._operation)
