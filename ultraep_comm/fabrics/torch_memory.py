"""Fabric ``torch``: the symmetric memory of torch.distributed, for groups without NVSHMEM.

torch allocates on every rank and maps each allocation on the other ranks of a process group. There
are addresses and nothing else: a rank that cannot be mapped cannot be in the group. Whoever maps an
allocation keeps it, also after its owner has freed it, so closing waits for no peer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ultraep_comm.errors import (
    BootstrapError,
    OutOfSharedMemoryError,
    UltraEPError,
    UnsupportedError,
)
from ultraep_comm.fabrics import SharedRegion
from ultraep_comm.fabrics.meeting import Meeting
from ultraep_comm.system import undocumented

BACKEND = "CUDA"  # of torch's symmetric memory: the one whose allocations need no other rank
FABRIC_HANDLE = 8  # CU_MEM_HANDLE_TYPE_FABRIC: memory that other machines of an NVLink rack can map
INSTEAD = "use fabric='nvshmem'"
_BUGS = (TypeError, AttributeError, NameError)  # say nothing of memory: they keep their type


class SymmetricMemory(Protocol):
    """torch's symmetric memory in this process. Tests supply another.

    Attributes:
        met: how often :meth:`rendezvous` has been called here.
        counts_in_process: whether torch counts those calls by process instead of by group.
    """

    met: int
    counts_in_process: bool

    def prepare(self, device: torch.device) -> None:
        """Raise UnsupportedError unless a device's memory can be symmetric."""

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for :meth:`rendezvous`, uint8, never used before. Not collective."""

    def handle_types(self, tensor: torch.Tensor) -> int:
        """Return how an allocation can travel to other processes, bits; 0: unknown."""

    def rendezvous(
        self, tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[list[int], object]:
        """Return where the ranks' allocations begin, as seen from here, and what keeps them."""


