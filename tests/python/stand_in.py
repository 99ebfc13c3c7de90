"""A benchmark's device without a GPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ultraep_comm.cuda import device


class StandIn:
    """The host engine's loopback, timed with the host's clock."""

    engine = "host"
    torch_device = torch.device("cpu")
    big_bytes = 1 << 20

    def num_sms(self, given: int | None, ranks_here: int) -> int:
        return given or 3

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        kind = ctypes.c_uint8 * num_bytes
        return torch.frombuffer(kind.from_address(address), dtype=torch.uint8)

    def time_us(
        self,
        run: Callable[[], None],
        calls: int,
        ranks_here: int,
        *,
        line_up: Callable[[], None] | None = None,
    ) -> float:
        (line_up or run)()
        self.settle()
        start = time.perf_counter_ns()
        for _ in range(calls):
            run()
        self.settle()
        return (time.perf_counter_ns() - start) / 1e3 / calls

    def spread(self, jobs: Sequence[Callable[[], None]]) -> None:
        for job in jobs:
            job()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        raise NotImplementedError  # the host engine has no graphs

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def settle(self) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {"gpu": "none", "gpu_sms": 1, "driver_version": "1.2"}


class Emulated(StandIn):
    """The emulated device. Calls only order its streams; who reads memory has to wait."""

    engine = "cuda"

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        emulated: Any = device.find_device()
        emulated.begin_capture()
        run()
        graph = emulated.end_capture()
        return lambda: emulated.replay(graph)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        self.settle()
        return tensor.clone()

    def settle(self) -> None:
        device.find_device().settle()
