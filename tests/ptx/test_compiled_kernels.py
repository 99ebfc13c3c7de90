"""The kernels as nvcc compiled them: every byte, every order, what a critical path costs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from measure import BUDGET, CLOCKS, ROWS, measure, nvcc_version, summary
from ptx_machine import PROGRAMS, RACE_FREE, TRAPPED, VIOLATED, Outcome, PtxMachine

from ultraep_comm.engines.cuda.kernels import BACKGROUND_NUM_SMS, DEFAULT_NUM_SMS

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


SMS = 72  # of a device
GEMM = SMS - BACKGROUND_NUM_SMS  # that a persistent kernel keeps until its slots are filled


def run_beside(
    machine: PtxMachine, blocks: tuple[int, ...], gemm: tuple[int, ...], timeout_ns: int = 0
) -> Outcome:
    """Call on each rank, with so many blocks, behind a GEMM on so many multiprocessors."""
    program = machine.folder / "test_device_ready"
    arguments = [",".join(map(str, blocks)), ",".join(map(str, gemm)), str(timeout_ns)]
    return machine.run(
        [program, *arguments], machine.with_example(), UEC_PTX_MULTIPROCESSORS=str(SMS)
    )


@pytest.mark.builds("cpu", "ptx", "ptx_example_90")
@pytest.mark.parametrize(
    "blocks,gemm",
    [
        ((BACKGROUND_NUM_SMS,) * 3, (GEMM,) * 3),
        ((BACKGROUND_NUM_SMS,) * 3, (GEMM, 0, 0)),
        ((BACKGROUND_NUM_SMS, DEFAULT_NUM_SMS, DEFAULT_NUM_SMS), (GEMM, 0, 0)),
    ],
    ids=["on-every-rank", "on-one", "on-the-one-that-calls-in-the-background"],
)
def test_a_background_call_runs_beside_a_gemm(
    machine: PtxMachine, blocks: tuple[int, ...], gemm: tuple[int, ...]
) -> None:
    outcome = run_beside(machine, blocks, gemm)
    assert outcome.status == RACE_FREE, outcome.text


@pytest.mark.builds("cpu", "ptx", "ptx_example_90")
def test_one_block_more_than_there_is_room_for_starts_none(machine: PtxMachine) -> None:
    blocks = (BACKGROUND_NUM_SMS + 1, BACKGROUND_NUM_SMS, BACKGROUND_NUM_SMS)
    outcome = run_beside(machine, blocks, (GEMM, 0, 0))
    assert outcome.status == TRAPPED, outcome.text
    assert "stuck: " in outcome.text
    assert "block (0, 0)" in outcome.text


@pytest.mark.builds("cpu", "ptx", "ptx_example_90")
def test_peers_wait_while_a_kernel_fills_a_device(machine: PtxMachine) -> None:
    outcome = run_beside(machine, (BACKGROUND_NUM_SMS,) * 3, (SMS, 0, 0), timeout_ns=3_000_000)
    assert outcome.status == RACE_FREE, outcome.text


@pytest.mark.builds("asan")
@pytest.mark.timeout(900)  # the first waits for the build
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_stay_within_bounds(machine: PtxMachine, name: str) -> None:
    """AddressSanitizer knows where each allocation of the program ends."""
    folder = machine.build("asan", f"test_device_{name}") / "tests"
    outcome = machine.run([folder / f"test_device_{name}"], seed=3)
    assert outcome.status == RACE_FREE, outcome.text


# Without the transfer that takes as long as ten others.
QUICK = [row for row in ROWS if "24576" not in row]


@pytest.mark.builds("cpu", "ptx", "ptx_kernels_90")
@pytest.mark.parametrize(("clock", "rows"), [("a", QUICK), ("b", QUICK[::4])])
def test_critical_paths_cost_what_is_committed(
    machine: PtxMachine, clock: str, rows: list[str]
) -> None:
    """After an intended change: ``python tests/ptx/measure.py --update``."""
    budget = json.loads(BUDGET.read_text())
    if budget["nvcc"] != nvcc_version():
        pytest.skip(f"the budget is of nvcc {budget['nvcc']}, here is {nvcc_version()}")
    found = {name: summary(report) for name, report in measure(machine, clock, rows).items()}
    still = [name for name in rows if name.startswith(("empty", "plan:"))]
    assert {name: held(of, moves_nothing=name in still) for name, of in found.items()} == {
        name: close(held(budget[clock][name], moves_nothing=name in still)) for name in rows
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
