"""Making groups of the CUDA engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ultraep_comm import _core
from ultraep_comm.cuda.device import Device, Kernels, find_device
from ultraep_comm.cuda.engine import CudaEngine, Peers, SharedLauncher, launch_peers
from ultraep_comm.cuda.kernels import (
    PEERS,
    GroupKernels,
    choose_num_sms,
    choose_tile_bytes,
    load_kernels,
)
from ultraep_comm.cuda.stages import CudaStages
from ultraep_comm.fabrics.bootstrap import (
    DEFAULT_TIMEOUT,
    Hello,
    Meeting,
    check_same_arguments,
)
from ultraep_comm.fabrics.loopback import LoopbackFabric, LoopbackMemory
from ultraep_comm.fabrics.nvshmem import NvshmemFabric, Runtime, find_runtime, join
from ultraep_comm.group import Group
from ultraep_comm.loads import LoopbackLoads, LoopbackTable, ProcessGroupLoads
from ultraep_comm.options import Options
from ultraep_comm.reach import check_domains, find_domains
from ultraep_comm.topology import Topology

PROBE_BYTES = 128


def cost_constants(num_ranks: int) -> tuple[int, int, int, int, int]:
    """Return the cost model's constants; see `CostModel` in src/core/cost.hpp.

    A link of 710 GB/s, memory of 3.3 TB/s, and 2 us from a publish to the peer's next store: those
    of a 72-GPU NVLink rack as published, not measured here.
    """
    return (1_440, 310, 200_000, 2_000_000, 100 * num_ranks)


def find_nvshmem_device() -> tuple[Device, Runtime, Kernels]:
    """Return what an NVSHMEM group needs; NVSHMEM is not touched before there is a device.

    Raises:
        UnsupportedError: something is missing or too old; says what to install.
    """
    device = find_device()
    runtime = find_runtime()
    return device, runtime, load_kernels(device, runtime.version())


def make_nvshmem_group(
    meeting: Meeting,
    options: Options,
    topology: Topology,
    given_domains: bool,
    found: tuple[Device, Runtime, Kernels],
) -> Group:
    """Make one rank's group. Collective; arguments have been checked on every rank.

    Raises:
        InvalidArgumentError, UnsupportedError: this rank's device does not do what was asked.
        BootstrapError: ranks disagree, or another one failed.
        OutOfSharedMemoryError: the symmetric heap is too small.
    """
    device, runtime, kernels = found
    rank, num_ranks = meeting.rank, meeting.num_ranks
    cost = cost_constants(num_ranks)
    error: Exception | None = None
    num_sms = 0
    try:
        config = options.config(topology, rank, meeting.timeout, cost)
        options.tile_bytes = choose_tile_bytes(options.given_tile_bytes, config, device)
        num_sms = choose_num_sms(options.num_sms, device, 1)
    except Exception as bad_argument:  # whatever it is, the peers must not wait for this rank
        error = bad_argument
    meeting.agree(error)
    hellos = meeting.exchange(Hello(digest=options.digest(topology, given_domains), cost=cost))
    check_same_arguments(hellos)

    pes = join(meeting, runtime, device.torch_device.index or 0)
    fabric = _make_fabric(meeting, runtime, kernels, device, pes)
    try:
        probe = fabric.allocate(PROBE_BYTES)
        reaches = meeting.gather_ints(*(int(base != 0) for base in probe.bases))
        if given_domains:
            check_domains(topology.domain, reaches)
        else:
            topology = topology.with_domains(find_domains(reaches))
        crosses = topology.allow_cross_domain and not all(map(all, reaches))
        far = [int(not reached) for reached in reaches[rank]] if crosses else []
        fabric.can_pull = not crosses
        config = options.config(topology, rank, meeting.timeout, hellos[0].cost)
        staging = (
            fabric.allocate(_core.cuda_staging_bytes(num_sms, config.tile_bytes)).local
            if crosses
            else None
        )
        peers = Peers(pes=pes, far=far, staging=staging)

        def make_engine(config: _core.EngineConfig) -> CudaEngine:
            shared = SharedLauncher(
                device,
                GroupKernels.of(kernels, config, far=bool(far)),
                config,
                first_rank=rank,
                num_ranks=1,
                num_sms=num_sms,
            )
            return CudaEngine(config, shared, peers)

        group = None
        try:
            group = Group(
                rank=rank,
                topology=topology,
                segments=options.segments,
                config=config,
                fabric=fabric,
                make_engine=make_engine,
                loads=ProcessGroupLoads(meeting),
                make_stages=partial(CudaStages, device, kernels, topology, rank),
            )
        except Exception as refused:
            error = refused
        # Also: every rank's flags are in place before anyone calls.
        _agree_or_close(meeting, error, group)
    except BaseException:
        fabric.close()
        raise
    assert group is not None
    return group


def _agree_or_close(meeting: Meeting, error: Exception | None, group: Group | None) -> None:
    try:
        meeting.agree(error)
    except BaseException:
        if group is not None:
            group.close()
        raise


def _make_fabric(
    meeting: Meeting, runtime: Runtime, kernels: Kernels, device: Device, pes: Sequence[int]
) -> NvshmemFabric:
    kernel, error = 0, None
    try:
        kernel = kernels.handle(PEERS, 0)
        runtime.register(kernels.code)
    except Exception as refused:
        error = refused
    meeting.agree(error)
    numbers = torch.tensor(list(pes), dtype=torch.int32, device=device.torch_device)

    def view(address: int, num_bytes: int) -> torch.Tensor:
        memory = device.view(address, num_bytes)
        memory.zero_()
        device.settle()
        return memory

    fabric = NvshmemFabric(
        meeting,
        runtime.heap,
        view,
        lambda own: launch_peers(device, kernel, own, numbers, meeting.num_ranks),
    )
    fabric.on_close = lambda: runtime.unregister(kernels.code)
    return fabric


def make_loopback_groups(
    options: Options, topology: Topology, device: Device, kernels: Kernels
) -> list[Group]:
    """Make the groups of all ranks in this process, on one device.

    Raises:
        InvalidArgumentError, UnsupportedError: the device does not do what was asked.
    """
    num_ranks = topology.num_ranks
    # One memory for all: more ranks move no more bytes at a time.
    cost = cost_constants(1)
    configs = [options.config(topology, r, DEFAULT_TIMEOUT, cost) for r in range(num_ranks)]
    tile_bytes = choose_tile_bytes(options.given_tile_bytes, configs[0], device)
    for config in configs:
        config.tile_bytes = tile_bytes
    shared = SharedLauncher(
        device,
        GroupKernels.of(kernels, configs[0], far=False),
        configs[0],
        first_rank=0,
        num_ranks=num_ranks,
        num_sms=choose_num_sms(options.num_sms, device, num_ranks),
    )
    memory = LoopbackMemory(num_ranks, device.allocate)
    table = LoopbackTable(num_ranks, configs[0].call_timeout)
    return [
        Group(
            rank=rank,
            topology=topology,
            segments=options.segments,
            config=config,
            fabric=LoopbackFabric(memory, rank),
            make_engine=lambda config: CudaEngine(config, shared),
            loads=LoopbackLoads(table, rank),
            make_stages=partial(CudaStages, device, kernels, topology, rank),
        )
        for rank, config in enumerate(configs)
    ]
