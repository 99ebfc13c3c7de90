"""Creates the CUDA engines of groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ultraep_comm import _core
from ultraep_comm.calibration import choose_constants, link_gbps
from ultraep_comm.engines.cuda.device import Device, Kernels, find_device
from ultraep_comm.engines.cuda.engine import CudaEngine, SharedLauncher
from ultraep_comm.engines.cuda.kernels import (
    choose_background_sms,
    choose_num_sms,
    choose_tile_bytes,
    find_kernels,
    load_kernels,
)
from ultraep_comm.engines.cuda.reach import clique_number, warn_of_split_cliques, warn_of_versions
from ultraep_comm.engines.cuda.virtual import PAGE_BYTES, compose, pages
from ultraep_comm.engines.options import Options, allowed_backends
from ultraep_comm.errors import BootstrapError, PeerGoneError, UnsupportedError
from ultraep_comm.fabrics import Fabric, Place
from ultraep_comm.fabrics.loopback import make_loopback_fabrics
from ultraep_comm.fabrics.nvshmem import NvshmemFabric, OtherPesError, Runtime, find_runtime, join
from ultraep_comm.fabrics.rendezvous import DEFAULT_TIMEOUT, Rendezvous, check_same_arguments
from ultraep_comm.fabrics.shm import machine_id
from ultraep_comm.fabrics.torch_memory import SymmetricMemory, TorchFabric, find_memory
from ultraep_comm.plan.topology import Topology, check_domains, find_domains

PROBE_BYTES = 128

# Of the cost model where all ranks share one GPU: `bench calibrate` on an H100 80 GB, 4 ranks.
LOOPBACK_COST = (242, 1_129, 173_419, 3_573_291, 196)


def cost_constants(num_ranks: int, gbps: float) -> tuple[int, int, int, int, int]:
    """Return the cost model's constants; see `CostModel` in src/core/schedule/cost.hpp.

    Links of ``gbps``, as `link_gbps` finds them, and memory of 3.3 TB/s: published. A flag group
    and a hop: as `ultraep_comm.model` has them for "nvl72". Not measured on a device.
    """
    return (round(1024e3 / gbps), 310, 18_000, 7_200_000, 100 * num_ranks)


def find_nvshmem_device() -> tuple[Device, Runtime, Kernels]:
    """Return what an NVSHMEM group needs; loads NVSHMEM only after a device has been found.

    Raises:
        UnsupportedError: something is missing or too old; says what to install.
    """
    device = find_device()
    runtime = find_runtime()
    return device, runtime, load_kernels(device, runtime.version())


def find_torch_device() -> tuple[Device, SymmetricMemory, Kernels]:
    """Return what a group over torch's symmetric memory needs.

    Raises:
        UnsupportedError: something is missing or too old; says what to install.
    """
    device = find_device()
    memory = find_memory()
    memory.prepare(device.torch_device)
    # The kernels for peers with load/store access never call NVSHMEM, so it is not initialised.
    return device, memory, load_kernels(device, None)


@dataclass(frozen=True)
class Candidate:
    """An engine over a fabric, as this process has it.

    Attributes:
        engine: as in `new_group`.
        fabric: as in `new_group`.
        found: what a group needs of it; None for the host engine.
        missing: why it cannot be used; None: it can.
    """

    engine: str
    fabric: str
    found: Any = None
    missing: Exception | None = None

    @property
    def reason(self) -> str:
        """Why it cannot be used; empty: it can."""
        return "" if self.missing is None else str(self.missing) or "nothing was found"


def probe_backends(
    engine: str, fabric: str, device: torch.device | None = None
) -> Iterator[Candidate]:
    """Look for what a group with these arguments may use, the preferred first.

    `new_group` takes the first that every rank has. Each is looked for when its turn comes: NVSHMEM
    is not loaded for nothing.
    """
    for engine_name, fabric_name in allowed_backends(engine, fabric, device):
        found: Any = None
        missing: Exception | None = None
        try:
            if engine_name == "cuda":
                found = find_nvshmem_device() if fabric_name == "nvshmem" else find_torch_device()
        except Exception as nothing:  # of any type: the peers must not wait for this rank
            missing = nothing
        yield Candidate(engine_name, fabric_name, found, missing)


def make_group_engine(
    rendezvous: Rendezvous, options: Options, topology: Topology
) -> tuple[CudaEngine | None, str]:
    """Create one rank's engine over the first fabric that all ranks have. Collective.

    Returns:
        The engine; None on every rank if there is no such fabric, and other engines are allowed.
        And why there is none.

    Raises:
        InvalidArgumentError: this rank's device cannot satisfy an argument.
        UnsupportedError: the requested fabric or engine cannot be used; says why.
        BootstrapError: ranks disagree, or another rank failed.
        OutOfSharedMemoryError: slots and flags do not fit in memory.
    """
    own: list[Exception] = []
    foreign: OtherPesError | None = None  # why NVSHMEM was skipped
    reasons: dict[str, list[str]] = {}  # reason -> fabrics that it rules out
    for candidate in probe_backends(options.engine, options.fabric, options.device):
        if candidate.engine != "cuda":
            # If NVSHMEM is in use the ranks have GPUs, and taking another engine would surprise.
            if foreign is None:
                return None, _reasons(reasons)
            break
        name, text = candidate.fabric, candidate.reason
        if candidate.missing is not None:
            own.append(candidate.missing)
        answers = rendezvous.exchange(text)
        lacking = [rank for rank, answer in enumerate(answers) if answer]
        if not lacking:
            options.refuse_check("cuda")  # on all ranks alike
            make = make_nvshmem_engine if name == "nvshmem" else make_torch_engine
            try:
                return make(rendezvous, options, topology, candidate.found), ""
            except OtherPesError as error:  # on all ranks alike, and before any allocation
                if options.fabric != "auto":
                    raise
                foreign = error
                own.append(error)
                reasons.setdefault(str(error), []).append(name)
                continue
            except UnsupportedError as error:
                if foreign is None:
                    raise
                raise error from foreign
        why = text or answers[lacking[0]]
        who = rendezvous.rank if text else lacking[0]
        reasons.setdefault(f"rank {who}: {why}", []).append(name)
    raise _why_none(rendezvous.rank, reasons, own)


def _why_none(
    rank: int, reasons: Mapping[str, Sequence[str]], own: Sequence[Exception]
) -> Exception:
    """Return why no fabric is on all ranks: this rank's own error if that is the only reason."""
    if len(reasons) == 1 and own:
        return own[-1]
    text = (
        f"rank {rank}: no group was created, because no fabric works on every rank."
        f" {_reasons(reasons)}"
    )
    return UnsupportedError(text) if own else BootstrapError(text)


