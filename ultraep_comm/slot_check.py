"""Check mode: what a transfer is said to have done wrong."""

from __future__ import annotations

from collections.abc import Sequence

from ultraep_comm.errors import CorruptSlotError
from ultraep_comm.rank_states import RankState

DAMAGED = 8  # in the order of `enum class Fault` in src/core/protocol.hpp
_UNTOUCHED, _SOURCE = 2, 3  # `Damage::Kind` in src/host/slot_check.hpp

# Kind, home, expert, slot, segment, offset, value found, value expected, source changed.
Damage = tuple[int, int, int, int, int, int, int, int, bool]


def damage_error(
    damage: Damage,
    epoch: int,
    rank: int,
    operation: str,
    names: Sequence[str],
    states: tuple[RankState, ...],
) -> CorruptSlotError:
    """Return what ``operation`` on ``rank`` raises; ``names`` of the group's segments."""
    kind, home, expert, slot, segment, offset, found, expected, source_changed = damage
    byte = f"byte {offset} of segment {names[segment]!r}"
    values = f"is 0x{found:02x}, expected 0x{expected:02x}"
    prefix = f"rank {rank}: {operation} (call {epoch} on this group), checked: "
    suffix = ". Filled slots are undefined; close the group and make a new one"
    if kind == _SOURCE:
        text = (
            f"this rank's main weights of expert {expert} changed while the call ran, from {byte}"
            f" on ({values} as before the call). Change weights only after wait()"
        )
    elif kind == _UNTOUCHED:
        held = f"slot {slot}, which the plan leaves empty" if expert < 0 else f"slot {slot}"
        text = (
            f"{byte} of {held} {values}: the call does not transfer it, and it was written to. Has"
            " other code written to the slot while the call ran?"
        )
    elif source_changed:
        text = (
            f"{byte} of expert {expert} in slot {slot} {values}, because rank {home}, its home,"
            " changed its main weights while the call ran. Change weights only after wait()"
        )
    else:
        text = (
            f"{byte} of expert {expert} in slot {slot} {values} from its home, rank {home}. Has"
            " other code written to the slot while the call ran? If not, please report it"
        )
    return CorruptSlotError(
        prefix + text + suffix,
        rank=rank,
        peer=rank if kind == _SOURCE else home,
        epoch=epoch,
        states=states,
        expert=expert,
        slot=slot,
        segment=names[segment],
        offset=offset,
        found=found,
        expected=expected,
        source_changed=source_changed,
    )
