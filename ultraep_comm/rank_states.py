"""What was last known of each rank: in which call it was seen, and whether it failed or ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What an engine has read of a rank: kind of record, its epoch (0: none), epoch of its abort (0:
# none), the rank it waited for, the rank that told it (-1: none), its process is gone, reached.
Words = tuple[int, int, int, int, int, bool, bool]

_REJECTED, _CLOSED = 1, 2  # `enum class RecordKind` in src/core/protocol.hpp
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
    kind, seen, failed, waited_for, told_by, gone, reached = words
    if not reached:
        return RankState(rank=rank, state="unknown (out of reach)")
    closed = seen > 0 and kind == _CLOSED
    epoch = seen - 1 if closed else seen  # a farewell is numbered one beyond the last call
    state = _place(kind, epoch, call)
    left = gone and not closed  # whoever closes says so first, unless the group has failed
    if left and not failed:
        last = f"last seen in call {epoch}" if seen else "before its first call"
        state = f"process ended ({last})"
    if failed and kind != _REJECTED:
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


def _place(kind: int, epoch: int, call: int | None) -> str:
    if kind == _CLOSED:
        return f"closed after call {epoch}" if epoch else "closed before its first call"
    if kind == _REJECTED:
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
