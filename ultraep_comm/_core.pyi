"""
The C++ core and the engines. Use the functions of `ultraep_comm` instead.

The stub is generated from this module. After changing the bindings and reinstalling, run:

    python -m nanobind.stubgen -q -m ultraep_comm._core -o ultraep_comm/_core.pyi
"""

from collections.abc import Mapping, Sequence
import enum
from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray


class Operation(enum.Enum):
    REPLICATE = 1

    GATHER = 2

    REDUCE = 3

class Mode(enum.IntEnum):
    PUSH = 0

    PULL = 1

    DIRECT = 2

class GradType(enum.IntEnum):
    FLOAT32 = 0

    BFLOAT16 = 1

class PlanFault(enum.Enum):
    NONE = 0

    OUT_OF_RANGE = 1

    ON_HOME = 2

    DUPLICATE = 3

    OUT_OF_DOMAIN = 4

class Refusal(enum.Enum):
    HOME = 5

    WEIGHTS = 6

class LoadFault(enum.Enum):
    NONE = 0

    NEGATIVE = 1

    TOO_MANY = 2

    TOO_MANY_IN_ALL = 3

class RerouteFault(enum.Enum):
    NONE = 0

    BAD_COUNT = 1

    BAD_SLOT = 2

    QUOTA_MISMATCH = 3

    ID_OUT_OF_RANGE = 4

    COUNT_MISMATCH = 5

    OTHER_HOME = 6

class Fault(enum.Enum):
    NONE = 0

    MISMATCH = 1

    REJECTED = 2

    CLOSED = 3

    GONE = 4

    ABORTED = 5

    TIMEOUT = 6

    CANCELLED = 7

    DAMAGED = 8

class FlagKind(enum.Enum):
    CALL = 0

    OPEN = 1

    READY = 2

    DONE = 3

    PULLED = 4

    GATHERED = 5

    SUMMED = 6

    CONSUMED = 7

    CHECKED = 8

class RecordKind(enum.Enum):
    CALL = 0

    REJECTED = 1

    CLOSED = 2

class DamageKind(enum.Enum):
    NONE = 0

    SLOT = 1

    UNTOUCHED = 2

    SOURCE = 3

    RESIDENT = 4

def plan_replicas(load: NDArray[numpy.int64], home: NDArray[numpy.int32], domain: NDArray[numpy.int32], slots_per_rank: int, allow_cross_domain: bool, target_ppm: int, costs: tuple[int, int, int] | None = None) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32], NDArray[numpy.int32]]:
    """Returns (slot_expert [G, S], slot_quota [G, S], home_quota [E])."""

def check_residents(home: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], domain: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], residents: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], allow_cross_domain: bool) -> None: ...

def plan_with_residents(load: NDArray[numpy.int64], home: NDArray[numpy.int32], domain: NDArray[numpy.int32], residents: NDArray[numpy.int32], allow_cross_domain: bool, target_ppm: int) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32], NDArray[numpy.int32]]:
    """Returns (slot_expert [G, S], slot_quota [G, S], home_quota [E])."""

class RerouteStatus:
    """The first fault found, or NONE; fields that do not apply are -1."""

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
def reroute(topk_ids: NDArray[numpy.int32], load: NDArray[numpy.int32], slot_expert: NDArray[numpy.int32], slot_quota: NDArray[numpy.int32], home_quota: NDArray[numpy.int32], home: NDArray[numpy.int32], rank: int, out: NDArray[numpy.int32]) -> RerouteStatus: ...

@overload
def reroute(topk_ids: NDArray[numpy.int64], load: NDArray[numpy.int32], slot_expert: NDArray[numpy.int32], slot_quota: NDArray[numpy.int32], home_quota: NDArray[numpy.int32], home: NDArray[numpy.int32], rank: int, out: NDArray[numpy.int64]) -> RerouteStatus:
    """Writes physical ids to `out`, which is undefined after a fault."""