def _reasons(reasons: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"fabric {' and '.join(names)}: {why}" for why, names in reasons.items())


def make_nvshmem_engine(
    rendezvous: Rendezvous,
    options: Options,
    topology: Topology,
    found: tuple[Device, Runtime, Kernels],
) -> CudaEngine:
    """Create one rank's engine over NVSHMEM. Collective; arguments have been checked on every rank.

    Raises:
        InvalidArgumentError, UnsupportedError: this rank's device cannot satisfy an argument.
        BootstrapError: ranks disagree, or another rank failed.
        OutOfSharedMemoryError: the symmetric heap is too small.
    """
    device, runtime, kernels = found
    num_sms, records = _agree_on_arguments(rendezvous, options, topology, device)
    pes = join(rendezvous, runtime, device.torch_device.index or 0)

    def view(address: int, num_bytes: int) -> torch.Tensor:
        memory = device.view(address, num_bytes)
        memory.zero_()
        device.synchronize_stream()
        return memory

    fabric = NvshmemFabric(rendezvous, runtime, pes, view)
    try:
        probe = fabric.allocate(PROBE_BYTES)
        reaches = rendezvous.exchange([base != 0 for base in probe.bases])
        if options.given_domains:
            check_domains(topology.domain, reaches)
        else:
            topology = topology.with_domains(find_domains(reaches))
            if rendezvous.rank == 0:
                warn_of_split_cliques([r["clique"] for r in records], topology.domain)
        crosses = topology.allow_cross_domain and not all(map(all, reaches))
        if crosses and options.grads:
            raise UnsupportedError(
                f"rank {rendezvous.rank}: allow_cross_domain=True with grads=, but some ranks of"
                " this group reach each other by puts only, and the gradients of replicas are"
                " loaded by their peers. Keep replicas inside domains, or create the group"
                " without grads="
            )
        far = [int(not reached) for reached in reaches[rendezvous.rank]] if crosses else []
        config = options.config(topology, rendezvous.rank, rendezvous.timeout, records[0]["cost"])
        staging = None
        if crosses:
            runtime.register(kernels.library)  # its kernels put
            rows = rendezvous.exchange([num_sms, *runtime.version(), *kernels.nvshmem])
            if rendezvous.rank == 0:
                warn_of_versions([((a, b), (c, d)) for _, a, b, c, d in rows])
            # Symmetric memory has one size on all ranks, though num_sms may differ.
            most = max(row[0] for row in rows)
            staging = fabric.allocate(_core.cuda_staging_bytes(most, config.tile_bytes)).local
        peers = {"pes": pes, "far": far, "staging": staging}
        engine = _make_one(rendezvous, options, topology, config, fabric, found, num_sms, **peers)
        engine.can_pull = not crosses
        # Kernels exchange loads by load/store, or by puts in groups with allow_cross_domain.
        if not topology.allow_cross_domain and not all(map(all, reaches)):
            engine.exchange_counts = partial(_exchange_counts, rendezvous)
        return engine
    except BaseException:
        fabric.close()
        raise


