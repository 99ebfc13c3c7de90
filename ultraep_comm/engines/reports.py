"""Typed errors from an engine's report of a failed call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ultraep_comm import _core
from ultraep_comm.errors import (
    CorruptSlotError,
    InvalidLoadError,
    InvalidPlanError,
    InvalidWeightsError,
    PeerGoneError,
    PeerRejectedError,
    PlanMismatchError,
    RankState,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
    UltraEPError,
    describe_states,
    read_states,
    unread_states,
)
from ultraep_comm.plan.topology import Topology

Fault, PlanFault, DamageKind = _core.Fault, _core.PlanFault, _core.DamageKind


def error_from(
    report: _core.Report, rank: int, operation: str, states: tuple[RankState, ...] = ()
) -> TransferError:
    """Return the error for a failed ``operation`` on ``rank``; ``states``: of all ranks."""
    root = report.root
    peer = report.aborter if report.aborter >= 0 else report.peer
    prefix = f"rank {rank}: {operation} (call {report.epoch} on this group) "
    undefined = "Filled slots are"
    if operation.startswith("reduce_expert_grads"):
        undefined = "Slot gradients and the main gradients of replicated experts are"
    suffix = f". {undefined} undefined; close the group and create a new one"
    if report.detail:
        suffix = f" (the backend says: {report.detail}){suffix}"
    tail = f"{suffix}. Last known states:\n{describe_states(states)}" if states else suffix
    places: dict[str, Any] = {"rank": rank, "peer": peer, "root": root}
    places |= {"epoch": report.epoch, "states": states}
    waited = f"`{report.flag.name.lower()}` from rank {report.peer}"
    if report.expert >= 0:
        waited += f" for expert {report.expert}"
    if report.piece >= 0:
        waited += f", piece {report.piece}"
    waited += f" (saw epoch {report.seen}, expected {report.expected})"
    match report.fault:
        case Fault.MISMATCH:
            return PlanMismatchError(
                f"{prefix}disagrees with rank {peer}, which made another call at this point:"
                " another operation, layer, microbatch, plan, mode, segment selection or order of"
                f" calls. Make the same calls with the same plan on every rank{suffix}",
                **places,
            )
        case Fault.REJECTED:
            return PeerRejectedError(
                f"{prefix}ended because rank {root} rejected its own input; its error says why"
                f"{suffix}",
                **(places | {"peer": root}),
            )
        case Fault.CLOSED:
            return PeerGoneError(
                f"{prefix}waited for {waited}, but that rank has closed its group. Close groups"
                f" only after the same number of calls on every rank{tail}",
                **places,
            )
        case Fault.GONE:
            return PeerGoneError(
                f"{prefix}waited for {waited}, but that rank's process has ended"
                f"{', or closed its group' if report.detail else ''}; see its log{tail}",
                **places,
            )
        case Fault.ABORTED:
            first = peer if root < 0 else root
            if first == rank and report.aborter not in (rank, -1):
                return TransferAbortedError(
                    f"{prefix}ended because this rank came too late, or was stuck: rank {peer}, or"
                    " the rank that told it, had waited for it until the timeout. Look for what"
                    f" kept this rank, or raise timeout= in new_group{tail}",
                    **places,
                )
            if first in (rank, -1):
                return TransferAbortedError(f"{prefix}was aborted on this rank{tail}", **places)
            via = "" if peer in (first, -1) else f", as rank {peer} reported"
            return TransferAbortedError(
                f"{prefix}ended because rank {first} failed first{via}; its error says why{tail}",
                **places,
            )
        case Fault.TIMEOUT:
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


def damage_error(
    report: _core.Report,
    rank: int,
    operation: str,
    names: Sequence[str],
    states: tuple[RankState, ...],
) -> CorruptSlotError:
    """Return the error for damage found by ``operation``; ``names``: of the group's segments."""
    damage = report.damage
    kind, home, expert, slot = damage.kind, damage.home, damage.expert, damage.slot
    byte = f"byte {damage.offset} of segment {names[damage.segment]!r}"
    values = f"is 0x{damage.found:02x}, expected 0x{damage.expected:02x}"
    prefix = f"rank {rank}: {operation} (call {report.epoch} on this group), checked: "
    suffix = ". Filled slots are undefined; close the group and create a new one"
    if kind is DamageKind.SOURCE:
        text = (
            f"this rank's main weights of expert {expert} changed during the call, from {byte} on"
            f" ({values} as before the call). Change weights only after wait()"
        )
    elif kind is DamageKind.UNTOUCHED:
        held = f"slot {slot}, which the plan leaves empty" if expert < 0 else f"slot {slot}"
        text = (
            f"{byte} of {held} {values}: it was written to, though the call does not transfer it."
            " Has other code written to the slot during the call?"
        )
    elif kind is DamageKind.RESIDENT:
        text = (
            f"{byte} of expert {expert}, which slot {slot} holds since an earlier call, {values}"
            f" from its home, rank {home}. Have main weights changed since? Then call"
            " bank.invalidate() first, or pass version="
        )
    elif damage.source_changed:
        text = (
            f"{byte} of expert {expert} in slot {slot} {values}, because rank {home}, its home,"
            " changed its main weights during the call. Change weights only after wait()"
        )
    else:
        text = (
            f"{byte} of expert {expert} in slot {slot} {values} from its home, rank {home}. Has"
            " other code written to the slot during the call? If not, please report a bug"
        )
    return CorruptSlotError(
        prefix + text + suffix,
        rank=rank,
        peer=rank if kind is DamageKind.SOURCE else home,
        root=rank,
        epoch=report.epoch,
        states=states,
        expert=expert,
        slot=slot,
        segment=names[damage.segment],
        offset=damage.offset,
        found=damage.found,
        expected=damage.expected,
        source_changed=damage.source_changed,
    )


