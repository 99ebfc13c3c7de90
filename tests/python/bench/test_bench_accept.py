"""The acceptance test: every stage runs, and what is bad is named."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from benched import bench, modes_of, settings_of

from ultraep_comm.bench.commands.accept import run as accept
from ultraep_comm.bench.commands.replicate import run as replicate
from ultraep_comm.bench.ranks import WeightRanks
from ultraep_comm.doctor.diagnose import ERROR, Finding
from ultraep_comm.errors import UltraEPError

if TYPE_CHECKING:
    from ultraep_comm.plan.plan import Plan

FEW = ["accept", "--engine", "host", "--ranks", "3", "--experts", "6", "-b", "64K", "-n", "2"]
FEW += ["--json", "o.json"]
STAGES = ["doctor", "links", "replicate", "reduce"]


def page_of(text: str) -> list[str]:
    """The lines after the last empty one."""
    return text.rpartition("\n\n")[2].splitlines()


def test_what_is_fine_passes(tmp_path: Path) -> None:
    done = bench(tmp_path, *FEW, "--min-bandwidth", "1e-6", "--max-over-bound", "1e6")
    assert done.returncode == 0, done.stderr
    page = page_of(done.stdout)
    assert page[0].startswith("# PASS; ")
    assert [line.split()[:2] for line in page[1:] if line[2] != " "] == [[s, "ok"] for s in STAGES]
    document = done.document()
    assert document["passed"] is True
    assert [stage["stage"] for stage in document["stages"]] == STAGES
    assert [r["op"] for r in modes_of(document)] == ["links"] * 6 + ["replicate", "reduce"]
    assert {r["wrong_bytes"] for r in document["records"]} == {0}


def slow_link() -> None:
    """The link from rank 2 to rank 0 takes a second longer."""
    call = WeightRanks.call

    def slowed(self: WeightRanks, plan: Plan, mode: str) -> None:
        if plan.num_experts == plan.num_ranks and 2 in plan.slot_expert[0] and dist.get_rank() == 0:
            time.sleep(1)
        call(self, plan, mode)

    WeightRanks.call = slowed  # type: ignore[method-assign]


def test_a_slow_link_is_named(tmp_path: Path) -> None:
    done = bench(tmp_path, *FEW, "--min-bandwidth", "2e-4", fault=slow_link)
    assert done.returncode == 3, done.stderr
    page = page_of(done.stdout)
    assert page[0].startswith("# FAIL: links; ")
    (missed,) = (line for line in page if "gate not met" in line)
    assert "gate not met by 1 of 6, expected at least 0.0002 GB/s: 2 to 0 " in missed
    assert any(line.lstrip().startswith("slow: 2 to 0, ") for line in page)
    stages = {stage["stage"]: stage["status"] for stage in done.document()["stages"]}
    assert stages == {"doctor": 0, "links": 3, "replicate": 0, "reduce": 0}


def fail_in_two_stages() -> None:
    """The doctor of this machine finds something, and no rank can replicate."""

    def fail(*_: Any) -> None:
        raise UltraEPError("no transfer today")

    finding = Finding(ERROR, "driver", "no driver", "apt install driver")
    accept.diagnose = lambda *_: [finding]  # type: ignore[assignment]
    replicate.run = fail  # type: ignore[assignment]


def test_stages_after_a_failure_run(tmp_path: Path) -> None:
    done = bench(tmp_path, *FEW, fault=fail_in_two_stages)
    assert done.returncode == 2, done.stderr
    page = page_of(done.stdout)
    assert page[0].startswith("# FAIL: doctor, replicate, reduce; ")
    assert f"      {socket.gethostname()}: no driver; run: apt install driver" in page
    assert page.count("      UltraEPError: no transfer today") == 2
    stages = done.document()["stages"]
    assert [stage["status"] for stage in stages] == [2, 0, 2, 2]
    assert len(stages[1]["document"]["records"]) == 6


# ---- on a rack, with stand-ins for its launchers ----------------------------------------------

RECIPE = Path(__file__).resolve().parents[3] / "bench" / "recipes" / "nvl72.sh"
LAUNCHER = """#!/usr/bin/env bash
while [[ $1 != -m ]]; do shift; done
printf '%q ' "${@:3}"
exit 3
"""


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_rack_is_accepted_by_a_command_there_is(launcher: str, tmp_path: Path) -> None:
    (tmp_path / launcher).write_text(LAUNCHER)
    (tmp_path / launcher).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", RECIPE, launcher],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "HEAD": "node1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3  # the command's
    name, *arguments = shlex.split(done.stdout)
    settings = settings_of(name, *arguments)  # raises for options that the command has not
    assert [stage.name for stage in settings.stages] == ["links", "replicate", "reduce"]
    assert settings.stages[1].settings.num_experts == 288
