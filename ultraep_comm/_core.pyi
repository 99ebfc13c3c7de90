"""The C++ core. Arrays are dense, row-major and on the CPU: NumPy arrays or torch tensors.

An array of another dtype, layout or device raises TypeError; a shape or value out of range raises
ValueError. Nothing is converted or copied.
"""

import enum
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

_Int32Input = NDArray[np.int32] | torch.Tensor
_Int64Input = NDArray[np.int64] | torch.Tensor

def plan_replicas(
    load: _Int64Input,
    home: _Int32Input,
    domain: _Int32Input,
    slots_per_rank: int,
    allow_cross_domain: bool,
    target_ppm: int,
    costs: tuple[int, int, int] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Plan from global sums: `(slot_expert [G, S], slot_quota [G, S], home_quota [E])`.

    `load [E]`, `home [E]`, `domain [G]`; `target_ppm` from `planner.target_to_ppm`; `costs` as
    `planner.Costs`.
    """

class RerouteFault(enum.Enum):
    """What a reroute found wrong; the status names the place.

    BAD_COUNT: a load or quota of `expert` is `value`, below 0 or with a sum of 2**31 or more.
    BAD_SLOT: `slot_expert` has `value` at the flat index `position`: no expert, or one that this
    rank has already. QUOTA_MISMATCH: the quotas of `expert` sum to `counted`, its load to
    `expected`. ID_OUT_OF_RANGE: `topk_ids` has `value` at the flat index `position`.
    COUNT_MISMATCH: the routing has `expert` `counted` times, `load[rank]` says `expected`.
    OTHER_HOME: the plan has `expert` at home on rank `value`, the group elsewhere.
    """

    NONE = 0
    BAD_COUNT = 1
    BAD_SLOT = 2
    QUOTA_MISMATCH = 3
    ID_OUT_OF_RANGE = 4
    COUNT_MISMATCH = 5
    OTHER_HOME = 6

class RerouteStatus:
    """The first fault found, or NONE; fields that the fault does not name are -1."""

    @property
    def fault(self) -> RerouteFault: ...
    @property
    def expert(self) -> int: ...
    @property
    def counted(self) -> int: ...
    @property
    def expected(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def value(self) -> int: ...

@overload
def reroute(
    topk_ids: NDArray[np.int32] | torch.Tensor,
    load: _Int32Input,
    slot_expert: _Int32Input,
    slot_quota: _Int32Input,
    home_quota: _Int32Input,
    home: _Int32Input,
    rank: int,
    out: NDArray[np.int32] | torch.Tensor,
) -> RerouteStatus:
    """Write the physical instance ids of `topk_ids` (any shape, -1 stays) to `out`.

    `load [G, E]`, `slot_expert [G, S]`, `slot_quota [G, S]`, `home_quota [E]`, `home [E]`. `out`
    has the size and dtype of `topk_ids`; after a fault its contents mean nothing.
    """

@overload
def reroute(
    topk_ids: NDArray[np.int64] | torch.Tensor,
    load: _Int32Input,
    slot_expert: _Int32Input,
    slot_quota: _Int32Input,
    home_quota: _Int32Input,
    home: _Int32Input,
    rank: int,
    out: NDArray[np.int64] | torch.Tensor,
) -> RerouteStatus: ...
def reroute_map(
    routing_map: NDArray[np.uint8] | torch.Tensor,
    load: _Int32Input,
    slot_expert: _Int32Input,
    slot_quota: _Int32Input,
    home_quota: _Int32Input,
    home: _Int32Input,
    rank: int,
) -> tuple[RerouteStatus, NDArray[np.int64]]:
    """Reroute a map `[T, E]` of bytes 0 and 1: `(status, moves [2, N])`.

    The plan's arrays as in `reroute`. `moves[0]` are the row-major positions of the map's ones,
    `moves[1]` where each of them moves to in the physical map `[T, G * P]`; after a fault they mean
    nothing.
    """

def make_schedule(
    slot_expert: list[int],
    home: list[int],
    domain: list[int],
    slots_per_rank: int,
    allow_cross_domain: bool,
    segment_bytes: list[int],
    tile_bytes: int,
    mode: int,
    may_pull: bool,
    cost: list[int],
) -> dict[str, Any]:
    """Return the schedule of a legal plan as plain lists; see `Schedule` in src/core/schedule.hpp.

    `slot_expert` is `[G * S]` row-major; `mode` is an index into `work.MODES`, or -1: by `cost`.
    `cost` is `CostModel`, field by field. Raises ValueError for an illegal plan or a value out of
    range.
    """

def model_transfer(
    slot_expert: list[int],
    home: list[int],
    num_ranks: int,
    segment_bytes: list[int],
    tile_bytes: int,
    mode: int,
    may_pull: bool,
    cost: list[int],
    rates: list[float],
    times: list[int],
    counts: list[int],
    cores: list[float],
    timeline: bool,
    parent: list[int],
    chunk_tiles: int,
) -> dict[str, Any]:
    """Run a plan's schedule, or trees of relays, on a described machine; see src/model/.

    As `make_schedule`. `rates`: picoseconds a byte, egress and ingress of stores, then of loads,
    and the four between domains. `times`: picoseconds, as in `model::Machine`. `counts`: ranks of a
    domain (0: one domain), workers, stages of a worker, whether loads are served fairly. `cores`:
    the part of a copy's time that it keeps the memory (0: ranks have links), and picoseconds a byte
    that is read. `parent`: who sends to each replica, or empty.

    Returns arrays: `finish_ps`, `egress_ps`, `ingress_ps` and `sent` `[G]`, `received` `[G, S]`
    bytes; with `timeline` also `spans` `[N, 6]` (rank, kind, peer, expert, piece, bytes) and
    `span_ps` `[N, 2]`. Raises RuntimeError for a transfer that does not end.
    """

def count_experts(ids: int, num_ids: int, is_long: bool, num_experts: int, counts: int) -> int:
    """Count routed ids. `ids` and `counts` are addresses; returns a bad id's position, else -1."""

def map_shared(fd: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map shared memory, pages populated; unmapped with the array. Raises OSError."""

class EngineConfig:
    """See `EngineConfig` in src/host/engine.hpp."""

    rank: int
    num_experts: int
    slots_per_rank: int
    home: list[int]
    domain: list[int]
    allow_cross_domain: bool
    segment_bytes: list[int]
    tile_bytes: int
    num_workers: int
    call_timeout: float
    wait_timeout: float
    peer_sockets: list[int]
    peer_processes: list[int]
    def __init__(self) -> None: ...
    def set_cost(
        self, store_per_kib: int, load_per_kib: int, group: int, hop: int, parallel_percent: int
    ) -> None: ...
    def set_bases(self, bases: list[int]) -> None: ...
    def set_check_bases(self, bases: list[int]) -> None: ...
    def set_grads(self, num_bytes: list[int], types: list[int]) -> None: ...

class EngineLayout:
    """Offsets that every rank computes alike, in bytes."""

    def __init__(self, config: EngineConfig) -> None: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def slots_base(self) -> int: ...
    @property
    def check_bytes(self) -> int: ...
    @property
    def slot_offset(self) -> list[int]: ...
    @property
    def grad_offset(self) -> list[int]: ...
    @property
    def region_bytes(self) -> int: ...
    @property
    def region_offset(self) -> list[int]: ...
    @property
    def main_idx(self) -> list[int]: ...
    @property
    def num_mains(self) -> list[int]: ...
    @property
    def max_mains(self) -> int: ...

class Report:
    """How a call failed; see `Report` in src/host/engine.hpp."""

    @property
    def fault(self) -> int: ...
    @property
    def flag(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def piece(self) -> int: ...
    @property
    def seen(self) -> int: ...
    @property
    def expected(self) -> int: ...
    @property
    def aborter(self) -> int: ...
    @property
    def root(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def all_called(self) -> bool: ...

class Engine:
    """The host engine of one rank. Addresses are integers; see src/host/engine.hpp."""

    def __init__(self, config: EngineConfig) -> None: ...
    def add_region(self, bases: list[int]) -> int: ...
    def check(self, slot_expert: int) -> tuple[int, int, int, int]: ...
    def accepts(self, slot_expert: int, home: int) -> bool: ...
    def has_home(self, home: int) -> bool: ...
    def replicate(
        self,
        slot_expert: int,
        slot_quota: int,
        home_quota: int,
        mains: int,
        segments: int,
        num_segments: int,
        mode: int,
        region: int,
        background: bool,
        tag: int,
    ) -> tuple[int, int]: ...
    def reduce(
        self,
        slot_expert: int,
        slot_quota: int,
        home_quota: int,
        mains: int,
        main_types: int,
        mode: int,
        zero: bool,
        background: bool,
        tag: int,
    ) -> tuple[int, int]: ...
    def gather(self, row: int, table: int) -> int: ...
    def reject(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> int: ...
    def wait(self, epoch: int) -> bool: ...
    def synchronize(self, epoch: int) -> bool: ...
    def is_completed(self, epoch: int) -> bool: ...
    def finished_at(self, epoch: int) -> int: ...
    def failed_epoch(self) -> int: ...
    def report(self) -> Report: ...
    @property
    def epoch(self) -> int: ...
    @property
    def bytes_stored(self) -> int: ...
    @property
    def completed(self) -> int: ...
    @property
    def calls(self) -> tuple[int, int, int, int]: ...
    @property
    def waits(self) -> tuple[float, list[int], float, int, int, int, int]: ...
    def damage(self) -> tuple[int, int, int, int, int, int, int, int, bool]: ...
    def last_words(self) -> list[tuple[int, int, int, int, int, bool, bool]]: ...

class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""

class CaptureError(RuntimeError):
    """The stream is being captured."""

def cuda_layout() -> list[int]:
    """Return sizes and offsets of the structs that host and device share."""

CUDA_MAX_DEVICE_SEGMENTS: int  # of a call whose plan is on the device
CUDA_MAX_LAUNCH_RANKS: int
CUDA_MAX_PLAN_WARPS: int
CUDA_REDUCE_WARPS: int  # of a block that adds gradients
CUDA_CAPTURED: int  # a bit that marks the numbers of captured calls

def cuda_tile_sizes() -> list[int]:
    """Return what the kernels are compiled for."""

def cuda_shared_bytes(config: EngineConfig) -> int:
    """Return the shared memory of a block, for any rank of the group."""

def cuda_reduce_shared_bytes(config: EngineConfig, num_warps: int) -> int:
    """Return the same of a block that adds gradients."""

def cuda_load_shared_bytes(num_ranks: int, num_experts: int) -> int:
    """Return the shared memory of a block of the load kernels."""

def cuda_load_plan_shared_bytes(
    num_ranks: int, num_experts: int, slots_per_rank: int, num_warps: int
) -> int:
    """Return the shared memory of a block of the kernel that also plans."""

def cuda_plan_offsets(
    num_ranks: int, slots_per_rank: int, num_experts: int
) -> tuple[int, int, int, int]:
    """Return where `slot_expert`, `slot_quota` and `home_quota` of a plan lie, and its bytes."""

def cuda_staging_bytes(num_sms: int, tile_bytes: int) -> int:
    """Return the symmetric memory that puts to far peers need."""

def cuda_driver_names() -> list[str]:
    """Return the names of the driver's functions that are called."""

def cuda_launch_peers(
    driver: CudaDriver,
    context: int,
    kernel: int,
    stream: int,
    bases: int,
    own: int,
    pes: int,
    num_ranks: int,
) -> None:
    """Fill `bases [num_ranks]` on the device with the addresses of peers; 0: out of reach."""

class CudaDriver:
    """Addresses of the driver's functions, by name. Raises ValueError if one is missing."""

    def __init__(self, addresses: dict[str, int]) -> None: ...

class CudaLauncherConfig:
    """See `LauncherConfig` in src/cuda/launcher.hpp."""

    def __init__(
        self,
        *,
        driver: CudaDriver,
        context: int,
        stream: int,
        captured_stream: int,
        kernel: int,
        reduce: int,
        notice: int,
        load: int,
        load_plan: int,
        plan_warps: int,
        reduce_warps: int,
        warp_size: int,
        first_rank: int,
        num_ranks: int,
        num_sms: int,
        config: EngineConfig,
    ) -> None: ...
    @property
    def device_bytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...

class CudaLauncher:
    """Launches calls of the ranks that share it; see src/cuda/launcher.hpp.

    `keep` owns the memory, the stream and the driver's functions.
    """

    def __init__(
        self, config: CudaLauncherConfig, device: int, pinned: int, keep: object
    ) -> None: ...
    @property
    def counts(self) -> tuple[int, int]:
        """Kernels launched, and copies to the device enqueued, by all calls so far."""

class CudaStageShape:
    """A rank as the kernels of the local stages see it; see `StageShape` in src/cuda/stages.hpp."""

    def __init__(
        self,
        *,
        rank: int,
        slots_per_rank: int,
        home: list[int],
        domain: list[int],
        allow_cross_domain: bool,
        warp_size: int,
    ) -> None: ...
    def plan_shared_bytes(self, num_warps: int) -> int: ...
    @property
    def shares_shared_bytes(self) -> int: ...
    @property
    def reroute_shared_bytes(self) -> int: ...
    @property
    def constants_bytes(self) -> int: ...
    def state_bytes(self, max_runs: int) -> int: ...
    def runs_of_ids(self, num_ids: int) -> int: ...
    def runs_of_map(self, num_tokens: int) -> int: ...

class LoadFault(enum.Enum):
    """Why a load has no plan."""

    NONE = 0
    NEGATIVE = 1
    TOO_MANY = 2
    TOO_MANY_IN_ALL = 3

class CudaStageFaults:
    """What launches found wrong: with a load, for `expert`; with a map, or ids, and their plan."""

    @property
    def load(self) -> LoadFault: ...
    @property
    def expert(self) -> int: ...
    @property
    def of_map(self) -> bool: ...
    @property
    def reroute(self) -> RerouteStatus: ...
    @property
    def saved_tag(self) -> int:
        """Of a save whose entry was in use; 0: of none."""
    @property
    def saved_generation(self) -> int: ...

def cuda_stage_faults_bytes() -> int:
    """Return the page-locked memory that faults need."""

class CudaStages:
    """Launches of the local stages of one rank. Addresses are integers; see src/cuda/stages.hpp.

    `keep` owns the memory and the driver's functions.
    """

    def __init__(
        self,
        *,
        driver: CudaDriver,
        context: int,
        shape: CudaStageShape,
        plan: int,
        shares: int,
        reroute_int32: int,
        reroute_int64: int,
        reroute_map: int,
        save_plan: int,
        plan_warps: int,
        constants: int,
        faults: int,
        keep: object,
    ) -> None: ...
    def lend_state(self, state: int, max_runs: int) -> None: ...
    @property
    def max_runs(self) -> int: ...
    @property
    def counts(self) -> tuple[int, int]:
        """Kernels launched so far, and copies enqueued, of which there are none."""
    def plan(
        self,
        load: int,
        kept_load: int,
        slot_expert: int,
        slot_quota: int,
        home_quota: int,
        num_sources: int,
        target_ppm: int,
        costs: tuple[int, int, int] | None,
        stream: int,
    ) -> None: ...
    def reroute(
        self,
        load: int,
        slot_expert: int,
        slot_quota: int,
        home_quota: int,
        home: int,
        ids: int,
        out: int,
        num_ids: int,
        id_bytes: int,
        stream: int,
    ) -> None: ...
    def reroute_map(
        self,
        load: int,
        slot_expert: int,
        slot_quota: int,
        home_quota: int,
        home: int,
        routing_map: int,
        out: int,
        num_tokens: int,
        probs: int,
        physical_probs: int,
        prob_bytes: int,
        instances: int,
        stream: int,
    ) -> None: ...
    def save_plan(
        self,
        fields: list[tuple[int, int, int]],
        in_use: int,
        generation: int,
        tag: int,
        stream: int,
    ) -> None:
        """Copy `fields` (to, from, words), or clear `in_use` for generation 0."""
    def is_capturing(self, stream: int) -> bool: ...
    @property
    def has_captured(self) -> bool: ...
    def await_idle(self) -> bool: ...
    def take_faults(self) -> CudaStageFaults | None: ...

class CudaEngine:
    """The CUDA engine of one rank. Addresses are integers; see src/cuda/engine.hpp."""

    def __init__(
        self,
        config: EngineConfig,
        launcher: CudaLauncher,
        *,
        far: list[int],
        pes: list[int],
        staging: int,
    ) -> None: ...
    def add_region(self, bases: list[int], table: int) -> int: ...
    def check(self, slot_expert: int) -> tuple[int, int, int, int]: ...
    def accepts(self, slot_expert: int, home: int) -> bool: ...
    def has_home(self, home: int) -> bool: ...
    def replicate(
        self,
        slot_expert: int,
        slot_quota: int,
        home_quota: int,
        mains: int,
        segments: int,
        num_segments: int,
        mode: int,
        region: int,
        background: bool,
        tag: int,
        stream: int,
    ) -> tuple[int, int]: ...
    def replicate_on_device(
        self,
        slot_expert: int,
        slot_quota: int,
        home_quota: int,
        home: int,
        mains: int,
        table: int,
        segments: int,
        mode: int,
        region: int,
        background: bool,
        tag: int,
        stream: int,
    ) -> int: ...
    def reduce(
        self,
        slot_expert: int,
        slot_quota: int,
        home_quota: int,
        mains: int,
        main_types: int,
        mode: int,
        zero: bool,
        background: bool,
        tag: int,
        stream: int,
    ) -> tuple[int, int]: ...
    def reduce_on_device(
        self,
        slot_expert: int,
        slot_quota: int,
        home_quota: int,
        home: int,
        mains: int,
        table: int,
        main_types: int,
        mode: int,
        zero: bool,
        in_use: int,
        background: bool,
        tag: int,
        stream: int,
    ) -> int: ...
    def gather(self, ids: int, count: int, id_bytes: int, load: int, stream: int) -> int: ...
    def gather_and_plan(
        self,
        ids: int,
        count: int,
        id_bytes: int,
        load: int,
        plan: int,
        stages: CudaStages,
        target_ppm: int,
        costs: tuple[int, int, int] | None,
        stream: int,
    ) -> int: ...
    def bad_id(self) -> tuple[int, int]: ...
    def reject(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> int: ...
    def wait(self, epoch: int, stream: int) -> bool: ...
    def synchronize(self, epoch: int) -> bool: ...
    def is_completed(self, epoch: int) -> bool: ...
    def failed_epoch(self) -> int: ...
    def report(self) -> Report: ...
    @property
    def epoch(self) -> int: ...
    @property
    def bytes_stored(self) -> int: ...
    @property
    def calls(self) -> tuple[int, int, int, int]: ...
