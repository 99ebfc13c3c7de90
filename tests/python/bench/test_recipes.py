"""The acceptance test of a rack, with stand-ins for its launchers."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from benched import settings_of

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
