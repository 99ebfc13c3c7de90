"""Faults planted into the compiled kernels: each is caught, or said to change nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults import EXPLAINED, KINDS, Fault, Kernels, programs_of
from ptx_machine import RACE_FREE, VIOLATED, PtxMachine

pytestmark = pytest.mark.builds("cpu", "ptx", "ptx_kernels_90", "ptx_example_90")

SEEDS = range(1, 9)  # a fault shows in a part of the interleavings only


@pytest.fixture(scope="module")
def kernels(machine: PtxMachine) -> Kernels:
    return Kernels(machine.with_example())


def how_caught(machine: PtxMachine, kernels: Kernels, fault: Fault, folder: Path) -> str:
    """Return what a program said of the fault; empty: none did."""
    faulty = folder / f"{abs(hash(fault.name))}.ptx"
    faulty.write_text(kernels.faulty(fault))
    try:
        for seed in SEEDS:
            for name in programs_of(fault):
                outcome = machine.run_program(name, faulty, seed=seed, UEC_PTX_STOP="1")
                if outcome.status != RACE_FREE:
                    said = outcome.text.strip().splitlines() or [f"status {outcome.status}"]
                    return f"test_device_{name}, seed {seed}: {said[-1][:160]}"
    finally:
        faulty.unlink()
    return ""


def check(
    machine: PtxMachine,
    kernels: Kernels,
    faults: list[Fault],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        caught = list(pool.map(lambda f: how_caught(machine, kernels, f, folder), faults))
    for fault, said in zip(faults, caught, strict=True):
        say(f"planted {fault.name}: {said or 'MISSED'}")
    assert [f.name for f, said in zip(faults, caught, strict=True) if not said] == []


@pytest.mark.timeout(900)
def test_every_fault_is_caught_or_explained(
    machine: PtxMachine, kernels: Kernels, tmp_path: Path, say: Callable[[str], None]
) -> None:
    every = kernels.faults()
    assert {fault.kind for fault in every} == set(KINDS)
    faults = [fault for fault in every if fault.explanation is None]
    assert len(faults) >= 60
    say(f"{len(faults)} faults planted, {len(every) - len(faults)} explained")
    check(machine, kernels, faults, tmp_path, say)


@pytest.mark.parametrize("name", ["replicate", "load"])
def test_what_a_network_card_wrote_is_ordered_by_its_library(
    machine: PtxMachine, tmp_path: Path, name: str
) -> None:
    """An acquire of the flag orders nothing."""
    wait = r"call\.uni \(retval0\),\s*nvshmem_signal_wait_until,[^;]*;"
    text, count = re.subn(wait, "", machine.kernels().read_text())
    assert count > 0
    faulty = tmp_path / "acquired.ptx"
    faulty.write_text(text)
    outcome = machine.run_program(name, faulty, UEC_PTX_STOP="1")
    assert outcome.status == VIOLATED, outcome.text


def test_each_explanation_is_of_a_fault(kernels: Kernels) -> None:
    names = [fault.name for fault in kernels.faults()]
    for pattern in EXPLAINED:
        assert any(re.search(pattern, name) for name in names), pattern
