"""Work: the handle of a call that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ultraep_comm.errors import UltraEPError

if TYPE_CHECKING:
    from ultraep_comm.group import Group


class Work:
    """A call on a group, as torch.distributed's ``Work``.

    When it has finished, this rank's filled slots are complete, nobody reads its main weights any
    more, and its own sends are delivered: no barrier is needed before or after.

    Attributes:
        mode: the transfer mode that was chosen.
    """

    def __init__(self, group: Group, epoch: int, operation: str, mode: str) -> None:
        self.mode = mode
        self._group = group
        self._epoch = epoch
        self._operation = operation

    def wait(self) -> None:
        """Block until the call has finished.

        Raises:
            TransferError: it failed; the subclass and the text say how.
        """
        try:
            done = self._group._engine.wait(self._epoch)
        except BaseException:
            self._group._aborted = True  # Ctrl-C ended the call, and says so itself
            raise
        if not done:
            raise self._group._failure(self._epoch, self._operation)

    def synchronize(self) -> None:
        """Block until the call has finished: on the host engine the same as :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has finished or failed, without blocking."""
        return self._group._engine.is_completed(self._epoch)

    def exception(self) -> UltraEPError | None:
        """Return the error of a call that failed, else None; never blocks."""
        failed = self._group._engine.failed_epoch()
        if failed == 0 or failed > self._epoch:
            return None
        return self._group._failure(self._epoch, self._operation)
