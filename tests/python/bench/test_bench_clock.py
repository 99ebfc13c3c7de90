"""The benchmarks' meter of a GPU: its calls of torch and their order. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ultraep_comm.bench import clock
from ultraep_comm.bench.clock import Gpu


class FakeCuda:
    """The part of torch.cuda that the meter uses; ``log`` has the calls in order."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.late = False  # the host is slower than the device
        outer = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.name = ("start", "end")[len([x for x in outer.log if x == "event"]) % 2]
                outer.log.append("event")

            def record(self) -> None:
                outer.log.append(self.name)

            def query(self) -> bool:
                assert self.name == "start"
                assert outer.log[-1] == "end"
                return outer.late

            def synchronize(self) -> None:
                outer.log.append(f"wait for {self.name}")

            def elapsed_time(self, end: Event) -> float:
                assert (self.name, end.name) == ("start", "end")
                return 3.0  # milliseconds

        self.Event, self.Stream = Event, object

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 8000, 16000

    def _sleep(self, cycles: int) -> None:
        self.log.append(("spin", cycles))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    found = SimpleNamespace(torch_device=torch.device("cpu"))
    monkeypatch.setattr(clock, "find_device", lambda: found)
    for name in ("Event", "Stream", "mem_get_info", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def says(cuda: FakeCuda, what: str) -> Callable[[], None]:
    return lambda: cuda.log.append(what)


def test_a_time_is_between_events_behind_the_line_up(cuda: FakeCuda) -> None:
    """The device starts when everything is enqueued; the line-up is not timed."""
    meter = Gpu()
    assert meter.big_bytes == 1000
    took = meter.time_us(says(cuda, "run"), 3, 2, line_up=says(cuda, "line up"))
    assert took == pytest.approx(1000.0)  # microseconds per call, of three
    (kind, cycles), *rest = [entry for entry in cuda.log if entry != "event"]
    assert (kind, cycles) == ("spin", 3 * clock._SPIN)
    assert rest == ["line up", "start", *["run"] * 3, "end", "wait for end"]


def test_without_a_line_up_one_more_run_is_not_counted(cuda: FakeCuda) -> None:
    Gpu().time_us(says(cuda, "run"), 1, 1)
    kept = [entry for entry in cuda.log if entry != "event"][1:]
    assert kept == ["run", "start", "run", "end", "wait for end"]


def test_a_host_that_is_too_slow_is_reported_once(
    cuda: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    meter = Gpu()
    for cuda.late in (False, True, True):
        meter.time_us(says(cuda, "run"), 1, 1)
    assert capsys.readouterr().err.count("the device did not wait for the host") == 1
