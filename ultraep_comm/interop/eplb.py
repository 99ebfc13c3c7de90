"""EPLB: rows of experts by rank, which move homes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ultraep_comm.errors import InvalidPlanError
from ultraep_comm.interop.tables import Tokens, make_plan, read_homes, read_rows
from ultraep_comm.plan.certificate import read_load
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import IntsLike


def from_eplb(
    physical_to_logical: IntsLike,
    *,
    num_ranks: int,
    num_experts: int,
    home: IntsLike | None = None,
    load: torch.Tensor | None = None,
    merge: bool = False,
    slots_per_rank: int | None = None,
) -> Plan:
    """Make a plan of EPLB's placement (github.com/deepseek-ai/EPLB; vLLM and SGLang use the same).

    Every expert needs a row on its home: the first one is the main instance, all other rows of a
    rank are its slots, in their order. EPLB moves homes, so a contiguous ``home`` seldom does:
    :func:`home_from_eplb` finds one for ``new_group`` and for this call.

    Args:
        physical_to_logical: integers ``[P]``, one layer of ``physical_to_logical_map``. Rank r has
            rows ``r * P / G`` to ``(r + 1) * P / G - 1``; -1: unused.
        num_ranks: G.
        num_experts: E.
        home: integers ``[E]``; None: contiguous, and the first E % G ranks have one more.
        load: integers ``[E]``, or ``[G, E]`` by source rank to have a plan that can be rerouted.
            EPLB deals an expert's tokens out to its rows in turn: each gets an even share, and the
            first ones what is left over. None: no quotas.
        merge: an expert with several rows on a rank gets one instance there, with the tokens of
            all of them; the other rows become empty slots. False: such a plan raises.
        slots_per_rank: the group's S; None: as many as the placement has.

    Raises:
        InvalidPlanError: an expert is out of range, has no row, none on its home, or two on a rank
            without ``merge``; rows do not divide by ranks, or do not fit into the slots; or as in
            :meth:`Plan.from_slots`.
        InvalidLoadError: as in :func:`ultraep_comm.verify_plan`.
    """
    num_ranks, num_experts, homes = read_homes(num_ranks, num_experts, home)
    rows, device = read_rows(physical_to_logical, num_ranks, num_experts)
    per_rank, rows_of = len(rows) // num_ranks, _rows_of(rows, num_experts)
    for expert, own in enumerate(rows_of):
        ranks = [row // per_rank for row in own]
        if homes[expert] not in ranks:
            raise InvalidPlanError(
                f"expert {expert} has no row on its home, rank {homes[expert]}: its rows are {own},"
                f" on ranks {ranks}. The placement moves it: pass home=home_from_eplb(...), here"
                " and to new_group"
            )
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    first: dict[tuple[int, int], int] = {}
    for row, expert in enumerate(rows):
        rank = row // per_rank
        again = expert >= 0 and first.setdefault((rank, expert), row) != row
        if again and not merge:
            raise InvalidPlanError(
                f"expert {expert} is twice on rank {rank}, in rows {first[rank, expert]} and {row};"
                " expected one instance of an expert on a rank. Pass merge=True to have one, with"
                " the tokens of both"
            )
        if again or expert < 0 or homes[expert] != rank:
            slots[rank].append(-1 if again else expert)
    by_source, tokens = None, None
    if load is not None:
        given = read_load(load, num_ranks, num_experts)
        by_source = torch.from_numpy(given) if given.ndim == 2 else None
        tokens = _even_shares(rows, per_rank, given.reshape(-1, num_experts).sum(axis=0).tolist())
    return make_plan(
        slots,
        homes,
        tokens,
        load=by_source,
        slots_per_rank=slots_per_rank,
        advice="have EPLB place fewer redundant experts",
        device=device,
    )


def home_from_eplb(
    physical_to_logical: IntsLike, *, num_ranks: int, num_experts: int
) -> torch.Tensor:
    """Return int32 ``[E]``: homes on which EPLB's placement has a row of every expert.

    The largest number of local experts on a rank is the lowest that the placement allows. That may
    be more than E / G: EPLB puts many cold experts on one rank, and hot ones twice. If no rank
    needs more than E / G rounded up, none has fewer than E / G rounded down where that is possible.
    Contiguous homes are tried first. Homes may differ between layers; a group has one home map.

    Args:
        physical_to_logical: as in :func:`from_eplb`.
        num_ranks: G.
        num_experts: E.

    Raises:
        InvalidPlanError: an expert is out of range or has no row; or rows do not divide by ranks.
    """
    num_ranks, num_experts, contiguous = read_homes(num_ranks, num_experts)
    rows, _ = read_rows(physical_to_logical, num_ranks, num_experts)
    per_rank = len(rows) // num_ranks
    ranks_of = [
        list(dict.fromkeys(row // per_rank for row in own)) for own in _rows_of(rows, num_experts)
    ]
    home = [-1] * num_experts
    local: list[set[int]] = [set() for _ in range(num_ranks)]
    # Raise the capacity step by step: a path never takes a local expert from a rank for good.
    for capacity in range(num_experts // num_ranks, per_rank + 1):
        for expert, rank in enumerate(contiguous):
            if home[expert] < 0 and rank in ranks_of[expert] and len(local[rank]) < capacity:
                home[expert] = rank
                local[rank].add(expert)
        homeless = [expert for expert in range(num_experts) if home[expert] < 0]
        found = [_find_home(expert, ranks_of, home, local, capacity) for expert in homeless]
        if all(found):
            break  # per_rank always suffices: every expert has a row
    return torch.tensor(home, dtype=torch.int32, device="cpu")


def _find_home(
    expert: int,
    ranks_of: Sequence[Sequence[int]],
    home: list[int],
    local: Sequence[set[int]],
    capacity: int,
) -> bool:
    """Find a home for an expert by an augmenting path, along which other experts change homes."""
    mover_to: dict[int, int] = {}  # by rank reached: the expert that would move there
    queue = [expert]
    for mover in queue:
        for rank in [r for r in ranks_of[mover] if r not in mover_to]:
            mover_to[rank] = mover
            if len(local[rank]) == capacity:
                queue.extend(sorted(local[rank]))
                continue
            free = rank
            while free >= 0:
                moved = mover_to[free]
                local[free].add(moved)
                free, home[moved] = home[moved], free
                if free >= 0:
                    local[free].remove(moved)
            return True
    return False


def _rows_of(rows: Sequence[int], num_experts: int) -> list[list[int]]:
    """Return the rows of each expert; every expert has one."""
    held = set(rows)
    missing = next((expert for expert in range(num_experts) if expert not in held), None)
    if missing is not None:
        raise InvalidPlanError(
            f"expert {missing} has no row; expected each of {num_experts} experts in at least one"
            f" of the {len(rows)} rows. Is num_experts that of the placement?"
        )
    found: list[list[int]] = [[] for _ in range(num_experts)]
    for row, expert in enumerate(rows):
        if expert >= 0:
            found[expert].append(row)
    return found


def _even_shares(rows: Sequence[int], per_rank: int, totals: Sequence[int]) -> Tokens:
    """Deal each expert's tokens out to its rows in turn."""
    dealt, num_rows = Counter[int](), Counter(rows)
    tokens = Counter[tuple[int, int]]()
    for row, expert in enumerate(rows):
        if expert >= 0:
            share, left = divmod(totals[expert], num_rows[expert])
            tokens[row // per_rank, expert] += share + (dealt[expert] < left)
            dealt[expert] += 1
    return tokens
