"""Real processes for tests: a pool of ranks that lives for the session, and payload to send."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ultraep_comm as uec
from ultraep_comm import Segment
from ultraep_comm.bench.payload import SENTINEL
from ultraep_comm.group.group import session_of
from ultraep_comm.plan.topology import Topology, contiguous_home

MAX_RANKS = 8


class NotARankError(Exception):
    """This process is none of a group's ranks."""


SUBGROUPS: dict[int, dist.ProcessGroup] = {}
_own_groups: list[dist.ProcessGroup] = []

# One segment of each kind: bf16, fp8, packed bytes, a small scale, an odd size, transposed.
MIXED = {
    "w13": Segment((64, 48), torch.bfloat16),
    "w2": Segment((48, 33), torch.float8_e4m3fn),
    "packed": Segment((5, 7, 11), torch.uint8),
    "scale": Segment((3,), torch.uint8),
    "bias": Segment((1,), torch.float32),
    "w_t": Segment((40, 24), torch.bfloat16, (1, 40)),
    "big": Segment((200_001,), torch.uint8),
}


@lru_cache(maxsize=256)  # of large segments 50 MB
def expert_bytes(epoch: int, expert: int, index: int, segment: Segment) -> torch.Tensor:
    """Return random bytes that depend on the four arguments alone; nobody may write to them."""
    seed = ((epoch * 65_537 + expert) * 257 + index) & 0x7FFFFFFF
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-segment.nbytes // 8),), generator=generator)
    return words.view(torch.uint8)[: segment.nbytes]


