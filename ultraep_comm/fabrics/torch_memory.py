"""Fabric ``torch``: the symmetric memory of torch.distributed, for groups without NVSHMEM.

torch allocates on every rank and maps each allocation on the other ranks of a process group. Peers
are reached by load/store alone: a rank whose memory cannot be mapped cannot be in the group. A
mapping keeps an allocation alive after its owner has freed it, so close() waits for no peer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ultraep_comm import env
from ultraep_comm.errors import (
    BootstrapError,
    OutOfSharedMemoryError,
    UltraEPError,
    UnsupportedError,
    first_line,
)
from ultraep_comm.fabrics import SharedRegion
from ultraep_comm.fabrics.rendezvous import Rendezvous
from ultraep_comm.system import read_version, undocumented

BACKEND = "CUDA"  # torch's symmetric memory backend whose allocations are not collective
FABRIC_HANDLE = 8  # CU_MEM_HANDLE_TYPE_FABRIC: memory that other machines of an NVLink rack can map
INSTEAD = "use fabric='nvshmem'"
_BUGS = (TypeError, AttributeError, NameError)  # raised as they are: no failures of memory


class SymmetricMemory:
    """torch's symmetric memory in this process. Tests supply their own.

    Attributes:
        met: number of :meth:`rendezvous` calls in this process.
        counts_in_process: whether torch counts those calls per process instead of per group.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._raw = undocumented(module, "_SymmetricMemory")
        self.met = 0
        # Up to torch 2.13 the keys of a rendezvous contain a counter of the process.
        self.counts_in_process = read_version(torch.__version__) < (2, 14)

    def prepare(self, device: torch.device) -> None:
        """Select the backend, unless the process has: it is process-wide.

        Raises:
            UnsupportedError: torch has none for the device, or the process has chosen another.
        """
        get_backend = getattr(self._module, "get_backend", None)
        if get_backend is None:
            return  # this torch has no other backend
        name = get_backend(device)
        if name is None:
            try:
                self._module.set_backend(BACKEND)
            except RuntimeError as error:
                raise UnsupportedError(
                    f"fabric='torch' needs symmetric memory of CUDA devices, which this torch"
                    f" {torch.__version__} does not have ({first_line(error)}); install a CUDA"
                    f" build of torch, or {INSTEAD}"
                ) from error
        elif name != BACKEND:
            raise UnsupportedError(
                f"fabric='torch' needs torch's symmetric memory with backend {BACKEND!r}, but this"
                f" process has chosen {name!r}; call"
                f" torch.distributed._symmetric_memory.set_backend({BACKEND!r}) before its first"
                f" use and leave TORCH_SYMMMEM unset, or {INSTEAD}"
            )

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return new uint8 memory for :meth:`rendezvous`. Not collective.

        Below ``empty``, which takes memory from a pool in newer versions: pooled memory may have
        had its rendezvous on one rank, while the others wait for that rank.
        """
        tensor: torch.Tensor = self._raw.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        return tensor

    def handle_types(self, tensor: torch.Tensor) -> int:
        """Return the allocation's shareable handle types as a bit mask; 0: unknown."""
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
        """Return the ranks' base addresses on this rank, and an object that keeps them mapped.

        Under the group's name, by which torch finds the group's store. Without the multicast object
        that torch would bind the memory to where GPUs report it: no kernel uses it, and where the
        driver refuses it after all, the rendezvous would fail.
        """
        self.met += 1
        with env.without_multicast():
            handle = self._module.rendezvous(tensor, group.group_name)
        if handle is None:
            raise RuntimeError("torch does not know the memory that it allocated")
        return [int(pointer) for pointer in handle.buffer_ptrs], handle


@functools.cache
def find_memory() -> SymmetricMemory:
    """Return torch's symmetric memory, imported on first use.

    Raises:
        UnsupportedError: this version of torch has none that this library supports.
    """
    try:
        import torch.distributed._symmetric_memory as module

        return SymmetricMemory(module)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"fabric='torch': torch {torch.__version__} has no symmetric memory that this library"
            f" supports ({first_line(error)}); install another version, or {INSTEAD}"
        ) from error


