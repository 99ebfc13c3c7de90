"""Device kernels: finds a device's cubin, checks it against this installation, and loads it.

A cubin is named ``ultraep_comm-sm_90.cubin``, and has the versions it was built with behind a mark.
Reading that needs no GPU, no driver and no NVSHMEM.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ultraep_comm import _core, env
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from ultraep_comm.engines.cuda.device import Device, Kernels
    from ultraep_comm.plan.topology import Topology

INFO_MAGIC = 0x55455032  # once in a cubin
# Magic, this library's version, CUDA major and minor, NVSHMEM major and minor, architecture, hash
# of the layout.
INFO_HEADER = struct.Struct("<7iI")
BUILD_HINT = (
    "build them with ULTRAEP_CUDA=ON pip install, for other devices with"
    ' -C cmake.define.ULTRAEP_CUDA_ARCHS="90;100"; see "CUDA" in docs/building.md'
)


@dataclass(frozen=True, kw_only=True)
class CubinInfo:
    """What a cubin was built with.

    Attributes:
        path: the file.
        version: of this library, as ``_core.CUDA_KERNELS_VERSION``.
        cuda_major: major version of the CUDA tool chain.
        cuda_minor: its minor version.
        nvshmem: (major, minor) of NVSHMEM's device library.
        arch: compute capability without the dot, as in sm_90.
        layout_hash: of the structs that kernels take as arguments, as ``_core.CUDA_LAYOUT_HASH``.
    """

    path: Path
    version: int
    cuda_major: int
    cuda_minor: int
    nvshmem: tuple[int, int]
    arch: int
    layout_hash: int


def cubin_folder() -> Path:
    """Return the folder of the cubins: ``ULTRAEP_CUBINS``, else beside the compiled module.

    In an editable installation the Python sources are elsewhere.
    """
    return env.cubins() or Path(_core.__file__).parent / "cubins"


def get_include() -> str:
    """Return the folder of the headers for kernels of yours: ``cuda/device/ready.cuh``."""
    return str(Path(_core.__file__).parent / "include")


def find_cubin(compute_capability: tuple[int, int]) -> Path:
    """Return the cubin for a device.

    Args:
        compute_capability: the device's, for example (9, 0). A cubin runs on devices of the same
            major version and the same or a higher minor version; the highest that fits is taken.

    Raises:
        UnsupportedError: there is none for this device; names those that exist.
    """
    folder = cubin_folder()
    cubins = {}
    for path in folder.glob("ultraep_comm-sm_*.cubin"):
        named = re.fullmatch(r"ultraep_comm-sm_(\d+)\.cubin", path.name)
        if named is not None:
            cubins[int(named[1])] = path
    major, minor = compute_capability
    fitting = [arch for arch in cubins if arch // 10 == major and arch % 10 <= minor]
    if fitting:
        return cubins[max(fitting)]
    found = ", ".join(f"sm_{arch}" for arch in sorted(cubins)) or "none"
    raise UnsupportedError(
        f"no device kernels for compute capability {major}.{minor} in {folder}, which has {found};"
        f" {BUILD_HINT}"
    )


def read_info(path: Path) -> CubinInfo:
    """Read what a cubin was built with.

    Raises:
        UnsupportedError: the file is not a cubin of this library.
    """
    data = path.read_bytes()
    at = data.find(struct.pack("<i", INFO_MAGIC))
    if at < 0:
        raise UnsupportedError(f"{path} is not a cubin of ultraep_comm; {BUILD_HINT}")
    try:
        header = INFO_HEADER.unpack_from(data, at)
    except struct.error as error:
        raise UnsupportedError(f"{path} is cut off: {error}; {BUILD_HINT}") from error
    _, version, cuda_major, cuda_minor, nvshmem_major, nvshmem_minor, arch, layout_hash = header
    return CubinInfo(
        path=path,
        version=version,
        cuda_major=cuda_major,
        cuda_minor=cuda_minor,
        nvshmem=(nvshmem_major, nvshmem_minor),
        arch=arch,
        layout_hash=layout_hash,
    )


def version_text(version: int) -> str:
    """Return 0.1.0 for 100."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def check_info(info: CubinInfo, *, cuda_major: int, nvshmem: tuple[int, int] | None = None) -> None:
    """Check that a cubin matches this installation.

    ``cuda_major``: of the installed bindings and NVSHMEM; ``nvshmem``: (major, minor) of NVSHMEM's
    host library; None: the cubin is used without it.

    Raises:
        UnsupportedError: one of them does not match; names both and what to install or build.
    """
    version = _core.CUDA_KERNELS_VERSION
    if info.version != version:
        raise UnsupportedError(
            f"{info.path} was built for ultraep_comm {version_text(info.version)}, but this is"
            f" {version_text(version)}: unset ULTRAEP_CUBINS, or {BUILD_HINT}"
        )
    if info.cuda_major != cuda_major:
        raise UnsupportedError(
            f"{info.path} was built with CUDA {info.cuda_major}.{info.cuda_minor}, but this"
            f" installation has CUDA {cuda_major}; install the extra cuda{info.cuda_major}, or"
            f" build the kernels with CUDA {cuda_major} (docs/building.md)"
        )
    if info.layout_hash != _core.CUDA_LAYOUT_HASH:
        raise UnsupportedError(
            f"{info.path} takes arguments of layout {info.layout_hash:#x}, but this installation"
            f" passes {_core.CUDA_LAYOUT_HASH:#x}: their sources differ; {BUILD_HINT}"
        )
    if nvshmem is not None and (nvshmem[0] != info.nvshmem[0] or nvshmem < info.nvshmem):
        has, needs = (f"{version[0]}.{version[1]}" for version in (nvshmem, info.nvshmem))
        raise UnsupportedError(
            f"{info.path} was built with NVSHMEM {needs}, but the library here is {has}; expected"
            f" {needs} or a later {info.nvshmem[0]}.x: install nvidia-nvshmem-cu{info.cuda_major}"
        )


