"""reduce_expert_grads: every bit of main + (r1 + ... + rn), in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_grads import RankGrads
from ranks import close_all, loopback, raised, synchronize_all
from reference.reduce_oracle import reduced, same_bits

import ultraep_comm as uec
from ultraep_comm import Segment, errors

F32, BF16 = torch.float32, torch.bfloat16
# Two that are cut into tiles, one that is smaller than any, one with a layout of its own, and one
# without gradients.
EXPERT = {
    "w13": Segment((33, 130), BF16),
    "scale": Segment((5,), torch.uint8),
    "bias": Segment((3,), F32),
    "w_t": Segment((40, 24), BF16, (1, 40)),
}
GRADS = dict.fromkeys(("w13", "bias", "w_t"), F32)


def make_groups(num_ranks: int, **options: Any) -> list[uec.Group]:
    options = {
        "num_experts": 7,
        "slots_per_rank": 2,
        "expert": EXPERT,
        "grads": GRADS,
        "timeout": 20.0,
    } | options
    return uec.testing.new_loopback_groups(num_ranks, **options)


def test_many_replicas_of_one_expert() -> None:
    # As many parts as one pass adds and more, and fan-outs with other flag groups.
    for num_ranks in (5, 6, 9, 18, 27):
        slots = torch.zeros((num_ranks, 1), dtype=torch.int32)
        slots[0] = 1
        plan = uec.Plan.from_slots(slots, num_experts=num_ranks)
        groups = make_groups(num_ranks, num_experts=num_ranks, slots_per_rank=1, tile_bytes=1024)
        grads = RankGrads(groups, GRADS)
        for mode in ("pull", "direct"):  # each against the sums of the definition
            grads.fill(3)
            works = grads.start(plan, mode=mode)
            synchronize_all(works)
            assert {work.mode for work in works} == {mode}
            grads.check(plan)
        close_all(groups)


def test_main_gradients_may_be_any_memory() -> None:
    groups = make_groups(2, expert={"w": ((5, 3), BF16)}, grads=BF16, num_experts=4)
    plan = uec.Plan.from_slots([[2, 3], [0, 1]], num_experts=4)
    RankGrads(groups, {"w": BF16}).fill(1)
    before = [group.slot_grads["w"].clone() for group in groups]
    draw = torch.Generator().manual_seed(1)
    flat = torch.randn(200, generator=draw).to(BF16)
    # Rank 0: odd places in a flat buffer, in any order.
    listed = [flat[101:116].view(5, 3), flat[7:22].view(5, 3)]
    spaced = torch.randn((2, 2, 5, 3), generator=draw)[:, 1]  # rank 1: rows with gaps between them
    grads: list[dict[str, Any]] = [{"w": listed}, {"w": spaced}]
    wanted = [  # each expert is in the other rank's slot of its index
        torch.stack([reduced(main, [slot]) for main, slot in zip(own, slots, strict=True)])
        for own, slots in ((listed, before[1]), (spaced, before[0]))
    ]
    rest = flat.clone()
    loopback(2, lambda r: uec.reduce_expert_grads(grads[r], plan, group=groups[r]))
    assert same_bits(torch.stack(listed), wanted[0])
    assert same_bits(spaced, wanted[1])
    changed = (flat != rest).nonzero().flatten().tolist()
    assert set(changed) <= {*range(101, 116), *range(7, 22)}
    close_all(groups)


# ---- bad input ----------------------------------------------------------------------------------


def test_segments_with_one_gradient() -> None:
    segment = ((5, 4), F32)
    (group,) = make_groups(1, num_experts=2, expert={"gate": segment, "up": segment}, grads=F32)
    grads = torch.zeros(2, 5, 4)
    with pytest.raises(
        errors.InvalidWeightsError, match=r"grads\['up'\] has rows that share memory"
    ):
        group.bind_grads({"gate": grads, "up": grads})
    group.close()


# ---- saved plans --------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["reduce_expert_grads", "replicate_experts"])
def test_bad_input_names_the_saved_plan(operation: str) -> None:
    groups = make_groups(2, num_experts=4)
    plan = uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4)
    handles = [group.save(plan, layer=3, microbatch=5) for group in groups]

    def call(rank: int) -> BaseException | None:
        grads = RankGrads(groups, GRADS).main_grads[rank]
        tensors = {name: tensor.to(torch.int16) for name, tensor in grads.items()}
        made = getattr(uec, operation)
        return raised(lambda: made(tensors, handles[rank], group=groups[rank]))

    found = loopback(2, call)
    assert any(isinstance(error, errors.InvalidArgumentError) for error in found)
    for rank, error in enumerate(found):
        if isinstance(error, errors.InvalidArgumentError):
            assert str(error).startswith(f"rank {rank}: ")
            assert str(error).endswith(f" (in {operation} of layer 3, microbatch 5)")
    for handle, group in zip(handles, groups, strict=True):
        handle.release()
        group.close()