def make_torch_engine(
    rendezvous: Rendezvous,
    options: Options,
    topology: Topology,
    found: tuple[Device, SymmetricMemory, Kernels],
) -> CudaEngine:
    """Create one rank's engine over torch's symmetric memory; see :func:`make_nvshmem_engine`.

    Raises:
        UnsupportedError: also if a rank has no load/store access to another.
    """
    device, memory, _ = found
    num_sms, records = _agree_on_arguments(rendezvous, options, topology, device)
    machines = [record["machine"] for record in records]
    fabric = TorchFabric(
        rendezvous, memory, device.torch_device, device.synchronize_stream, machines
    )
    if not options.given_domains:  # the fabric requires that all ranks reach each other
        topology = topology.with_domains(np.zeros(rendezvous.num_ranks, np.int32))
    config = options.config(topology, rendezvous.rank, rendezvous.timeout, records[0]["cost"])
    return _make_one(rendezvous, options, topology, config, fabric, found, num_sms)


def _agree_on_arguments(
    rendezvous: Rendezvous,
    options: Options,
    topology: Topology,
    device: Device,
) -> tuple[int, list[dict[str, Any]]]:
    """Return this rank's ``num_sms`` and all ranks' records, once all agree on their arguments."""
    rank, num_ranks = rendezvous.rank, rendezvous.num_ranks
    mine = list(device.compute_capability)
    options.page_bytes = PAGE_BYTES
    links = device.links()
    built_in = cost_constants(num_ranks, link_gbps(device.compute_capability, links))
    cost = choose_constants(options.calibration, "cuda", num_ranks, built_in)
    config = options.config(topology, rank, rendezvous.timeout, cost)
    options.tile_bytes = choose_tile_bytes(options.given_tile_bytes, config, device)
    num_sms = choose_num_sms(options.num_sms, device, 1)
    records = rendezvous.exchange(
        {
            "arguments": options.arguments(topology),
            "machine": machine_id(),
            "cost": cost,
            "capability": mine,
            "clique": clique_number(links),
        }
    )
    for other, record in enumerate(records):
        if record["capability"] != mine:
            theirs, ours = (".".join(map(str, version)) for version in (record["capability"], mine))
            raise UnsupportedError(
                f"rank {rank}: the GPU of rank {other} has compute capability {theirs}, this"
                f" rank's {ours}; create groups of ranks whose GPUs have the same"
            )
    check_same_arguments([record["arguments"] for record in records])
    return num_sms, records