DIVERGED = -(1 << 31)  # overwrites the experts of a plan that a device found to differ
_PLAN_FAULTS = {
    PlanFault.OUT_OF_RANGE: "expected an expert in [0, {num_experts}) or -1 for an empty slot",
    PlanFault.ON_HOME: "which is at home on that rank; expected a rank other than its home",
    PlanFault.DUPLICATE: "which that rank already holds; expected at most one instance on a rank",
    PlanFault.OUT_OF_DOMAIN: "which is at home in another domain; place it inside that domain, or"
    " pass allow_cross_domain=True",
}


def bad_id_error(
    rank: int, position: int, value: int, num_experts: int, routing: str = "topk_ids"
) -> InvalidLoadError:
    """Return the error for an out-of-range id at a flat position of the argument ``routing``."""
    return InvalidLoadError(
        f"rank {rank}: {routing} has the id {value} at position {position}; expected"
        f" [0, {num_experts}), or -1 for padding"
    )


def bad_count_error(rank: int, expert: int, value: int) -> InvalidLoadError:
    """Return the error for an impossible number of tokens."""
    return InvalidLoadError(
        f"rank {rank}: counts[{expert}] is {value}; expected a number of tokens, 0 to 2**31 - 1"
    )


def name_call(error: Exception, operation: str) -> None:
    """Append the operation to an error's text."""
    if isinstance(error, UltraEPError) and error.args:
        error.args = (f"{error.args[0]} (in {operation})", *error.args[1:])


def placement_error(
    rank: int, fault: _core.PlanFault, place: tuple[int, int], expert: int, num_experts: int
) -> InvalidPlanError:
    """Return the error for an illegal replica at ``place``, a rank and its slot."""
    text = _PLAN_FAULTS[fault].format(num_experts=num_experts)
    if expert == DIVERGED:
        return InvalidPlanError(
            f"rank {rank}: two passes of a layer shared slots and had different plans: the"
            " recomputed forward pass routed differently, or passes overlap. Save the router's ids,"
            " or keep the router and the plan out of what is recomputed"
        )
    return InvalidPlanError(
        f"rank {rank}: slot {place[1]} of rank {place[0]} holds expert {expert}: {text}"
    )


