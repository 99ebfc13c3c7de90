"""The benchmark of the CUDA engine over kernels that run on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from stand_in import StandIn

from ultraep_comm.bench import device
from ultraep_comm.bench.cli import _parser, main, make_settings
from ultraep_comm.cuda import device as cuda_device

FEW = ["--engine", "cuda", "-b", "96K", "-n", "1", "-w", "0", "--experts", "8", "--ranks", "3"]


class Emulated(StandIn):
    """Calls only order streams; what reads memory has to wait for the device."""

    engine = "cuda"

    def time_us(self, run: Callable[[], None], calls: int, ranks_here: int) -> float:
        run()
        self.settle()
        start = time.perf_counter_ns()
        for _ in range(calls):
            run()
        self.settle()
        return (time.perf_counter_ns() - start) / 1e3 / calls

    def settle(self) -> None:
        cuda_device.find_device().settle()


def test_every_byte_is_right(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    if engine == "cuda":
        assert main(["replicate", *FEW, "--num-sms", "2,4", "--check"]) == 0
    else:
        meter = StandIn() if engine == "host" else Emulated()
        settings = make_settings(_parser().parse_args(["replicate", *FEW, "--check"]))
        assert device.run_on(meter, settings) == 0
    assert capsys.readouterr().out.count("#wrong") == 1