def _exchange_counts(rendezvous: Rendezvous, counts: torch.Tensor) -> torch.Tensor:
    """All-gather counts over the process group."""
    try:
        return rendezvous.gather(counts)
    except BootstrapError as error:
        raise PeerGoneError(
            f"rank {rendezvous.rank}: gather_load over the process group failed ({error}); close"
            " the group and create a new one",
            rank=rendezvous.rank,
            peer=error.failed_rank,
        ) from error


def _make_one(
    rendezvous: Rendezvous,
    options: Options,
    topology: Topology,
    config: _core.EngineConfig,
    fabric: Fabric,
    found: tuple[Device, object, Kernels],
    num_sms: int,
    **peers: Any,
) -> CudaEngine:
    """Create this rank's engine, or raise on every rank; ``peers``: as for `CudaEngine`."""
    device, _, kernels = found
    far, adds = bool(peers.get("far")), bool(options.grads)
    shared = SharedLauncher(
        device,
        find_kernels(device, kernels, config, far=far, adds=adds),
        config,
        first_rank=rendezvous.rank,
        num_ranks=1,
        num_sms=num_sms,
        background_sms=choose_background_sms(options.num_sms, num_sms),
    )
    rendezvous.raise_if_any_failed()

    setup = options, config, fabric
    engine = CudaEngine(device, kernels, topology, rendezvous.rank, setup, shared, **peers)
    with ExitStack() as undo:
        undo.callback(fabric.close)
        undo.callback(engine.close)
        # This is also a barrier: every rank's flags are in place before any rank calls.
        rendezvous.raise_if_any_failed()
        undo.pop_all()
    return engine


def make_loopback_engines(
    options: Options, topology: Topology, device: Device, kernels: Kernels
) -> list[CudaEngine]:
    """Create the engines of all ranks in this process, on one device.

    Raises:
        InvalidArgumentError, UnsupportedError: the device cannot satisfy an argument.
    """
    num_ranks = topology.num_ranks
    if num_ranks > _core.CUDA_MAX_LAUNCH_RANKS:
        raise UnsupportedError(
            f"{num_ranks} ranks of the CUDA engine in one process; expected at most"
            f" {_core.CUDA_MAX_LAUNCH_RANKS}, since they share a launch"
        )
    options.page_bytes = PAGE_BYTES
    cost = choose_constants(options.calibration, "loopback", num_ranks, LOOPBACK_COST)
    configs = [options.config(topology, r, DEFAULT_TIMEOUT, cost) for r in range(num_ranks)]
    tile_bytes = choose_tile_bytes(options.given_tile_bytes, configs[0], device)
    for config in configs:
        config.tile_bytes = tile_bytes
    num_sms = choose_num_sms(options.num_sms, device, num_ranks)
    shared = SharedLauncher(
        device,
        find_kernels(device, kernels, configs[0], far=False, adds=bool(options.grads)),
        configs[0],
        first_rank=0,
        num_ranks=num_ranks,
        num_sms=num_sms,
        background_sms=choose_background_sms(options.num_sms, num_sms),
    )
    layout = _core.EngineLayout(configs[0])

    def allocate_for_rank(num_bytes: int) -> torch.Tensor:
        if not options.instances or num_bytes != layout.total_bytes:
            return device.allocate(num_bytes)
        held = [*options.segments.values()] * options.banks
        held += [*options.grads.values()] * options.grad_banks
        offsets = [*layout.slot_offset, *layout.grad_offset]
        sizes = [pages(topology.slots_per_rank * segment.nbytes) for segment in held]
        places = [Place(at, 0, size) for at, size in zip(offsets, sizes, strict=True)]
        return compose(device, num_bytes, places)

    fabrics = make_loopback_fabrics(num_ranks, allocate_for_rank)
    return [
        CudaEngine(device, kernels, topology, rank, (options, config, fabric), shared)
        for rank, (config, fabric) in enumerate(zip(configs, fabrics, strict=True))
    ]
