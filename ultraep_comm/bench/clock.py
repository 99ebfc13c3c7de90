"""Clocks: a GPU's, the host's in its place, and how the ranks of a run begin together."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ultraep_comm.bench.launch import find_launcher
from ultraep_comm.engines.cuda.device import Device, find_device
from ultraep_comm.engines.cuda.kernels import choose_num_sms, find_cubin
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.group.group import Group

Run = Callable[[], None]

NUM_STREAMS = 8
# Ranks of one machine start together this long after the last of them was ready: enough for all
# to have left the barrier.
_LINE_UP_NS = 1_000_000
_BIG_BYTES = 1 << 30
_SPIN = 2_000_000  # cycles, about a millisecond
_SMI_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "persistence_mode",
)


class Meter(Protocol):
    """A device to measure on. Tests have one without a GPU.

    Attributes:
        engine: of the groups.
        torch_device: of all tensors.
        big_bytes: size of the large buffer whose copy is timed.
    """

    engine: str
    torch_device: torch.device
    big_bytes: int

    def num_sms(self, given: int | None, ranks_here: int) -> int:
        """Return the blocks of a rank."""

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return memory, also a peer's, as uint8."""

    def time_us(
        self, run: Run, calls: int, ranks_here: int, *, line_up: Run | None = None
    ) -> float:
        """Return the device's time of one of so many calls in a row, behind one that counts not.

        That one is ``line_up``, if it is given.
        """

    def capture(self, run: Run) -> Run:
        """Capture what a call enqueues on the current stream; return what enqueues it again."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the CPU, behind what the current stream holds."""

    def spread(self, jobs: Sequence[Run]) -> None:
        """Run jobs on several streams, behind the current one and before what it gets next."""

    def settle(self) -> None:
        """Wait for the device."""

    def describe(self) -> dict[str, Any]:
        """Return what it is."""


class HostMeter:
    """A `Meter` of the host engine, whose calls block."""

    engine = "host"
    torch_device = torch.device("cpu")
    big_bytes = 1 << 20

    def num_sms(self, given: int | None, ranks_here: int) -> int:
        """Return one thread, unless another number was given."""
        return given or 1

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Wrap memory."""
        kind = ctypes.c_uint8 * num_bytes
        return torch.frombuffer(kind.from_address(address), dtype=torch.uint8)

    def time_us(
        self, run: Run, calls: int, ranks_here: int, *, line_up: Run | None = None
    ) -> float:
        """Time calls in a row."""
        (line_up or run)()
        self.settle()
        start = time.perf_counter_ns()
        for _ in range(calls):
            run()
        self.settle()
        return (time.perf_counter_ns() - start) / 1e3 / calls

    def spread(self, jobs: Sequence[Run]) -> None:
        """Run jobs one after the other."""
        for job in jobs:
            job()

    def capture(self, run: Run) -> Run:
        """Raise UnsupportedError."""
        raise UnsupportedError("the host engine has no graphs")

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy."""
        return tensor.clone()

    def settle(self) -> None:
        """Return: calls block."""

    def describe(self) -> dict[str, Any]:
        """Return nothing: the host is described elsewhere."""
        return {}


class Gpu:
    """Torch's current device."""

    engine = "cuda"

    def __init__(self) -> None:
        """Find the device.

        Raises:
            UnsupportedError: there is none.
        """
        self._device: Device = find_device()
        self.torch_device = self._device.torch_device
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        self.big_bytes = min(_BIG_BYTES, free // 8)
        cuda: Any = torch.cuda  # partly without annotations
        self._cuda = cuda
        self._streams = [cuda.Stream() for _ in range(NUM_STREAMS)]
        self._was_late = False

    def num_sms(self, given: int | None, ranks_here: int) -> int:
        """Return what a group would take."""
        return choose_num_sms(given, self._device, ranks_here)

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Wrap memory that the device reaches."""
        return view_mapped(address, num_bytes, self.torch_device)

    def time_us(
        self, run: Run, calls: int, ranks_here: int, *, line_up: Run | None = None
    ) -> float:
        """Time calls between two events, all of them in the stream before the device begins."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        _spin(_SPIN * (1 + ranks_here))
        (line_up or run)()  # lines up the ranks
        start.record()
        for _ in range(calls):
            run()
        end.record()
        if start.query() and not self._was_late:
            self._was_late = True
            print(
                "# the device did not wait for the host: some of these times are the host's",
                file=sys.stderr,
                flush=True,
            )
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / calls

    def capture(self, run: Run) -> Run:
        """Capture on a stream of torch's own."""
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph):
            run()
        replay: Run = graph.replay
        return replay

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy, and wait for it."""
        return tensor.cpu()

    def spread(self, jobs: Sequence[Run]) -> None:
        """Deal jobs out to streams."""
        current = torch.cuda.current_stream()
        used = self._streams[: len(jobs)]
        for stream in used:
            stream.wait_stream(current)
        for i, job in enumerate(jobs):
            with torch.cuda.stream(self._streams[i % NUM_STREAMS]):
                job()
        for stream in used:
            current.wait_stream(stream)

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.torch_device)

    def describe(self) -> dict[str, Any]:
        """Return the device, its driver and its clocks."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        return {
            "gpu": properties.name,
            "gpu_id": str(getattr(properties, "uuid", "")) or None,
            "gpu_memory_bytes": properties.total_memory,
            "gpu_sms": properties.multi_processor_count,
            "gpus": torch.cuda.device_count(),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            **query_smi(str(getattr(properties, "uuid", ""))),
        }