def raw(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Return the bytes of one expert's tensor in memory order."""
    elements = segment.nbytes // segment.dtype.itemsize
    return tensor.as_strided((elements,), (1,)).view(torch.uint8)


def same_bytes(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Compare the CPU's tensors of bytes, of which torch.equal takes one at a time."""
    return np.array_equal(found.numpy(), wanted.numpy())


def make_weights(group: uec.Group) -> dict[str, torch.Tensor]:
    """Return stacked weights for a group's main instances."""
    result = {}
    for name, segment in group.segments.items():
        count = group.num_local_experts * segment.nbytes
        storage = torch.zeros(count, dtype=torch.uint8, device=group.device)
        result[name] = segment.view(storage, group.num_local_experts)
    return result


def fill_weights(
    group: uec.Group, weights: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], epoch: int
) -> None:
    local = group.topology.local_experts(group.rank)
    for index, (name, segment) in enumerate(group.segments.items()):
        for i, expert in enumerate(local):
            raw(weights[name][i], segment).copy_(expert_bytes(epoch, int(expert), index, segment))


def bytes_stored(group: uec.Group) -> int:
    """Return the bytes that a rank has stored; on a CUDA group the device is asked."""
    known = group.health().bytes_stored
    if known is not None:
        return known
    engine: Any = session_of(group).engine
    return int(engine.bytes_stored)


def slot_memory(group: uec.Group) -> torch.Tensor:
    """Return symmetric memory from the first slot on, including gaps."""
    engine: Any = session_of(group).engine
    memory: torch.Tensor = engine.memory[0].local[engine.layout.slots_base :]
    return memory


def clear_slots(group: uec.Group) -> None:
    """Set every byte of :func:`slot_memory` to SENTINEL."""
    slot_memory(group).fill_(SENTINEL)


def wrong_bytes(
    group: uec.Group,
    plan: uec.Plan,
    epoch: int,
    *,
    names: Sequence[str] | None = None,
    found: torch.Tensor | None = None,
) -> int:
    """Return the number of wrong bytes in slots that were cleared before the call.

    Args:
        names: of the segments that were moved; None: all.
        found: a copy of :func:`slot_memory`; None: what is there now.
    """
    found = (slot_memory(group) if found is None else found).cpu()
    expected, layout = torch.full_like(found, SENTINEL), session_of(group).engine.layout
    for index, (name, segment) in enumerate(group.segments.items()):
        if names is not None and name not in names:
            continue
        start = layout.slot_offset[index] - layout.slots_base
        for slot, expert in enumerate(plan.slot_expert[group.rank].tolist()):
            if expert >= 0:
                at = start + slot * segment.nbytes
                expected[at : at + segment.nbytes] = expert_bytes(epoch, expert, index, segment)
    return 0 if same_bytes(found, expected) else int((found != expected).sum())


def random_plan(
    seed: int, num_ranks: int, num_experts: int, slots: int, home: Any = None, fill: float = 0.7
) -> uec.Plan:
    """Return a legal plan with chains: random slots hold random experts of other ranks."""
    generator = torch.Generator().manual_seed(seed)
    topology = Topology.make(
        num_ranks=num_ranks, num_experts=num_experts, slots_per_rank=slots, home=home
    )
    slot_expert = torch.full((num_ranks, slots), -1, dtype=torch.int32)
    for rank in range(num_ranks):
        legal = torch.tensor([e for e in range(num_experts) if topology.home[e] != rank])
        if len(legal) == 0:
            continue
        # Low ids are more likely, so that some experts get many replicas.
        order = legal[(torch.rand(len(legal), generator=generator) ** 2).argsort()]
        order = order[: max(slots, 1)]
        for slot in range(min(slots, len(order))):
            if torch.rand((), generator=generator) < fill:
                slot_expert[rank, slot] = order[slot]
    return uec.Plan.from_slots(slot_expert, num_experts=num_experts, home=home)


def plan_alone(
    load: torch.Tensor,
    *,
    slots_per_rank: int,
    num_ranks: int | None = None,
    home: Any = None,
    domains: Any = None,
    allow_cross_domain: bool = False,
    **options: Any,
) -> uec.Plan:
    """Plan without a group: for the experts of a load and, by default, its ranks."""
    topology = Topology.make(
        num_ranks=load.shape[0] if num_ranks is None else num_ranks,
        num_experts=load.shape[-1],
        slots_per_rank=slots_per_rank,
        home=home,
        domains=domains,
        allow_cross_domain=allow_cross_domain,
    )
    return uec.plan_replicas(load, topology=topology, **options)


def fan_out_plan(num_ranks: int, num_experts: int, slots: int) -> uec.Plan:
    """Return a plan with expert 0 on every other rank, and expert 1 too where slots allow."""
    slot_expert = torch.full((num_ranks, slots), -1, dtype=torch.int32)
    home = contiguous_home(num_experts, num_ranks)
    for slot, expert in enumerate(range(min(slots, num_experts, 2))):
        for rank in range(num_ranks):
            if home[expert] != rank:
                slot_expert[rank, slot] = expert
    return uec.Plan.from_slots(slot_expert, num_experts=num_experts)


def start_all(
    groups: Sequence[uec.Group],
    given: Sequence[Any] | Mapping[int, Any],
    plan: Any,
    *,
    call: Callable[..., uec.Work | None] = uec.replicate_experts,
    **options: Any,
) -> list[uec.Work]:
    """Start ``call`` on every group; ``given``, and ``plan`` where it is a list, are by rank."""
    works = []
    for group in groups:
        own = plan[group.rank] if isinstance(plan, list) else plan
        work = call(given[group.rank], own, group=group, async_op=True, **options)
        assert work is not None
        works.append(work)
    return works


def synchronize_all(works: Sequence[uec.Work]) -> None:
    for work in works:
        work.synchronize()


def assert_mismatch(works: Sequence[uec.Work]) -> None:
    """Check that every call fails, and at least one with PlanMismatchError."""
    found = [raised(work.synchronize) for work in works]
    assert all(isinstance(error, uec.errors.TransferError) for error in found)
    assert uec.errors.PlanMismatchError in map(type, found)


def prepare_all(groups: Sequence[uec.Group], weights: Sequence[Any], epoch: int) -> None:
    """Give every rank's weights the bytes of an epoch, and clear its slots."""
    for group in groups:
        fill_weights(group, weights[group.rank], epoch)
        clear_slots(group)


def close_all(groups: Sequence[uec.Group]) -> None:
    for group in groups:
        group.close()


def loopback(num_ranks: int, fn: Callable[[int], Any]) -> list[Any]:
    """Run ``fn(rank)`` on one thread per rank, as collectives in one process need."""
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(fn, range(num_ranks)))


