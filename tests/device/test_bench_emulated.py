"""The benchmark of the CUDA engine over kernels that run on the CPU."""

from __future__ import annotations

import pytest
from stand_in import Emulated, StandIn

from ultraep_comm.bench import critical_path, device, device_reduce, plan_device
from ultraep_comm.bench.cli import _parser, main
from ultraep_comm.bench.critical_path_settings import make_path_settings
from ultraep_comm.bench.plan_settings import make_plan_settings
from ultraep_comm.bench.reduce_settings import make_reduce_settings
from ultraep_comm.bench.replicate_settings import make_settings

FEW = ["--engine", "cuda", "-b", "96K", "-n", "1", "-w", "0", "--experts", "8", "--ranks", "3"]


def test_every_byte_is_right(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    if engine == "cuda":
        assert main(["replicate", *FEW, "--num-sms", "2,4", "--check"]) == 0
    else:
        meter = StandIn() if engine == "host" else Emulated()
        settings = make_settings(_parser().parse_args(["replicate", *FEW, "--check"]))
        assert device.run_on(meter, settings) == 0
    assert capsys.readouterr().out.count("#wrong") == 1


def test_every_sum_is_right(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    if engine == "cuda":
        assert main(["reduce", *FEW, "--num-sms", "2,4", "--check"]) == 0
    else:
        meter = StandIn() if engine == "host" else Emulated()
        settings = make_reduce_settings(_parser().parse_args(["reduce", *FEW, "--check"]))
        assert device_reduce.run_on(meter, settings) == 0
    assert "big copy" in capsys.readouterr().out


def test_the_critical_path_is_right(streams: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["-b", "96K", "-n", "2", "-w", "1", "--experts", "8", "--ranks", "3", "--check"]
    few += ["--tokens", "40", "--topk", "2"]
    if streams == "cuda":
        assert main(["critical-path", *few]) == 0
    else:
        settings = make_path_settings(_parser().parse_args(["critical-path", *few]))
        assert critical_path.run_on(Emulated(), settings) == 0
    assert capsys.readouterr().out.count("#wrong") == 1


def test_kernels_plan_count_and_reroute_as_the_host(
    streams: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["plan", "--engine", "cuda", "--families", "zipf1.0", "--seeds", "1", "--topk", "2"]
    if streams == "cuda":
        assert main([*few, "--sizes", "8/32/1,64/256/2"]) == 0
    else:
        few += ["--sizes", "4/8/1", "--tokens", "8", "--warps", "1,2"]
        settings = make_plan_settings(_parser().parse_args(few))
        assert plan_device.run_on(Emulated(), settings) == 0
    assert capsys.readouterr().out.count("#wrong") == 1