class TorchFabric:
    """One rank's symmetric memory.

    Args:
        rendezvous: exchanges records with the peers.
        memory: torch's symmetric memory in this process.
        device: where to allocate.
        synchronize: blocks until all work on the device has finished.
        machines: ``[G]`` ids of the ranks' machines.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        memory: SymmetricMemory,
        device: torch.device,
        synchronize: Callable[[], None],
        machines: Sequence[str],
    ) -> None:
        self._rendezvous = rendezvous
        self._memory = memory
        self._device = device
        self._synchronize = synchronize
        self._machines = machines

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Allocate on every rank; all memory is zeroed before any rank returns.

        Raises:
            OutOfSharedMemoryError: this rank's device has too little memory.
            UnsupportedError: some ranks cannot map each other's memory.
            BootstrapError: another rank failed, or did not call.
        """
        rendezvous = self._rendezvous
        with rendezvous.failure_scope():
            with self._typed(f"{num_bytes} bytes could not be allocated"):
                local = self._memory.allocate(num_bytes, self._device)
                local.zero_()
                self._synchronize()
                types = self._memory.handle_types(local)
            # After this no rank waits in torch for one without memory, or writes to memory that its
            # owner is still zeroing.
            self._check_before(rendezvous.exchange([types, self._memory.met]))
            with self._typed("the ranks' memory could not be mapped"):
                begins, handle = self._memory.rendezvous(local, rendezvous.group)
                # A tensor may start inside its allocation; only its owner knows the offset.
                offset = local.data_ptr() - begins[rendezvous.rank]
            rows = rendezvous.exchange([offset, *(begin != 0 for begin in begins)])
            self._check_reach([row[1:] for row in rows])
        bases = [begin + row[0] for begin, row in zip(begins, rows, strict=True)]
        return SharedRegion(bases=bases, local=local, keep=(handle,))

    def close(self) -> None:
        """Release the process group; memory is freed with the tensors and the handle."""
        self._rendezvous.leave()

    def _check_before(self, rows: Sequence[Sequence[int]]) -> None:
        """Raise on every rank if ranks would wait for each other in torch indefinitely."""
        types, met = [row[0] for row in rows], [row[1] for row in rows]
        here = self._rendezvous.rank
        if len(set(self._machines)) > 1:
            for rank, type_bits in enumerate(types):
                if not type_bits & FABRIC_HANDLE:
                    raise UnsupportedError(
                        f"rank {here}: the ranks are on {len(set(self._machines))} machines, and"
                        f" the memory of rank {rank} cannot be mapped from another one: its GPU"
                        " has no NVLink fabric handles, or torch does not use them (before 2.9)."
                        " In an NVLink rack check the IMEX channels; else create one group per"
                        f" machine, or {INSTEAD}"
                    )
        if len(set(types)) > 1:
            other = next(rank for rank, type_bits in enumerate(types) if type_bits != types[0])
            raise UnsupportedError(
                f"rank {here}: rank 0 shares its memory by handle type {types[0]}, rank {other} by"
                f" {types[other]}; give all processes of a machine the same access to IMEX"
                f" channels, or {INSTEAD}"
            )
        if self._memory.counts_in_process and len(set(met)) > 1:
            other = next(rank for rank, count in enumerate(met) if count != met[0])
            raise UnsupportedError(
                f"rank {here}: rank 0 has made {met[0]} rendezvous for symmetric memory, rank"
                f" {other} {met[other]}, in groups without the other rank; torch"
                f" {torch.__version__} would wait indefinitely. Create the groups of all ranks"
                f" before those of some, or {INSTEAD}"
            )

    def _check_reach(self, reaches: Sequence[Sequence[int]]) -> None:
        """Raise on every rank if any rank does not reach another."""
        for rank, row in enumerate(reaches):
            if not all(row):
                raise UnsupportedError(
                    f"rank {self._rendezvous.rank}: rank {rank} has no load/store access to rank"
                    f" {row.index(False)}, which fabric='torch' requires. Create groups of ranks"
                    f" that reach each other, or {INSTEAD}, with allow_cross_domain=True for"
                    " replicas across domains"
                )

    @contextlib.contextmanager
    def _typed(self, what: str) -> Iterator[None]:
        """Turn any error of torch into one that says ``what`` failed, and what to do."""
        try:
            yield
        except (UltraEPError, *_BUGS):
            raise
        except Exception as error:
            raise self._explain(error, what) from error

    def _explain(self, error: Exception, what: str) -> UltraEPError:
        start = f"rank {self._rendezvous.rank}: {what} by torch's symmetric memory"
        why = first_line(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return OutOfSharedMemoryError(
                f"{start}: {why}. Use fewer slots_per_rank or smaller experts, or leave more"
                " device memory free"
            )
        if isinstance(error, dist.DistStoreError):
            return BootstrapError(f"{start}: {why}. Has a rank left the process group?")
        if "overlapping devices" in str(error):
            return UnsupportedError(
                f"{start}: {why}. Call torch.cuda.set_device with another GPU in every process of"
                " a machine; where CUDA_VISIBLE_DEVICES shows each process one GPU only, set"
                " TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
            )
        return UnsupportedError(
            f"{start}: {why}. Check whether the GPUs reach each other (nvidia-smi topo -p2p r,"
            f" container isolation, IMEX channels between machines), or {INSTEAD}"
        )