def reroute_map(routing_map: NDArray[numpy.uint8], load: NDArray[numpy.int32], slot_expert: NDArray[numpy.int32], slot_quota: NDArray[numpy.int32], home_quota: NDArray[numpy.int32], home: NDArray[numpy.int32], rank: int) -> tuple[RerouteStatus, NDArray[numpy.int64]]:
    """Returns (status, moves [2, N]); moves are flat positions in both maps."""

def make_schedule(slot_expert: Sequence[int], home: Sequence[int], domain: Sequence[int], slots_per_rank: int, allow_cross_domain: bool, segment_bytes: Sequence[int], tile_bytes: int, mode: Mode | None, may_pull: bool, cost: Sequence[int], resident: Sequence[int] | None = None) -> dict[str, Any]:
    """Returns a legal plan's schedule; `cost` is CostModel by field."""

def model_transfer(slot_expert: Sequence[int], home: Sequence[int], num_ranks: int, segment_bytes: Sequence[int], tile_bytes: int, mode: Mode | None, may_pull: bool, cost: Sequence[int], rates: Sequence[float], times: Sequence[int], counts: Sequence[int], cores: Sequence[float], timeline: bool, parent: Sequence[int], chunk_tiles: int, grad_types: Sequence[int], zero: bool, resident: Sequence[int] | None = None) -> dict[str, Any]:
    """See src/model. RuntimeError: the transfer does not finish."""

def map_shared(fd: int, num_bytes: int) -> NDArray[numpy.uint8]: ...

def map_again(target: int, source: int, num_bytes: int) -> None: ...

class PeerState:
    """What a rank last published about itself."""

    def __init__(self, *, kind: RecordKind, epoch: int, failed_epoch: int = 0, waited_for: int = -1, aborted_by: int = -1, gone: bool = False, reachable: bool = True) -> None: ...

    @property
    def kind(self) -> RecordKind: ...

    @property
    def epoch(self) -> int: ...

    @property
    def failed_epoch(self) -> int: ...

    @property
    def waited_for(self) -> int: ...

    @property
    def aborted_by(self) -> int: ...

    @property
    def gone(self) -> bool: ...

    @property
    def reachable(self) -> bool: ...

