"""Means of capturing calls into graphs: torch's, cuda.core's, and the emulated device's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from ranks import loopback

from ultraep_comm.engines.cuda import device

Replay = Callable[[], None]
Call = Callable[[], Any]


class TorchGraphs:
    """`torch.cuda.graph`, as most users have it."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream this thread's current one."""
        return torch.cuda.stream(stream)

    def current(self) -> Any:
        return torch.cuda.current_stream()

    def new_stream(self) -> Any:
        return torch.cuda.Stream()

    def wait_stream(self, stream: Any, other: Any) -> None:
        """Let a stream wait for what another holds: in a capture, fork or join it."""
        stream.wait_stream(other)

    def capture(self, call: Call) -> tuple[Any, Replay]:
        """Return what ``call()`` returned, and how to replay what it launched."""
        graph = torch.cuda.CUDAGraph()
        # The strictest mode: what any thread of the process does that a capture cannot have
        # (queries of events, synchronous copies, allocations) ends the capture.
        with torch.cuda.graph(graph, capture_error_mode="global"):
            result = call()
        return result, graph.replay


class CoreGraphs(TorchGraphs):
    """cuda.core's graph builder. Torch knows nothing of the capture, but for the stream's state.

    So its tensors come from its ordinary memory: they are free for others as soon as nobody holds
    them, and results have to be held as long as the graph.
    """

    def capture(self, call: Call) -> tuple[Any, Replay]:
        core: Any = pytest.importorskip("cuda.core")
        core_device = core.Device(torch.cuda.current_device())
        core_device.set_current()
        if not hasattr(core.Stream, "create_graph_builder"):
            pytest.skip(f"cuda.core {core.__version__} has no graph builder")
        stream = torch.cuda.Stream()  # lives on: torch's allocator asks it when tensors are freed
        builder = core.Stream.from_handle(int(stream.cuda_stream)).create_graph_builder()
        torch.cuda.synchronize()
        builder.begin_building("thread_local")
        try:
            with torch.cuda.stream(stream):
                result = call()
        finally:
            builder.end_building()
        graph = builder.complete()
        own = torch.cuda.Stream()

        def replay() -> None:
            """Launch on a stream with a handle of its own, between what the current one gets."""
            current = torch.cuda.current_stream()
            own.wait_stream(current)
            graph.launch(core.Stream.from_handle(int(own.cuda_stream)))
            current.wait_stream(own)

        return result, replay


class EmulatedGraphs:
    """Those of the device on the CPU."""

    def __init__(self) -> None:
        found: Any = device.find_device()
        self._device: EmulatedDevice = found

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._device.on(stream)

    def current(self) -> Any:
        return self._device.current_stream()

    def new_stream(self) -> Any:
        return self._device.new_stream()[0]

    def wait_stream(self, stream: Any, other: Any) -> None:
        self._device.wait_stream(stream, other)

    def capture(self, call: Call) -> tuple[Any, Replay]:
        self._device.settle()
        self._device.begin_capture()
        try:
            result = call()
        finally:
            graph = self._device.end_capture()
        return result, lambda: self._device.replay(graph)


Graphs = TorchGraphs | EmulatedGraphs

MAKERS: dict[str, Callable[[], Graphs]] = {
    "torch": TorchGraphs,
    "core": CoreGraphs,
    "emulated": EmulatedGraphs,
}


def on_each(graphs: Graphs, num_ranks: int, call: Callable[[int], Any]) -> list[Any]:
    """Call each rank in a thread of its own, all on this thread's current stream."""
    stream = graphs.current()

    def run(rank: int) -> Any:
        with graphs.on(stream):
            return call(rank)

    return loopback(num_ranks, run)


def on_forks(graphs: Graphs, streams: list[Any], call: Callable[[int], Any]) -> list[Any]:
    """The same, each on a stream of its own, forked from the current one and joined again."""
    stream = graphs.current()

    def run(rank: int) -> Any:
        own = streams[rank]
        with graphs.on(own):
            graphs.wait_stream(own, stream)
            return call(rank)

    try:
        return loopback(len(streams), run)
    finally:
        for own in streams:
            graphs.wait_stream(stream, own)
