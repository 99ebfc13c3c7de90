"""Ranks as processes.

PYTHONPATH=tests/python python tests/device/process_ranks.py FABRIC CASE NUM_RANKS [NUM_GPUS]

FABRIC is shm, nvshmem or torch, CASE one of `CASES`. Ranks take the first NUM_GPUS GPUs in turn,
by default only one. Exits with 0; with 77 and a line beginning REFUSED where the fabric does not
work here, which is only so while no group has been made; else with 1.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from loopback_ranks import Ranks, critical_path, put_plan
from ranks import raised

import ultraep_comm as uec
from ultraep_comm import errors

REFUSED, MADE = 77, "a group was made"
SIZES = {"w13": 200_003, "w2": 65_536, "bias": 1}
EXPERTS, SLOTS = 6, 2
MODES = ("push", "pull", "direct", "auto")
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


def make_ranks(fabric: str, **options: Any) -> Ranks:
    options = {"num_experts": EXPERTS, "slots": SLOTS, "timeout": 60.0, **options}
    ranks = Ranks(fabric, dist.get_world_size(), SIZES, **options)
    _made.append(ranks.groups[0].name)
    print(MADE, flush=True)
    return ranks


def every_mode(fabric: str) -> None:
    """All plans in all modes, from the CPU and from the device."""
    with make_ranks(fabric) as ranks:
        weights, (group,) = ranks.shared(), ranks.groups
        for plan, mode in itertools.product(ranks.plans(range(4)), MODES):
            for given in (plan, put_plan(group, plan)):
                ranks.fill(weights)
                ranks.call(weights, given, mode=mode)
                wrong = ranks.wrong(plan)
                assert wrong == [0], (group.rank, mode, plan.slot_expert.tolist(), wrong)
    print(f"rank {dist.get_rank()}: {ranks.epoch} calls, every byte right", flush=True)


def on_device(fabric: str) -> None:
    """From ids to slots and physical ids, where the ids are; beside another group."""
    from test_gpu_replicate import test_a_layer_from_routing_to_slots

    with make_ranks(fabric):
        test_a_layer_from_routing_to_slots(fabric, dist.get_world_size())


def several_groups(fabric: str) -> None:
    """Two groups at once and one after them: memory is given back."""
    for _ in range(3):
        with make_ranks(fabric) as one, make_ranks(fabric) as two:
            for ranks in (one, two):
                ranks.replicate(ranks.shared(), ranks.plans(range(1))[-1])


def missing_rank(fabric: str) -> None:
    """The last rank never calls: the others' kernels time out, and their errors name it."""
    ranks = make_ranks(fabric, timeout=1.0 if fabric == "shm" else 2.0)
    (group,), (weights,), last = ranks.groups, ranks.stacked(), dist.get_world_size() - 1
    if group.rank == last:
        dist.barrier()  # until the others have seen it
        group.abort()
        group.close()
        return
    *_, plan, _ = ranks.plans(range(0))  # all slots are filled
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


def graph(fabric: str) -> None:
    """The path captured once, and replayed with fresh ids and weights. The host has no graphs."""
    with make_ranks(fabric) as ranks:
        if fabric == "shm":
            return
        weights, (group,) = ranks.shared(), ranks.groups
        bound, draw = group.bind(weights[0]), torch.Generator().manual_seed(7)
        ids = torch.zeros(200, 2, dtype=torch.int64, device=group.device)

        path = partial(critical_path, group, ids, bound)
        path()  # load lazily loaded kernels before the capture
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = path()
        for turn in range(50):
            all_ids = torch.randint(-1, EXPERTS, (group.num_ranks, 200, 2), generator=draw)
            all_ids[torch.rand(all_ids.shape, generator=draw) < 0.5] = turn % EXPERTS
            ids.copy_(all_ids[group.rank])
            ranks.fill(weights)
            captured.replay()
            ranks.check_path(all_ids, [found])
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
