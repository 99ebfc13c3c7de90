"""Other systems' plans, in their own output formats, as plans of this library.

Not imported by ``ultraep_comm``: ``from ultraep_comm import interop``. Each function takes what the
system's planner returns for one layer, and checks it: a plan that cannot be expressed raises, with
the expert, the rank and the reason. Inputs on a device are copied to the CPU, which synchronises;
the plan is on the device of the first argument. It has no domains: a group checks its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from ultraep_comm.errors import InvalidPlanError
from ultraep_comm.plan.plan import Plan, as_int_tensor
from ultraep_comm.plan.topology import MAX_COUNT, IntsLike, as_int, contiguous_home

__all__ = ["from_eplb", "from_llep", "from_moonep", "from_ultraep", "home_from_eplb"]

# Tokens that a rank computes of an expert, by (rank, expert). Python's integers do not overflow.
Tokens: TypeAlias = "Mapping[tuple[int, int], int]"


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
        home: integers ``[E]``; None: contiguous, as even as possible.
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
    """
    num_ranks, num_experts = _count(num_ranks, "num_ranks"), _count(num_experts, "num_experts")
    rows, device = _rows(physical_to_logical, num_ranks, num_experts)
    per_rank, rows_of = len(rows) // num_ranks, _rows_of(rows, num_experts)
    homes = _homes(home, num_ranks, num_experts)
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
        totals, by_source = _totals(load, num_ranks, num_experts)
        tokens = _even_shares(rows, per_rank, totals)
    return _plan(
        _fitted(slots, slots_per_rank, "have EPLB place fewer redundant experts"),
        homes,
        tokens,
        device,
        by_source,
    )


