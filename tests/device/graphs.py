"""Ways to capture calls into graphs: torch's, cuda.core's, and the emulated device's."""

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
    """`torch.cuda.graph`, the usual way."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream this thread's current stream."""
        return torch.cuda.stream(stream)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream()

    def new_stream(self) -> tuple[Any, object]:
        return torch.cuda.Stream(), None

    def wait_stream(self, stream: Any, other: Any) -> None:
        """Make a stream wait for the work queued on another; in a capture, fork or join it."""
        stream.wait_stream(other)

    def capture(self, call: Call) -> tuple[Any, Replay]:
        """Return what ``call()`` returned, and how to replay what it launched."""
        graph = torch.cuda.CUDAGraph()
        # The strictest mode: an illegal operation of any thread of the process (event queries,
        # synchronous copies, allocations) ends the capture.
        with torch.cuda.graph(graph, capture_error_mode="global"):
            result = call()
        return result, graph.replay


class CoreGraphs(TorchGraphs):
    """cuda.core's graph builder. Torch knows of the capture only through the stream's state.

    So tensors come from torch's ordinary memory, which is reused as soon as they are dropped:
    results must be held as long as the graph.
    """

    def capture(self, call: Call) -> tuple[Any, Replay]:
        core: Any = pytest.importorskip("cuda.core")
        core_device = core.Device(torch.cuda.current_device())
        core_device.set_current()
        if not hasattr(core.Stream, "create_graph_builder"):
            pytest.skip(f"cuda.core {core.__version__} has no graph builder")
        stream = torch.cuda.Stream()  # torch's allocator queries it when it frees tensors
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
            """Launch on another stream, ordered with the current one."""
            current = torch.cuda.current_stream()
            own.wait_stream(current)
            graph.launch(core.Stream.from_handle(int(own.cuda_stream)))
            current.wait_stream(own)

        return result, replay


Graphs = TorchGraphs | EmulatedDevice

MAKERS: dict[str, Callable[[], Any]] = {
    "torch": TorchGraphs,
    "core": CoreGraphs,
    "emulated": lambda: device.find_device(),  # noqa: PLW0108 (it is the fixture's by then)
}


def on_each(graphs: Graphs, num_ranks: int, call: Callable[[int], Any]) -> list[Any]:
    """Call each rank in its own thread, all on this thread's current stream."""
    stream = graphs.current_stream()

    def run(rank: int) -> Any:
        with graphs.on(stream):
            return call(rank)

    return loopback(num_ranks, run)


def on_forks(graphs: Graphs, streams: list[Any], call: Callable[[int], Any]) -> list[Any]:
    """Call each rank on its own stream, forked from the current one and joined again."""
    stream = graphs.current_stream()

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
