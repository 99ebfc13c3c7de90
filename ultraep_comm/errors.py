"""Typed errors. Each names the value, the rank, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ultraep_comm import _core


class UltraEPError(RuntimeError):
    """Base class of every error that the library raises on purpose."""


class _AttributesError(Exception):
    # Not of every error: torch.compile cannot trace an error with a constructor.
    def __init__(self, *message: object, **attributes: object) -> None:
        # Needs no attributes: unpickling passes the message alone, then restores the others.
        super().__init__(*message)
        self.__dict__.update(attributes)


class InvalidArgumentError(UltraEPError, ValueError):
    """An argument is invalid, whatever other ranks pass."""


class InvalidWeightsError(InvalidArgumentError):
    """Weights do not match the group's expert, or gradients its slot gradients.

    Name, count, shape, dtype, device or layout; or the slots have no gradients.
    """


class InvalidPlanError(InvalidArgumentError):
    """A plan breaks a rule: expert range, replica at home, duplicate, domain, quotas or shapes."""


class InvalidLoadError(InvalidArgumentError):
    """Loads, routed ids, maps or probabilities are out of range, misshapen or not the plan's."""


class PlanHandleError(_AttributesError, UltraEPError, ValueError):
    """A saved plan's handle was used after its plan was freed, or with another group.

    Also raised if a CUDA graph replay saved to a handle whose plan was still in use.

    Attributes:
        rank: the rank that raises.
        layer: the handle's layer.
        microbatch: the handle's microbatch.
        generation: the handle's sequence number among the plans saved by its group.
    """

    rank: int
    layer: int
    microbatch: int
    generation: int


class GroupBusyError(_AttributesError, UltraEPError):
    """A group that should be idle has saved plans in use, or unfinished calls.

    Attributes:
        rank: the rank that raises.
        live: layer and microbatch of each saved plan in use; empty if a call is unfinished.
    """

    rank: int
    live: list[tuple[int, int]]


class RecordingError(UltraEPError, ValueError):
    """A file is not a recording of a group's calls, or recordings do not belong together."""


class UnsupportedError(UltraEPError):
    """The request is legal but this machine, fabric or build cannot do it."""


class BootstrapError(_AttributesError, UltraEPError):
    """A group could not be created: ranks disagree, a rank left, or a connection failed.

    Attributes:
        failed_rank: the rank that failed, or whose process has ended; -1 if unknown.
    """

    failed_rank: int = -1


class OutOfSharedMemoryError(BootstrapError, MemoryError):
    """A rank's slots and flags do not fit in memory."""


class DeviceError(UltraEPError):
    """The CUDA driver rejected a call, or a kernel failed with a CUDA error."""


class GroupClosedError(UltraEPError):
    """The group is closed, or failed in an earlier call and accepts no more."""


class TransferError(_AttributesError, UltraEPError):
    """A call on the group failed. Filled slots are undefined; create a new group.

    Main weights may be changed at once: a peer that reads them discards what it has read. A peer
    that is in the middle of the call may still write to this rank's slots, until it raises or ends.

    Attributes:
        rank: the rank that raises.
        peer: the rank it waited for or disagrees with; -1 if none.
        root: the end of the chain of waits, as far as ranks published theirs; -1 if unknown.
        epoch: number of the failed call on this group.
        states: the last known state of every rank ``[G]``, by rank; empty if none was read.
    """

    rank: int = -1
    peer: int = -1
    root: int = -1
    epoch: int = 0
    states: tuple[RankState, ...] = ()


class PlanMismatchError(TransferError):
    """Ranks made different calls at the same epoch: plan, mode, operation or order differ."""


class PeerRejectedError(TransferError):
    """A peer rejected its own input and did not take part in the call."""


class PeerGoneError(TransferError, ConnectionError):
    """A peer's process ended, or the peer closed its group, before the call was complete."""


class TransferAbortedError(TransferError):
    """Another rank failed first, perhaps as it waited for this one; or an abort here."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A wait for a peer timed out; or ``work.wait(timeout)`` did, and the call continues."""


