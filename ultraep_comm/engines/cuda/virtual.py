"""Virtual memory of a device: slots that appear behind other mains once more.

Never run on a device: it follows the driver's documentation, and a fake driver in the tests.

``cuMemMap`` is documented to take a piece of memory from its beginning only, "currently". Slots lie
behind the flags of their allocation, so a driver that means it refuses, which is UnsupportedError.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ultraep_comm.engines.cuda.device import Device, checked
from ultraep_comm.errors import DeviceError, OutOfSharedMemoryError, UnsupportedError
from ultraep_comm.fabrics import Place, SharedRegion


class Mapping:
    """A range of addresses, freed with what is mapped there once nothing refers to this.

    Args:
        device: whose work has to end before that.
        driver: the module ``cuda.bindings.driver``.
        num_bytes: of the range, whole pages.
    """

    def __init__(self, device: Device, driver: Any, num_bytes: int) -> None:
        self._driver, self._num_bytes = driver, num_bytes
        self.start = int(checked(driver.cuMemAddressReserve(num_bytes, 0, 0, 0)))
        self._mapped: list[tuple[int, int]] = []
        free = weakref.finalize(self, _free, device, driver, self.start, num_bytes, self._mapped)
        free.atexit = False

    def add(self, offset: int, num_bytes: int, handle: Any, at: int) -> None:
        """Map a piece of memory from ``at`` on; takes its handle."""
        begin = self.start + offset
        try:
            checked(self._driver.cuMemMap(begin, num_bytes, at, handle, 0))
        finally:
            checked(self._driver.cuMemRelease(handle))
        self._mapped.append((begin, num_bytes))

    def open(self, location: Any) -> None:
        """Let a device read and write all of it."""
        access = self._driver.CUmemAccessDesc()
        access.location = location
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        checked(self._driver.cuMemSetAccess(self.start, self._num_bytes, [access], 1))


def _free(
    device: Device, driver: Any, start: int, num_bytes: int, mapped: list[tuple[int, int]]
) -> None:
    device.settle()
    for begin, size in mapped:
        driver.cuMemUnmap(begin, size)
    driver.cuMemAddressFree(start, num_bytes)


def show_again(device: Device, num_bytes: int, places: Sequence[Place]) -> SharedRegion:
    """Return new memory in which other memory of the device appears at some places.

    Raises:
        UnsupportedError: that memory can be mapped only once.
        OutOfSharedMemoryError: the device has too little memory for the rest.
    """
    from cuda.bindings import driver

    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device.torch_device.index or 0
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = location
    mapping = Mapping(device, driver, num_bytes)
    own, end = [], 0  # what lies between the places
    for place in [*places, Place(num_bytes, 0, 0)]:
        if place.offset > end:
            own.append((end, place.offset - end))
        end = place.offset + place.num_bytes
    try:
        for place in places:
            start, _ = checked(driver.cuMemGetAddressRange(place.address))
            handle = checked(driver.cuMemRetainAllocationHandle(place.address))
            mapping.add(place.offset, place.num_bytes, handle, place.address - int(start))
    except DeviceError as error:
        raise UnsupportedError(
            f"the memory of this group's slots can be mapped only once ({error}); create the group"
            " with a bank for each layer"
        ) from error
    try:
        for offset, size in own:
            mapping.add(offset, size, checked(driver.cuMemCreate(size, properties, 0)), 0)
        mapping.open(location)
    except DeviceError as error:
        raise OutOfSharedMemoryError(
            f"the device has too little memory for {num_bytes} bytes of main weights ({error}); use"
            " fewer slots_per_rank or smaller experts, or leave more device memory free"
        ) from error
    memory = device.view(mapping.start, num_bytes, mapping)
    for offset, size in own:
        memory.narrow(0, offset, size).zero_()
    device.settle_stream()
    return SharedRegion(bases=[], local=memory)