def _refusal_error(
    report: _core.Report, rank: int, topology: Topology, names: Sequence[str]
) -> UltraEPError | None:
    """Return the error for a call that this rank's device rejected; None: it did not."""
    reason = report.seen
    if report.bad_id is None or report.fault is not Fault.REJECTED or report.root != rank:
        return None
    position, value = report.bad_id
    if position >= 0:
        return bad_id_error(rank, position, value, topology.num_experts)
    if position < -1:
        return bad_count_error(rank, -2 - position, value)
    if reason == 0:
        return None
    if reason == _core.Refusal.HOME.value:
        return InvalidPlanError(
            f"rank {rank}: the plan's home map is not the group's, from expert {report.expert} on;"
            " pass home= to both"
        )
    if reason == _core.Refusal.WEIGHTS.value:
        return InvalidWeightsError(
            f"rank {rank}: the table of bound weights has no address of segment"
            f" {names[report.piece]!r} of expert {report.expert}, which the plan replicates; call"
            " bound.update(weights) first"
        )
    place = divmod(report.piece, topology.slots_per_rank)
    return placement_error(rank, PlanFault(reason), place, report.expert, topology.num_experts)


def other_home(rank: int) -> InvalidPlanError:
    """Return the error for a plan with another home map."""
    return InvalidPlanError(
        f"rank {rank}: the plan's home map is not the group's; pass home= to both"
    )


def raise_fault(status: _core.RerouteStatus, routing: str, rank: int, num_experts: int) -> None:
    """Raise the error for an invalid plan, or for the invalid argument named ``routing``."""
    faults = _core.RerouteFault
    if status.fault is faults.NONE:
        return
    if status.fault is faults.ID_OUT_OF_RANGE:
        raise bad_id_error(rank, status.position, status.value, num_experts, routing)
    if status.fault is faults.COUNT_MISMATCH:
        raise InvalidLoadError(
            f"rank {rank}: {routing} has expert {status.expert} {status.counted} times, but the"
            f" plan's load has {status.expected}; reroute what gather_load counted"
        )
    if status.fault is faults.QUOTA_MISMATCH:
        raise InvalidPlanError(
            f"rank {rank}: the quotas of expert {status.expert} sum to {status.counted}; expected"
            f" its load, {status.expected}"
        )
    if status.fault is faults.OTHER_HOME:
        raise other_home(rank)
    if status.fault is faults.BAD_SLOT:
        raise InvalidPlanError(
            f"rank {rank}: slot_expert has {status.value} at flat index {status.position};"
            " expected -1 or an expert without another instance on that rank"
        )
    raise InvalidPlanError(
        f"rank {rank}: a load or quota of expert {status.expert} is {status.value}; expected at"
        " least 0, and a sum below 2**31"
    )


def failure_of(
    report: _core.Report,
    operation: str,
    rank: int,
    topology: Topology,
    names: Sequence[str],
) -> UltraEPError:
    """Return the error of a group's first call that failed; ``names``: of its segments."""
    refused = _refusal_error(report, rank, topology, names)
    if refused is not None:
        name_call(refused, operation)
        return refused
    if report.peers is not None:
        states = read_states(report.peers, report.epoch)
    else:
        known = {rank: f"failed in call {report.epoch}"}
        if report.aborter >= 0 and report.aborter != rank:
            known[report.aborter] = "failed, and told this rank"
        elif report.peer >= 0 and report.peer != rank:
            known[report.peer] = f"waited for by rank {rank}"
        states = unread_states(topology.num_ranks, known)
    if report.fault is Fault.DAMAGED:
        return damage_error(report, rank, operation, names, states)
    return error_from(report, rank, operation, states)