class TorchMemory:
    """The real one. Made by :func:`find_memory`."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._raw = undocumented(module, "_SymmetricMemory")
        self.met = 0
        # One counter of each process is part of the keys under which ranks meet, up to torch 2.13.
        self.counts_in_process = torch_version() < (2, 14)

    def prepare(self, device: torch.device) -> None:
        """Leave the backend that somebody has chosen: it is that of the whole process."""
        get_backend = getattr(self._module, "get_backend", None)
        if get_backend is None:
            return  # torch had no other backend then
        name = get_backend(device)
        if name is None:
            try:
                self._module.set_backend(BACKEND)
            except RuntimeError as error:
                raise UnsupportedError(
                    f"fabric='torch' needs symmetric memory of CUDA devices, which this torch"
                    f" {torch.__version__} does not have ({_first_line(error)}); install a CUDA"
                    f" build of torch, or {INSTEAD}"
                ) from error
        elif name != BACKEND:
            raise UnsupportedError(
                f"fabric='torch' needs torch's symmetric memory with backend {BACKEND!r}, and this"
                f" process has chosen {name!r}; call"
                f" torch.distributed._symmetric_memory.set_backend({BACKEND!r}) before its first"
                f" use and leave TORCH_SYMMMEM unset, or {INSTEAD}"
            )

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocate below ``empty``, which in newer versions takes memory out of a pool.

        From a pool one rank may get what it has met for already, while the others wait for it.
        """
        tensor: torch.Tensor = self._raw.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        return tensor

    def handle_types(self, tensor: torch.Tensor) -> int:
        """Ask the driver what torch asked it for."""
        from cuda.bindings import driver

        result, handle = driver.cuMemRetainAllocationHandle(tensor.data_ptr())
        if int(result) != 0:
            return 0
        result, properties = driver.cuMemGetAllocationPropertiesFromHandle(handle)
        driver.cuMemRelease(handle)
        return 0 if int(result) != 0 else int(properties.requestedHandleTypes)

    def rendezvous(
        self, tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[list[int], object]:
        """Meet under the group's name; torch takes the store from the group itself."""
        self.met += 1
        handle = self._module.rendezvous(tensor, group.group_name)
        if handle is None:
            raise RuntimeError("torch does not know the memory that it has allocated")
        return [int(pointer) for pointer in handle.buffer_ptrs], handle


def torch_version() -> tuple[int, int]:
    """Return torch's (major, minor)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def find_memory() -> SymmetricMemory:
    """Return torch's symmetric memory. Imported here: nobody else may need it.

    Raises:
        UnsupportedError: this version of torch has none that is known.
    """
    try:
        import torch.distributed._symmetric_memory as module

        return TorchMemory(module)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"fabric='torch': torch {torch.__version__} has no symmetric memory that this library"
            f" knows ({_first_line(error)}); install another version, or {INSTEAD}"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


class TorchFabric:
    """One rank's symmetric memory.

    Args:
        meeting: the process group.
        memory: torch's, of this process.
        device: where to allocate.
        settle: waits until the device has done all that was asked of it.
        machines: ``[G]`` names of the ranks' machines.
    """

    def __init__(
        self,
        meeting: Meeting,
        memory: SymmetricMemory,
        device: torch.device,
        settle: Callable[[], None],
        machines: Sequence[bytes],
    ) -> None:
        self._meeting = meeting
        self._memory = memory
        self._device = device
        self._settle = settle
        self._machines = machines

    @property
    def peer_sockets(self) -> list[int]:
        """A device cannot look at sockets."""
        return [-1] * self._meeting.num_ranks

    @property
    def peer_processes(self) -> list[int]:
        """Nor at processes."""
        return [-1] * self._meeting.num_ranks

    @property
    def can_pull(self) -> bool:
        """Every rank maps every other's memory."""
        return True

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Allocate on every rank, zeroed before any rank goes on.

        Raises:
            OutOfSharedMemoryError: this rank's device has no room.
            UnsupportedError: some ranks cannot map each other's memory.
            BootstrapError: another rank failed, or did not come.
        """
        with self._meeting.making():
            return self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> SharedRegion:
        local, types, error = torch.empty(0, device="cpu"), 0, None
        try:
            local = self._memory.allocate(num_bytes, self._device)
            local.zero_()
            self._settle()
            types = self._memory.handle_types(local)
        except Exception as refused:  # whatever it is, the peers must not wait for this rank
            error = self._typed(refused, f"{num_bytes} bytes could not be allocated")
        # Nobody can wait in torch for a rank that has no memory, or write to one that still zeroes.
        self._meeting.agree(error)
        self._check_before(self._meeting.gather_ints(types, self._memory.met))

        begins, handle, offset = [0] * self._meeting.num_ranks, None, 0
        try:
            begins, handle = self._memory.rendezvous(local, self._meeting.group)
            offset = local.data_ptr() - begins[self._meeting.rank]
        except Exception as refused:
            error = self._typed(refused, "the ranks' memory could not be mapped")
        self._meeting.agree(error)
        # A tensor need not begin where its allocation does, and its owner knows how far behind.
        reached = [int(begin != 0) for begin in begins]
        rows = self._meeting.gather_ints(offset, *reached, most=2**47)
        self._check_reach([row[1:] for row in rows])
        bases = [begin + row[0] for begin, row in zip(begins, rows, strict=True)]
        return SharedRegion(bases=bases, local=local, keep=(handle,))

    def close(self) -> None:
        """Let go of the process group; memory goes with the tensors and the handle."""
        self._meeting.leave()

    def _check_before(self, rows: Sequence[Sequence[int]]) -> None:
        """Raise, on every rank alike, where ranks would wait for each other in torch."""
        types, met = [row[0] for row in rows], [row[1] for row in rows]
        here = self._meeting.rank
        if len(set(self._machines)) > 1:
            for rank, type_bits in enumerate(types):
                if not type_bits & FABRIC_HANDLE:
                    raise UnsupportedError(
                        f"rank {here}: the ranks are on {len(set(self._machines))} machines, and"
                        f" the memory of rank {rank} cannot be mapped from another one: its GPU"
                        " has no NVLink fabric handles, or torch does not use them (before 2.9)."
                        " In an NVLink rack look at the IMEX channels; else make a group of each"
                        f" machine's ranks, or {INSTEAD}"
                    )
        if len(set(types)) > 1:
            other = next(rank for rank, type_bits in enumerate(types) if type_bits != types[0])
            raise UnsupportedError(
                f"rank {here}: the memory of rank 0 travels as handle type {types[0]}, that of rank"
                f" {other} as {types[other]}; give all processes of a machine the same access to"
                f" IMEX channels, or {INSTEAD}"
            )
        if self._memory.counts_in_process and len(set(met)) > 1:
            other = next(rank for rank, count in enumerate(met) if count != met[0])
            raise UnsupportedError(
                f"rank {here}: rank 0 has met others {met[0]} times for symmetric memory, rank"
                f" {other} {met[other]} times, in groups that the other was not in; torch"
                f" {torch.__version__} would wait for a rank that has come. Make the groups of"
                f" all ranks before those of some, or {INSTEAD}"
            )

    def _check_reach(self, reaches: Sequence[Sequence[int]]) -> None:
        """Raise, on every rank alike, if a rank does not reach another."""
        for rank, row in enumerate(reaches):
            if not all(row):
                raise UnsupportedError(
                    f"rank {self._meeting.rank}: rank {rank} has no load/store access to rank"
                    f" {row.index(0)}, and fabric='torch' has no other way to it. Make groups of"
                    f" ranks that reach each other, or {INSTEAD}, with allow_cross_domain=True for"
                    " replicas on ranks beyond reach"
                )

    def _typed(self, error: Exception, what: str) -> Exception:
        if isinstance(error, (UltraEPError, *_BUGS)):
            return error
        start = f"rank {self._meeting.rank}: {what} by torch's symmetric memory"
        why = _first_line(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            typed: UltraEPError = OutOfSharedMemoryError(
                f"{start}: {why}. Use fewer slots_per_rank or smaller experts, or leave more"
                " memory to this library"
            )
        elif isinstance(error, dist.DistStoreError):
            typed = BootstrapError(f"{start}: {why}. Has a rank left the process group?")
        elif "overlapping devices" in str(error):
            typed = UnsupportedError(
                f"{start}: {why}. Call torch.cuda.set_device with another GPU in every process of"
                " a machine; where CUDA_VISIBLE_DEVICES shows each process one GPU only, set"
                " TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
            )
        else:
            typed = UnsupportedError(
                f"{start}: {why}. Look whether the GPUs reach each other (nvidia-smi topo -p2p r,"
                f" container isolation, IMEX channels between machines), or {INSTEAD}"
            )
        typed.__cause__ = error
        return typed
