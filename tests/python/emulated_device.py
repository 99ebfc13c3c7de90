"""A device on the CPU that runs the real kernels: tests/device/emulation as a ``Device``."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fake_bindings import FakeBindings
from fake_device import CpuDevice

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


class EmulatedDevice(CpuDevice):
    """A thread's current stream is ``stream``, or the one it is ``on``."""

    warp_size = 2

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        for name, arguments in {
            "emulated_begin_capture": 1,
            "emulated_synchronize_stream": 1,
            "emulated_is_capturing": 1,
            "emulated_end_capture": 2,
            "emulated_replay": 2,
            "emulated_delay": 2,
            "emulated_copy": 4,
            "cuEventRecord": 2,
        }.items():
            getattr(self.library, name).argtypes = [ctypes.c_void_p] * arguments
        names = _core.cuda_driver_names()
        functions = {name: getattr(self.library, name) for name in names}
        super().__init__(EmulatedKernels(self.library), functions)
        self.num_sms = self.library.emulated_multiprocessors()
        self.bindings = FakeBindings()
        self._threads = threading.local()
        self._uploads: list[torch.Tensor] = []
        self._kept: dict[tuple[int, int], torch.Tensor] = {}  # of keep(), by memory and stream

    def __del__(self) -> None:
        # Streams outlive it: its memory must not be freed before they are done with it.
        self.library.emulated_synchronize()

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        stream = self.current_stream()
        self._kept.update(((t.untyped_storage().data_ptr(), stream), t) for t in tensors)

    def is_kept(self, tensor: torch.Tensor, stream: int) -> bool:
        """Return whether memory that is freed now would outlive the work queued on the stream."""
        return (tensor.untyped_storage().data_ptr(), stream) in self._kept

    def upload(self, to: torch.Tensor, values: torch.Tensor) -> None:
        self._uploads.append(values)
        self.copy(to, values)

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

    def synchronize(self) -> None:
        self.library.emulated_synchronize()

    def synchronize_stream(self) -> None:
        self.library.emulated_synchronize_stream(self.current_stream())

    def launches(self) -> int:
        """Return how many kernels were launched, or captured, so far."""
        return int(self.library.emulated_launches())

    # ---- graphs

    @contextmanager
    def capturing(self, stream: int | None = None) -> Iterator[Callable[[], None]]:
        """Capture what is queued on a stream, by default the current one; yield its replay."""
        self.synchronize()
        stream, graph = stream or self.current_stream(), ctypes.c_void_p()
        self.library.emulated_begin_capture(stream)
        try:
            yield lambda: self.library.emulated_replay(graph, self.current_stream())
        finally:
            result = self.library.emulated_end_capture(stream, ctypes.byref(graph))
            assert result == 0, f"the capture ended with {result}"

    def capture(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Return what ``call()`` returned, and how to replay what it launched."""
        with self.capturing() as replay:
            result = call()
        return result, replay

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
