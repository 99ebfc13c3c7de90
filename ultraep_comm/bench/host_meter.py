"""The host's clock in place of a GPU's, for what is measured alike on both."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ultraep_comm.errors import UnsupportedError


class HostMeter:
    """A `Meter` of the host engine, whose calls block."""

    engine = "host"
    torch_device = torch.device("cpu")
    big_bytes = 1 << 20

    def num_sms(self, given: int | None, ranks_here: int) -> int:
        """Return one thread, unless another number was given."""
        return given or 1

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Wrap memory."""
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
        """Time calls in a row."""
        (line_up or run)()
        self.settle()
        start = time.perf_counter_ns()
        for _ in range(calls):
            run()
        self.settle()
        return (time.perf_counter_ns() - start) / 1e3 / calls

    def spread(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run jobs one after the other."""
        for job in jobs:
            job()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Raise UnsupportedError."""
        raise UnsupportedError("the host engine has no graphs")

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy."""
        return tensor.clone()

    def settle(self) -> None:
        """Return: calls block."""

    def describe(self) -> dict[str, Any]:
        """Return nothing: the host is described elsewhere."""
        return {}
