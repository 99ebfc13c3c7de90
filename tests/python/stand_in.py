"""A benchmark's device without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ultraep_comm.bench.clock import Meter
from ultraep_comm.engines.cuda import device


class StandIn(Meter):
    """The host engine's loopback, timed with the host's clock."""

    def num_sms(self, given: int | None, ranks_here: int) -> int:
        return given or 3

    def describe(self) -> dict[str, Any]:
        return {"gpu": "none", "gpu_sms": 1, "driver_version": "1.2"}


class Emulated(StandIn):
    """The emulated device. Calls only order its streams: wait before reading memory."""

    engine = "cuda"

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        emulated: Any = device.find_device()
        _, replay = emulated.capture(run)
        return replay  # type: ignore[no-any-return]

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        self.synchronize()
        return tensor.clone()

    def synchronize(self) -> None:
        device.find_device().synchronize()
