"""The seam to a device. ``CudaDevice`` is the real one; tests supply an emulation."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from ultraep_comm import _core
from ultraep_comm.errors import DeviceError, OutOfSharedMemoryError, UnsupportedError
from ultraep_comm.system import undocumented

INSTALL_HINT = "install the extra cuda12 or cuda13, as in pip install 'ultraep_comm[cuda13]'"
DRIVER_VERSION = 12000  # the versions of the driver's functions that are asked for


class Kernels(Protocol):
    """A cubin, loaded on one device."""

    @property
    def code(self) -> object:
        """What ``NvshmemKernelObject.from_obj`` takes."""

    def handle(self, name: str, shared_bytes: int) -> int:
        """Return a kernel to launch with up to so many bytes of dynamic shared memory."""


class Device(Protocol):
    """What the engine needs from a device.

    Attributes:
        torch_device: of this device's tensors.
        compute_capability: (major, minor).
        num_sms: multiprocessors.
        warp_size: threads of a warp.
        max_shared_bytes: shared memory that a block can have.
        cuda_major: CUDA's major version of the Python bindings.
        context: to be made current around driver calls; 0: none has to be.
        driver: addresses of the driver's functions.
    """

    torch_device: torch.device
    compute_capability: tuple[int, int]
    num_sms: int
    warp_size: int
    max_shared_bytes: int
    cuda_major: int
    context: int
    driver: _core.CudaDriver

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return device memory, uint8, zeroed: by now, not in the order of a stream."""

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return memory of this device that somebody else owns, as uint8.

        Raises:
            DeviceError: it is not this device's.
        """

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return page-locked host memory, uint8, zeroed, at the same address on the device."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor, in the order of the current stream."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this device."""

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep tensors' memory until what the current stream holds has run, also if dropped."""

    def upload(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy a CPU tensor, in the order of the current stream; ``values`` may go at once.

        The host does not wait for what the stream holds.
        """

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""

    def current_stream(self) -> int:
        """Return the handle of the caller's current stream."""

    def new_stream(self) -> tuple[int, object]:
        """Return a stream's handle, and what keeps it alive."""

    def settle(self) -> None:
        """Wait until the device has done all that was asked of it."""

    def load(self, cubin: Path) -> Kernels:
        """Load kernels, once for all who ask."""


class CudaKernels:
    """A cubin that cuda.core has loaded."""

    def __init__(self, code: Any, device: int) -> None:
        self.code = code
        self._device = device

    def handle(self, name: str, shared_bytes: int) -> int:
        """Return a kernel's handle; its limit of dynamic shared memory only grows.

        The kernel is on the device then: a launch that has to load it could wait for the kernels
        of other groups, and they for their peers.
        """
        from cuda.bindings import driver
        from cuda.core import Device as CoreDevice

        with _refusals_typed(f"kernel {name}"):
            kernel = self.code.get_kernel(name).handle
        attributes = driver.CUfunction_attribute
        attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = driver.CUdevice(self._device)
        limit = _checked(driver.cuKernelGetAttribute(attribute, kernel, device))
        if limit < shared_bytes:
            _checked(driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, device))
        CoreDevice(self._device).set_current()
        function = _checked(driver.cuKernelGetFunction(kernel))
        try:
            answer = driver.cuFuncLoad(function)
        except RuntimeError:  # drivers before 12.4 have no such function
            return int(kernel)
        _checked(answer)
        return int(kernel)


