"""What the formats have in common: slots by rank, and tokens by rank and expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from ultraep_comm.errors import InvalidPlanError
from ultraep_comm.plan.plan import Plan, as_int_tensor
from ultraep_comm.plan.topology import MAX_COUNT, IntsLike, Topology, as_int

# Tokens that a rank computes of an expert, by (rank, expert). Python's integers do not overflow.
Tokens: TypeAlias = "Mapping[tuple[int, int], int]"


def read_homes(
    num_ranks: int, num_experts: int, home: IntsLike | None = None, *, even_in: str = ""
) -> tuple[int, int, list[int]]:
    """Return the number of ranks, that of experts, and each expert's home, checked.

    ``even_in`` is a system that has equally many local experts on each rank.
    """
    checked = Topology.make(
        num_ranks=num_ranks, num_experts=num_experts, slots_per_rank=0, home=home
    )
    if even_in and checked.num_experts % checked.num_ranks:
        raise InvalidPlanError(
            f"num_experts is {num_experts} for {num_ranks} ranks; expected a multiple: {even_in}"
            " has as many experts at home on each rank"
        )
    return checked.num_ranks, checked.num_experts, checked.home.tolist()


def read_rows(table: IntsLike, num_ranks: int, num_experts: int) -> tuple[list[int], torch.device]:
    """Return physical_to_logical ``[P]``, checked, and the device that it is on."""
    name = "physical_to_logical"
    tensor = as_int_tensor(table, name)
    if tensor.dim() != 1 or len(tensor) == 0 or len(tensor) % num_ranks:
        raise InvalidPlanError(
            f"{name} has shape {tuple(tensor.shape)}; expected [P], one layer's rows, and a"
            f" multiple of {num_ranks} ranks: of all layers pass {name}[layer]"
        )
    rows: list[int] = tensor.tolist()
    check_experts(rows, name, num_experts)
    return rows, tensor.device


def check_experts(row: Sequence[int], name: str, num_experts: int) -> None:
    """Raise InvalidPlanError unless all are experts or -1."""
    for index, expert in enumerate(row):
        if not -1 <= expert < num_experts:
            raise InvalidPlanError(
                f"{name}[{index}] is {expert}; expected an expert in [0, {num_experts}) or -1 for"
                " an unused row"
            )


def fit_slots(slots: list[list[int]], slots_per_rank: int | None, advice: str) -> list[list[int]]:
    """Return slots ``[G, S]``: rows cut to their filled slots, then padded with empty ones."""
    size = max(map(len, slots))
    if slots_per_rank is not None:
        size = as_int(slots_per_rank, "slots_per_rank")
    if not 0 <= size <= MAX_COUNT:
        raise InvalidPlanError(f"slots_per_rank is {size}; expected 0 to {MAX_COUNT}")
    rows = []
    for rank, row in enumerate(slots):
        kept = row if len(row) <= size else [expert for expert in row if expert >= 0]
        if len(kept) > size:
            raise InvalidPlanError(
                f"rank {rank} needs {len(kept)} slots, for experts {kept}, but slots_per_rank is"
                f" {size}. Give the group that many slots, or {advice}"
            )
        rows.append(kept + [-1] * (size - len(kept)))
    return rows


def make_plan(
    slots: list[list[int]],
    homes: list[int],
    tokens: Tokens | None,
    *,
    load: torch.Tensor | None,
    slots_per_rank: int | None,
    advice: str,
    device: torch.device | None = None,
) -> Plan:
    """Return the plan by which each rank has these experts in slots; -1: unused.

    ``tokens`` are those of all instances; None: no quotas. ``advice`` says how the system needs
    fewer slots than ``slots_per_rank``; None: as many as the rank with most needs.
    """
    rows = fit_slots(slots, slots_per_rank, advice)
    slot_quota = home_quota = None
    if tokens is not None:
        for (rank, expert), count in tokens.items():
            if not 0 <= count < 2**31:
                raise InvalidPlanError(
                    f"rank {rank} computes {count} tokens of expert {expert}; expected 0 to"
                    " 2**31 - 1"
                )
        counts = [
            [tokens.get((rank, expert), 0) if expert >= 0 else 0 for expert in row]
            for rank, row in enumerate(rows)
        ]
        slot_quota = torch.tensor(counts, dtype=torch.int64, device="cpu")
        at_home = [tokens.get((rank, expert), 0) for expert, rank in enumerate(homes)]
        home_quota = torch.tensor(at_home, dtype=torch.int64, device="cpu")
    return Plan.from_slots(
        torch.tensor(rows, dtype=torch.int32, device=device or "cpu"),
        num_experts=len(homes),
        home=homes,
        slot_quota=slot_quota,
        home_quota=home_quota,
        load=load,
    )
