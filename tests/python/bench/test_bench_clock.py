"""The benchmarks' meter of a GPU: its calls of torch and their order. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ultraep_comm.bench import clock
from ultraep_comm.bench.clock import Gpu

LATE = "the device did not wait for the host"


@dataclass
class Event:
    """An event that writes into the log of calls."""

    log: list[Any]
    late: list[bool]  # of each measurement: whether the host is slower than the device
    name: str

    def record(self) -> None:
        self.log.append(self.name)

    def query(self) -> bool:
        assert (self.name, self.log[-1]) == ("start", "end")
        return self.late.pop(0)

    def synchronize(self) -> None:
        self.log.append(f"wait for {self.name}")

    def elapsed_time(self, end: Event) -> float:
        assert (self.name, end.name) == ("start", "end")
        return 3.0  # milliseconds


@pytest.mark.parametrize("lines_up", [True, False])
def test_a_time_is_between_events_behind_the_line_up(
    lines_up: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device starts when everything is enqueued; the line-up, or a first run, is not timed.

    A host that is too slow for that is reported once.
    """
    log: list[Any] = []
    late, names = [False, True, True], ["start", "end"] * 3
    found = SimpleNamespace(torch_device=torch.device("cpu"))
    monkeypatch.setattr(clock, "find_device", lambda: found)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8000, 16000))
    monkeypatch.setattr(torch.cuda, "_sleep", log.append)
    make_event = lambda enable_timing: Event(log, late, names.pop(0))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Event", make_event)
    meter, run = Gpu(), partial(log.append, "run")
    assert meter.big_bytes == 1000
    line_up = partial(log.append, "line up") if lines_up else None
    for warned in (0, 1, 0):
        log.clear()
        took = meter.time_us(run, 3, 2, line_up=line_up)
        assert took == pytest.approx(1000.0)  # microseconds per call, of three
        first = "line up" if lines_up else "run"
        timed = ["start", *["run"] * 3, "end", "wait for end"]
        assert log == [3 * clock._SPIN, first, *timed]
        assert capsys.readouterr().err.count(LATE) == warned
