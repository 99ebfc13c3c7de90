"""The order of calls among the caller's own work: at once on a CPU, by streams on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class CallMark(Protocol):
    """A call's place: after the caller's work at its submission, before what waits for it."""

    issued: bool

    def wait(self) -> None:
        """Let the current stream wait for the call, which has been issued."""

    def synchronize(self) -> None:
        """Block until the call has finished."""

    def is_done(self) -> bool:
        """Return whether the call has finished."""


class HostOrder:
    """A CPU's: a call that its thread has run has finished."""

    is_host = True
    issued = True

    def enter(self) -> HostOrder:
        """Return the mark of a call that is submitted now."""
        return self

    def leave(self, wait: Callable[[], None]) -> None:
        """Do nothing: the caller goes on while the thread runs the call."""

    @contextmanager
    def running(self, mark: CallMark) -> Iterator[None]:
        """Enclose the call on the engine's thread."""
        yield

    def wait(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def is_done(self) -> bool:
        """Return True."""
        return True


@dataclass
class _DeviceMark:
    ready: Any  # the caller's work so far
    done: Any
    issued: bool = False

    def wait(self) -> None:
        """Let the current stream wait for the call."""
        self.done.wait()

    def synchronize(self) -> None:
        """Block until the call has finished."""
        self.done.synchronize()

    def is_done(self) -> bool:
        """Return whether the call has finished."""
        finished: bool = self.done.query()
        return finished


class DeviceOrder:
    """A device's: calls run on a stream of their own, behind the caller's current stream.

    Written for any device with streams, and not run on one yet.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime: Any = torch.get_device_module(device)
        self._stream = self._runtime.Stream(device)

    def enter(self) -> _DeviceMark:
        """Return the mark of a call behind what the current stream has been given."""
        ready = self._runtime.Event()
        ready.record(self._runtime.current_stream(self._device))
        return _DeviceMark(ready, self._runtime.Event())

    def leave(self, wait: Callable[[], None]) -> None:
        """Wait until the call has been issued.

        Rule: its operations are issued before the caller's next ones, on every rank. Backends of
        devices may run two process groups one after another, and each rank in its own order of
        issue: two orders would wait for each other.
        """
        wait()

    @contextmanager
    def running(self, mark: CallMark) -> Iterator[None]:
        """Enclose the call on the engine's thread, whose current stream is the engine's."""
        assert isinstance(mark, _DeviceMark)
        with self._runtime.device(self._device), self._runtime.stream(self._stream):
            mark.ready.wait()
            yield
            mark.done.record(self._stream)
        mark.issued = True
