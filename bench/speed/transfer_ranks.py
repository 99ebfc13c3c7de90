"""Ranks for the benchmarks of replication: payload, plan, calls and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ultraep_comm import Group, Plan, replicate_experts
from ultraep_comm.bench.payload import SENTINEL, Payload, count_disturbed

SEGMENT_BYTES = {"64K": 64 << 10, "4M": 4 << 20}  # a benchmark moves one of them
EXPERT = {name: ((size,), torch.uint8) for name, size in SEGMENT_BYTES.items()}


@cache
def make_payload() -> Payload:
    """Return the bytes of all experts in all epochs, equal in every process."""
    return Payload(1, SEGMENT_BYTES)


def spread_plan(num_ranks: int, num_experts: int, slots_per_rank: int) -> Plan:
    """Return a plan with a replica of expert 0 on every other rank."""
    slot_expert = torch.full((num_ranks, slots_per_rank), -1)
    slot_expert[1:, 0] = 0
    return Plan.from_slots(slot_expert, num_experts=num_experts)


def set_epoch(
    group: Group, weights: Mapping[str, torch.Tensor], plan: Plan, epoch: int, segment: str
) -> None:
    """Write the bytes of an epoch to a rank's replicated mains, and SENTINEL to its slots."""
    mains = group.topology.local_experts(group.rank).tolist()
    for row, expert in zip(weights[segment], mains, strict=True):
        if expert in plan.slot_expert:
            make_payload().fill(row.numpy(), epoch=epoch, expert=expert, segment=segment)
    group.slots[segment].fill_(SENTINEL)


def count_wrong(group: Group, plan: Plan, epoch: int, segment: str) -> int:
    """Return how many bytes of a rank's slots are wrong; empty slots must keep SENTINEL."""
    wrong = 0
    experts = plan.slot_expert[group.rank].tolist()
    for slot, expert in zip(group.slots[segment], experts, strict=True):
        data = slot.numpy()
        if expert < 0:
            wrong += count_disturbed(data)
        else:
            payload = make_payload()
            wrong += payload.count_wrong(data, epoch=epoch, expert=expert, segment=segment)
    return wrong


def call_all(
    groups: Sequence[Group],
    weights: Sequence[Mapping[str, torch.Tensor]],
    plan: Plan,
    **options: Any,
) -> Callable[[], None]:
    """Return a call of all ranks from this thread, submitted on all before the first wait."""
    bound = [group.bind(own) for group, own in zip(groups, weights, strict=True)]

    def call() -> None:
        works = [
            replicate_experts(own, plan, group=group, async_op=True, **options)
            for group, own in zip(groups, bound, strict=True)
        ]
        for work in works:
            work.wait()

    return call
