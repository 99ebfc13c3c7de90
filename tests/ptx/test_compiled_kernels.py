"""The kernels as nvcc compiled them: every byte, every order, what a critical path costs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from measure import BUDGET, CLOCKS, ROWS, measure, nvcc_version, summary
from ptx_machine import PROGRAMS, RACE_FREE, VIOLATED, PtxMachine

TOLERANCE = 0.1
TIMES = ("us", "prepare_call_us")


@pytest.mark.builds("cpu", "ptx", "ptx_kernels_90")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_run_without_a_race(machine: PtxMachine, name: str, seed: int) -> None:
    outcome = machine.run_program(name, seed=seed)
    assert outcome.status == RACE_FREE, outcome.text


@pytest.mark.builds("cpu", "ptx", "ptx_example_90")
def test_a_kernel_of_a_user_waits_for_its_slots(machine: PtxMachine, tmp_path: Path) -> None:
    kernels = machine.with_example()
    outcome = machine.run_program("ready", kernels)
    assert outcome.status == RACE_FREE, outcome.text
    before, own, after = re.split(r"(\.entry slot_gemm.*?\n}\n)", kernels.read_text(), flags=re.S)
    weaker = tmp_path / "weaker.ptx"
    weaker.write_text(before + own.replace("ld.acquire.gpu", "ld.relaxed.gpu") + after)
    outcome = machine.run_program("ready", weaker)
    assert outcome.status == VIOLATED, outcome.text


@pytest.mark.builds("asan")
@pytest.mark.timeout(900)  # the first waits for the build
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_stay_within_bounds(machine: PtxMachine, name: str) -> None:
    """AddressSanitizer knows where each allocation of the program ends."""
    folder = machine.build("asan", f"test_device_{name}") / "tests"
    outcome = machine.run([folder / f"test_device_{name}"], seed=3)
    assert outcome.status == RACE_FREE, outcome.text


@pytest.mark.builds("cpu", "ptx", "ptx_kernels_90")
@pytest.mark.parametrize("clock", CLOCKS)
def test_critical_paths_cost_what_is_committed(machine: PtxMachine, clock: str) -> None:
    """After an intended change: ``python tests/ptx/measure.py --update``."""
    budget = json.loads(BUDGET.read_text())
    if budget["nvcc"] != nvcc_version():
        pytest.skip(f"the budget is of nvcc {budget['nvcc']}, here is {nvcc_version()}")
    found = {name: summary(report) for name, report in measure(machine, clock).items()}
    still = [name for name in ROWS if name.startswith(("empty", "plan:"))]
    assert {name: held(of, moves_nothing=name in still) for name, of in found.items()} == {
        name: close(held(budget[clock][name], moves_nothing=name in still)) for name in ROWS
    }


def held(of: dict[str, Any], *, moves_nothing: bool) -> dict[str, Any]:
    """Return what does not depend on who polls a flag how often."""
    return of if moves_nothing else {key: of[key] for key in TIMES if key in of}


def close(value: object) -> object:
    if isinstance(value, dict):
        return {key: close(inner) for key, inner in value.items()}
    return pytest.approx(value, rel=TOLERANCE, abs=1)


def test_the_budget_has_all_rows() -> None:
    budget = json.loads(BUDGET.read_text())
    for clock in CLOCKS:
        assert list(budget[clock]) == list(ROWS)
