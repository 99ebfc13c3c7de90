"""The benchmark of the CUDA engine over kernels that run on the CPU."""

from __future__ import annotations

import pytest
from benched import run_on, words_of
from stand_in import Emulated, StandIn

from ultraep_comm.bench.cli import main

FEW = ["--engine", "cuda", "-b", "96K", "-n", "1", "-w", "0", "--experts", "8", "--ranks", "3"]


@pytest.mark.parametrize("command", ["replicate", "reduce"])
def test_every_byte_is_right(command: str, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    if engine == "cuda":
        assert main([*words_of(command), *FEW, "--num-workers", "2,4", "--check"]) == 0
    else:
        meter = StandIn() if engine == "host" else Emulated()
        assert run_on(meter, command, *FEW, "--check") == 0
    printed = capsys.readouterr().out
    assert printed.count("#wrong") == 1
    assert "big copy" in printed


def test_the_critical_path_is_right(streams: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["critical-path", "-b", "96K", "-n", "2", "-w", "1", "--experts", "8", "--ranks", "3"]
    few += ["--check", "--tokens", "40", "--topk", "2"]
    assert (main(few) if streams == "cuda" else run_on(Emulated(), *few)) == 0
    assert capsys.readouterr().out.count("#wrong") == 1


def test_kernels_plan_count_and_reroute_as_the_host(
    streams: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["plan", "--engine", "cuda", "--workload", "zipf1.0", "--seeds", "1", "--topk", "2"]
    if streams == "cuda":
        assert main([*few, "--sizes", "8/32/1,64/256/2"]) == 0
    else:
        few += ["--sizes", "4/8/1", "--tokens", "8", "--warps", "1,2"]
        assert run_on(Emulated(), *few) == 0
    assert capsys.readouterr().out.count("#wrong") == 1
