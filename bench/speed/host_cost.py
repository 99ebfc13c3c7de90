"""The host time of a call of the CUDA engine, with a CUDA driver that does nothing.

    python bench/speed/host_cost.py [--iters 5000] [--json FILE]

Rank 0 of a group of 8, and of 64, calls ``replicate_experts`` with a different plan each time. It
has no peers and no GPU. Weights are bound once, or checked in every call: stacked tensors, or one
tensor per expert. The figures exclude the CUDA driver, whose functions return at once here: on a
GPU add its time for a copy, a launch and a few events.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ultraep_comm import _core
from ultraep_comm.bench.loads import generate_load
from ultraep_comm.bench.report import describe_run, print_records
from ultraep_comm.bench.table import Column
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.calls.replicate import replicate_experts
from ultraep_comm.engines.base import Engine
from ultraep_comm.engines.cuda.device import Kernels
from ultraep_comm.engines.cuda.engine import CudaEngine, SharedLauncher
from ultraep_comm.engines.cuda.make import cost_constants
from ultraep_comm.engines.options import GroupConfig, Options
from ultraep_comm.fabrics.loopback import host_memory, make_loopback_fabrics
from ultraep_comm.group.group import Group
from ultraep_comm.group.session import Session
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import Topology
from ultraep_comm.weights.binding import Binding
from ultraep_comm.weights.segments import Weights

EXPERTS, SLOTS = 256, 2
EXPERT = {"w13": ((2 * 2048, 3072), torch.bfloat16), "w2": ((3072, 2048), torch.bfloat16)}
TILE_BYTES = 32 << 10
TOKENS, TOPK, IMBALANCE = 4096, 8, 3.0
NUM_PLANS = 256


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
)
def _one_block(blocks: Any, *_: object) -> int:
    """Say that a multiprocessor has room for one: asked when a group is made."""
    blocks[0] = 1
    return 0


class IdleDevice:
    """A device with host memory and a driver that does nothing.

    (The recording driver of the tests is in Python; its callbacks would cost more than the call.)
    """

    torch_device = torch.device("cpu")
    compute_capability = (9, 0)
    num_sms = 132
    warp_size = 32
    max_shared_bytes = 227 << 10
    cuda_major = 13
    context = 0

    def __init__(self) -> None:
        # A C function that ignores its arguments and returns 0, success.
        nothing = ctypes.CDLL(None).pthread_mutexattr_destroy
        address = ctypes.cast(nothing, ctypes.c_void_p).value or 0
        functions = dict.fromkeys(_core.cuda_driver_names(), address)
        occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        functions[occupancy] = ctypes.cast(_one_block, ctypes.c_void_p).value or 0
        self.driver = _core.CudaDriver(functions)
        self._held: list[torch.Tensor] = []
        self._addresses: set[int] = set()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed pages."""
        return host_memory(num_bytes)

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Not used."""
        raise NotImplementedError

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed pages."""
        return host_memory(num_bytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory that `holds` takes for the device's."""
        self._held.append(torch.empty(tuple(shape), dtype=dtype))
        self._addresses.add(self._held[-1].data_ptr())
        return self._held[-1]

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor came from :meth:`empty`."""
        return tensor.data_ptr() in self._addresses

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: memory is never freed."""

    def upload(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy."""
        to.copy_(values)

    def synchronize_stream(self) -> None:
        """Do nothing: copies are done at once."""

    def is_capturing(self) -> bool:
        """Return False."""
        return False

    def current_stream(self) -> int:
        """Return a handle that the driver ignores."""
        return 7

    def new_stream(self) -> tuple[int, object]:
        """Return another handle."""
        return 8, None

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""

    def load(self, cubin: Path) -> Kernels:
        """Not used."""
        raise NotImplementedError


class IdleEngine(CudaEngine):
    """Rank 0's engine on an `IdleDevice`, whose stages are not used."""

    def is_on_device(self, value: object) -> bool:
        """Return whether a tensor, or a plan, is on the device."""
        tensor = value.slot_expert if isinstance(value, Plan) else value
        return isinstance(tensor, torch.Tensor) and self._device.is_on_device(tensor)

    def plan_for_call(
        self, plan: Plan, operation: str, *, in_bank: bool = False
    ) -> tuple[Plan, bool]:
        """Return the plan, and whether it is on the device."""
        return plan, in_bank or self.is_on_device(plan)  # a bank's plans here are

    is_capturing = Engine.is_capturing
    raise_fault = None


def make_group(num_ranks: int, device: IdleDevice) -> Group:
    """Create rank 0's group with a launcher of one rank, as over NVSHMEM."""
    rank, num_sms = 0, 32
    given = GroupConfig(
        num_experts=EXPERTS,
        slots_per_rank=SLOTS,
        expert=EXPERT,
        engine="cuda",
        timeout=30,
        num_sms=num_sms,
        tile_bytes=TILE_BYTES,
    )
    options, topology = Options(given), given.topology(num_ranks)
    config = options.config(topology, rank, 30, cost_constants(num_ranks, 710.0))
    shared = SharedLauncher(
        device,
        {
            **{"kernel": 1, "notice": 2, "load": 3},
            **{"load_plan": 4, "plan_warps": 8, "reduce": 0},
        },
        config,
        first_rank=rank,
        num_ranks=1,
        num_sms=num_sms,
        background_sms=num_sms,
    )
    fabric = make_loopback_fabrics(num_ranks)[rank]
    kernels: Any = SimpleNamespace(handle=lambda *_: 6)
    engine = IdleEngine(device, kernels, topology, rank, (options, config, fabric), shared)
    return Group(Session(engine, options))


def put_plan(plan: Plan, device: IdleDevice) -> Plan:
    """Return a copy of the plan on the device."""
    fields = plan.tensors()
    return Plan(**{n: device.empty(t.shape, t.dtype).copy_(t) for n, t in fields.items()})


def make_plans(num_ranks: int) -> list[Plan]:
    """Return the plans of NUM_PLANS loads of the same imbalance."""
    plans = []
    topology = Topology.make(num_ranks=num_ranks, num_experts=EXPERTS, slots_per_rank=SLOTS)
    for seed in range(NUM_PLANS):
        load = generate_load(
            num_ranks=num_ranks,
            num_experts=EXPERTS,
            imbalance=IMBALANCE,
            num_tokens=num_ranks * TOKENS * TOPK,
            seed=seed,
        )
        plans.append(plan_replicas(torch.from_numpy(load), topology=topology))
    return plans


def make_weights(group: Group) -> dict[str, torch.Tensor]:
    """Return main weights. Their pages are never touched."""
    return {
        name: segment.view(
            host_memory(group.num_local_experts * segment.nbytes), group.num_local_experts
        )
        for name, segment in group.segments.items()
    }


def measure(
    group: Group, device: IdleDevice, plans: list[Plan], iters: int
) -> Iterator[tuple[str, bool, np.ndarray]]:
    """Yield (weights, async_op, times in us) for each kind of call; kinds are interleaved.

    For "device" the plan is on the device; for "resident" it is one plan, of a bank whose slots
    hold it, so that nothing is moved.
    """
    stacked = make_weights(group)
    given: dict[str, Weights | Binding] = {
        "bound": group.bind(stacked),
        "stacked": stacked,
        "listed": {name: list(tensor) for name, tensor in stacked.items()},
        "device": group.bind(stacked),
        "resident": group.bind(stacked),
    }
    held = replace(put_plan(plans[0], device), reuse=True)
    on_device = itertools.cycle([put_plan(plan, device) for plan in plans])
    rows = list(itertools.product(given, (False, True)))
    times = np.zeros((len(rows), iters))
    next_plan = itertools.cycle(plans)
    for i in range(-50, iters):
        for row, (kind, async_op) in enumerate(rows):
            weights = given[kind]
            plan = (
                held if kind == "resident" else next(on_device if kind == "device" else next_plan)
            )
            start = time.perf_counter_ns()
            work = replicate_experts(weights, plan, group=group, async_op=async_op)
            end = time.perf_counter_ns()
            if work is not None:
                work.wait()
            if i >= 0:
                times[row, i] = (end - start) / 1e3
    for (kind, async_op), row_times in zip(rows, times, strict=True):
        yield kind, async_op, row_times


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--iters", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(*(f"# {line}" for line in describe_run("one rank's host, no driver")), sep="\n")
    records = []
    for num_ranks in arguments.ranks:
        plans = make_plans(num_ranks)
        replicas = float(np.median([plan.num_replicas for plan in plans]))
        device = IdleDevice()
        with make_group(num_ranks, device) as group:
            for kind, async_op, times in measure(group, device, plans, arguments.iters):
                p50, p99 = (float(np.percentile(times, q)) for q in (50, 99))
                records.append(
                    {
                        "op": "replicate_experts",
                        "ranks": num_ranks,
                        "replicas": replicas,
                        "weights": kind,
                        "async_op": async_op,
                        "time_us": {"p50": p50, "p99": p99},
                    }
                )
    settings = {
        "iters": arguments.iters,
        "plans": NUM_PLANS,
        "experts": EXPERTS,
        "slots": SLOTS,
        "expert_bytes": sum(math.prod(s) * d.itemsize for s, d in EXPERT.values()),
        "tile_bytes": TILE_BYTES,
        "imbalance": IMBALANCE,
        "driver": "none: its functions return at once",
    }
    columns = [
        *(Column(name, "", name) for name in ("ranks", "replicas", "weights", "async_op")),
        Column("p50", "(us)", "time_us.p50", ".1f"),
        Column("p99", "(us)", "time_us.p99", ".1f"),
    ]
    print_records(columns, records, arguments.json, settings=settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
