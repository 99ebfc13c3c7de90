"""UltraEP: masters and slots of each rank, and the tokens of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ultraep_comm.errors import InvalidPlanError
from ultraep_comm.interop.tables import Tokens, make_plan, read_homes, read_rows
from ultraep_comm.plan.plan import Plan, as_int_tensor
from ultraep_comm.plan.topology import IntsLike


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
            has E / G masters, its local experts, then its slots; -1: unused.
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
    num_ranks, num_experts, _ = read_homes(num_ranks, num_experts, even_in="UltraEP")
    rows, device = read_rows(physical_to_logical, num_ranks, num_experts)
    per_rank, masters = len(rows) // num_ranks, num_experts // num_ranks
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
    return make_plan(
        slots,
        homes,
        tokens,
        load=load,
        slots_per_rank=slots_per_rank,
        advice="have UltraEP use fewer redundant experts on a rank",
        device=device,
    )


def _by_instance(
    rows: Sequence[int],
    per_rank: int,
    places: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
) -> Tokens:
    """Return the tokens of each row; raise InvalidPlanError if UltraEP's two maps disagree."""
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
