"""Command lines of the studies: light parsers, errors before anything runs, one entry."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from benched import refusal

from studies.cli import main
from studies.model import MACHINES
from ultraep_comm.model import MACHINES as MODELLED

ROOT = Path(__file__).resolve().parents[3]

BAD = {
    "against --peers nobody": "--peers has 'nobody'; expected any of none, moonep",
    "against --sizes 256/512/2": "--sizes has 256/512/2 by 64; expected at most 72",
    "against --sizes 8/4/2 --topk 4": "--sizes has 8/4/2, but workload W5 draws --topk 4 different",
    "against --workload moonep --sizes 8/48/2": "none of --sizes; expected one of 2, 4, 8 ranks",
    "steady --ranks 32 --experts 16": "16 experts for --ranks 32",
    "steady --steps 1": "--steps",
    "steady --expert-bytes 16G": "their slots, take",
    "model --imbalance 2,x": "'x' is not a number",
    "model --imbalance inf": "not a number above 1",
    "model --sizes 4/1/1": "fewer experts than --topk",
    "model --imbalance= --workload ,": "are both empty",
    "layer --ranks 9 --experts 8": "at least one for each of 9 ranks",
    "layer --imbalance 5": "expected 1 to 2",
    "layer --workload W1 --imbalance 2": "--imbalance is 2, but --workload W1 has its",
    "layer --workload W1,W9": "--workload has 'W9'; expected any of W0, W1",
    "layer --experts 8 --workload W5 --topk 5": "W5 draws --topk 5 different experts of 4",
    "against": "pip install 'ultraep_comm[bench]'",
    "draw r.json --out o.svg": "expected a name that ends in .png",
    "draw r.json --out none/o.png": "cannot be written to: No such file",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_arguments_run_nothing(
    arguments: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    installed = None if "pip install" in BAD[arguments] else True
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed)
    assert BAD[arguments] in refusal(main, arguments.split(), monkeypatch, capsys)
    assert list(tmp_path.iterdir()) == []


def test_the_entry_starts_ranks(tmp_path: Path) -> None:
    """From another folder, so that nothing but the entry finds the package."""
    few = "--ranks 2 --experts 4 --tokens 16 --topk 1 --hidden 8 --inner 8 -n 1 -w 0 --check"
    command = [sys.executable, str(ROOT / "bench" / "studies"), "layer", *few.split()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].endswith(": layer")


def test_machines_in_the_parser_are_those_of_the_model() -> None:
    assert sorted(MODELLED) == list(MACHINES)
