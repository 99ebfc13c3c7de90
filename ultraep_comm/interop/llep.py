"""LLEP: chunks of each expert's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from ultraep_comm.errors import InvalidPlanError
from ultraep_comm.interop.tables import make_plan, read_homes
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import as_int


def from_llep(
    lpt_plan: Mapping[int, Sequence[tuple[int, int, int]]],
    *,
    num_ranks: int,
    num_experts: int,
    load: torch.Tensor | None = None,
    slots_per_rank: int | None = None,
) -> Plan:
    """Make a plan of an assignment by LLEP (arXiv 2601.17111, Salesforce's LeastLoadedEP).

    LLEP has no slot budget: a rank needs a slot for each expert that it computes for others.

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
    num_ranks, num_experts, homes = read_homes(num_ranks, num_experts, even_in="LLEP")
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
    return make_plan(
        slots,
        homes,
        tokens,
        load=load,
        slots_per_rank=slots_per_rank,
        advice="raise LLEP's max_tokens_factor or min_tokens_per_gemm, or use plan_replicas",
    )
