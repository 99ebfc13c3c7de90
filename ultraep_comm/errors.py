"""Typed errors. Each names the value, the rank, what was expected and what to do."""

from __future__ import annotations


class UltraEPError(RuntimeError):
    """Base class of every error that the library raises on purpose."""


class InvalidArgumentError(UltraEPError, ValueError):
    """An argument is wrong in itself, whatever other ranks do."""


class InvalidWeightsError(InvalidArgumentError):
    """Weights do not match the group's expert: name, count, shape, dtype, device or layout."""


class InvalidGradientsError(InvalidArgumentError):
    """Gradients do not match the group's slot gradients, or slots hold none."""


class InvalidPlanError(InvalidArgumentError):
    """A plan breaks a rule: range, own home, duplicate, domain, quotas or shapes."""


class InvalidLoadError(InvalidArgumentError):
    """Loads, or routed ids, maps or probabilities: out of range, misshapen, or not the plan's."""


class PlanHandleError(UltraEPError, ValueError):
    """A handle of a saved plan was used after its end, or with another group than its own.

    Or a replay of a CUDA graph saved to a handle whose plan was still in use.

    Attributes:
        rank: the rank that raises.
        layer: the handle's layer.
        microbatch: the handle's microbatch.
        generation: the handle's number among the plans that its group has saved.
    """

    def __init__(
        self, message: str, *, rank: int, layer: int, microbatch: int, generation: int
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.layer = layer
        self.microbatch = microbatch
        self.generation = generation


class GroupBusyError(UltraEPError):
    """A group that was to be idle has saved plans in use, or calls that have not finished.

    Attributes:
        rank: the rank that raises.
        live: layer and microbatch of each saved plan in use; empty: it is a call.
    """

    def __init__(self, message: str, *, rank: int, live: list[tuple[int, int]]) -> None:
        super().__init__(message)
        self.rank = rank
        self.live = live


class RecordingError(UltraEPError, ValueError):
    """A file is no recording of a group's calls, or recordings do not belong together."""


class UnsupportedError(UltraEPError):
    """The request is legal but this machine, fabric or build cannot do it."""


class CalibrationError(UltraEPError, ValueError):
    """The file of measured costs cannot be read, is damaged, or is of another machine."""


class BootstrapError(UltraEPError):
    """A group could not be made: ranks disagree, a rank left, or a connection failed.

    Attributes:
        failed_rank: the rank that failed, or whose process has ended; -1: not known.
    """

    def __init__(self, message: str, *, failed_rank: int = -1) -> None:
        super().__init__(message)
        self.failed_rank = failed_rank


class OutOfSharedMemoryError(BootstrapError, MemoryError):
    """There is not enough memory for a rank's slots and flags."""


class DeviceError(UltraEPError):
    """The CUDA driver refused a call, or a kernel ended with an error that is not ours."""


class GroupClosedError(UltraEPError):
    """The group was closed, or failed earlier and takes no more calls."""


class TransferError(UltraEPError):
    """A call on the group failed. Filled slots are undefined; make a new group.

    Attributes:
        rank: the rank that raises.
        peer: the rank it waited for or disagrees with; -1 if none.
        root: the end of the chain of waits, as far as ranks have published theirs; -1 unknown.
        epoch: number of the failed call on this group.
    """

    def __init__(
        self, message: str, *, rank: int = -1, peer: int = -1, root: int = -1, epoch: int = 0
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.root = root
        self.epoch = epoch


class PlanMismatchError(TransferError):
    """Ranks made different calls at the same epoch: another plan, mode, operation or order."""


class PeerRejectedError(TransferError):
    """A peer rejected its own input and does not take part."""


class PeerGoneError(TransferError, ConnectionError):
    """A peer's process ended, or it closed its group, while it was still needed."""


class TransferAbortedError(TransferError):
    """A peer failed first and told this rank, or the group was aborted here."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A bounded wait for a peer expired."""


# Short names, as in `except ultraep_comm.errors.PlanMismatch`.
PlanMismatch = PlanMismatchError
TransferTimeout = TransferTimeoutError
