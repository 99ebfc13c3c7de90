"""Tables of addresses in device memory, for kernels to read."""

from __future__ import annotations

import torch

from ultraep_comm.engines.cuda.device import Device
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.weights.binding import Addresses


def put_addresses(
    device: Device, addresses: Addresses, shape: tuple[int, int], table: torch.Tensor | None
) -> torch.Tensor | None:
    """Write addresses to a table, int64 ``[num_segments, M]``, in the current stream's order.

    Args:
        device: of the group.
        addresses: to write.
        shape: of the table.
        table: which is written to; None: a new one, ready for every stream.

    Returns:
        The table; None if it would be a new one, and the current stream is being captured.

    Raises:
        UnsupportedError: there is a table, and the current stream is being captured.
    """
    is_new = table is None
    if device.is_capturing():
        if is_new:
            return None
        raise UnsupportedError(
            "the current stream is being captured into a CUDA graph: a replay would write the"
            " addresses of the capture again; call bound.update() before the replay"
        )
    if table is None:
        with torch.inference_mode(False):  # it is also written to outside inference mode
            table = device.allocate(8 * len(addresses)).view(torch.int64).view(shape)
    if addresses:  # uint64 bits in int64, since torch has few operations for uint64
        device.upload(table, torch.frombuffer(addresses, dtype=torch.int64).view(shape))
    if is_new:
        device.synchronize_stream()
    return table
