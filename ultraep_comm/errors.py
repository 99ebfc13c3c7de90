"""Typed errors. Each names the value, the rank, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ultraep_comm import _core


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
        states: what was last known of every rank ``[G]``, by rank; empty if nothing was read.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        peer: int = -1,
        root: int = -1,
        epoch: int = 0,
        states: tuple[RankState, ...] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.root = root
        self.epoch = epoch
        self.states = states


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


class CorruptSlotError(TransferError):
    """Check mode: after a transfer a slot, or a main weight, was not what it should be.

    Attributes:
        expert: the expert; -1: of a slot that was to stay empty.
        slot: the slot of this rank; -1: main weights of this rank changed while the call ran.
        segment: the segment's name.
        offset: of the first bad byte in the segment's bytes of one expert.
        found: that byte's value.
        expected: the value that the home had before the call, or, of what the call had nothing for,
            this rank's slot.
        source_changed: main weights changed while the call ran: the transfer is not to blame.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        peer: int,
        epoch: int,
        states: tuple[RankState, ...],
        expert: int,
        slot: int,
        segment: str,
        offset: int,
        found: int,
        expected: int,
        source_changed: bool,
    ) -> None:
        super().__init__(message, rank=rank, peer=peer, root=rank, epoch=epoch, states=states)
        self.expert = expert
        self.slot = slot
        self.segment = segment
        self.offset = offset
        self.found = found
        self.expected = expected
        self.source_changed = source_changed


# Short names, as in `except ultraep_comm.errors.PlanMismatch`.
PlanMismatch = PlanMismatchError
TransferTimeout = TransferTimeoutError
# What an engine has read of a rank: kind of record, its epoch (0: none), epoch of its abort (0:
# none), the rank it waited for, the rank that told it (-1: none), its process is gone, reached.
Words: TypeAlias = "tuple[_core.RecordKind, int, int, int, int, bool, bool]"
_MOST_LINES = 8


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What was last known of a rank.

    Attributes:
        rank: the rank.
        epoch: the last call that it was seen in; 0: none, or unknown.
        state: in words, such as "in call 7", "not yet in call 7 (last seen in call 6)", "process
            ended (last seen in call 6)", "closed after call 6" or "unknown".
        failed_epoch: the call that it says it failed in; 0: it has not said so.
        waited_for: the rank that it then waited for; -1: none.
        told_by: the rank whose failure made it fail; -1: none.
        gone: its process has ended without closing the group, or has closed it after a failure.
    """

    rank: int
    epoch: int = 0
    state: str = "unknown"
    failed_epoch: int = 0
    waited_for: int = -1
    told_by: int = -1
    gone: bool = False


def read_states(words: Sequence[Words], epoch: int | None) -> tuple[RankState, ...]:
    """Return the states of all ranks, in words about call ``epoch``; None: about no call."""
    return tuple(_read(rank, said, epoch) for rank, said in enumerate(words))


def _read(rank: int, words: Words, call: int | None) -> RankState:
    kind, seen, failed, waited_for, told_by, gone, reached = words  # names: no import of the core
    if not reached:
        return RankState(rank=rank, state="unknown (out of reach)")
    closed = seen > 0 and kind.name == "CLOSED"
    epoch = seen - 1 if closed else seen  # a farewell is numbered one beyond the last call
    state = _place(kind, epoch, call)
    left = gone and not closed  # whoever closes says so first, unless the group has failed
    if left and not failed:
        last = f"last seen in call {epoch}" if seen else "before its first call"
        state = f"process ended ({last})"
    if failed and kind.name != "REJECTED":
        where = "" if failed in (call, epoch) else f" in call {failed}"
        if told_by >= 0:
            why = f": told by rank {told_by}"
        else:
            why = f": waited for rank {waited_for}" if waited_for >= 0 else " by itself"
        state = f"{state}, failed{where}{why}{', then left' if left else ''}"
    return RankState(
        rank=rank,
        epoch=epoch,
        state=state,
        failed_epoch=failed,
        waited_for=waited_for if failed else -1,
        told_by=told_by if failed else -1,
        gone=left,
    )


def _place(kind: _core.RecordKind, epoch: int, call: int | None) -> str:
    if kind.name == "CLOSED":
        return f"closed after call {epoch}" if epoch else "closed before its first call"
    if kind.name == "REJECTED":
        return f"rejected its own input in call {epoch}"
    if call is None:
        return f"last seen in call {epoch}" if epoch else "not seen in a call yet"
    if epoch < call:
        seen = f"last seen in call {epoch}" if epoch else "not seen in a call yet"
        return f"not yet in call {call} ({seen})"
    return f"in call {call}" if epoch == call else f"finished call {call}, in call {epoch}"


def unread_states(num_ranks: int, known: dict[int, str]) -> tuple[RankState, ...]:
    """Return states where an engine cannot read what ranks say: all but ``known`` are unknown."""
    return tuple(RankState(rank=r, state=known.get(r, "unknown")) for r in range(num_ranks))


def describe_states(states: Sequence[RankState]) -> str:
    """Return a few lines for any number of ranks: those in the same state share one."""
    groups: dict[str, list[int]] = {}
    for state in states:
        groups.setdefault(state.state, []).append(state.rank)
    if len(groups) > _MOST_LINES:  # why each has failed is in `states`
        groups = {}
        for state in states:
            place = state.state.split(", failed")[0]
            text = f"{place}, failed" if state.failed_epoch and place != state.state else place
            groups.setdefault(text, []).append(state.rank)
    lines = [f"  {name_ranks(ranks)}: {text}" for text, ranks in groups.items()]
    if len(lines) > _MOST_LINES:
        rest = sum(len(ranks) for ranks in list(groups.values())[_MOST_LINES - 1 :])
        lines[_MOST_LINES - 1 :] = [f"  {rest} more ranks: see the error's `states`"]
    return "\n".join(lines)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 5" of ascending numbers."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
