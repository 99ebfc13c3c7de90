"""Ranks as processes.

PYTHONPATH=tests/python python tests/device/process_ranks.py FABRIC CASE NUM_RANKS [NUM_GPUS]

FABRIC is shm, nvshmem or torch, CASE one of `CASES`. Ranks take the first NUM_GPUS GPUs in turn,
by default only one. Exits with 0; with 77 and a line beginning REFUSED where the fabric does not
work here, which is only so while no group has been made; else with 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
import torch.multiprocessing
from loopback_ranks import Rank, hard_slots, load_of, random_slots
from ranks import raised

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.bench.payload import SENTINEL, Payload

REFUSED, MADE = 77, "a group was made"
SIZES = {"w13": 200_003, "w2": 65_536, "bias": 1}
EXPERTS, SLOTS = 6, 2
GRACE = 30.0  # seconds for the other ranks, once one has failed
_made: list[str] = []  # groups of this process


def status_of(error: BaseException, made: int) -> int:
    """Return the exit status of a rank that failed after creating ``made`` groups."""
    refused = isinstance(error, (errors.BootstrapError, errors.UnsupportedError))
    return REFUSED if refused and not made else 1


def outcome(statuses: Sequence[int | None]) -> int:
    """Return the exit status of all ranks together: any failure overrides a refusal.

    None is a rank that had to be stopped because another had ended.
    """
    ended = {status for status in statuses if status is not None}
    if ended - {0, REFUSED}:
        return 1
    return REFUSED if REFUSED in ended else int(None in statuses)


def make_group(fabric: str, **options: float) -> uec.Group:
    group = uec.new_group(
        num_experts=EXPERTS,
        slots_per_rank=SLOTS,
        expert={name: ((size,), torch.uint8) for name, size in SIZES.items()},
        engine="host" if fabric == "shm" else "cuda",
        fabric=fabric,
        **{"timeout": 60.0, **options},  # type: ignore[arg-type]
    )
    _made.append(group.name)
    print(MADE, flush=True)
    return group


def plans(group: uec.Group) -> list[uec.Plan]:
    home = group.topology.home.tolist()
    shape = group.num_ranks, EXPERTS, SLOTS
    rows = [*hard_slots(*shape, home), *(random_slots(seed, *shape, home) for seed in range(4))]
    return [uec.Plan.from_slots(slots, num_experts=EXPERTS) for slots in rows]


def every_mode(fabric: str) -> None:
    """All plans in all modes; the barriers are there only because slots are cleared."""
    with make_group(fabric) as group:
        rank, weights, epoch = Rank(group, Payload(1, SIZES)), group.empty_weights(), 0
        for plan in plans(group):
            for mode in ("push", "pull", "direct", "auto"):
                epoch += 1
                rank.fill(weights, epoch)
                rank.slots().fill_(SENTINEL)
                uec.replicate_experts(weights, plan, group=group, mode=mode)
                wrong = int((rank.slots().cpu().numpy() != rank.expected(plan, epoch, None)).sum())
                assert wrong == 0, (group.rank, mode, plan.slot_expert.tolist(), wrong)
        ids = torch.tensor([[group.rank % EXPERTS, 0]], device=group.device)
        load = uec.gather_load(ids, group=group)
        assert load.sum(dim=1).tolist() == [2] * group.num_ranks
    print(f"rank {dist.get_rank()}: {epoch} calls, every byte right", flush=True)


def several_groups(fabric: str) -> None:
    """Two groups at once and one after them: memory is given back."""
    for _ in range(3):
        with make_group(fabric) as one, make_group(fabric) as two:
            for group in (one, two):
                uec.replicate_experts(group.empty_weights(), plans(group)[-1], group=group)
                if fabric != "shm":
                    torch.cuda.synchronize()


def missing_rank(fabric: str) -> None:
    """The last rank never calls: the others' kernels time out, and their errors name it."""
    group = make_group(fabric, timeout=1.0 if fabric == "shm" else 2.0)
    last = group.num_ranks - 1
    home = group.topology.home.tolist()
    slots = [[e for e in range(EXPERTS) if home[e] != r][-SLOTS:] for r in range(group.num_ranks)]
    if group.rank == last:
        dist.barrier()  # until the others have seen it
        group.abort()
        group.close()
        return
    weights = Rank(group, Payload(1, SIZES)).stacked()
    plan = uec.Plan.from_slots(slots, num_experts=EXPERTS)
    work = uec.replicate_experts(weights, plan, group=group, async_op=True)
    assert work is not None
    error = raised(work.synchronize)
    # With more ranks some are told by the first that waited long enough.
    kind = errors.TransferTimeoutError if group.num_ranks == 2 else errors.TransferError
    assert isinstance(error, kind), error
    assert last in (error.peer, error.root), error
    dist.barrier()
    error = raised(lambda: uec.replicate_experts(weights, plan, group=group))
    assert isinstance(error, errors.GroupClosedError), error
    group.close()


