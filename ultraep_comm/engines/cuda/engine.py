"""The CUDA engine of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ultraep_comm import _core
from ultraep_comm.engines.base import Objective, Setup
from ultraep_comm.engines.cuda.device import Device, Kernels
from ultraep_comm.engines.cuda.kernels import check_residency
from ultraep_comm.engines.cuda.stages import CORE_ERRORS, CudaStages, raise_typed, translated
from ultraep_comm.engines.cuda.virtual import compose
from ultraep_comm.fabrics import Place, SharedRegion
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import IntArray, Topology
from ultraep_comm.weights.binding import Binding


class SharedLauncher:
    """A launcher and its memory, for one rank or for all ranks of a loopback group.

    Raises:
        InvalidArgumentError: ``num_sms`` blocks of each rank are too many for the device.
    """

    def __init__(
        self,
        device: Device,
        kernels: Mapping[str, int],
        config: _core.EngineConfig,
        *,
        first_rank: int,
        num_ranks: int,
        num_sms: int,
        background_sms: int,
    ) -> None:
        stream, stream_owner = device.new_stream()
        captured_stream, captured_owner = device.new_stream()
        launcher_config = _core.CudaLauncherConfig(
            driver=device.driver,
            context=device.context,
            stream=stream,
            captured_stream=captured_stream,
            warp_size=device.warp_size,
            first_rank=first_rank,
            num_ranks=num_ranks,
            num_sms=num_sms,
            background_sms=background_sms,
            max_shared_bytes=device.max_shared_bytes,
            config=config,
            **kernels,
        )
        blocks_per_sm = translated(launcher_config.blocks_per_multiprocessor)
        check_residency(num_sms, device, num_ranks, blocks_per_sm)
        self.device = device
        self.plans = kernels["plan_warps"] > 0
        self.memory = memory = device.allocate(launcher_config.device_bytes)
        pinned = device.pinned(launcher_config.pinned_bytes)
        self.launcher = translated(
            _core.CudaLauncher,
            launcher_config,
            memory.data_ptr(),
            pinned.data_ptr(),
            (device, stream_owner, captured_owner, memory, pinned),
        )


_OF_CORE = ("failed_epoch", "report", "health", "version")  # as they are
_TRANSLATED = ("synchronize", "reject", "abort", "close")  # as they are, with typed errors


class CudaEngine(CudaStages):
    """One rank. Calls run on the current stream, or on the group's stream ordered after it.

    Args:
        device, kernels, topology, rank, setup: as for `CudaStages`.
        shared: launches calls.
        pes: the ranks' NVSHMEM PEs; empty: NVSHMEM is not used.
        far: 1 for each rank reached by puts and signals; empty: none is.
        staging: symmetric memory for puts; None: no rank is far.
    """

    _native: _core.CudaEngine
    wait_blocks = False

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        topology: Topology,
        rank: int,
        setup: Setup,
        shared: SharedLauncher,
        pes: Sequence[int] = (),
        far: Sequence[int] = (),
        staging: torch.Tensor | None = None,
    ) -> None:
        super().__init__(device, kernels, topology, rank, setup)
        self._shared = shared
        self.plans_at_once = shared.plans
        self._current_stream = shared.device.current_stream
        self._staging = staging
        self._tables: list[torch.Tensor] = []  # of regions
        self._native = translated(
            _core.CudaEngine,
            self.config,
            shared.launcher,
            far=far,
            pes=pes,
            staging=0 if staging is None else staging.data_ptr(),
        )
        for name in _OF_CORE:
            setattr(self, name, getattr(self._native, name))
        for name in _TRANSLATED:
            setattr(self, name, partial(translated, getattr(self._native, name)))

    def add_region(self, bases: list[int], offset: list[int]) -> int:
        """Register main weights that peers can address; return the region's index."""
        table = self._device.allocate(8 * (len(bases) + len(offset)))
        self._tables.append(table)
        return translated(self._native.add_region, bases, offset, table.data_ptr())

    def share_slots(
        self, allocate: Callable[[int], SharedRegion], num_bytes: int, places: Sequence[Place]
    ) -> SharedRegion:
        """Return new memory in which slots appear once more; peers cannot address it."""
        return SharedRegion(bases=[], local=compose(self._device, num_bytes, places))

    def transfer(self, call: _core.TransferCall, bound: Binding) -> tuple[int, _core.Mode | None]:
        """Submit a transfer or a reduction on the current stream, or ordered after it.

        Returns:
            Its epoch, with the bit ``CUDA_CAPTURED`` if the stream is being captured; and its mode,
            which is the requested one if the plan is on the device.
        """
        try:
            return self._native.transfer(call, self._current_stream())
        except CORE_ERRORS as error:
            raise_typed(error)

    def residents(self, bank: int) -> IntArray:
        """Return int32 ``[G, S]``, what the slots of a bank hold; see `Engine`."""
        return translated(self._native.residents, bank, self._current_stream())

    def bank_table(self, bank: int) -> int:
        """Return the address of what the slots of a bank hold."""
        return translated(self._native.bank_table, bank, self._current_stream())

    def invalidate(self, bank: int) -> int:
        """Let a bank hold nothing, of the next version, from here on in the current stream."""
        translated(self._native.invalidate, bank, self._current_stream())
        return 0

    def gather(
        self, counted: torch.Tensor, load: torch.Tensor, objective: Objective | None = None
    ) -> tuple[int, Plan | None]:
        """Count contiguous ids on the device, exchange the counts, and plan if one launch can."""
        id_bytes = counted.element_size() if counted.dim() == 2 else 0  # 0: these are counts
        given = (counted.data_ptr(), counted.numel(), id_bytes, load.data_ptr())
        stream = self._current_stream()
        if objective is None or not self.plans_at_once:
            return translated(self._native.gather, *given, stream), None
        memory, plan = self.plan_memory(load)
        return translated(
            self._native.gather_and_plan,
            *given,
            memory.data_ptr(),
            self._stages,
            *objective,
            stream,
        ), plan

    def wait(self, epoch: int, slots: list[int] | None = None) -> bool:
        """Make the current stream wait; False if the call is known to have failed."""
        try:
            if slots is None:
                return self._native.wait(epoch, self._current_stream())
            return self._native.wait_slots(epoch, slots, self._current_stream())
        except CORE_ERRORS as error:
            raise_typed(error)

    def ready(self, bank: int) -> torch.Tensor:
        """Return int64 ``[S]`` on the device, the words of ready.cuh; a view."""
        memory = self._shared.memory
        words = memory.narrow(
            0, self._native.ready(bank) - memory.data_ptr(), 8 * self.topology.slots_per_rank
        )
        return words.view(torch.int64)

    def is_completed(self, epoch: int, slot: int | None = None) -> bool:
        """Return whether a call has finished or failed."""
        try:
            return self._native.is_completed(epoch)
        except CORE_ERRORS as error:
            raise_typed(error)

    @property
    def launch_counts(self) -> tuple[int, int]:
        """Return the numbers of kernels and of copies to the device: this rank's stages, all calls.

        Ranks that share a launcher count the calls of all of them.
        """
        kernels, copies = self._shared.launcher.counts
        own_kernels, own_copies = self._stages.counts
        return kernels + own_kernels, copies + own_copies

    @property
    def bytes_stored(self) -> int:
        """Return the bytes stored by finished calls; synchronises with the device."""
        return translated(lambda: self._native.bytes_stored)
