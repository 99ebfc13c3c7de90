"""The calls that CudaDevice makes to the driver and cuda.core, logged by stand-ins."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ultraep_comm import _core
from ultraep_comm.engines.cuda.device import CudaDevice, CudaKernels
from ultraep_comm.errors import DeviceError, UnsupportedError

KERNEL = 0x77


class FakeDriver:
    """The part of `cuda.bindings.driver` that is used. Each call is a line of the log."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="opt-in",
        CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH="cooperative",
    )
    CUdevice = int

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.limit = 1000
        self.loaded: tuple[int, ...] | Exception = (0,)
        self.attributes = {"opt-in": 232448, "cooperative": 1}
        self.moved = 0  # from page-locked memory's address to that on the device

    def cuKernelGetAttribute(self, attribute: str, kernel: int, device: int) -> tuple[int, int]:  # noqa: N802
        assert (attribute, kernel, device) == ("shared", KERNEL, 5)
        return 0, self.limit

    def cuKernelSetAttribute(self, attribute: str, value: int, *_: int) -> tuple[int]:  # noqa: N802
        self.log.append((attribute, value))
        return (0,)

    def cuKernelGetFunction(self, kernel: int) -> tuple[int, str]:  # noqa: N802
        self.log.append("find")
        return 0, f"function of {kernel:#x}"

    def cuFuncLoad(self, function: str) -> tuple[int, ...]:  # noqa: N802
        self.log.append(f"load {function}")
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return 0, 13000

    def cuDeviceGet(self, index: int) -> tuple[int, int]:  # noqa: N802
        return 0, index

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:  # noqa: N802
        return 0, 0xC

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[int, int]:  # noqa: N802
        return 0, self.attributes[attribute]

    def cuGetProcAddress(self, name: bytes, version: int, _: int) -> tuple[int, int, int]:  # noqa: N802
        assert version == 12000
        return 0, 1 + _core.cuda_driver_names().index(name.decode()), 0

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:  # noqa: N802
        assert flags == 0
        return 0, address + self.moved


class FakeCore:
    """The part of `cuda.core` that is used."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.num_streams = 0

    def Device(self, index: int) -> FakeCore:  # noqa: N802
        assert index == 5
        return self

    def StreamOptions(self, **options: Any) -> dict[str, Any]:  # noqa: N802
        return options

    def set_current(self) -> None:
        self.log.append("current")

    def create_stream(self, *, options: dict[str, Any]) -> SimpleNamespace:
        self.num_streams += 1
        self.log.append(options)
        return SimpleNamespace(handle=self.num_streams)


@pytest.fixture
def log() -> list[Any]:
    return []


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> FakeDriver:
    fake, core, bindings = FakeDriver(log), FakeCore(log), ModuleType("cuda.bindings")
    bindings.driver = fake  # type: ignore[attr-defined]
    bindings.__version__ = "13.0.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    return fake


def kernels() -> CudaKernels:
    code = SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=KERNEL))
    return CudaKernels(code, 5)


def test_a_kernel_is_on_the_device_before_its_first_launch(
    driver: FakeDriver, log: list[Any]
) -> None:
    """Otherwise that launch could wait for kernels that wait for it."""
    loading = ["current", "find", f"load function of {KERNEL:#x}"]
    assert kernels().handle("k", 1000) == KERNEL
    assert log == loading
    log.clear()
    assert kernels().handle("k", 1001) == KERNEL
    assert log == [("shared", 1001), *loading]


def test_a_kernel_that_cannot_be_loaded(driver: FakeDriver) -> None:
    driver.loaded = RuntimeError('Function "cuFuncLoad" not found')  # an old driver
    assert kernels().handle("k", 0) == KERNEL
    driver.loaded = (2,)
    with pytest.raises(DeviceError, match="the CUDA driver answered 2"):
        kernels().handle("k", 0)


@pytest.mark.usefixtures("driver")
def test_streams_are_nobody_elses(log: list[Any]) -> None:
    device = CudaDevice.__new__(CudaDevice)
    device._index = 5
    made = [device.new_stream() for _ in range(40)]  # torch has 32
    assert [handle for handle, _ in made] == list(range(1, 41))
    assert all(isinstance(owner, SimpleNamespace) for _, owner in made)
    assert log == ["current", {"nonblocking": True, "priority": -1}] * 40


def test_a_device_has_to_take_cooperative_launches(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: kind)
    monkeypatch.setattr(torch, "empty", lambda count, device: None)
    found = CudaDevice(5)
    assert (found.compute_capability, found.num_sms, found.max_shared_bytes) == (
        (9, 0),
        132,
        232448,
    )
    driver.attributes["cooperative"] = 0
    with pytest.raises(
        UnsupportedError, match=r"GPU 5 takes no cooperative launches.*engine='host'"
    ):
        CudaDevice(5)


def test_page_locked_memory_has_one_address(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, zeros = CudaDevice.__new__(CudaDevice), torch.zeros

    def pin(count: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return zeros(count, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "zeros", pin)
    device._index, device.torch_device = 5, torch.device("cuda", 5)
    assert device.pinned(64).tolist() == [0] * 64
    driver.moved = 4096
    with pytest.raises(DeviceError, match=r"64 bytes of page-locked memory at .* on cuda:5"):
        device.pinned(64)