def on_device(fabric: str) -> None:
    """From ids to slots and physical ids, where the ids are; what a GPU makes is what the CPU does.

    On a GPU nothing of it leaves the device; plans that were made by hand stay there too.
    """
    with make_group(fabric) as group:
        rank, weights = Rank(group, Payload(1, SIZES)), group.empty_weights()
        bound, there = group.bind(weights), group.device
        draw, epoch = torch.Generator().manual_seed(5), 0

        def call(plan: uec.Plan, expected: uec.Plan, **options: str) -> None:
            rank.fill(weights, epoch)
            rank.slots().fill_(SENTINEL)
            uec.replicate_experts(bound, plan, group=group, **options)
            wrong = int((rank.slots().cpu().numpy() != rank.expected(expected, epoch, None)).sum())
            assert wrong == 0, (group.rank, options, expected.slot_expert.tolist(), wrong)

        for turn in range(6):
            epoch += 1
            all_ids = torch.randint(-1, EXPERTS, (group.num_ranks, 200, 2), generator=draw)
            all_ids[torch.rand(all_ids.shape, generator=draw) < 0.5] = turn % EXPERTS
            ids = all_ids[group.rank].to(there)
            load = uec.gather_load(ids, group=group)
            plan = uec.plan_replicas(load, group=group)
            physical = uec.reroute(ids, plan, group=group)
            assert load.device == plan.slot_expert.device == physical.device == ids.device
            assert torch.equal(load.cpu(), load_of(all_ids, EXPERTS))
            expected = uec.plan_replicas(load.cpu(), group=group)
            assert torch.equal(plan.slot_expert.cpu(), expected.slot_expert)
            assert torch.equal(
                physical.cpu(), uec.reroute(all_ids[group.rank], expected, group=group)
            )
            call(plan, expected)
        for made in plans(group):
            for mode in ("push", "pull", "direct", "auto"):
                epoch += 1
                moved = uec.Plan(slot_expert=made.slot_expert.to(there), home=made.home.to(there))
                call(moved, made, mode=mode)
    print(f"rank {dist.get_rank()}: {epoch} calls, every byte right", flush=True)


def graph(fabric: str) -> None:
    """The same captured once, and replayed with fresh ids and weights. The host has no graphs."""
    with make_group(fabric) as group:
        if fabric == "shm":
            return
        rank, weights = Rank(group, Payload(1, SIZES)), group.empty_weights()
        bound, draw = group.bind(weights), torch.Generator().manual_seed(7)
        ids = torch.zeros(200, 2, dtype=torch.int64, device=group.device)

        def path() -> tuple[torch.Tensor, uec.Plan, torch.Tensor]:
            load = uec.gather_load(ids, group=group)
            plan = uec.plan_replicas(load, group=group)
            work = uec.replicate_experts(bound, plan, group=group, async_op=True)
            physical = uec.reroute(ids, plan, group=group)
            assert work is not None
            work.wait()
            return load, plan, physical

        path()  # load lazily loaded kernels before the capture
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            _, plan, physical = path()
        for epoch in range(1, 51):
            all_ids = torch.randint(-1, EXPERTS, (group.num_ranks, 200, 2), generator=draw)
            all_ids[torch.rand(all_ids.shape, generator=draw) < 0.5] = epoch % EXPERTS
            ids.copy_(all_ids[group.rank])
            rank.fill(weights, epoch)
            rank.slots().fill_(SENTINEL)
            captured.replay()
            expected = uec.plan_replicas(load_of(all_ids, EXPERTS), group=group)
            torch.cuda.synchronize()
            assert torch.equal(plan.slot_expert.cpu(), expected.slot_expert)
            assert torch.equal(
                physical.cpu(), uec.reroute(all_ids[group.rank], expected, group=group)
            )
            wrong = int((rank.slots().cpu().numpy() != rank.expected(expected, epoch, None)).sum())
            assert wrong == 0, (group.rank, epoch, wrong)
        del captured
    print(f"rank {dist.get_rank()}: 50 replays, every byte right", flush=True)


CASES = {
    "every_mode": every_mode,
    "on_device": on_device,
    "graph": graph,
    "several_groups": several_groups,
    "missing_rank": missing_rank,
}


def _start(rank: int, fabric: str, case: str, num_ranks: int, num_gpus: int, meeting: str) -> None:
    torch.set_num_threads(1)
    if fabric != "shm":
        torch.cuda.set_device(rank % num_gpus)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
    try:
        CASES[case](fabric)
    except Exception as error:
        status = status_of(error, len(_made))
        if status == REFUSED:
            print(f"REFUSED {error}", flush=True)
        else:
            traceback.print_exc()
        _leave(status)
    dist.barrier()
    dist.destroy_process_group()
    if fabric == "nvshmem":
        _leave(0)


def _leave(status: int) -> None:
    """Exit without the libraries' exit handlers: NVSHMEM is not finalised and may crash in them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> int:
    fabric, case, num_ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    num_gpus = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    if num_gpus < num_ranks:
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    # A rank that ends while a peer still connects to it would fail that peer: connect all first.
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(256 << 20))
    with tempfile.TemporaryDirectory() as folder:
        arguments = (fabric, case, num_ranks, num_gpus, f"file://{folder}/ranks")
        context = torch.multiprocessing.spawn(_start, arguments, nprocs=num_ranks, join=False)
        assert context is not None
        statuses = _join(context.processes)
    if any(statuses):
        print(f"ranks ended with {statuses}", flush=True)
    return outcome(statuses)


def _join(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Return the exit status of each process; None: it was killed after another had ended."""
    end = float("inf")
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        time.sleep(0.05)
        if end == float("inf") and any(process.exitcode for process in processes):
            end = time.monotonic() + GRACE
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    return [None if process in stuck else process.exitcode for process in processes]


if __name__ == "__main__":
    sys.exit(main())
