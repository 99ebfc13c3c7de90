"""What the formats have in common: slots by rank, and tokens by rank and expert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from ultraep_comm.errors import InvalidPlanError
from ultraep_comm.plan.plan import Plan, as_int_tensor
from ultraep_comm.plan.topology import MAX_COUNT, IntsLike, as_int

# Tokens that a rank computes of an expert, by (rank, expert). Python's integers do not overflow.
Tokens: TypeAlias = "Mapping[tuple[int, int], int]"


def as_count(value: int, name: str) -> int:
    """Return a number of ranks or experts."""
    number = as_int(value, name)
    if not 1 <= number <= MAX_COUNT:
        raise InvalidPlanError(f"{name} is {number}; expected 1 to {MAX_COUNT}")
    return number


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


def local_experts_of_each(num_ranks: int, num_experts: int, system: str) -> int:
    """Return E / G, for systems with equally many local experts on each rank."""
    if num_experts % num_ranks:
        raise InvalidPlanError(
            f"num_experts is {num_experts} for {num_ranks} ranks; expected a multiple: {system} has"
            " as many experts at home on each rank"
        )
    return num_experts // num_ranks


def fit_slots(slots: Iterable[list[int]], slots_per_rank: int | None, advice: str) -> torch.Tensor:
    """Return slots ``[G, S]``: rows cut to their filled slots, then padded with empty ones."""
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
    return torch.tensor(rows, dtype=torch.int32, device="cpu")


def make_plan(
    slots: torch.Tensor,
    homes: Sequence[int],
    tokens: Tokens | None,
    device: torch.device,
    load: torch.Tensor | None,
) -> Plan:
    """Return a plan on a device; ``tokens`` of all instances, or None: no quotas."""
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
            for rank, row in enumerate(slots.tolist())
        ]
        slot_quota = torch.tensor(counts, dtype=torch.int64, device="cpu")
        at_home = [tokens.get((rank, expert), 0) for expert, rank in enumerate(homes)]
        home_quota = torch.tensor(at_home, dtype=torch.int64, device="cpu")
    return Plan.from_slots(
        slots.to(device),
        num_experts=len(homes),
        home=homes,
        slot_quota=slot_quota,
        home_quota=home_quota,
        load=load,
    )