# With two workers each they keep 384 tiles in flight. By the model (docs/model.md), with a third of
# that, tiles for a rank that imports two experts delay its senders' tiles for other ranks.
DEFAULT_NUM_SMS = 64
# With async_op=True: so few find room beside a GEMM, which starts none of them before there is room
# for all. docs/engines.md has what fewer and more cost.
BACKGROUND_NUM_SMS = 24
PLAN_WARPS = 16  # at most; each runs its own probes, so two rounds suffice. Not measured


def load_kernels(device: Device, nvshmem: tuple[int, int] | None) -> Kernels:
    """Load the cubin for a device; ``nvshmem``: as for :func:`check_info`.

    Raises:
        UnsupportedError: there is none, or it does not match this installation.
    """
    info = read_info(find_cubin(device.compute_capability))
    check_info(info, cuda_major=device.cuda_major, nvshmem=nvshmem)
    kernels = device.load(info.path)
    kernels.nvshmem = info.nvshmem
    return kernels


def find_kernels(
    device: Device, kernels: Kernels, config: _core.EngineConfig, *, far: bool, adds: bool
) -> dict[str, int]:
    """Return the handles of a group's kernels, by their names in `CudaLauncherConfig`.

    ``far``: some peers are reached by puts; ``adds``: slots have gradients, else there is no
    ``reduce``.

    Raises:
        UnsupportedError: the group is too large for the reduce kernel.
    """
    num_ranks, num_experts = config.num_ranks, config.num_experts

    def plan_bytes(warps: int) -> int:
        slots = config.slots_per_rank
        return _core.cuda_load_plan_shared_bytes(num_ranks, num_experts, slots, warps)

    # Without: the group is too large for that kernel, or has far peers.
    plan_warps = 0 if far else choose_plan_warps(plan_bytes, device)
    suffix = "_far" if far else ""
    transfer_bytes = _core.cuda_shared_bytes(config, device.max_shared_bytes)
    load_bytes = _core.cuda_load_shared_bytes(num_ranks, num_experts)
    plan = kernels.handle("ultraep_load_plan", plan_bytes(plan_warps)) if plan_warps else 0
    reduce_bytes = _core.cuda_reduce_shared_bytes(config)
    if adds and reduce_bytes > device.max_shared_bytes:
        raise UnsupportedError(
            f"a block that reduces gradients needs {reduce_bytes} bytes of shared memory, but this"
            f" device has {device.max_shared_bytes}; use fewer ranks or slots_per_rank"
        )
    return {
        "kernel": kernels.handle(f"ultraep_replicate{suffix}", transfer_bytes),
        "notice": kernels.handle("ultraep_replicate_notice", 0),
        "load": kernels.handle(f"ultraep_load{suffix}", load_bytes),
        "load_plan": plan,
        "plan_warps": plan_warps,
        "reduce": kernels.handle("ultraep_reduce", reduce_bytes) if adds else 0,
    }


