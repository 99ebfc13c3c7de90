"""Tables of main weights' addresses in device memory, for kernels of a captured graph."""

from __future__ import annotations

import torch

from ultraep_comm.engines.cuda.device import Device
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.weights.segments import Addresses


class WeightTables:
    """The tables of one group: int64 ``[num_segments, M]``."""

    def __init__(self, device: Device, num_segments: int, num_mains: int) -> None:
        self._device = device
        self._shape = (num_segments, num_mains)
        self._own: torch.Tensor | None = None

    def frozen(self, addresses: Addresses) -> torch.Tensor | None:
        """Return a table that never changes, ready for every stream; None during a capture."""
        if self._device.is_capturing():
            return None
        table = self._device.empty(self._shape, torch.int64)
        self._device.upload(table, self._on_host(addresses))
        self._device.settle_stream()
        return table

    def own(self) -> torch.Tensor:
        """Return the table that the caller updates; zero at first. Its address is stable.

        Raises:
            UnsupportedError: it does not exist yet, and the current stream is being captured.
        """
        if self._own is None:
            self._refuse_capture("read group.weight_table once before the capture")
            with torch.inference_mode(False):  # it is also written to outside inference mode
                memory = self._device.allocate(8 * self._shape[0] * self._shape[1])
                self._own = memory.view(torch.int64).view(self._shape)
        return self._own

    def update(self, addresses: Addresses) -> None:
        """Write new addresses to the caller's table, in stream order.

        Raises:
            UnsupportedError: the current stream is being captured.
        """
        self._refuse_capture(
            "a replay would write the addresses of the capture again; call"
            " group.update_weight_table before the replay"
        )
        self._device.upload(self.own(), self._on_host(addresses))

    def _on_host(self, addresses: Addresses) -> torch.Tensor:
        table = torch.empty(self._shape, dtype=torch.int64, device="cpu")
        if table.numel():  # uint64 bits in int64, since torch has few operations for uint64
            table.view(-1).copy_(torch.frombuffer(addresses, dtype=torch.int64))
        return table

    def _refuse_capture(self, why: str) -> None:
        if self._device.is_capturing():
            raise UnsupportedError(f"the current stream is being captured into a CUDA graph: {why}")
