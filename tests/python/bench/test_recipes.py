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
printf '%q ' "${@:3}" >>commands
echo >>commands
[[ " $FAIL " != *" $3 "* ]] || exit 3
"""


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("failing", [[], ["links"], ["links", "replicate"]])
def test_a_command_that_fails_keeps_no_other_from_running(
    launcher: str, failing: list[str], tmp_path: Path
) -> None:
    (tmp_path / launcher).write_text(LAUNCHER)
    (tmp_path / launcher).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", RECIPE, launcher],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "HEAD": "node1", "FAIL": " ".join(failing)},
        capture_output=True,
        text=True,
        check=False,
    )
    commands = [shlex.split(line) for line in (tmp_path / "commands").read_text().splitlines()]
    assert [name for name, *_ in commands] == ["links", *["replicate"] * 4]
    for name, *arguments in commands:
        settings_of(name, *arguments)  # raises for options that the command has not
    missed = [shlex.join(command) for command in commands if command[0] in failing]
    assert done.stderr == "".join(f"FAILED, status 3: {command}\n" for command in missed)
    assert done.returncode == bool(failing)
