"""A device on the CPU that runs the real kernels: tests/device/emulation as a ``Device``."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from fake_bindings import FakeBindings

import ultraep_comm as uec
from ultraep_comm import _core


class EmulatedKernels:
    library = 0

    def __init__(self, library: ctypes.CDLL) -> None:
        self._kernel = library.emulated_kernel
        self._kernel.restype = ctypes.c_void_p
        self._kernel.argtypes = [ctypes.c_char_p]

    def handle(self, name: str, shared_bytes: int) -> int:
        handle = self._kernel(name.encode())
        assert handle, name
        return int(handle)


class EmulatedDevice:
    """Streams are numbers; a thread's current one is ``stream``, or the one it is ``on``."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        for name, arguments in {
            "emulated_begin_capture": 1,
            "emulated_synchronize_stream": 1,
            "emulated_is_capturing": 1,
            "emulated_end_capture": 2,
            "emulated_replay": 2,
            "cuEventRecord": 2,
        }.items():
            getattr(self.library, name).argtypes = [ctypes.c_void_p] * arguments
        self.library.emulated_launches.restype = ctypes.c_uint64
        self.library.emulated_delay.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self.library.emulated_copy.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_void_p,
        ]
        self.torch_device = torch.device("cpu")
        self.compute_capability = (9, 0)
        self.num_sms = self.library.emulated_multiprocessors()
        self.warp_size = 2
        self.max_shared_bytes = 227 << 10
        self.cuda_major = 13
        self.context = 0
        self.stream = 1
        self.kernels = EmulatedKernels(self.library)
        addresses = {
            name: ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0
            for name in _core.cuda_driver_names()
        }
        self.driver = _core.CudaDriver(addresses)
        self.bindings = FakeBindings()
        self._streams = 1
        self._threads = threading.local()
        self._memory: list[torch.Tensor] = []
        self._uploads: list[torch.Tensor] = []
        self._held: dict[
            int, torch.Tensor
        ] = {}  # of empty(): kept so that addresses are never reused
        self._kept: dict[tuple[int, int], torch.Tensor] = {}  # of keep(), by memory and stream

    def __del__(self) -> None:
        # Streams outlive it: its memory must not be freed before they are done with it.
        self.library.emulated_synchronize()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self._memory.append(torch.zeros(num_bytes + 4096, dtype=torch.uint8, device="cpu"))
        address = self._memory[-1].data_ptr()
        # Like memory from a device: it begins a tensor's storage.
        return self.view(address + -address % 4096, max(1, num_bytes)).narrow(0, 0, num_bytes)

    pinned = allocate

    def view(self, address: int, num_bytes: int, owner: object = None) -> torch.Tensor:
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        memory = torch.empty(max(1, count), dtype=dtype, device="cpu")[:count].view(tuple(shape))
        self._held[memory.untyped_storage().data_ptr()] = memory
        return memory

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return tensor.untyped_storage().data_ptr() in self._held or any(
            memory.data_ptr() <= at < memory.data_ptr() + memory.numel() for memory in self._memory
        )

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        stream = self.current_stream()
        self._kept.update(((t.untyped_storage().data_ptr(), stream), t) for t in tensors)

    def is_kept(self, tensor: torch.Tensor, stream: int) -> bool:
        """Return whether memory that is freed now would outlive the work queued on the stream."""
        return (tensor.untyped_storage().data_ptr(), stream) in self._kept

    def upload(self, to: torch.Tensor, values: torch.Tensor) -> None:
        self._uploads.append(values)
        self.copy(to, values)

    def links(self) -> None:
        """NVML knows of no such device."""

    def is_capturing(self) -> bool:
        return bool(self.library.emulated_is_capturing(self.current_stream()))

    def has_graph_pool(self) -> bool:
        return True

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device; the copy is complete."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def put_plan(self, plan: uec.Plan) -> uec.Plan:
        values = vars(plan).items()
        put = self.put
        return uec.Plan(**{n: put(v) if isinstance(v, torch.Tensor) else v for n, v in values})

    def current_stream(self) -> int:
        return int(getattr(self._threads, "stream", self.stream))

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make a stream this thread's current stream."""
        self._threads.stream = stream
        try:
            yield
        finally:
            del self._threads.stream

    def wait_stream(self, stream: int, other: int) -> None:
        """Make a stream wait for the work queued on another; in a capture, fork or join it."""
        event = ctypes.c_void_p()
        self.library.cuEventCreate(ctypes.byref(event), 0)
        assert self.library.cuEventRecord(event, other) == 0
        wait = self.library.cuStreamWaitEvent
        assert wait(ctypes.c_void_p(stream), event, 0) == 0

    def new_stream(self) -> tuple[int, object]:
        self._streams += 1
        return self._streams, None

    def synchronize(self) -> None:
        self.library.emulated_synchronize()

    def synchronize_stream(self) -> None:
        self.library.emulated_synchronize_stream(self.current_stream())

    def load(self, cubin: Path) -> EmulatedKernels:
        return self.kernels

    def launches(self) -> int:
        """Return how many kernels were launched, or captured, so far."""
        return int(self.library.emulated_launches())

    # ---- graphs

    def begin_capture(self) -> None:
        """Capture what is queued on the current stream from now on."""
        self.library.emulated_begin_capture(self.current_stream())

    def end_capture(self) -> int:
        graph = ctypes.c_void_p()
        result = self.library.emulated_end_capture(self.current_stream(), ctypes.byref(graph))
        assert result == 0, f"the capture ended with {result}"
        return graph.value or 0

    def replay(self, graph: int) -> None:
        self.library.emulated_replay(graph, self.current_stream())

    # ---- the caller's own work, in stream order

    def delay(self, microseconds: int) -> None:
        self.library.emulated_delay(self.current_stream(), microseconds)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert to.is_contiguous()
        assert source.is_contiguous()
        self.library.emulated_copy(
            to.data_ptr(),
            source.data_ptr(),
            to.numel() * to.element_size(),
            self.current_stream(),
        )
