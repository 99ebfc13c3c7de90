"""Access to a device, and to kernels on it. Tests supply emulations of both."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ultraep_comm import _core
from ultraep_comm.driver import Links, read_links
from ultraep_comm.errors import DeviceError, OutOfSharedMemoryError, UnsupportedError
from ultraep_comm.system import undocumented

INSTALL_HINT = "install the extra cuda12 or cuda13, as in pip install 'ultraep_comm[cuda13]'"
DRIVER_VERSION = 12000  # requested version of the driver's functions
PCI_LENGTH = 32  # bytes of a PCI address, at most
NEEDED = ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction")  # since CUDA 12.0


class Kernels:
    """A cubin, loaded on one device.

    Attributes:
        library: its handle (CUlibrary).
        nvshmem: (major, minor) of NVSHMEM's device library in it, as `load_kernels` has read it.
    """

    nvshmem: tuple[int, int]

    def __init__(self, library: Any, device: Device) -> None:
        self.library = int(library)
        self._library = library
        self._device = device

    def handle(self, name: str, shared_bytes: int) -> int:
        """Return a kernel's handle, for launches with up to ``shared_bytes`` dynamic memory.

        Loads the kernel on the device: lazy loading at launch could wait for other groups' kernels,
        which may be waiting for their peers.
        """
        driver = self._device.bindings
        kernel = checked(driver.cuLibraryGetKernel(self._library, name.encode()), f"kernel {name}")
        attributes = driver.CUfunction_attribute
        attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = driver.CUdevice(self._device.index)
        limit = checked(driver.cuKernelGetAttribute(attribute, kernel, device))
        if limit < shared_bytes:
            checked(driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, device))
        with self._device.made_current():
            function = checked(driver.cuKernelGetFunction(kernel))
            try:
                answer = driver.cuFuncLoad(function)
            except RuntimeError:  # drivers before 12.4 have no such function
                return int(kernel)
            checked(answer, f"kernel {name}")
        return int(kernel)


class Owner:
    """Calls a function once nothing refers to this, unless the process ends first."""

    def __init__(self, release: Callable[..., object], *arguments: Any) -> None:
        weakref.finalize(self, release, *arguments).atexit = False


class Device:
    """A GPU of this process. Returned by :func:`find_device`.

    Attributes:
        torch_device: the device of tensors on it.
        index: torch's and the driver's.
        compute_capability: (major, minor).
        num_sms: number of multiprocessors.
        warp_size: threads per warp.
        max_shared_bytes: maximum shared memory per block.
        cuda_major: CUDA major version of the Python bindings.
        context: CUDA context to make current around driver calls; 0: none.
        driver: addresses of the driver's functions.
        bindings: the module ``cuda.bindings.driver``.
    """

    def __init__(self, index: int) -> None:
        driver, self.cuda_major = find_bindings()
        self.bindings, self.index = driver, index
        self.torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        self.compute_capability = (properties.major, properties.minor)
        self.num_sms = properties.multi_processor_count
        self.warp_size = 32
        torch.empty(1, device=self.torch_device)  # creates torch's context
        newest = checked(driver.cuDriverGetVersion())
        if newest // 1000 < self.cuda_major:
            raise UnsupportedError(
                f"the NVIDIA driver is for CUDA {newest // 1000}.{newest % 1000 // 10}, but the"
                f" Python bindings are for CUDA {self.cuda_major}; update the driver, or install"
                f" the extra cuda{newest // 1000}"
            )
        device = checked(driver.cuDeviceGet(index))
        self._context = checked(driver.cuDevicePrimaryCtxRetain(device))
        self.context = int(self._context)
        attributes = driver.CUdevice_attribute
        attribute = attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.max_shared_bytes = checked(driver.cuDeviceGetAttribute(attribute, device))
        attribute = attributes.CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
        if not checked(driver.cuDeviceGetAttribute(attribute, device)):
            raise UnsupportedError(
                f"GPU {index} takes no cooperative launches, which keep all blocks of a transfer"
                " resident; use a GPU with compute capability 9.0 or later, or engine='host'"
            )
        addresses = {}
        for name in _core.cuda_driver_names():
            address, _ = checked(driver.cuGetProcAddress(name.encode(), DRIVER_VERSION, 0))
            if not address:
                raise UnsupportedError(
                    f"the NVIDIA driver has no {name}; update it to one for CUDA 12 or later"
                )
            addresses[name] = int(address)
        self.driver = _core.CudaDriver(addresses)
        self._raw_stream = getattr(undocumented(torch, "_C"), "_cuda_getCurrentRawStream", None)
        self._loaded: dict[Path, Kernels] = {}

    @contextmanager
    def made_current(self) -> Iterator[None]:
        """Make this device the driver's current one in this thread, and then the one that was."""
        checked(self.bindings.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            checked(self.bindings.cuCtxPopCurrent())

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 device memory, already zeroed: usable from every stream."""
        with _typed_errors(f"{num_bytes} bytes"):
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)
            self.synchronize_stream()
        return memory

    def view(self, address: int, num_bytes: int, owner: object = None) -> torch.Tensor:
        """Return a uint8 tensor over device memory, which keeps its ``owner`` alive.

        Raises:
            DeviceError: the memory is not on this device, so that torch has copied it.
        """
        interface = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 2,
        }
        wrapped = SimpleNamespace(__cuda_array_interface__=interface, owner=owner)
        with _typed_errors(f"a view of {num_bytes} bytes at {address:#x}"):
            memory = torch.as_tensor(wrapped, device=self.torch_device)
        if num_bytes and memory.data_ptr() != address:
            raise DeviceError(
                f"{num_bytes} bytes at {address:#x} are not memory of {self.torch_device}: torch"
                " made a copy of them instead of a view"
            )
        return memory

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed page-locked host memory, uint8, at the same address on the device.

        Raises:
            DeviceError: it has another address on the device, which kernels are not told.
        """
        with _typed_errors(f"{num_bytes} bytes of page-locked memory"), self.made_current():
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            at = self.bindings.cuMemHostGetDevicePointer(memory.data_ptr(), 0)
            address = int(checked(at))
        if address != memory.data_ptr():
            raise DeviceError(
                f"{num_bytes} bytes of page-locked memory at {memory.data_ptr():#x} are at"
                f" {address:#x} on {self.torch_device}; unset pinned_use_cuda_host_register in"
                " PYTORCH_CUDA_ALLOC_CONF"
            )
        return memory

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new uninitialised tensor, in stream order; in a capture, of its graph."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this device."""
        return tensor.device == self.torch_device

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep tensors' memory, even if dropped, until the current stream's work is done."""
        stream, last = torch.cuda.current_stream(self.index), None
        for tensor in tensors:
            base = undocumented(tensor, "_base")
            memory = tensor if base is None else base
            if memory is not last:  # a plan's tensors are views of one memory
                memory.record_stream(stream)
            last = memory

    def upload(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy a CPU tensor in stream order, without waiting; ``values`` may be freed at once."""
        # torch keeps page-locked memory until the stream has read it.
        to.copy_(values.pin_memory(), non_blocking=True)

    def links(self) -> Links | None:
        """Return what NVML knows of the device now; None: it does not answer."""
        device = checked(self.bindings.cuDeviceGet(self.index))
        address = checked(self.bindings.cuDeviceGetPCIBusId(PCI_LENGTH, device))
        return read_links(address.split(b"\0")[0].decode())

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph, by any library."""
        with torch.cuda.device(self.index):  # whichever device is current
            return bool(torch.cuda.is_current_stream_capturing())

    def has_graph_pool(self) -> bool:
        """Return whether torch captures the current stream, and :meth:`empty` is of its graph.

        Older releases of torch do not tell, and are believed.
        """
        find = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", None)
        try:
            with torch.cuda.device(self.index):
                return find is None or find() is not None
        except RuntimeError:
            return False

    def current_stream(self) -> int:
        """Return the handle of torch's current stream on this device."""
        if self._raw_stream is not None:  # takes a tenth of the time
            return int(self._raw_stream(self.index))
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def new_stream(self) -> tuple[int, object]:
        """Return a new stream's handle, and an object that keeps it alive.

        Its priority is high, since other work waits for transfers. It is not one of torch's pool of
        32, which others may share: their work would queue behind kernels that wait for peers, or be
        captured with them.
        """
        driver = self.bindings
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        with self.made_current():
            stream = checked(driver.cuStreamCreateWithPriority(flags, -1), "a stream")
        return int(stream), Owner(driver.cuStreamDestroy, stream)

    def synchronize(self) -> None:
        """Block until all work on the device has finished."""
        with _typed_errors("work in progress"):
            torch.cuda.synchronize(self.index)

    def synchronize_stream(self) -> None:
        """Block until the work on the current stream has finished."""
        with _typed_errors("work in progress"):
            torch.cuda.current_stream(self.index).synchronize()

    def load(self, cubin: Path) -> Kernels:
        """Load a cubin, once per file."""
        if cubin not in self._loaded:
            answer = self.bindings.cuLibraryLoadData(cubin.read_bytes(), [], [], 0, [], [], 0)
            self._loaded[cubin] = Kernels(checked(answer, str(cubin)), self)
        return self._loaded[cubin]


@contextmanager
def _typed_errors(what: str) -> Iterator[None]:
    """Raise this library's errors for those of torch."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfSharedMemoryError(
            f"the device has too little memory for {what}: {error}. Use fewer slots_per_rank or"
            " smaller experts, or leave more device memory free"
        ) from error
    except Exception as error:
        raise DeviceError(f"the device refused {what}: {error}") from error


def checked(answer: tuple[Any, ...], what: str = "") -> Any:
    """Return the values of an answer; for an error raise DeviceError, naming ``what`` failed."""
    result, *values = answer
    if int(result) != 0:
        asked = f" when asked for {what}" if what else ""
        raise DeviceError(
            f"the CUDA driver answered {result!r}{asked}; see the NVIDIA driver's log"
        )
    return values[0] if len(values) == 1 else tuple(values)


def find_bindings() -> tuple[Any, int]:
    """Return the module ``cuda.bindings.driver`` and CUDA's major version that it is for.

    Raises:
        UnsupportedError: it is missing, or too old.
    """
    try:
        from cuda.bindings import __version__ as version
        from cuda.bindings import driver
    except ImportError as error:
        raise UnsupportedError(
            f"engine='cuda' needs cuda-bindings ({error}); {INSTALL_HINT}"
        ) from error
    lacks = [name for name in NEEDED if not hasattr(driver, name)]
    if lacks:
        raise UnsupportedError(
            f"cuda-bindings {version} has no {lacks[0]}; {INSTALL_HINT} --upgrade"
        )
    return driver, int(version.split(".")[0])


def find_device() -> Device:
    """Return torch's current device.

    Raises:
        UnsupportedError: there is no GPU, no driver, no CUDA build of torch, or no bindings.
    """
    if torch.version.cuda is None:
        raise UnsupportedError(
            "this build of torch has no CUDA; install one with CUDA, or use the host engine"
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "no usable CUDA device: torch.cuda.is_available() is False. Check with nvidia-smi"
            " whether there is a GPU and a driver, or use the host engine"
        )
    return _device(torch.cuda.current_device())


@functools.cache
def _device(index: int) -> Device:
    return Device(index)
