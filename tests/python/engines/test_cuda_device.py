"""The calls that Device makes to the driver, logged by a stand-in."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ultraep_comm import _core
from ultraep_comm.driver import Links
from ultraep_comm.engines.cuda import device as device_module
from ultraep_comm.engines.cuda.device import Device, Kernels
from ultraep_comm.errors import DeviceError, UnsupportedError

KERNEL = 0x77


@pytest.fixture
def log() -> list[Any]:
    """The calls of the driver that tests look at."""
    return []


def fake_driver(log: list[Any]) -> Any:
    """Return the part of `cuda.bindings.driver` that is used."""
    functions, streams = _core.cuda_driver_names(), itertools.count(1)

    def logged(line: Any, *answer: Any) -> tuple[Any, ...]:
        log.append(line)
        return 0, *answer

    def load(function: str) -> tuple[Any, ...]:
        log.append(f"load {function}")
        if isinstance(fake.loaded, Exception):
            raise fake.loaded
        return fake.loaded  # type: ignore[no-any-return]

    def find(name: bytes, version: int, _: int) -> tuple[int, int, int]:
        assert version == 12000
        return 0, 1 + functions.index(name.decode()), 0

    fake: Any = SimpleNamespace(
        loaded=(0,),
        attributes={"opt-in": 232448, "cooperative": 1},
        moved=0,  # from page-locked memory's address to that on the device
        CUfunction_attribute=SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared"
        ),
        CUdevice_attribute=SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="opt-in",
            CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH="cooperative",
        ),
        CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING="non-blocking"),
        CUdevice=int,
        cuLibraryLoadData=None,
        cuLibraryGetKernel=lambda *of: (0, {(7, b"k"): KERNEL}[of]),
        cuCtxPushCurrent=lambda context: logged({0xC: "push"}[context]),
        cuCtxPopCurrent=lambda: logged("pop", 0xC),
        cuStreamCreateWithPriority=lambda *how: logged(how, next(streams)),
        cuStreamDestroy=lambda stream: logged(f"destroy {stream}"),
        cuKernelGetAttribute=lambda *of: (0, {("shared", KERNEL, 5): 1000}[of]),
        cuKernelSetAttribute=lambda attribute, value, *_: logged((attribute, value)),
        cuKernelGetFunction=lambda kernel: logged("find", f"function of {kernel:#x}"),
        cuFuncLoad=load,
        cuDriverGetVersion=lambda: (0, 13000),
        cuDeviceGet=lambda index: (0, index),
        cuDeviceGetPCIBusId=lambda length, device: (
            0,
            f"0000:{device:02X}:00.0".encode().ljust(length, b"\0"),
        ),
        cuDevicePrimaryCtxRetain=lambda device: (0, 0xC),
        cuDeviceGetAttribute=lambda attribute, device: (0, fake.attributes[attribute]),
        cuGetProcAddress=find,
        cuMemHostGetDevicePointer=lambda address, flags: (flags, address + fake.moved),
    )
    return fake


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> Any:
    fake = fake_driver(log)
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver, bindings.__version__ = fake, "13.0.1"
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return fake


def device_of(driver: Any) -> Device:
    device = Device.__new__(Device)
    device.index, device._context, device.bindings = 5, 0xC, driver
    device.torch_device = torch.device("cuda", 5)
    return device


def test_a_kernel_is_on_the_device_before_its_first_launch(driver: Any, log: list[Any]) -> None:
    """Otherwise that launch could wait for kernels that wait for it."""
    loading = ["push", "find", f"load function of {KERNEL:#x}", "pop"]
    kernels = Kernels(7, device_of(driver))
    assert kernels.handle("k", 1000) == KERNEL
    assert log == loading
    log.clear()
    assert kernels.handle("k", 1001) == KERNEL
    assert log == [("shared", 1001), *loading]


def test_a_kernel_that_cannot_be_loaded(driver: Any) -> None:
    kernels = Kernels(7, device_of(driver))
    driver.loaded = RuntimeError('Function "cuFuncLoad" not found')  # an old driver
    assert kernels.handle("k", 0) == KERNEL
    driver.loaded = (2,)
    with pytest.raises(DeviceError, match="the CUDA driver answered 2 when asked for kernel k"):
        kernels.handle("k", 0)


def test_streams_are_nobody_elses(driver: Any, log: list[Any]) -> None:
    device = device_of(driver)
    made = [device.new_stream() for _ in range(40)]  # torch has 32
    assert [handle for handle, _ in made] == list(range(1, 41))
    assert log == ["push", ("non-blocking", -1), "pop"] * 40
    log.clear()
    made.pop()
    assert log == ["destroy 40"]


def test_bindings_that_are_missing_or_too_old(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(driver, "cuKernelGetFunction")
    with pytest.raises(
        UnsupportedError, match=r"cuda-bindings 13\.0\.1 has no cuKernelGetFunction"
    ):
        Device(5)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnsupportedError, match=r"needs cuda-bindings .*ultraep_comm\[cuda13\]"):
        Device(5)


def test_a_device_has_to_take_cooperative_launches(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: kind)
    monkeypatch.setattr(torch, "empty", lambda count, device: None)
    found = Device(5)
    assert (found.compute_capability, found.num_sms, found.max_shared_bytes) == (
        (9, 0),
        132,
        232448,
    )
    driver.attributes["cooperative"] = 0
    with pytest.raises(
        UnsupportedError, match=r"GPU 5 takes no cooperative launches.*engine='host'"
    ):
        Device(5)


def test_nvml_is_asked_by_the_address_of_the_device(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's numbers are not NVML's."""
    monkeypatch.setattr(device_module, "read_links", lambda pci: Links(pci=pci))
    assert device_of(driver).links() == Links(pci="0000:05:00.0")


def test_page_locked_memory_has_one_address(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, zeros = device_of(driver), torch.zeros

    def pin(count: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return zeros(count, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "zeros", pin)
    assert device.pinned(64).tolist() == [0] * 64
    driver.moved = 4096
    with pytest.raises(DeviceError, match=r"64 bytes of page-locked memory at .* on cuda:5"):
        device.pinned(64)


def test_a_copy_in_place_of_a_view_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch copies memory that it assigns to another device, and symmetric memory would be lost."""
    memory = torch.arange(10, dtype=torch.uint8)
    made = Device.__new__(Device)
    made.torch_device = torch.device("cpu")
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: memory)
    assert made.view(memory.data_ptr(), 10) is memory
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: memory.clone())
    with pytest.raises(DeviceError, match="a copy of them instead of a view"):
        made.view(memory.data_ptr(), 10)

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("pointer resides on device 1")

    monkeypatch.setattr(torch, "as_tensor", refuse)
    with pytest.raises(DeviceError, match="pointer resides on device 1"):
        made.view(memory.data_ptr(), 10)
