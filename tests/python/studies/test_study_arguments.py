"""Command lines of the studies: light parsers, errors before anything runs, one entry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benched import refusal

from studies.cli import COMMANDS, main
from studies.model import MACHINES
from ultraep_comm.model import MACHINES as MODELLED

ROOT = Path(__file__).resolve().parents[3]
NAMES = [command.name for command in COMMANDS]

BAD: dict[str, list[tuple[list[str], str]]] = {
    "against": [
        (["--peers", "nobody"], "--peers has 'nobody'; expected any of none, moonep"),
        (["--sizes", "256/512/2"], "--sizes has 256/512/2 by 64; expected at most 72"),
        (
            ["--sizes", "8/4/2", "--topk", "4"],
            "--sizes has 8/4/2, but workload W5 draws --topk 4 different experts of 2",
        ),
        (
            ["--families", "moonep", "--sizes", "8/48/2,64/256/2"],
            "none of --sizes; expected one of 2, 4, 8 ranks with 1, 2, 3, 4, 5, 7, 8, 16, 256, 320",
        ),
    ],
    "imbalance": [
        (["--workloads", "W9"], "--workloads has 'W9'; expected any of W0, W1"),
        (["--topk", "5"], "--experts is 8, but workload W5 draws --topk 5 different experts of 4;"),
        (["--topk", "9", "--workloads", "W1"], "W1 draws --topk 9 different experts of 8;"),
        (["--slots", "9"], "--slots is 9; expected at most --experts 8"),
        (["--ranks", "3"], "--experts is 8, not a multiple of --ranks 3"),
        (["--tokens", "0"], "--tokens is 0; expected at least 1"),
        (["--tokens", str(1 << 24)], "are too many"),
        (["--seed", "-1"], "--seed is -1; expected at least 0"),
    ],
    "steady": [
        (["--ranks", "32", "--experts", "16"], "16 experts for --ranks 32"),
        (["--rho", "1"], "--rho is 1.0"),
        (["--target", "0.5"], "--target is 0.5"),
        (["--topk", "17", "--experts", "16"], "--topk is 17"),
        (["--steps", "1"], "--steps"),
        (["--expert-bytes", "16G"], "--expert-bytes 16G"),
        (["--slots", "x"], "--slots"),
    ],
    "model": [
        (["--imbalances", "1"], "not a number above 1"),
        (["--imbalances", "2,x"], "'x' is not a number"),
        (["--imbalances", "inf"], "not a number above 1"),
        (["--families", "published2"], "'published2'; expected any of zipf0.6"),
        (["--sizes", "4/16"], "is not ranks/experts/slots"),
        (["--sizes", "4/1/1"], "fewer experts than --topk"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--expert-bytes", "0"], "is not a size"),
        (["--imbalances", "", "--families", ","], "are both empty"),
    ],
    "validate": [
        (["--ranks", "1"], "--ranks is 1; expected at least 2"),
        (["--plans", "0"], "--plans is 0; expected at least 1"),
        (["--iters", "0"], "--iters is 0"),
        (["-b", "x"], "'x' is not a size"),
        (["-b", "1M", "-e", "64K"], "in ascending order"),
        (["-b", "64"], "at least 4096 bytes"),
        (["--max-error", "nan"], "--max-error is nan"),
        (["--max-error", "0"], "expected a number above 0"),
    ],
    "layer": [
        (["--ranks", "9", "--experts", "8"], "at least one for each of 9 ranks"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--imbalance", "5"], "expected 1 to 2"),
        (["--max-over-bound", "-1"], "--max-over-bound is -1.0"),
        (["--workload", "W1", "--imbalance", "2"], "--imbalance is 2, but --workload W1 has its"),
        (["--workload", "W1,W9"], "--workload has 'W9'; expected any of W0, W1"),
        (
            ["--experts", "8", "--workload", "W5", "--topk", "5"],
            "--experts is 8, but workload W5 draws --topk 5 different experts of 4",
        ),
    ],
    "draw": [
        (["r.json", "--out", "o.svg"], "expected a name that ends in .png"),
        (["r.json", "--out", "none/o.png"], "there is no such folder"),
        (["none.json", "--out", "o.png"], "No such file"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "text"),
    [(command, *row) for command, rows in BAD.items() for row in rows],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_arguments_run_nothing(
    command: str,
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert text in refusal(main, [command, *arguments], monkeypatch, capsys)
    assert list(tmp_path.iterdir()) == []


def test_help_loads_nothing_heavy() -> None:
    """``--help`` loads neither torch nor numpy nor the extension module."""
    code = f"""
import sys
sys.path[0] = {str(ROOT / "bench")!r}
from studies.cli import main
for command in {["", *NAMES]}:
    try:
        main([*command.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0
heavy = ("torch", "numpy", "ultraep_comm._core")
sys.exit(", ".join(name for name in heavy if name in sys.modules) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(f"bench/studies {command}" in done.stdout for command in NAMES)


def test_the_entry_starts_ranks(tmp_path: Path) -> None:
    """From another folder, so that nothing but the entry finds the package."""
    few = "--ranks 2 --experts 4 --tokens 16 --topk 1 --hidden 8 --inner 8 -n 1 -w 0 --check"
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "studies"), "layer", *few.split()],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].endswith(": layer")


def test_machines_in_the_parser_are_those_of_the_model() -> None:
    assert sorted(MODELLED) == list(MACHINES)
