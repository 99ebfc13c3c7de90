"""A short run over all modes and all kernels for compute-sanitizer.

PYTHONPATH=tests/python python tests/device/sanitized.py ENGINE [PART]

PART is one of `PARTS`, by default all. With out_of_bounds it reads beyond an allocation instead,
which memcheck has to report.
"""

from __future__ import annotations

import sys

import torch
from loopback_ranks import Ranks, load_of
from rank_grads import RankGrads
from ranks import close_all, loopback, random_plan

import ultraep_comm as uec

MODES = ["push", "pull", "direct"]


def run_one_call(engine: str) -> int:
    """The smallest: a tool that takes a hundred times as long gets through it."""
    with Ranks(engine, 2, {"w": 5_001}, num_experts=2, num_sms=1, timeout=300) as ranks:
        ranks.replicate(ranks.shared(), ranks.plan([[1, -1], [0, -1]]), mode="push")
    return 1


def run_modes(engine: str) -> int:
    """Return the number of calls; each has been compared byte by byte."""
    calls = 0
    for num_ranks, tile_bytes in ((3, 16384), (4, 32768)):
        sizes = {"w13": 70_001, "w2": 32_768, "bias": 5}
        with Ranks(
            engine, num_ranks, sizes, num_experts=7, num_sms=2, tile_bytes=tile_bytes, timeout=300
        ) as ranks:
            shared = ranks.shared()
            odd = [rank.at_odd_offsets(1, 3) for rank in ranks.ranks]
            for plan in ranks.plans(range(2)):
                for mode in MODES:
                    ranks.replicate(shared, plan, mode=mode)
                ranks.replicate(odd, plan, mode="push")
                calls += len(MODES) + 1
    return calls


def run_stages(engine: str) -> int:
    """From ids to slots and physical ids where the ids are, and plans there in every mode."""
    calls, num_experts, draw = 0, 7, torch.Generator().manual_seed(1)
    sizes = {"w13": 70_001, "w2": 32_768, "bias": 5}
    with Ranks(engine, 3, sizes, num_experts=num_experts, num_sms=2, timeout=300) as ranks:
        weights, there = ranks.shared(), ranks.groups[0].device
        tables = [group.bind(own) for group, own in zip(ranks.groups, weights, strict=True)]
        for dtype in (torch.int32, torch.int64):
            ids = torch.randint(-1, num_experts, (3, 300, 3), generator=draw, dtype=dtype)
            ids[:, :150, 0] = 2
            own = ids.to(there)

            def path(
                r: int, own: torch.Tensor = own
            ) -> tuple[torch.Tensor, uec.Plan, torch.Tensor]:
                group = ranks.groups[r]
                load = uec.gather_load(own[r], group=group)
                plan = uec.plan_replicas(load, group=group)
                uec.replicate_experts(tables[r], plan, group=group)
                return load, plan, uec.reroute(own[r], plan, group=group)

            ranks.fill(weights)
            found = loopback(3, path)
            load = load_of(ids, num_experts)
            expected = uec.plan_replicas(load, group=ranks.groups[0])
            assert ranks.wrong(expected) == [0] * 3
            for r, (gathered, plan, physical) in enumerate(found):
                assert torch.equal(gathered.cpu(), load)
                assert torch.equal(plan.slot_expert.cpu(), expected.slot_expert)
                here = uec.reroute(ids[r], expected, group=ranks.groups[r])
                assert torch.equal(physical.cpu(), here)
            calls += 4
        routing = torch.rand((3, 150, num_experts), generator=draw) < 0.4
        load = routing.sum(dim=1)
        here, plan = (
            uec.plan_replicas(own, group=ranks.groups[0]) for own in (load, load.to(there))
        )
        for r, group in enumerate(ranks.groups):
            probs = torch.rand(routing[r].shape, generator=draw)
            given = uec.reroute_map(routing[r].to(there), probs.to(there), plan, group=group)
            for a, b in zip(
                given, uec.reroute_map(routing[r], probs, here, group=group), strict=True
            ):
                assert a is not None
                assert b is not None
                assert torch.equal(a.cpu(), b)
        for made in ranks.plans(range(2)):
            moved = uec.Plan(slot_expert=made.slot_expert.to(there), home=made.home.to(there))
            for mode in MODES:
                ranks.fill(weights)
                ranks.call(tables, moved, mode=mode)
                assert ranks.wrong(made) == [0] * 3, (made.slot_expert, mode)
                calls += 1
    return calls


def run_reductions(engine: str) -> int:
    """Return the number of reductions; each has been compared bit by bit."""
    calls = 0
    expert = {"w": uec.Segment((65, 128), torch.bfloat16), "b": uec.Segment((7,), torch.float32)}
    for dtype in (torch.float32, torch.bfloat16):
        groups = uec.testing.new_loopback_groups(
            4,
            num_experts=6,
            slots_per_rank=2,
            expert=expert,
            grads={"w": dtype, "b": torch.float32},
            engine=engine,
            num_sms=2,
            timeout=300,
        )
        grads = RankGrads(groups, dict.fromkeys(expert, dtype))
        for mode in ("pull", "direct"):
            for seed in range(2):
                grads.reduce(random_plan(seed, 4, 6, 2), seed, mode=mode)
                calls += 1
        close_all(groups)
    return calls


def read_out_of_bounds() -> None:
    """Sum more bytes than were allocated."""
    from ultraep_comm.engines.cuda.device import find_device

    device = find_device()
    memory = torch.zeros(64, dtype=torch.uint8, device=device.torch_device)
    print(int(device.view(memory.data_ptr(), 1 << 16).sum()))


PARTS = {
    "one_call": run_one_call,
    "reductions": run_reductions,
    "stages": run_stages,
    "modes": run_modes,
}

if __name__ == "__main__":
    if sys.argv[2:] == ["out_of_bounds"]:
        read_out_of_bounds()
    else:
        chosen = sys.argv[2:] or list(PARTS)
        print(f"{sum(PARTS[part](sys.argv[1]) for part in chosen)} calls, every byte right")
