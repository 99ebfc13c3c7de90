"""What the benchmark asks of a GPU: its clock, its copies, and what it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ultraep_comm.bench.launch import find_launcher
from ultraep_comm.cuda.device import Device, find_device
from ultraep_comm.cuda.kernels import choose_num_sms
from ultraep_comm.errors import UnsupportedError

NUM_STREAMS = 8
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
        self,
        run: Callable[[], None],
        calls: int,
        ranks_here: int,
        *,
        line_up: Callable[[], None] | None = None,
    ) -> float:
        """Return the device's time of one of so many calls in a row, behind one that counts not.

        That one is ``line_up``, if it is given.
        """

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture what a call enqueues on the current stream; return what enqueues it again."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the CPU, behind what the current stream holds."""

    def spread(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run jobs on several streams, behind the current one and before what it gets next."""

    def settle(self) -> None:
        """Wait for the device."""

    def describe(self) -> dict[str, Any]:
        """Return what it is."""


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
        self,
        run: Callable[[], None],
        calls: int,
        ranks_here: int,
        *,
        line_up: Callable[[], None] | None = None,
    ) -> float:
        """Time calls between two events, all of them in the stream before the device begins."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda._sleep(_SPIN * (1 + ranks_here))
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

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture on a stream of torch's own."""
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy, and wait for it."""
        return tensor.cpu()

    def spread(self, jobs: Sequence[Callable[[], None]]) -> None:
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


def view_mapped(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory that a device reaches, also a peer's, as uint8 of that device.

    Torch copies between it and the device's own by their addresses, on the current stream. (Through
    `__cuda_array_interface__` torch would copy a peer's memory at once, and give that copy.)
    """
    construct: Any = torch._C._construct_storage_from_data_pointer
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


def is_usable() -> bool:
    """Return whether there is a GPU, and a cubin for it."""
    from ultraep_comm.cuda.cubins import find_cubin

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