def home_from_eplb(
    physical_to_logical: IntsLike,
    *,
    num_ranks: int,
    num_experts: int,
    max_mains: int | None = None,
) -> torch.Tensor:
    """Return int32 ``[E]``: homes on which EPLB's placement has a row of every expert.

    The rank with most mains has as few as the placement allows. That may be more than E / G: EPLB
    puts many cold experts on one rank, and hot ones twice. If no rank needs more than E / G rounded
    up, none has fewer than E / G rounded down where that is possible. Contiguous homes are tried
    first. Homes may differ between layers, while a group has one home map.

    Args:
        physical_to_logical: as in :func:`from_eplb`.
        num_ranks: G.
        num_experts: E.
        max_mains: the most experts that may be at home on a rank; None: any number.

    Raises:
        InvalidPlanError: as in :func:`from_eplb`, or more than ``max_mains`` experts for each of
            some ranks have all their rows on these. The message names them.
    """
    num_ranks, num_experts = _count(num_ranks, "num_ranks"), _count(num_experts, "num_experts")
    rows, _ = _rows(physical_to_logical, num_ranks, num_experts)
    per_rank = len(rows) // num_ranks  # that many mains always suffice: every expert has a row
    limit = per_rank if max_mains is None else min(per_rank, _count(max_mains, "max_mains"))
    ranks_of = [
        list(dict.fromkeys(row // per_rank for row in own)) for own in _rows_of(rows, num_experts)
    ]
    home = [-1] * num_experts
    mains: list[set[int]] = [set() for _ in range(num_ranks)]
    stuck: list[int] = []
    # What a rank has it keeps: paths pass through it, or end there.
    for most in range(min(num_experts // num_ranks, limit), limit + 1):
        for expert, rank in enumerate(_homes(None, num_ranks, num_experts)):
            if home[expert] < 0 and rank in ranks_of[expert] and len(mains[rank]) < most:
                home[expert] = rank
                mains[rank].add(expert)
        homeless = [expert for expert in range(num_experts) if home[expert] < 0]
        found = [_find_home(expert, ranks_of, home, mains, most) for expert in homeless]
        stuck = next(filter(None, found), [])
        if not stuck:
            return torch.tensor(home, dtype=torch.int32)
    ranks = sorted({rank for expert in stuck for rank in ranks_of[expert]})
    raise InvalidPlanError(
        f"no home map with at most {limit} experts on a rank: the {len(stuck)} experts"
        f" {sorted(stuck)} have all their rows on ranks {ranks}, which can be homes of"
        f" {limit * len(ranks)}. Raise max_mains, or have EPLB place more redundant experts"
    )


def _find_home(
    expert: int,
    ranks_of: Sequence[Sequence[int]],
    home: list[int],
    mains: Sequence[set[int]],
    most: int,
) -> list[int]:
    """Give an expert a home by an augmenting path, on which other experts move one rank on.

    Returns nothing, or else the experts for which Hall's condition fails: all their rows are on
    ranks with room for one expert less.
    """
    mover_to: dict[int, int] = {}  # of each rank reached, the expert that would move there
    queue = [expert]
    for mover in queue:
        for rank in [r for r in ranks_of[mover] if r not in mover_to]:
            mover_to[rank] = mover
            if len(mains[rank]) == most:
                queue.extend(sorted(mains[rank]))
                continue
            free = rank
            while free >= 0:
                moved = mover_to[free]
                mains[free].add(moved)
                free, home[moved] = home[moved], free
                if free >= 0:
                    mains[free].remove(moved)
            return []
    return queue


def from_llep(
    lpt_plan: Mapping[int, Sequence[tuple[int, int, int]]],
    *,
    num_ranks: int,
    num_experts: int,
    load: torch.Tensor | None = None,
    slots_per_rank: int | None = None,
) -> Plan:
    """Make a plan of an assignment by LLEP (arXiv 2601.17111, Salesforce's LeastLoadedEP).

    LLEP keeps to no slot budget: a rank needs a slot for each expert that it computes for others.

    Args:
        lpt_plan: what ``compute_llep_lpt_plan`` returns under this name: by expert, its chunks
            ``(rank, start, end)``. Chunks on one rank become one instance. An expert that is not
            in it has no tokens. Its home is rank ``e // (E / G)``.
        num_ranks: G.
        num_experts: E, a multiple of G.
        load: integers ``[G, E]``; None: the plan cannot be rerouted.
        slots_per_rank: the group's S; None: as many as the fullest rank needs.

    Raises:
        InvalidPlanError: an expert or a rank is out of range, chunks leave a gap or overlap, a rank
            needs more than ``slots_per_rank``; or as in :meth:`Plan.from_slots`.
    """
    num_ranks, num_experts = _count(num_ranks, "num_ranks"), _count(num_experts, "num_experts")
    mains = _mains(num_ranks, num_experts, "LLEP")
    homes = [expert // mains for expert in range(num_experts)]
    if not isinstance(lpt_plan, Mapping):
        raise InvalidPlanError(
            f"lpt_plan is a {type(lpt_plan).__name__}; expected a mapping from experts to chunks:"
            " the field `lpt_plan` of what compute_llep_lpt_plan returns"
        )
    tokens: Counter[tuple[int, int]] = Counter()
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    for key, chunks in sorted(lpt_plan.items(), key=lambda item: as_int(item[0], "an expert")):
        expert, done = as_int(key, "an expert"), 0
        if not 0 <= expert < num_experts:
            raise InvalidPlanError(
                f"lpt_plan has expert {expert}; expected an expert in [0, {num_experts})"
            )
        if not isinstance(chunks, Sequence):
            raise InvalidPlanError(f"lpt_plan[{expert}] is {chunks!r}; expected a list of chunks")
        for index, chunk in enumerate(chunks):
            name = f"lpt_plan[{expert}][{index}]"
            if not isinstance(chunk, Sequence) or len(chunk) != 3:
                raise InvalidPlanError(f"{name} is {chunk!r}; expected (rank, start, end)")
            rank, start, end = (as_int(value, name) for value in chunk)
            if not 0 <= rank < num_ranks:
                raise InvalidPlanError(
                    f"{name} is on rank {rank}; expected a rank in [0, {num_ranks})"
                )
            if start != done or end <= start:
                raise InvalidPlanError(
                    f"{name} on rank {rank} has tokens {start} to {end}; expected some from {done}"
                    " on, since the chunks before it end there"
                )
            if rank != homes[expert] and (rank, expert) not in tokens:
                slots[rank].append(expert)
            tokens[rank, expert] += end - start
            done = end
    advice = "raise LLEP's max_tokens_factor or min_tokens_per_gemm, or use plan_replicas"
    return _plan(
        _fitted(slots, slots_per_rank, advice),
        homes,
        tokens,
        torch.device("cpu"),
        load,
    )


def from_moonep(
    experts_to_copy: IntsLike,
    *,
    num_experts: int,
    alloc: IntsLike | None = None,
    load: torch.Tensor | None = None,
    slots_per_rank: int | None = None,
) -> Plan:
    """Make a plan of MoonEP's (Moonshot AI): ``MoonEPCommPlan.experts_to_copy``.

    Args:
        experts_to_copy: integers ``[R, B]``, the experts that each rank copies; -1: unused. An
            expert's home is rank ``e // (E / R)``.
        num_experts: E, a multiple of R.
        alloc: integers ``[R, E]``, the tokens that each rank computes of each expert, as the
            planner balances them; None: no quotas.
        load: integers ``[R, E]`` by source rank; None: the plan cannot be rerouted.
        slots_per_rank: the group's S; None: B.

    Raises:
        InvalidPlanError: an expert is out of range, ``alloc`` gives tokens to a rank that neither
            owns nor copies the expert, a rank needs more than ``slots_per_rank``; or as in
            :meth:`Plan.from_slots`.
    """
    num_experts = _count(num_experts, "num_experts")
    copies = as_int_tensor(experts_to_copy, "experts_to_copy")
    if copies.dim() != 2 or len(copies) == 0:
        raise InvalidPlanError(
            f"experts_to_copy has shape {tuple(copies.shape)}; expected [R, B], all ranks' rows"
        )
    num_ranks = len(copies)
    slots: list[list[int]] = copies.tolist()
    for rank, row in enumerate(slots):
        _check_experts(row, f"experts_to_copy[{rank}]", num_experts)
    mains = _mains(num_ranks, num_experts, "MoonEP")
    homes = [expert // mains for expert in range(num_experts)]
    tokens = None
    if alloc is not None:
        given = as_int_tensor(alloc, "alloc").cpu()
        if given.shape != (num_ranks, num_experts):
            raise InvalidPlanError(
                f"alloc has shape {tuple(given.shape)}; expected {(num_ranks, num_experts)}"
            )
        tokens = {(r, e): int(given[r, e]) for r, e in given.nonzero().tolist()}
    for (rank, expert), count in (tokens or {}).items():
        if rank != homes[expert] and expert not in slots[rank]:
            raise InvalidPlanError(
                f"alloc[{rank}, {expert}] is {count}, but rank {rank} is not the home of expert"
                f" {expert} and does not copy it: experts_to_copy[{rank}] is {slots[rank]}."
                " Expected a copy of each expert that a rank computes: pass alloc of the same"
                " plan, and give MoonEP's Buffer more slots (B) if it has a limit"
            )
    return _plan(
        _fitted(slots, slots_per_rank, "use plan_replicas: MoonEP fills up to E / R slots"),
        homes,
        tokens,
        copies.device,
        load,
    )


def from_ultraep(
    physical_to_logical: IntsLike,
    *,
    num_ranks: int,
    num_experts: int,
    logical_to_physical: IntsLike | None = None,
    quota: IntsLike | None = None,
    load: torch.Tensor | None = None,
    slots_per_rank: int | None = None,
) -> Plan:
    """Make a plan of UltraEP's (arXiv 2606.04101), from one layer of its manager's tensors.

    Args:
        physical_to_logical: integers ``[P]``, ``manager.physical_to_logical_map[layer]``. Each rank
            has E / G masters, which are its mains and make it their home, then its slots; -1:
            unused.
        num_ranks: G.
        num_experts: E, a multiple of G.
        logical_to_physical: integers ``[E, X]``, ``manager.logical_to_physical_map[layer]``: the
            rows of each expert; -1: unused. Required with ``quota``.
        quota: integers ``[E, X]``, ``manager.logical_instance_quota[layer]``: the tokens of those
            rows; None: no quotas.
        load: integers ``[G, E]`` by source rank; None: the plan cannot be rerouted.
        slots_per_rank: the group's S; None: as many as the layer has.

    Raises:
        InvalidPlanError: an expert is out of range, not the master of exactly one rank, or rows
            and quotas contradict each other; a rank needs more than ``slots_per_rank``; or as in
            :meth:`Plan.from_slots`.
    """
    num_ranks, num_experts = _count(num_ranks, "num_ranks"), _count(num_experts, "num_experts")
    rows, device = _rows(physical_to_logical, num_ranks, num_experts)
    per_rank, masters = len(rows) // num_ranks, _mains(num_ranks, num_experts, "UltraEP")
    if per_rank < masters:
        raise InvalidPlanError(
            f"a rank has {per_rank} of {len(rows)} rows; expected its {masters} masters, then its"
            " slots. Are num_ranks and num_experts those of the layer?"
        )
    homes = [-1] * num_experts
    for row, expert in enumerate(rows):
        if row % per_rank >= masters:
            continue
        if expert < 0 or homes[expert] >= 0:
            found = "unused" if expert < 0 else f"expert {expert}, as on rank {homes[expert]}"
            raise InvalidPlanError(
                f"physical_to_logical[{row}], a master of rank {row // per_rank}, is {found};"
                f" expected each expert once in the first {masters} rows of a rank"
            )
        homes[expert] = row // per_rank
    if (quota is None) != (logical_to_physical is None):
        given = "quota" if logical_to_physical is None else "logical_to_physical"
        raise InvalidPlanError(
            f"only {given} was given; expected both or neither of quota and logical_to_physical"
        )
    tokens = None
    if quota is not None and logical_to_physical is not None:
        places = as_int_tensor(logical_to_physical, "logical_to_physical").cpu()
        counts = as_int_tensor(quota, "quota").cpu()
        if places.dim() != 2 or len(places) != num_experts or counts.shape != places.shape:
            raise InvalidPlanError(
                f"logical_to_physical has shape {tuple(places.shape)} and quota"
                f" {tuple(counts.shape)}; expected [{num_experts}, X] for both, one layer's"
            )
        tokens = _by_instance(rows, per_rank, places.tolist(), counts.tolist())
    slots = [rows[at + masters : at + per_rank] for at in range(0, len(rows), per_rank)]
    return _plan(
        _fitted(slots, slots_per_rank, "have UltraEP use fewer redundant experts on a rank"),
        homes,
        tokens,
        device,
        load,
    )


# ---- tables -------------------------------------------------------------------------------------


def _count(value: int, name: str) -> int:
    number = as_int(value, name)
    if not 1 <= number <= MAX_COUNT:
        raise InvalidPlanError(f"{name} is {number}; expected 1 to {MAX_COUNT}")
    return number


def _rows(table: IntsLike, num_ranks: int, num_experts: int) -> tuple[list[int], torch.device]:
    """Return physical_to_logical ``[P]``, checked, and the device that it is on."""
    name = "physical_to_logical"
    tensor = as_int_tensor(table, name)
    if tensor.dim() != 1 or len(tensor) == 0 or len(tensor) % num_ranks:
        raise InvalidPlanError(
            f"{name} has shape {tuple(tensor.shape)}; expected [P], one layer's rows, and a"
            f" multiple of {num_ranks} ranks: of all layers pass {name}[layer]"
        )
    rows: list[int] = tensor.tolist()
    _check_experts(rows, name, num_experts)
    return rows, tensor.device


def _check_experts(row: Sequence[int], name: str, num_experts: int) -> None:
    for index, expert in enumerate(row):
        if not -1 <= expert < num_experts:
            raise InvalidPlanError(
                f"{name}[{index}] is {expert}; expected an expert in [0, {num_experts}) or -1 for"
                " an unused row"
            )


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


def _homes(home: IntsLike | None, num_ranks: int, num_experts: int) -> list[int]:
    if home is None:
        return [int(rank) for rank in contiguous_home(num_experts, num_ranks)]
    tensor = as_int_tensor(home, "home")
    if tensor.shape != (num_experts,):
        raise InvalidPlanError(f"home has shape {tuple(tensor.shape)}; expected [{num_experts}]")
    ranks: list[int] = tensor.tolist()
    for expert, rank in enumerate(ranks):
        if not 0 <= rank < num_ranks:
            raise InvalidPlanError(f"home[{expert}] is {rank}; expected a rank in [0, {num_ranks})")
    return ranks


def _mains(num_ranks: int, num_experts: int, system: str) -> int:
    """Return E / G, of systems that have as many experts at home on each rank."""
    if num_experts % num_ranks:
        raise InvalidPlanError(
            f"num_experts is {num_experts} for {num_ranks} ranks; expected a multiple: {system} has"
            " as many experts at home on each rank"
        )
    return num_experts // num_ranks


def _fitted(slots: Iterable[list[int]], slots_per_rank: int | None, advice: str) -> torch.Tensor:
    """Return slots ``[G, S]``: of a longer row the filled ones, and empty ones behind a shorter."""
    rows = list(slots)
    size = (
        max(map(len, rows)) if slots_per_rank is None else as_int(slots_per_rank, "slots_per_rank")
    )
    if not 0 <= size <= MAX_COUNT:
        raise InvalidPlanError(f"slots_per_rank is {size}; expected 0 to {MAX_COUNT}")
    for rank, row in enumerate(rows):
        kept = row if len(row) <= size else [expert for expert in row if expert >= 0]
        if len(kept) > size:
            raise InvalidPlanError(
                f"rank {rank} needs {len(kept)} slots, for experts {kept}, but slots_per_rank is"
                f" {size}. Give the group that many slots, or {advice}"
            )
        rows[rank] = kept + [-1] * (size - len(kept))
    return torch.tensor(rows, dtype=torch.int32)


# ---- tokens -------------------------------------------------------------------------------------


def _totals(
    load: torch.Tensor, num_ranks: int, num_experts: int
) -> tuple[list[int], torch.Tensor | None]:
    """Return the tokens of each expert, and the load by source rank if it is that."""
    tensor = as_int_tensor(load, "load").cpu()
    if tensor.shape not in ((num_experts,), (num_ranks, num_experts)):
        raise InvalidPlanError(
            f"load has shape {tuple(tensor.shape)}; expected [{num_experts}], or"
            f" [{num_ranks}, {num_experts}] by source rank"
        )
    if (tensor < 0).any():
        where = (tensor < 0).nonzero()[0].tolist()
        raise InvalidPlanError(f"load{where} is {int(tensor[tuple(where)])}; expected at least 0")
    if tensor.dim() == 1:
        return tensor.tolist(), None
    return tensor.sum(dim=0, dtype=torch.int64).tolist(), tensor


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


def _by_instance(
    rows: Sequence[int],
    per_rank: int,
    places: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
) -> Tokens:
    """Return the tokens of rows that UltraEP's two maps agree on."""
    tokens: dict[tuple[int, int], int] = {}
    for expert, own in enumerate(places):
        for index, row in enumerate(own):
            name, count = f"logical_to_physical[{expert}, {index}]", counts[expert][index]
            if row == -1:
                if count:
                    raise InvalidPlanError(
                        f"quota[{expert}, {index}] is {count}, but {name} is -1"
                        "; expected 0 where there is no row"
                    )
                continue
            held = rows[row] if 0 <= row < len(rows) else -1
            if held != expert:
                raise InvalidPlanError(
                    f"{name} is {row}, which is not a row of expert {expert}; expected the rows"
                    f" {[r for r, e in enumerate(rows) if e == expert]}. Are both maps of one"
                    " layer, and of one call?"
                )
            if (row // per_rank, expert) in tokens:
                raise InvalidPlanError(
                    f"{name} is {row}: expert {expert} is twice on rank {row // per_rank};"
                    " expected one instance of an expert on a rank"
                )
            tokens[row // per_rank, expert] = count
    for row, expert in enumerate(rows):
        if expert >= 0 and (row // per_rank, expert) not in tokens:
            raise InvalidPlanError(
                f"physical_to_logical[{row}] on rank {row // per_rank} is expert {expert}, but"
                f" logical_to_physical[{expert}] is {places[expert]}; expected all of its rows"
            )
    return tokens


def _plan(
    slots: torch.Tensor,
    homes: Sequence[int],
    tokens: Tokens | None,
    device: torch.device,
    load: torch.Tensor | None,
) -> Plan:
    slot_quota = home_quota = None
    if tokens is not None:
        for (rank, expert), count in tokens.items():
            if count >= 2**31:
                raise InvalidPlanError(
                    f"rank {rank} computes {count} tokens of expert {expert}; expected a 32-bit"
                    " quota"
                )
        counts = [
            [tokens.get((rank, expert), 0) if expert >= 0 else 0 for expert in row]
            for rank, row in enumerate(slots.tolist())
        ]
        slot_quota = torch.tensor(counts, dtype=torch.int64)
        mains = [tokens.get((rank, expert), 0) for expert, rank in enumerate(homes)]
        home_quota = torch.tensor(mains, dtype=torch.int64)
    return Plan.from_slots(
        slots.to(device),
        num_experts=len(homes),
        home=homes,
        slot_quota=slot_quota,
        home_quota=home_quota,
        load=load,
    )
