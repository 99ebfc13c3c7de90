"""The benchmarks' meter of a GPU: its calls of torch and their order. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ultraep_comm.bench import clock
from ultraep_comm.bench.clock import Gpu, view_mapped
from ultraep_comm.engines.cuda.device import Device
from ultraep_comm.errors import DeviceError


class FakeCuda:
    """The part of torch.cuda that the meter uses; ``log`` has the calls in order."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.names = iter(range(100))
        self.current = "current"
        self.late = False  # the host is slower than the device
        outer = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.name = ("start", "end")[len([x for x in outer.log if x == "event"]) % 2]
                outer.log.append("event")

            def record(self) -> None:
                outer.log.append((self.name, outer.current))

            def query(self) -> bool:
                assert self.name == "start"
                assert outer.log[-1][0] == "end"
                return outer.late

            def synchronize(self) -> None:
                outer.log.append(f"wait for {self.name}")

            def elapsed_time(self, end: Event) -> float:
                assert (self.name, end.name) == ("start", "end")
                return 3.0  # milliseconds

        class Stream:
            def __init__(self) -> None:
                self.name = f"stream {next(outer.names)}"

            def wait_stream(self, other: Any) -> None:
                outer.log.append((self.name, "waits for", getattr(other, "name", other)))

        class CUDAGraph:
            def replay(self) -> None:
                outer.log.append("replay")

        self.Event, self.Stream, self.CUDAGraph = Event, Stream, CUDAGraph

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 8000, 16000

    def _sleep(self, cycles: int) -> None:
        self.log.append(("spin", cycles))

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.log.append("capture begins")
        yield
        self.log.append("capture ends")

    def current_stream(self) -> Any:
        name, outer = self.current, self

        class Current:
            def wait_stream(self, other: Any) -> None:
                outer.log.append((name, "waits for", other.name))

        made = Current()
        made.name = name  # type: ignore[attr-defined]
        return made

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def synchronize(self, device: torch.device) -> None:
        self.log.append("settle")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    found = SimpleNamespace(torch_device=torch.device("cpu"))
    monkeypatch.setattr(clock, "find_device", lambda: found)
    names = ("Event", "Stream", "CUDAGraph", "mem_get_info", "_sleep", "graph", "current_stream")
    for name in (*names, "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def says(cuda: FakeCuda, what: str) -> Callable[[], None]:
    return lambda: cuda.log.append((what, cuda.current))


def test_a_time_is_between_events_behind_the_line_up(cuda: FakeCuda) -> None:
    """The device starts when everything is enqueued; the line-up is not timed."""
    meter = Gpu()
    assert meter.big_bytes == 1000
    took = meter.time_us(says(cuda, "run"), 3, 2, line_up=says(cuda, "line up"))
    assert took == pytest.approx(1000.0)  # microseconds per call, of three
    (kind, cycles), *rest = [entry for entry in cuda.log if entry != "event"]
    assert (kind, cycles) == ("spin", 3 * clock._SPIN)
    on = "current"
    runs = [("run", on)] * 3
    assert rest == [("line up", on), ("start", on), *runs, ("end", on), "wait for end"]


def test_without_a_line_up_one_more_run_is_not_counted(cuda: FakeCuda) -> None:
    Gpu().time_us(says(cuda, "run"), 1, 1)
    on = "current"
    kept = [entry for entry in cuda.log if entry != "event"][1:]
    assert kept == [("run", on), ("start", on), ("run", on), ("end", on), "wait for end"]


def test_a_host_that_is_too_slow_is_reported_once(
    cuda: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    meter = Gpu()
    for cuda.late in (False, True, True):
        meter.time_us(says(cuda, "run"), 1, 1)
    assert capsys.readouterr().err.count("the device did not wait for the host") == 1


def test_a_capture_is_replayed(cuda: FakeCuda) -> None:
    replay = Gpu().capture(says(cuda, "run"))
    assert cuda.log == ["capture begins", ("run", "current"), "capture ends"]
    replay()
    assert cuda.log[-1] == "replay"


@pytest.mark.parametrize("count", [2, clock.NUM_STREAMS + 1])
def test_jobs_fork_from_the_current_stream_and_join_it(cuda: FakeCuda, count: int) -> None:
    meter = Gpu()
    meter.spread([says(cuda, f"job {i}") for i in range(count)])
    streams = [f"stream {i}" for i in range(min(count, clock.NUM_STREAMS))]
    forks = [(name, "waits for", "current") for name in streams]
    jobs = [(f"job {i}", streams[i % len(streams)]) for i in range(count)]
    joins = [("current", "waits for", name) for name in streams]
    assert cuda.log == [*forks, *jobs, *joins]
    meter.settle()
    assert cuda.log[-1] == "settle"


# ---- peer memory --------------------------------------------------------------------------------


def test_mapped_memory_is_seen_not_copied(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if `as_tensor` would copy a peer's memory."""
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: torch.zeros(10, dtype=torch.uint8))
    memory = torch.arange(20, dtype=torch.uint8)
    for found in (
        Gpu().view(memory.data_ptr() + 3, 10),
        view_mapped(memory.data_ptr() + 3, 10, torch.device("cpu")),
    ):
        assert found.data_ptr() == memory.data_ptr() + 3
        memory[3] += 50
        assert found.tolist() == memory[3:13].tolist()


def test_a_copy_in_place_of_a_view_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch copies memory that it assigns to another device, and symmetric memory would be lost."""
    memory = torch.arange(10, dtype=torch.uint8)
    made = Device.__new__(Device)
    made.torch_device = torch.device("cpu")
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: memory)
    assert made.view(memory.data_ptr(), 10) is memory
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: memory.clone())
    with pytest.raises(DeviceError, match="a copy of them instead of a view"):
        made.view(memory.data_ptr(), 10)

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("pointer resides on device 1")

    monkeypatch.setattr(torch, "as_tensor", refuse)
    with pytest.raises(DeviceError, match="pointer resides on device 1"):
        made.view(memory.data_ptr(), 10)