class _Memory:
    """Bytes on a device, as torch.as_tensor takes them."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 2,
        }


class CudaDevice:
    """A GPU of this process. Made by :func:`find_device`."""

    def __init__(self, index: int) -> None:
        from cuda.bindings import __version__ as bindings_version
        from cuda.bindings import driver

        self._index = index
        self.torch_device = torch.device("cuda", index)
        self.cuda_major = int(bindings_version.split(".")[0])
        properties = torch.cuda.get_device_properties(index)
        self.compute_capability = (properties.major, properties.minor)
        self.num_sms = properties.multi_processor_count
        self.warp_size = 32
        torch.empty(1, device=self.torch_device)  # torch makes its context
        newest = _checked(driver.cuDriverGetVersion())
        if newest // 1000 < self.cuda_major:
            raise UnsupportedError(
                f"the NVIDIA driver is for CUDA {newest // 1000}.{newest % 1000 // 10}, the Python"
                f" bindings for CUDA {self.cuda_major}; update the driver, or install the extra"
                f" cuda{newest // 1000}"
            )
        device = _checked(driver.cuDeviceGet(index))
        self.context = int(_checked(driver.cuDevicePrimaryCtxRetain(device)))
        attributes = driver.CUdevice_attribute
        attribute = attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.max_shared_bytes = _checked(driver.cuDeviceGetAttribute(attribute, device))
        addresses = {}
        for name in _core.cuda_driver_names():
            address, _ = _checked(driver.cuGetProcAddress(name.encode(), DRIVER_VERSION, 0))
            if not address:
                raise UnsupportedError(
                    f"the NVIDIA driver has no {name}; update it to one for CUDA 12 or later"
                )
            addresses[name] = int(address)
        self.driver = _core.CudaDriver(addresses)
        self._raw_stream = getattr(undocumented(torch, "_C"), "_cuda_getCurrentRawStream", None)
        self._loaded: dict[Path, CudaKernels] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed device memory."""
        with _refusals_typed(f"{num_bytes} bytes"):
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)
            torch.cuda.current_stream(self._index).synchronize()
        return memory

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Wrap memory; torch copies what it takes for another device's."""
        with _refusals_typed(f"a view of {num_bytes} bytes at {address:#x}"):
            memory = torch.as_tensor(_Memory(address, num_bytes), device=self.torch_device)
        if num_bytes and memory.data_ptr() != address:
            raise DeviceError(
                f"{num_bytes} bytes at {address:#x} are not memory of {self.torch_device}: torch"
                " made a copy of them instead of a view"
            )
        return memory

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed page-locked memory: under unified addressing, at one address."""
        with _refusals_typed(f"{num_bytes} bytes of page-locked memory"):
            return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor: during a capture, of the graph's memory."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this device."""
        return tensor.device == self.torch_device

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tell torch's allocator, in captures too. It looks at that when the memory is freed."""
        stream, last = torch.cuda.current_stream(self._index), None
        for tensor in tensors:
            base = undocumented(tensor, "_base")
            memory = tensor if base is None else base
            if memory is not last:  # a plan's tensors are views of one memory
                memory.record_stream(stream)
            last = memory

    def upload(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy by way of page-locked memory, which torch keeps until the stream has read it."""
        to.copy_(values.pin_memory(), non_blocking=True)

    def is_capturing(self) -> bool:
        """Ask torch, which knows of graphs of other libraries too."""
        with torch.cuda.device(self._index):  # of this device, whichever is current
            return bool(torch.cuda.is_current_stream_capturing())

    def current_stream(self) -> int:
        """Return torch's current stream on this device."""
        if self._raw_stream is not None:  # a tenth of the time
            return int(self._raw_stream(self._index))
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def new_stream(self) -> tuple[int, object]:
        """Return a stream that goes before others: what it moves is waited for.

        Nobody else has it, unlike torch's, which are 32 in all: what another library gives its own
        would wait for kernels that wait for peers, or land in a capture.
        """
        from cuda.core import Device as CoreDevice
        from cuda.core import StreamOptions

        with _refusals_typed("a stream"):
            core_device = CoreDevice(self._index)
            core_device.set_current()
            stream = core_device.create_stream(options=StreamOptions(nonblocking=True, priority=-1))
            return int(stream.handle), stream

    def settle(self) -> None:
        """Wait for the device."""
        with _refusals_typed("work under way"):
            torch.cuda.synchronize(self._index)

    def load(self, cubin: Path) -> CudaKernels:
        """Load a cubin, once for each file."""
        if cubin not in self._loaded:
            from cuda.core import Device as CoreDevice
            from cuda.core import ObjectCode

            CoreDevice(self._index).set_current()
            code = ObjectCode.from_cubin(cubin.read_bytes())
            with _refusals_typed(str(cubin)):
                _ = code.handle  # loads it
            self._loaded[cubin] = CudaKernels(code, self._index)
        return self._loaded[cubin]


@contextmanager
def _refusals_typed(what: str) -> Iterator[None]:
    """Raise our errors for those of torch and cuda.core."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfSharedMemoryError(
            f"the device has no room for {what}: {error}. Use fewer slots_per_rank or smaller"
            " experts, or leave more memory to this library"
        ) from error
    except Exception as error:  # cuda.core has no public base class
        raise DeviceError(f"the device refused {what}: {error}") from error


def _checked(answer: tuple[Any, ...]) -> Any:
    """Return what a function of cuda.bindings returned beside its error code, if that is none."""
    result, *values = answer
    if int(result) != 0:
        raise DeviceError(f"the CUDA driver answered {result!r}; see the NVIDIA driver's log")
    return values[0] if len(values) == 1 else tuple(values)


def find_device() -> Device:
    """Return torch's current device.

    Raises:
        UnsupportedError: there is no GPU, no driver, no CUDA build of torch, or no bindings.
    """
    if torch.version.cuda is None:
        raise UnsupportedError(
            "this build of torch has no CUDA; install one that has, or use engine='host'"
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "no usable CUDA device: torch.cuda.is_available() is False. Look with nvidia-smi"
            " whether there is a GPU and a driver, or use engine='host'"
        )
    return _device(torch.cuda.current_device())


@functools.cache
def _device(index: int) -> CudaDevice:
    try:
        return CudaDevice(index)
    except ImportError as error:
        raise UnsupportedError(f"engine='cuda' needs {error.name}; {INSTALL_HINT}") from error
