"""Clocks of the host and of a GPU, and the start that lines up the ranks of a run."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ultraep_comm.bench.launch import find_launcher
from ultraep_comm.calibration import describe_links, from_environment, link_gbps
from ultraep_comm.engines.cuda.device import Device, find_device
from ultraep_comm.engines.cuda.kernels import choose_num_sms, find_cubin
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.group.group import Group

Run = Callable[[], Any]

NUM_STREAMS = 8
# Ranks of one machine start this long after the last of them was ready, so that all have left the
# barrier.
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


class Meter:
    """A device to measure on: this class is the CPU, whose calls block.

    Attributes:
        engine: of the groups.
        torch_device: of all tensors.
        big_bytes: size of the buffer whose copy gives the copy rate.
    """

    engine = "host"
    torch_device = torch.device("cpu")
    big_bytes = 1 << 20

    def __init__(self, engine: str | None = None) -> None:
        """Create it; ``engine``: of the groups, if it is another one."""
        self.engine = engine or self.engine

    def num_sms(self, given: int | None, ranks_here: int) -> int:
        """Return the number of blocks, or threads, of a rank."""
        return given or 1

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return memory, possibly a peer's, as a uint8 tensor."""
        kind = ctypes.c_uint8 * num_bytes
        return torch.frombuffer(kind.from_address(address), dtype=torch.uint8)

    def time_us(
        self, run: Run, calls: int, ranks_here: int, *, line_up: Run | None = None
    ) -> float:
        """Return the time per call, of ``calls`` in a row after one that is not timed.

        The untimed call is ``line_up``, or else ``run``.
        """
        (line_up or run)()
        self.synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            run()
        self.synchronize()
        return (time.perf_counter_ns() - start) / 1e3 / calls

    def capture(self, run: Run) -> Run:
        """Capture what a call enqueues on the current stream; return a function that replays it."""
        raise UnsupportedError("the host engine has no graphs")

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the CPU, ordered after the current stream."""
        return tensor.clone()

    def spread(self, jobs: Sequence[Run]) -> None:
        """Run jobs, on several streams if there are any, after and before the current stream."""
        for job in jobs:
            job()

    def synchronize(self) -> None:
        """Wait for the device."""

    def describe(self) -> dict[str, Any]:
        """Return the device's fields for headers and JSON; empty for the CPU."""
        return {}

    def find_link(self) -> tuple[float, str] | None:
        """Return the rate of the device's links one way in GB/s, and its source; None: unknown."""
        return None


class Gpu(Meter):
    """Torch's current device."""

    engine = "cuda"

    def __init__(self) -> None:
        """Find the device.

        Raises:
            UnsupportedError: there is no GPU.
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
        """Return the number that a group would use."""
        return choose_num_sms(given, self._device, ranks_here)

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return memory that the device can address.

        Torch copies to and from it by address, on the current stream. (Through
        `__cuda_array_interface__` torch would return a copy of a peer's memory.)
        """
        from torch._C import _construct_storage_from_data_pointer as construct

        storage = construct(address, self.torch_device, num_bytes)
        memory = torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        return memory.set_(storage, 0, (num_bytes,), (1,))

    def time_us(
        self, run: Run, calls: int, ranks_here: int, *, line_up: Run | None = None
    ) -> float:
        """Time calls between two events; all are enqueued before the device starts."""
        from torch.cuda import _sleep as sleep  # keeps the device busy

        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        sleep(_SPIN * (1 + ranks_here))  # type: ignore[no-untyped-call]
        (line_up or run)()
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
        """Capture on a side stream that torch chooses."""
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph):
            run()
        replay: Run = graph.replay
        return replay

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy, and wait for the copy."""
        return tensor.cpu()

    def spread(self, jobs: Sequence[Run]) -> None:
        """Deal jobs out to streams in turn."""
        current = torch.cuda.current_stream()
        used = self._streams[: len(jobs)]
        for stream in used:
            stream.wait_stream(current)
        for i, job in enumerate(jobs):
            with torch.cuda.stream(self._streams[i % NUM_STREAMS]):
                job()
        for stream in used:
            current.wait_stream(stream)

    def synchronize(self) -> None:
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

    def find_link(self) -> tuple[float, str] | None:
        """Return the rate that ``auto`` goes by: rank 0's, which alone prints it."""
        first = not dist.is_initialized() or dist.get_rank() == 0
        measured = from_environment("cuda").get("cuda") if first else None
        if measured is not None:
            return measured.store_gbps, "measured here, by bench calibrate"
        capability, links = self._device.compute_capability, self._device.links()
        name = torch.cuda.get_device_name(self.torch_device)
        source = f"built-in constants for {name}, {describe_links(links)}; not measured here"
        return link_gbps(capability, links), source