class CorruptSlotError(TransferError):
    """Check mode: after a transfer, a slot or a main weight does not hold the expected bytes.

    Attributes:
        expert: the expert; -1 for a slot that the plan leaves empty.
        slot: the slot of this rank; -1 if this rank's main weights changed during the call.
        segment: the segment's name.
        offset: the first bad byte in the segment's bytes of one expert.
        found: that byte's value.
        expected: its value at the home before the call; for bytes that the call does not transfer,
            its value in this rank's slot before the call.
        source_changed: main weights changed during the call, so the transfer is not at fault.
    """

    expert: int
    slot: int
    segment: str
    offset: int
    found: int
    expected: int
    source_changed: bool


_MAX_LINES = 8


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The last known state of a rank.

    Attributes:
        rank: the rank.
        epoch: the last call it was seen in; 0: none, or unknown.
        state: in words, such as "in call 7", "not yet in call 7 (last seen in call 6)", "process
            ended (last seen in call 6)", "closed after call 6" or "unknown".
        failed_epoch: the call in which it reported a failure; 0: none.
        waited_for: the rank it was waiting for when it failed; -1: none.
        aborted_by: the rank whose failure ended its call; -1: none.
        gone: its process ended without closing the group, or closed it after a failure.
    """

    rank: int
    epoch: int = 0
    state: str = "unknown"
    failed_epoch: int = 0
    waited_for: int = -1
    aborted_by: int = -1
    gone: bool = False


def read_states(peers: Sequence[_core.PeerState], epoch: int | None) -> tuple[RankState, ...]:
    """Return the states of all ranks, relative to call ``epoch`` unless it is None."""
    return tuple(_read(rank, record, epoch) for rank, record in enumerate(peers))


def _read(rank: int, peer: _core.PeerState, call: int | None) -> RankState:
    kind, seen, failed = peer.kind, peer.epoch, peer.failed_epoch
    if not peer.reachable:
        return RankState(rank=rank, state="unknown (out of reach)")
    # Kinds are compared by name, so that this module need not import the core.
    closed = seen > 0 and kind.name == "CLOSED"
    epoch = seen - 1 if closed else seen  # closing takes the epoch after the last call
    state = _place(kind, epoch, call)
    # A rank that closes publishes it first, unless the group failed.
    left = peer.gone and not closed
    if left and not failed:
        last = f"last seen in call {epoch}" if seen else "before its first call"
        state = f"process ended ({last})"
    if failed and kind.name != "REJECTED":
        where = "" if failed in (call, epoch) else f" in call {failed}"
        if peer.aborted_by >= 0:
            why = f": aborted by rank {peer.aborted_by}"
        elif peer.waited_for >= 0:
            why = f": waited for rank {peer.waited_for}"
        else:
            why = " by itself"
        state = f"{state}, failed{where}{why}{', then left' if left else ''}"
    return RankState(
        rank=rank,
        epoch=epoch,
        state=state,
        failed_epoch=failed,
        waited_for=peer.waited_for if failed else -1,
        aborted_by=peer.aborted_by if failed else -1,
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
    """Return states for an engine that cannot read them: all but ``known`` are unknown."""
    return tuple(RankState(rank=r, state=known.get(r, "unknown")) for r in range(num_ranks))


def describe_states(states: Sequence[RankState]) -> str:
    """Return at most eight lines of text; ranks in the same state share one."""
    groups: dict[str, list[int]] = {}
    for state in states:
        groups.setdefault(state.state, []).append(state.rank)
    if len(groups) > _MAX_LINES:  # drop the reasons of failure, which `states` still has
        groups = {}
        for state in states:
            place = state.state.split(", failed")[0]
            text = f"{place}, failed" if state.failed_epoch and place != state.state else place
            groups.setdefault(text, []).append(state.rank)
    lines = [f"  {name_ranks(ranks)}: {text}" for text, ranks in groups.items()]
    if len(lines) > _MAX_LINES:
        rest = sum(len(ranks) for ranks in list(groups.values())[_MAX_LINES - 1 :])
        lines[_MAX_LINES - 1 :] = [f"  {rest} more ranks: see the error's `states`"]
    return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type's name."""
    return (str(error) or type(error).__name__).splitlines()[0]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5" for ascending ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
