"""Groups with banks, random walks of plans, and what slots have to hold then."""

from __future__ import annotations

import random
from typing import Any

import torch
from ranks import (
    MIXED,
    bytes_stored,
    expert_bytes,
    fill_weights,
    make_weights,
    random_plan,
    raw,
    same_bytes,
    start_all,
    synchronize_all,
)

import ultraep_comm as uec
from ultraep_comm.group.bank import Bank

E, S = 8, 2
EXPERT_BYTES = sum(segment.nbytes for segment in MIXED.values())
EMULATED_SMS = 16  # of emulated_device
Held = dict[tuple[int, int, int], tuple[int, int]]  # (bank, rank, slot): expert and epoch


def new_groups(num_ranks: int, *, engine: str = "", **options: Any) -> list[uec.Group]:
    """``engine``: also "emulated", of a test that has the fixture; "": the test's own."""
    if engine == "emulated":
        options = {"num_sms": EMULATED_SMS // num_ranks, **options}
    if engine:
        options["engine"] = "cuda" if engine == "emulated" else engine
    options = {"expert": MIXED, "timeout": 30.0, "banks": 2, **options}
    return uec.testing.new_loopback_groups(num_ranks, num_experts=E, slots_per_rank=S, **options)


def plan_of(
    slots: list[list[int]], bank: int = 0, *, reuse: bool = True, **fields: Any
) -> uec.Plan:
    return uec.Plan.from_slots(
        torch.tensor(slots, dtype=torch.int32), num_experts=E, bank=bank, reuse=reuse, **fields
    )


def filled_weights(groups: list[uec.Group], epoch: int) -> list[dict[str, torch.Tensor]]:
    weights = [make_weights(group) for group in groups]
    for group in groups:
        fill_weights(group, weights[group.rank], epoch)
    return weights


def stored(groups: list[uec.Group]) -> int:
    """Return the experts that all ranks have stored since they exist."""
    total = sum(bytes_stored(group) for group in groups)
    assert total % EXPERT_BYTES == 0
    return total // EXPERT_BYTES


def replicate(groups: list[uec.Group], weights: Any, plan: Any, **options: Any) -> int:
    """Return the number of experts that were moved."""
    before = stored(groups)
    synchronize_all(start_all(groups, weights, plan, **options))
    return stored(groups) - before


def check_slot(bank: Bank, slot: int, expert: int, epoch: int) -> None:
    """Check every byte of a slot; without an expert they are zero."""
    for index, (name, segment) in enumerate(MIXED.items()):
        found = raw(bank.slots[name][slot], segment).cpu()
        if expert < 0:
            assert not found.any()
        else:
            assert same_bytes(found, expert_bytes(epoch, expert, index, segment))


def check_slots(group: uec.Group, held: Held) -> None:
    """Check this rank's slots."""
    for bank in group.banks:
        for slot in range(S):
            check_slot(bank, slot, *held.get((bank.index, group.rank, slot), (-1, 0)))


def check_residents(bank: Bank, rank: int) -> None:
    """Check what this rank's slots are said to hold, of weights of epoch 0."""
    for slot, expert in enumerate(bank.residents[rank].tolist()):
        if expert >= 0:
            check_slot(bank, slot, expert, 0)


def walk(seed: int, num_ranks: int, steps: int) -> list[tuple[int, int, list[list[int]]]]:
    """Return (bank, epoch of the weights, slots) of calls that have much in common."""
    generator = random.Random(seed)
    plans = [random_plan(seed + bank, num_ranks, E, S).slot_expert.tolist() for bank in range(2)]
    calls, epoch = [], 0
    for step in range(steps):
        epoch += generator.random() < 0.2
        bank = generator.randrange(2)
        other = random_plan(seed + 100 + step, num_ranks, E, S).slot_expert.tolist()
        row = generator.randrange(num_ranks)
        plans[bank][row] = other[row]
        calls.append((bank, epoch, [list(slots) for slots in plans[bank]]))
    return calls


def expected_slots(
    calls: list[tuple[int, int, list[list[int]]]],
) -> list[tuple[Held, int]]:
    """Return what slots hold after each call, and how many experts it moves."""
    held: Held = {}
    resident: Held = {}
    versions = [0, 0]
    result = []
    for bank, epoch, slots in calls:
        if versions[bank] != epoch:
            resident = {at: value for at, value in resident.items() if at[0] != bank}
            versions[bank] = epoch
        moved = 0
        for rank, row in enumerate(slots):
            new = {(bank, rank, s): (expert, epoch) for s, expert in enumerate(row) if expert >= 0}
            moved += sum(resident.get(at) != value for at, value in new.items())
            # A rank has one resident of an expert.
            gone = {at for at in resident if at[:2] == (bank, rank)}
            gone = {at for at in gone if resident[at] in new.values()} - set(new)
            resident = {at: value for at, value in resident.items() if at not in gone} | new
            held |= new
        result.append((dict(held), moved))
    return result
