"""The order of calls among the caller's own work on a device: by streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class DeviceOrder:
    """Calls run on a stream of their own, behind the caller's current stream.

    Written for any device with streams, and not run on one yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime: Any = torch.get_device_module(device)
        self._stream = self._runtime.Stream(device)

    def enter(self) -> tuple[Any, Any]:
        """Return a call's events: behind what the current stream has been given, and its end."""
        begin = self._runtime.Event()
        begin.record(self._runtime.current_stream(self._device))
        return begin, self._runtime.Event()

    @contextmanager
    def running(self, begin: Any, end: Any) -> Iterator[None]:
        """Enclose the call on the engine's thread, whose current stream is the engine's."""
        with self._runtime.device(self._device), self._runtime.stream(self._stream):
            begin.wait()
            yield
            end.record(self._stream)