class Damage:
    """What check mode found wrong; see src/host/slot_check.hpp."""

    @property
    def kind(self) -> DamageKind: ...

    @property
    def home(self) -> int: ...

    @property
    def expert(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def segment(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def found(self) -> int: ...

    @property
    def expected(self) -> int: ...

    @property
    def source_changed(self) -> bool: ...

class Report:
    """How a call failed; see src/core/transfer/failure.hpp."""

    def __init__(self, *, fault: Fault, epoch: int, flag: FlagKind = FlagKind.CALL, peer: int = -1, expert: int = -1, piece: int = -1, seen: int = 0, expected: int = 0, aborter: int = -1, root: int = -1, seconds: float = 0.0, all_called: bool = False, detail: str = '') -> None: ...

    @property
    def fault(self) -> Fault: ...

    @property
    def flag(self) -> FlagKind: ...

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

    @property
    def detail(self) -> str: ...

    @property
    def bad_id(self) -> tuple[int, int] | None: ...

    @property
    def damage(self) -> Damage: ...

    @property
    def peers(self) -> list[PeerState] | None: ...

class Waits:
    """How long workers slept in waits; see src/engine/health.hpp."""

    @property
    def seconds(self) -> float: ...

    @property
    def longer(self) -> list[int]: ...

    @property
    def longest(self) -> float: ...

    @property
    def flag(self) -> FlagKind: ...

    @property
    def peer(self) -> int: ...

    @property
    def expert(self) -> int: ...

    @property
    def epoch(self) -> int: ...

class EngineHealth:
    """What an engine has done so far."""

    def __init__(self, *, replicate: int, reduce: int, gather: int, rejected: int, completed: int, bytes_stored: int) -> None: ...

    @property
    def replicate(self) -> int: ...

    @property
    def reduce(self) -> int: ...

    @property
    def gather(self) -> int: ...

    @property
    def rejected(self) -> int: ...

    @property
    def completed(self) -> int | None: ...

    @property
    def bytes_stored(self) -> int | None: ...

    @property
    def waits(self) -> Waits | None: ...

class EngineConfig:
    """See src/engine/config.hpp."""

    def __init__(self, *, rank: int, num_experts: int, slots_per_rank: int, home: Sequence[int], domain: Sequence[int], allow_cross_domain: bool, segment_bytes: Sequence[int], grad_bytes: Sequence[int], grad_type: Sequence[GradType], tile_bytes: int, cost: Sequence[int], call_timeout: float, wait_timeout: float, num_banks: int = 1, num_grad_banks: int = 1, instance_align: int = 0) -> None: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def slots_per_rank(self) -> int: ...

    @property
    def num_banks(self) -> int: ...

    @property
    def num_grad_banks(self) -> int: ...

    @property
    def tile_bytes(self) -> int: ...

    @tile_bytes.setter
    def tile_bytes(self, arg: int, /) -> None: ...

    @property
    def num_workers(self) -> int: ...

    @num_workers.setter
    def num_workers(self, arg: int, /) -> None: ...

    def set_memory(self, bases: Sequence[int], check_bases: Sequence[int]) -> None: ...

    def set_peers(self, pipes: Sequence[int], processes: Sequence[int]) -> None: ...

    def check_plan(self, plan: PlanView) -> tuple[PlanFault, int, int, int]: ...

    def accepts(self, plan: PlanView) -> bool: ...

    def fits(self, plan: PlanView) -> bool: ...

    def has_shape(self, plan: PlanView) -> bool: ...

class EngineLayout:
    """Offsets in bytes, the same on every rank."""

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
    def instance_align(self) -> int: ...

    @property
    def instance_bytes(self) -> int: ...

    @property
    def instance_offset(self) -> list[int]: ...

    @property
    def grad_instance_bytes(self) -> int: ...

    @property
    def grad_instance_offset(self) -> list[int]: ...

    @property
    def local_idx(self) -> list[int]: ...

    @property
    def num_local_experts(self) -> list[int]: ...

    @property
    def max_local_experts(self) -> int: ...

class PlanView:
    """Addresses of a plan's tensors, and its shape."""

    def __init__(self, slot_expert: int, slot_quota: int, home_quota: int, home: int, num_ranks: int, slots_per_rank: int, num_experts: int, on_cpu: bool) -> None: ...

class TransferCall:
    """Arguments of an engine's transfer; see bindings/calls.hpp."""

    def __init__(self, operation: Operation, plan: PlanView, main_ptrs: int, num_segments: int, mode: Mode | None, background: bool, tag: int, *, segments: int = 0, region: int = -1, main_types: int = 0, zero: bool = False, on_device: bool = False, own_home: bool = False, table: int = 0, in_use: int = 0, bank: int = -1, version: int = 0, known: int = 0) -> None: ...

    @property
    def bank(self) -> int: ...

    @property
    def zero(self) -> bool: ...

class Engine:
    """One rank's host engine; see src/host/engine.hpp."""

    def __init__(self, config: EngineConfig) -> None: ...

    def add_region(self, bases: Sequence[int], offset: Sequence[int]) -> int: ...

    def transfer(self, call: TransferCall, bound: object | None = None) -> tuple[int, Mode]: ...

    def exchange(self, row: int, table: int) -> int: ...

    def residents(self, bank: int) -> NDArray[numpy.int32]: ...

    def version(self, bank: int) -> int: ...

    def last_call(self, bank: int) -> int: ...

    def invalidate(self, bank: int) -> None: ...

    def slots_to_fill(self) -> NDArray[numpy.bool_]: ...

    def reject(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> int: ...

    def wait(self, epoch: int) -> bool: ...

    def synchronize(self, epoch: int) -> bool: ...

    def slot_ready(self, epoch: int, slot: int) -> bool: ...

    def wait_slots(self, epoch: int, slots: Sequence[int]) -> bool: ...

    def is_completed(self, epoch: int) -> bool: ...

    def finished_at(self, epoch: int) -> int: ...

    def failed_epoch(self) -> int: ...

    def report(self) -> Report: ...

    @property
    def epoch(self) -> int: ...

    @property
    def bytes_stored(self) -> int: ...

    def health(self, waits: bool) -> EngineHealth: ...

def count_experts(ids: int, num_ids: int, is_long: bool, num_experts: int, counts: int) -> int:
    """Returns the position of the first bad id, or -1."""

class C10dStep(enum.IntEnum):
    SEND_MAIN = 0

    SEND_SLOT = 1

    RECEIVE = 2

    SEND_GRAD = 3

    KEEP_GRAD = 4

    ADD_GRAD = 5

    SEND_SUM = 6

    ADD_SUM = 7

class C10dLedger:
    """One rank's calls; see src/c10d/ledger.hpp."""

    def __init__(self, config: EngineConfig) -> None: ...

    def transfer(self, call: TransferCall) -> tuple[int, int, Mode, bool, NDArray[numpy.int64]]:
        """
        Returns (epoch, digest, mode, is_empty, steps): a row for each Step, by field.
        """

    def gather(self) -> tuple[int, int]: ...

    def reject(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    def residents(self, bank: int) -> NDArray[numpy.int32]: ...

    def version(self, bank: int) -> int: ...

    def last_call(self, bank: int) -> int: ...

    def invalidate(self, bank: int) -> None: ...

    def slots_to_fill(self) -> NDArray[numpy.bool_]: ...

class DriverError(RuntimeError):
    pass

class CaptureError(RuntimeError):
    pass

def cuda_layout() -> list[int]: ...

CUDA_KERNELS_VERSION: int = 100

CUDA_MAX_DEVICE_SEGMENTS: int = 32

CUDA_MAX_LAUNCH_RANKS: int = 64

CUDA_CAPTURED: int = 4611686018427387904

def cuda_tile_sizes() -> list[int]: ...

def cuda_shared_bytes(config: EngineConfig, max_shared_bytes: int) -> int: ...

def cuda_reduce_shared_bytes(config: EngineConfig) -> int: ...

def cuda_load_shared_bytes(num_ranks: int, num_experts: int) -> int: ...

def cuda_load_plan_shared_bytes(num_ranks: int, num_experts: int, slots_per_rank: int, num_warps: int) -> int: ...

def cuda_plan_offsets(num_ranks: int, slots_per_rank: int, num_experts: int) -> tuple[int, int, int, int]:
    """Offsets of slot_expert, slot_quota and home_quota, and total bytes."""

def cuda_staging_bytes(num_sms: int, tile_bytes: int) -> int: ...

def cuda_driver_names() -> list[str]: ...

class CudaDriver:
    """Addresses of the driver's functions; ValueError: one is missing."""

    def __init__(self, addresses: Mapping[str, int]) -> None: ...

class CudaLauncherConfig:
    """See src/cuda/launcher.hpp."""

    def __init__(self, *, driver: CudaDriver, context: int, stream: int, captured_stream: int, kernel: int, bank_kernel: int, reduce: int, notice: int, load: int, load_plan: int, plan_warps: int, warp_size: int, first_rank: int, num_ranks: int, num_sms: int, background_sms: int, max_shared_bytes: int, config: EngineConfig) -> None: ...

    @property
    def device_bytes(self) -> int: ...

    @property
    def pinned_bytes(self) -> int: ...

    def blocks_per_multiprocessor(self) -> int: ...

class CudaLauncher:
    """Launches calls of the ranks that share it; `keep` owns its memory."""

    def __init__(self, config: CudaLauncherConfig, device: int, pinned: int, keep: object) -> None: ...

    @property
    def counts(self) -> tuple[int, int]: ...

class CudaEngine:
    """One rank's CUDA engine; see src/cuda/engine.hpp."""

    def __init__(self, config: EngineConfig, launcher: CudaLauncher, *, far: Sequence[int], pes: Sequence[int], staging: int) -> None: ...

    def add_region(self, bases: Sequence[int], offset: Sequence[int], table: int) -> int: ...

    def transfer(self, call: TransferCall, stream: int) -> tuple[int, Mode | None]: ...

    def gather(self, ids: int, count: int, id_bytes: int, load: int, stream: int) -> int: ...

    def gather_and_plan(self, ids: int, count: int, id_bytes: int, load: int, plan: int, stages: CudaStages, target_ppm: int, costs: tuple[int, int, int] | None, stream: int) -> int: ...

    def residents(self, bank: int, stream: int) -> NDArray[numpy.int32]: ...

    def bank_table(self, bank: int, stream: int) -> int: ...

    def version(self, bank: int) -> int: ...

    def ready(self, bank: int) -> int: ...

    def wait_slots(self, epoch: int, slots: Sequence[int], stream: int) -> bool: ...

    def invalidate(self, bank: int, stream: int) -> None: ...

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

    def health(self, waits: bool) -> EngineHealth: ...

class CudaStageShape:
    """See src/cuda/stages.hpp."""

    def __init__(self, *, rank: int, slots_per_rank: int, home: Sequence[int], domain: Sequence[int], allow_cross_domain: bool, warp_size: int) -> None: ...

    def plan_shared_bytes(self, num_warps: int) -> int: ...

    def bank_plan_shared_bytes(self, num_warps: int) -> int: ...

    @property
    def shares_shared_bytes(self) -> int: ...

    @property
    def reroute_shared_bytes(self) -> int: ...

    @property
    def constants_bytes(self) -> int: ...

    def state_bytes(self, max_runs: int) -> int: ...

    def runs_of_ids(self, num_ids: int) -> int: ...

    def runs_of_map(self, num_tokens: int) -> int: ...

class CudaStageFaults:
    """Faults found by launches: in a load, a reroute, a save."""

    @property
    def load(self) -> LoadFault: ...

    @property
    def expert(self) -> int: ...

    @property
    def of_map(self) -> bool: ...

    @property
    def reroute(self) -> RerouteStatus: ...

    @property
    def saved_tag(self) -> int: ...

    @property
    def saved_generation(self) -> int: ...

CUDA_MAX_PLAN_WARPS: int = 16

CUDA_MAX_BANK_PLAN_WARPS: int = 8

def cuda_stage_faults_bytes() -> int: ...

class CudaStages:
    """Launches local stages of one rank; see src/cuda/stages.hpp."""

    def __init__(self, *, driver: CudaDriver, context: int, shape: CudaStageShape, plan: int, plan_in_bank: int, shares: int, reroute_int32: int, reroute_int64: int, reroute_map: int, save_plan: int, plan_warps: int, bank_plan_warps: int, constants: int, faults: int, keep: object) -> None: ...

    def bind_state(self, state: int, max_runs: int) -> None: ...

    @property
    def max_runs(self) -> int: ...

    @property
    def counts(self) -> tuple[int, int]: ...

    def plan(self, load: int, kept_load: int, slot_expert: int, slot_quota: int, home_quota: int, num_sources: int, target_ppm: int, costs: tuple[int, int, int] | None, bank: int, moves: int, stream: int) -> None: ...

    def reroute(self, load: int, slot_expert: int, slot_quota: int, home_quota: int, home: int, source: int, ids: int, out: int, num_ids: int, id_bytes: int, stream: int) -> None: ...

    def reroute_map(self, load: int, slot_expert: int, slot_quota: int, home_quota: int, home: int, source: int, routing_map: int, out: int, num_tokens: int, probs: int, physical_probs: int, prob_bytes: int, instances: int, stream: int) -> None: ...

    def save_plan(self, fields: Sequence[tuple[int, int, int]], in_use: int, generation: int, tag: int, stream: int) -> None:
        """Copies `fields` (to, from, words); generation 0: clears `in_use`."""

    def is_capturing(self, stream: int) -> bool: ...

    @property
    def has_captured(self) -> bool: ...

    def await_idle(self) -> bool: ...

    def take_faults(self) -> CudaStageFaults | None: ...

def drain_threads_at_exit(seconds: float) -> None: ...