def _spin(cycles: int) -> None:
    """Keep the device busy."""
    from torch.cuda import _sleep as sleep

    sleep(cycles)  # type: ignore[no-untyped-call]


def view_mapped(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory that a device reaches, also a peer's, as uint8 of that device.

    Torch copies between it and the device's own by their addresses, on the current stream. (Through
    `__cuda_array_interface__` torch would copy a peer's memory at once, and give that copy.)
    """
    from torch._C import _construct_storage_from_data_pointer as construct

    storage = construct(address, device, num_bytes)
    memory = torch.empty(0, dtype=torch.uint8, device=device)
    return memory.set_(storage, 0, (num_bytes,), (1,))


def query_smi(uuid: str) -> dict[str, str]:
    """Return driver and clocks as nvidia-smi says them; nothing where there is none."""
    name = uuid if not uuid or uuid.startswith("GPU-") else f"GPU-{uuid}"
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            [*command, *(["-i", name] if name else [])],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(",") if done.stdout.strip() else []
    return {
        field.replace(".", "_"): v.strip() for field, v in zip(_SMI_FIELDS, values, strict=False)
    }


def gpu_is_usable() -> bool:
    """Return whether there is a GPU, and a cubin for it."""
    if not torch.cuda.is_available():
        return False
    try:
        find_cubin(torch.cuda.get_device_capability())
    except UnsupportedError:
        return False
    return True


def own_gpu() -> Gpu:
    """Return this process's GPU, by its number on its machine or, without a launcher, its rank.

    Raises:
        UnsupportedError: there is none.
        InvalidArgumentError: as :func:`find_launcher`.
    """
    launched = find_launcher()
    if launched is not None or dist.is_initialized():
        _take_device(launched.local_rank if launched is not None else dist.get_rank())
    return Gpu()


def _take_device(local_rank: int) -> None:
    """Make the rank's GPU torch's current device: the machine's GPUs are dealt out in turn."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


# ---- how long a call of all ranks takes ---------------------------------------------------------


class Clock(Protocol):
    """Times a call that all ranks make.

    Attributes:
        loopback: all ranks are in this process.
        one_clock: starts and ends of two ranks can be compared; else a call takes as long as the
            slowest rank's own time.
    """

    loopback: bool
    one_clock: bool

    def span(self, run: Run) -> tuple[float, float]:
        """Return this rank's start and end in microseconds. Collective, but in loopback."""


class HostClock:
    """Of calls that block."""

    loopback = False

    def __init__(self, group: Group) -> None:
        """Take the ranks of a domain for those of one machine."""
        self.one_clock = len(set(group.topology.domain.tolist())) == 1

    def span(self, run: Run) -> tuple[float, float]:
        """Begin together with all ranks."""
        line_up(self.one_clock)
        start = time.perf_counter_ns()
        run()
        end = time.perf_counter_ns()
        dist.barrier()
        return start / 1e3, end / 1e3


class DeviceClock:
    """Of calls that are enqueued, so many in a row."""

    one_clock = False

    def __init__(
        self,
        meter: Meter,
        ranks_here: int,
        calls: int,
        *,
        loopback: bool,
        line_up: Run | None = None,
    ) -> None:
        """Time with a device; see `Meter.time_us`."""
        self.loopback = loopback
        self._meter, self._ranks_here, self._calls = meter, ranks_here, calls
        self._line_up = line_up

    def settle(self) -> None:
        """Wait for the device, and for other ranks: nobody fills what another one still reads."""
        self._meter.settle()
        if not self.loopback:
            dist.barrier()

    def time_us(self, run: Run, calls: int = 0) -> float:
        """Return the device's time of a call; ``calls`` in a row where it is given."""
        self.settle()
        took = self._meter.time_us(
            run, calls or self._calls, self._ranks_here, line_up=self._line_up
        )
        self.settle()
        return took

    def span(self, run: Run) -> tuple[float, float]:
        """Time it on the device."""
        return 0.0, self.time_us(run)


def line_up(one_machine: bool) -> None:
    """Let all ranks leave at the same time: a barrier on which they agree on a moment."""
    ready = torch.tensor([time.perf_counter_ns()])
    dist.all_reduce(ready, op=dist.ReduceOp.MAX)
    if one_machine:  # one clock
        wait = int(ready) + _LINE_UP_NS - time.perf_counter_ns()
        time.sleep(max(wait, 0) / 1e9)
