"""From an engine's report of a failed call to a typed error that says what to do."""

from __future__ import annotations

from typing import TypedDict

from ultraep_comm import _core
from ultraep_comm.errors import (
    PeerGoneError,
    PeerRejectedError,
    PlanMismatchError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
)
from ultraep_comm.rank_states import RankState, describe_states

# In the order of `enum class FlagKind` in src/core/protocol.hpp; the cases below of `enum class
# Fault`, from kMismatch on.
FLAGS = ("call", "open", "ready", "done", "pulled", "gathered", "summed", "consumed", "checked")


class _Places(TypedDict):
    rank: int
    peer: int
    root: int
    epoch: int
    states: tuple[RankState, ...]


def error_from(
    report: _core.Report, rank: int, operation: str, states: tuple[RankState, ...] = ()
) -> TransferError:
    """Return the error that ``operation`` on ``rank`` raises; ``states`` of all ranks by then."""
    root = report.root
    peer = report.aborter if report.aborter >= 0 else report.peer
    prefix = f"rank {rank}: {operation} (call {report.epoch} on this group) "
    undefined = "Filled slots are"
    if operation.startswith("reduce_expert_grads"):
        undefined = "Slot gradients and the main gradients of replicated experts are"
    suffix = f". {undefined} undefined; close the group and make a new one"
    tail = f"{suffix}. Last known states:\n{describe_states(states)}" if states else suffix
    places = _Places(rank=rank, peer=peer, root=root, epoch=report.epoch, states=states)
    waited = f"`{FLAGS[report.flag]}` from rank {report.peer}"
    if report.expert >= 0:
        waited += f" for expert {report.expert}"
    if report.piece >= 0:
        waited += f", piece {report.piece}"
    waited += f" (saw epoch {report.seen}, expected {report.expected})"
    match report.fault:
        case 1:
            return PlanMismatchError(
                f"{prefix}disagrees with rank {peer}, which made another call at this point:"
                " another operation, layer, microbatch, plan, mode, segment selection or order of"
                f" calls. Make the same calls with the same plan on every rank{suffix}",
                **places,
            )
        case 2:
            return PeerRejectedError(
                f"{prefix}ended because rank {root} rejected its own input; its error says why"
                f"{suffix}",
                **_Places(rank=rank, peer=root, root=root, epoch=report.epoch, states=states),
            )
        case 3:
            return PeerGoneError(
                f"{prefix}needed {waited}, but that rank has closed its group. Close groups only"
                f" after the same number of calls on every rank{tail}",
                **places,
            )
        case 4:
            return PeerGoneError(
                f"{prefix}needed {waited}, but that rank's process has ended; see its log{tail}",
                **places,
            )
        case 5:
            first = peer if root < 0 else root
            if first in (rank, -1):
                return TransferAbortedError(f"{prefix}was aborted on this rank{tail}", **places)
            via = "" if peer in (first, -1) else f", as rank {peer} told this one"
            return TransferAbortedError(
                f"{prefix}ended because rank {first} failed first{via}; its error says why{tail}",
                **places,
            )
        case 6:
            others = (
                "every rank of the plan had called"
                if report.all_called
                else "not every rank of the plan had called: is one stuck or on another code path"
            )
            chain = f"The chain of waits ends at rank {root}. " if root not in (peer, -1) else ""
            return TransferTimeoutError(
                f"{prefix}waited {report.seconds:.1f} s for {waited}; {others}. {chain}Look at rank"
                f" {root if root >= 0 else peer} first, or raise timeout= in new_group{tail}",
                **places,
            )
        case _:
            return TransferAbortedError(f"{prefix}was aborted on this rank{tail}", **places)