def stage_shape(topology: Topology, rank: int, device: Device) -> _core.CudaStageShape:
    """Return a rank as the kernels of the local stages see it."""
    return _core.CudaStageShape(
        rank=rank,
        slots_per_rank=topology.slots_per_rank,
        home=topology.home.tolist(),
        domain=topology.domain.tolist(),
        allow_cross_domain=topology.allow_cross_domain,
        warp_size=device.warp_size,
    )


def choose_plan_warps(
    shared_bytes: Callable[[int], int], device: Device, most: int = PLAN_WARPS
) -> int:
    """Return the warps per block of a plan kernel: as many as fit in shared memory, or 0."""
    return next((n for n in range(most, 0, -1) if shared_bytes(n) <= device.max_shared_bytes), 0)


def choose_tile_bytes(given: int | None, config: _core.EngineConfig, device: Device) -> int:
    """Return the tile size: ``given``, else the default.

    Raises:
        InvalidArgumentError: the kernels do not take ``given``.
        UnsupportedError: the group's tables leave too little shared memory for tiles.
    """
    sizes = _core.cuda_tile_sizes()
    if given is not None and given not in sizes:
        raise InvalidArgumentError(f"tile_bytes is {given}; the CUDA engine takes {sizes}")
    config.tile_bytes = sizes[0] if given is None else given
    needed = _core.cuda_shared_bytes(config, device.max_shared_bytes)
    if needed > device.max_shared_bytes:
        raise UnsupportedError(
            f"a block needs {needed} bytes of shared memory with tiles of {config.tile_bytes}, but"
            f" this device has {device.max_shared_bytes}; use tiles of {sizes[0]} bytes, or fewer"
            " ranks or slots_per_rank"
        )
    return config.tile_bytes


def choose_num_sms(given: int | None, device: Device, ranks_here: int) -> int:
    """Return the blocks per rank. All blocks of a launch have to be resident at the same time.

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


def choose_background_sms(given: int | None, num_sms: int) -> int:
    """Return the same for calls with ``async_op=True``: a ``given`` number is for all calls."""
    return num_sms if given is not None else min(num_sms, BACKGROUND_NUM_SMS)


def check_residency(num_sms: int, device: Device, ranks_here: int, blocks_per_sm: int) -> None:
    """Check that all blocks of a launch are resident at the same time, as they wait for each other.

    Raises:
        InvalidArgumentError: the device holds fewer.
    """
    most = blocks_per_sm * device.num_sms // ranks_here
    if num_sms > most:
        raise InvalidArgumentError(
            f"num_sms is {num_sms} for each of {ranks_here} ranks on this device, which holds"
            f" {blocks_per_sm * device.num_sms} blocks of these kernels at a time; expected at most"
            f" {most}: pass that as num_sms, or use fewer ranks or a smaller tile_bytes"
        )