def query_smi(uuid: str) -> dict[str, str]:
    """Return driver version and clocks from nvidia-smi; empty if it is not available."""
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
    """Return whether there is a GPU and a cubin for it."""
    if not torch.cuda.is_available():
        return False
    try:
        find_cubin(torch.cuda.get_device_capability())
    except UnsupportedError:
        return False
    return True


def own_meter(engine: str) -> Meter:
    """Return what this process measures an engine on.

    It is the process's GPU, by its local rank or, without a launcher, its rank; else the CPU, on
    which torch has one thread from here on.

    Raises:
        UnsupportedError: there is no GPU.
        InvalidArgumentError: as :func:`find_launcher`.
    """
    if engine != "cuda":
        torch.set_num_threads(1)
        return Meter(engine)
    launched = find_launcher()
    if torch.cuda.is_available() and (launched is not None or dist.is_initialized()):
        local_rank = launched.local_rank if launched is not None else dist.get_rank()
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return Gpu()


# ---- the time of a call of all ranks ------------------------------------------------------------


class HostClock:
    """Clock for calls that block.

    Attributes:
        loopback: all ranks are in this process.
        one_clock: the ranks' times are comparable. Otherwise the time of a call is that of the
            slowest rank.
    """

    loopback = False

    def __init__(self, group: Group) -> None:
        """Create the clock.

        Ranks without a launcher, or of one domain, are assumed to share a machine.
        """
        self.one_clock = find_launcher() is None or len(set(group.topology.domain.tolist())) == 1

    def span(self, run: Run) -> tuple[float, float]:
        """Return this rank's start and end in microseconds. Collective."""
        line_up(self.one_clock)
        start = time.perf_counter_ns()
        run()
        end = time.perf_counter_ns()
        dist.barrier()
        return start / 1e3, end / 1e3


class DeviceClock:
    """Clock for calls that are enqueued, several in a row."""

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
        """Create the clock; for the arguments see `Meter.time_us`."""
        self.loopback = loopback
        self._meter, self._ranks_here, self._calls = meter, ranks_here, calls
        self._line_up = line_up

    def synchronize(self) -> None:
        """Wait for the device and the ranks, so that none overwrites what another reads."""
        self._meter.synchronize()
        if not self.loopback:
            dist.barrier()

    def time_us(self, run: Run) -> float:
        """Return the device time per call."""
        self.synchronize()
        took = self._meter.time_us(run, self._calls, self._ranks_here, line_up=self._line_up)
        self.synchronize()
        return took

    def span(self, run: Run) -> tuple[float, float]:
        """Return 0 and the device time."""
        return 0.0, self.time_us(run)


Clock = HostClock | DeviceClock  # times a call that all ranks make


def line_up(one_machine: bool) -> None:
    """Release all ranks at the same time: a barrier that agrees on a start time."""
    ready = torch.tensor([time.perf_counter_ns()])
    dist.all_reduce(ready, op=dist.ReduceOp.MAX)
    if one_machine:  # one clock
        wait = int(ready) + _LINE_UP_NS - time.perf_counter_ns()
        time.sleep(max(wait, 0) / 1e9)
