"""Work: the handle of a submitted call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ultraep_comm import _core
from ultraep_comm.engines.base import Engine
from ultraep_comm.errors import UltraEPError, UnsupportedError


class Submitter(Protocol):
    """The part of the session that a Work uses."""

    rank: int
    engine: Engine
    aborted: bool

    def failure(self, epoch: int, operation: str) -> UltraEPError:
        """Record and return the error of a failed call."""

    def require_own_process(self, operation: str) -> None:
        """Raise GroupClosedError in a forked child."""


class Work:
    """A call on a group, like torch.distributed's ``Work``.

    When the call has finished, this rank's filled slots are complete, no peer reads its main
    weights any more, and its own sends are delivered: no barrier is needed before or after.

    If the call was captured into a CUDA graph, only :meth:`wait` can be used, in the capture.

    Attributes:
        mode: the chosen transfer mode; if the device chooses, the requested one.
        epoch: the call's number on its group.
    """

    def __init__(self, session: Submitter, epoch: int, operation: str, mode: str) -> None:
        self.mode = mode
        self._session = session
        self.epoch = epoch
        self._operation = operation

    def wait(self) -> None:
        """Order everything that follows after the call.

        On the host engine this blocks until the call has finished. On the CUDA engine the current
        stream waits, not the host; a failure that is not known yet surfaces in
        :meth:`synchronize`, :meth:`exception` or the next call on the group. Only ranks that share
        a launch (``new_loopback_groups``) block until all of them have called.

        Raises:
            TransferError: the call failed; the subclass and the text say how.
        """
        self._finish(self._session.engine.wait)

    def synchronize(self) -> None:
        """Block until the call has finished.

        Raises:
            TransferError: the call failed; the subclass and the text say how.
        """
        self._refuse_captured("synchronize()")
        self._finish(self._session.engine.synchronize)

    def _refuse_captured(self, what: str) -> None:
        if self.epoch & _core.CUDA_CAPTURED:
            raise UnsupportedError(
                f"rank {self._session.rank}: {what} of a {self._operation} that is part of a CUDA"
                " graph and runs in every replay; synchronize with the stream of the replay. The"
                " next call on the group raises its failure"
            )

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
        self._refuse_captured("is_completed()")
        self._session.require_own_process(f"is_completed() of a {self._operation}")
        return self._session.engine.is_completed(self.epoch)

    def exception(self) -> UltraEPError | None:
        """Return the error if the call failed, else None; never blocks."""
        self._refuse_captured("exception()")
        self._session.require_own_process(f"exception() of a {self._operation}")
        failed = self._session.engine.failed_epoch()
        if failed == 0 or failed > self.epoch:
            return None
        return self._session.failure(self.epoch, self._operation)
