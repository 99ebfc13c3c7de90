"""Choosing the kernels for a group: which cubin, which tile size, how many blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ultraep_comm import _core
from ultraep_comm.cuda.cubins import check_info, find_cubin, read_info
from ultraep_comm.cuda.device import Device, Kernels
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError

# With 4 stages each they keep 256 tiles in flight. Modelled (docs/model.md): with half as many,
# tiles for a rank that imports two experts hold up those that its senders have for others.
DEFAULT_NUM_SMS = 64
PLAN_WARPS = 16  # at most: each makes probes of its own, so that two rounds do. To be measured
NOTICE, PEERS = "ultraep_replicate_notice", "ultraep_replicate_peers"
REDUCE = "ultraep_reduce"


def load_kernels(device: Device, nvshmem: tuple[int, int] | None) -> Kernels:
    """Load the cubin for a device, if it fits this installation.

    Args:
        device: where to.
        nvshmem: (major, minor) of NVSHMEM's host library; None: it is not used.

    Raises:
        UnsupportedError: there is none, or it does not fit.
    """
    cubin = find_cubin(device.compute_capability)
    check_info(
        read_info(cubin),
        cuda_major=device.cuda_major,
        layout=_core.cuda_layout(),
        nvshmem=nvshmem,
    )
    return device.load(cubin)


@dataclass(frozen=True)
class GroupKernels:
    """Handles of the kernels of one group."""

    replicate: int
    notice: int
    load: int
    load_plan: int  # 0: the group is too large for it, or has far peers
    plan_warps: int
    reduce: int = 0  # 0: slots hold no gradients
    reduce_warps: int = 0

    @classmethod
    def of(
        cls, device: Device, kernels: Kernels, config: _core.EngineConfig, *, far: bool, adds: bool
    ) -> GroupKernels:
        """Look them up; with ``far``, those that reach peers by puts and signals.

        Raises:
            UnsupportedError: the group is too large for the kernel that adds gradients.
        """
        num_ranks, num_experts = len(config.domain), config.num_experts

        def plan_bytes(warps: int) -> int:
            slots = config.slots_per_rank
            return _core.cuda_load_plan_shared_bytes(num_ranks, num_experts, slots, warps)

        def reduce_bytes(warps: int) -> int:
            return _core.cuda_reduce_shared_bytes(config, warps)

        reduce_warps = choose_reduce_warps(reduce_bytes, device) if adds else 0
        plan_warps = 0 if far else choose_plan_warps(plan_bytes, device)
        suffix = "_far" if far else ""
        name = f"ultraep_replicate_{config.tile_bytes}{suffix}"
        return cls(
            replicate=kernels.handle(name, _core.cuda_shared_bytes(config)),
            notice=kernels.handle(NOTICE, 0),
            load=kernels.handle(
                f"ultraep_load{suffix}",
                _core.cuda_load_shared_bytes(num_ranks, num_experts),
            ),
            load_plan=kernels.handle("ultraep_load_plan", plan_bytes(plan_warps))
            if plan_warps
            else 0,
            plan_warps=plan_warps,
            reduce=kernels.handle(REDUCE, reduce_bytes(reduce_warps)) if adds else 0,
            reduce_warps=reduce_warps,
        )


def choose_plan_warps(
    shared_bytes: Callable[[int], int], device: Device, most: int | None = None
) -> int:
    """Return the warps of a block that plans: as many as fit in shared memory; 0: none does."""
    most = PLAN_WARPS if most is None else most
    return next((n for n in range(most, 0, -1) if shared_bytes(n) <= device.max_shared_bytes), 0)


def choose_reduce_warps(shared_bytes: Callable[[int], int], device: Device) -> int:
    """Return the warps of a block that adds gradients: as many as fit in shared memory.

    Raises:
        UnsupportedError: none does.
    """
    warps = choose_plan_warps(shared_bytes, device, _core.CUDA_REDUCE_WARPS)
    if warps == 0:
        raise UnsupportedError(
            f"a block that adds gradients needs {shared_bytes(1)} bytes of shared memory, this"
            f" device has {device.max_shared_bytes}; use a group of fewer ranks and slots_per_rank"
        )
    return warps


def choose_tile_bytes(given: int | None, config: _core.EngineConfig, device: Device) -> int:
    """Return the tile size: the one asked for, else the largest that fits.

    Raises:
        InvalidArgumentError: the kernels are not compiled for the size asked for.
        UnsupportedError: the group's tables leave no room for tiles in shared memory.
    """
    sizes = sorted(_core.cuda_tile_sizes(), reverse=True)
    if given is not None and given not in sizes:
        raise InvalidArgumentError(
            f"tile_bytes is {given}; the CUDA engine's kernels are compiled for {sorted(sizes)}"
        )
    needed = 0
    for size in sizes if given is None else [given]:
        config.tile_bytes = size
        needed = _core.cuda_shared_bytes(config)
        if needed <= device.max_shared_bytes:
            return size
    raise UnsupportedError(
        f"a block needs {needed} bytes of shared memory with tiles of {config.tile_bytes}, this"
        f" device has {device.max_shared_bytes}; use smaller tiles, of {min(sizes)} bytes, or a"
        " group of fewer ranks and slots_per_rank"
    )


def choose_num_sms(given: int | None, device: Device, ranks_here: int) -> int:
    """Return the blocks of a rank. All blocks of a launch have to run at the same time.

    Raises:
        InvalidArgumentError: the device has too few multiprocessors.
    """
    most = device.num_sms // ranks_here
    wanted = min(DEFAULT_NUM_SMS, max(most, 1)) if given is None else given
    if wanted > most:
        raise InvalidArgumentError(
            f"num_sms is {wanted} for each of {ranks_here} ranks on this device, which has"
            f" {device.num_sms} multiprocessors; expected at most {most}, or fewer ranks"
        )
    return wanted