def raised(fn: Callable[[], Any]) -> BaseException | None:
    """Return the error that ``fn`` raises, if any."""
    try:
        fn()
    except BaseException as error:
        return error
    return None


def group_here(num_ranks: int) -> dist.ProcessGroup:
    """Return the process group of the first ranks of a :class:`RankPool`, in one of them."""
    if dist.get_rank() >= num_ranks:
        raise NotARankError
    return SUBGROUPS[num_ranks]


def run_here(rank: int, process_group: Any, fn: Callable[..., None], options: Any) -> None:
    """Call ``fn`` in a process that may be none of the ranks that it creates a group of."""
    with contextlib.suppress(NotARankError):
        fn(**options)


def own_group(rank: int, num_ranks: int, path: str) -> dist.ProcessGroup:
    """Return a process group that no other test uses, for one that leaves it in disorder."""
    store, limit = dist.FileStore(path, num_ranks), timedelta(seconds=100)
    group = dist.ProcessGroup(store, rank, num_ranks)
    gloo = dist.ProcessGroupGloo(dist.FileStore(path, num_ranks), rank, num_ranks, limit)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    _own_groups.append(group)  # peers may still be connected to it
    return group


def run_python(
    *arguments: str, timeout: float = 250, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


# ---- processes -----------------------------------------------------------------------------


def forkserver() -> Any:
    """Return a context that forks from a single-threaded process with torch loaded."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "ultraep_comm.engines.cuda.make"])
    return context


def prepare_forked() -> None:
    """Prepare a process that was just forked: one thread, and garbage only of what it makes.

    To look through all of torch takes 0.1 s, and a copy of its pages.
    """
    torch.set_num_threads(1)
    gc.freeze()


def _serve(rank: int, store: str, pipe: Connection) -> None:
    prepare_forked()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=MAX_RANKS)
    for size in range(1, MAX_RANKS + 1):
        SUBGROUPS[size] = dist.new_group(list(range(size)))
    pipe.send((0, "ready", None))
    while True:
        task = pipe.recv()
        if task is None:
            break
        number, fn, size, args = task
        try:
            pipe.send((number, "ok", fn(rank, SUBGROUPS[size], *args)))
        except BaseException:
            pipe.send((number, "error", traceback.format_exc()))


class RankPool:
    """Processes that run test functions ``fn(rank, process_group, *args)``."""

    def __init__(self) -> None:
        context = forkserver()
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        self._number = 0  # of the latest task
        for rank in range(MAX_RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for rank in range(MAX_RANKS):
            self._receive(rank, 120)

    def _receive(self, rank: int, timeout: float) -> Any:
        number = -1
        while number != self._number:  # results of a task that was given up come late
            if not self._pipes[rank].poll(timeout):
                raise TimeoutError(f"rank {rank} did not answer within {timeout} s")
            number, kind, value = self._pipes[rank].recv()
        if kind == "error":
            raise AssertionError(f"rank {rank} failed:\n{value}")
        return value

    def run(self, num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 240) -> Any:
        """Run on ranks 0 to ``num_ranks - 1`` and return their results by rank."""
        self._number += 1
        for pipe in self._pipes[:num_ranks]:
            pipe.send((self._number, fn, num_ranks, args))
        end, results, errors = time.monotonic() + timeout, [], []
        for rank in range(num_ranks):
            try:
                results.append(self._receive(rank, max(end - time.monotonic(), 0.1)))
            except AssertionError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()
