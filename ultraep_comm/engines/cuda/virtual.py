"""Virtual memory of a device: slots that are mapped a second time, behind other main weights.

``cuMemMap`` takes an allocation from its beginning only, says the driver's header. So the slots of
each segment are an allocation of their own, side by side with main weights in one range of
addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ultraep_comm.engines.cuda.device import Device, Owner, checked
from ultraep_comm.errors import DeviceError, OutOfSharedMemoryError, UnsupportedError
from ultraep_comm.fabrics import Place

PAGE_BYTES = 2 << 20  # of device memory that is mapped together


def _free(device: Device, start: int, num_bytes: int, mapped: list[tuple[int, int]]) -> None:
    """Free a range of addresses with what is mapped there, once the device's work has ended."""
    device.synchronize()
    for begin, size in mapped:
        device.bindings.cuMemUnmap(begin, size)
    device.bindings.cuMemAddressFree(start, num_bytes)


def pages(num_bytes: int) -> int:
    """Return the bytes of whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def compose(device: Device, num_bytes: int, places: Sequence[Place]) -> torch.Tensor:
    """Map allocations side by side: new ones at places without an address, and between places.

    ``places``: in ascending order, whole pages; only these can be places of other memory in turn.

    Returns:
        uint8; what is new is zeroed.

    Raises:
        UnsupportedError: the memory of a place can be mapped only once.
        OutOfSharedMemoryError: the device has too little memory for the rest.
    """
    driver = device.bindings
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device.torch_device.index or 0
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = location
    access = driver.CUmemAccessDesc()
    access.location = location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    start = int(checked(driver.cuMemAddressReserve(pages(num_bytes), 0, 0, 0)))
    mapped: list[tuple[int, int]] = []
    owner = Owner(_free, device, start, pages(num_bytes), mapped)
    parts, end = list[Place](), 0
    for place in [*places, Place(pages(num_bytes), 0, 0)]:
        parts += [Place(end, 0, place.offset - end), place]
        end = place.offset + place.num_bytes
    parts = [part for part in parts if part.num_bytes]
    try:
        for part in parts:
            if part.address:
                handle = _retained(driver, part.address)
            else:
                handle = checked(driver.cuMemCreate(part.num_bytes, properties, 0))
            try:
                checked(driver.cuMemMap(start + part.offset, part.num_bytes, 0, handle, 0))
            finally:
                checked(driver.cuMemRelease(handle))
            mapped.append((start + part.offset, part.num_bytes))
        checked(driver.cuMemSetAccess(start, pages(num_bytes), [access], 1))
    except DeviceError as error:
        raise OutOfSharedMemoryError(
            f"the device has too little memory for {num_bytes} bytes of main weights and slots"
            f" ({error}); use fewer slots_per_rank or smaller experts, or leave more device memory"
            " free"
        ) from error
    memory = device.view(start, num_bytes, owner)
    for part in parts:
        if not part.address:
            memory[part.offset : part.offset + part.num_bytes].zero_()
    device.synchronize_stream()
    return memory


def _retained(driver: Any, address: int) -> Any:
    """Return a handle of the allocation that begins at an address."""
    instead = "create the group with a bank for each layer"
    try:
        start, size = checked(driver.cuMemGetAddressRange(address))
        if int(start) == address:
            return checked(driver.cuMemRetainAllocationHandle(address))
    except DeviceError as error:
        raise UnsupportedError(
            f"the memory of this group's slots can be mapped only once ({error}); {instead}"
        ) from error
    raise UnsupportedError(
        f"slots lie {address - int(start)} bytes into an allocation of {int(size)} bytes, and CUDA"
        f" maps allocations from their beginning only, so they can be mapped only once; {instead}"
    )
