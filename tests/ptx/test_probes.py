"""The probes that tools/gpu_hour runs on a GPU, here on the machine: they notice what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cpp_build import ROOT
from ptx_machine import HERE, RACE_FREE, Outcome, PtxMachine

sys.path.insert(0, str(ROOT / "tools" / "gpu_probes"))
import probes

SOURCE = ROOT / "tools" / "gpu_probes" / "probes.cu"
pytestmark = pytest.mark.builds("cpu", "ptx", "ptx_kernels_90")


def compiled(text: str, folder: Path) -> Path:
    (folder / "probes.cu").write_text(text)
    flags = ["-ptx", "-arch=sm_90", "-std=c++20", "-O3", "-lineinfo", "-I", str(ROOT / "src")]
    words = [shutil.which("nvcc") or "nvcc", *flags, "-o", "probes.ptx", "probes.cu"]
    subprocess.run(words, cwd=folder, check=True)
    return folder / "probes.ptx"


@pytest.fixture(scope="module")
def kernels(machine: PtxMachine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(SOURCE.read_text(), tmp_path_factory.mktemp("probes"))


def run(machine: PtxMachine, kernels: Path, *names: str, **options: Any) -> Outcome:
    program = [sys.executable, ROOT / "tools/gpu_probes/probes.py"]
    words = [*program, "--machine", machine.library, kernels, *names]
    return machine.run(words, kernels, **options)


def lines(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in outcome.text.splitlines() if line.startswith("{")]


def test_every_function_of_the_device_is_probed() -> None:
    device = (ROOT / "src" / "cuda" / "device" / "ptx.cuh").read_text()
    functions = set(re.findall(r"^UEC_DEVICE [\w ]*?(\w+)\(", device, re.MULTILINE))
    assert len(functions) > 40
    assert functions <= set(re.findall(r"ptx::(\w+)", SOURCE.read_text()))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_primitive_is_right(machine: PtxMachine, kernels: Path, seed: int) -> None:
    outcome = run(machine, kernels, *probes.CHECKS, seed=seed)
    assert outcome.status == RACE_FREE, outcome.text
    assert [line["probe"] for line in lines(outcome)] == list(probes.CHECKS)


def test_measurements_race_no_more_than_the_checks(machine: PtxMachine, kernels: Path) -> None:
    outcome = run(machine, kernels, *probes.MEASURES)
    assert outcome.status == RACE_FREE, outcome.text


@pytest.mark.parametrize("name", ["clock_a", "clock_b"])
def test_the_constants_of_a_clock_are_found_again(
    machine: PtxMachine, kernels: Path, name: str
) -> None:
    clock = HERE / f"{name}.env"
    outcome = run(machine, kernels, *probes.MEASURES, UEC_PTX_COSTS=str(clock))
    assert outcome.status == RACE_FREE, outcome.text
    found = probes.clock(lines(outcome))
    values = [line.split("#")[0].split("=") for line in clock.read_text().splitlines()]
    given = {pair[0]: int(pair[1]) for pair in values if len(pair) == 2}
    assert given.keys() - found.keys() == {"REMOTE", "LINK_BYTES"}
    for constant, value in found.items():
        # Whole cycles; and the time to a first byte has the probe's own instructions in it.
        slack = 120 if constant == "BULK" else 0.5
        assert value == pytest.approx(given[constant], rel=0.2, abs=slack), constant


def test_probes_are_launched_by_the_driver(
    machine: PtxMachine, kernels: Path, tmp_path: Path
) -> None:
    """What runs on a GPU, over a driver with the real one's signatures."""
    library = tmp_path / "libcuda.so.1"
    words = ["c++", "-std=c++20", "-shared", "-fPIC", "-O1", "-I", HERE.parent, "-o", library]
    subprocess.run([*words, HERE / "fake_cuda.cc", "-ldl"], check=True)
    program = [sys.executable, ROOT / "tools/gpu_probes/probes.py", kernels]
    names = [
        *("device", "check_bulk_load", "check_message_host", "measure_shuffle"),
        *("measure_cluster", "launch", "device_copy"),
    ]
    outcome = machine.run([*program, *names], kernels, LD_LIBRARY_PATH=str(tmp_path))
    assert outcome.status == RACE_FREE, outcome.text
    device, load, host, shuffle, cluster, launch, copy = lines(outcome)
    assert (device["name"], device["arch"]) == ("a machine in software", 90)
    assert load["ended"] == load["threads"] == 128
    assert host["ended"] == 64
    assert (shuffle["count"], cluster["count"]) == (4096, 4096)
    assert launch["plain_host_us"] > 0
    assert copy["gb_per_s"] == pytest.approx(2 * 2**30 / 2e6, rel=0.001)


# What is wrong in a kernel, and whose check has to find it.
WRONG = [
    ("check_bulk_load", "  ptx::fence_proxy_async_global();\n", ""),
    ("check_bulk_load", "if (await(r, [&] { return ptx::mbarrier_test(barrier, 0); }))", ""),
    ("check_bulk_store", "ptx::bulk_wait<0>()", "ptx::bulk_wait_read<0>()"),
    ("check_bulk_store", "  ptx::fence_proxy_async_shared();\n", ""),
    ("check_buffer_reuse", "ptx::bulk_wait_read<0>()", "ptx::bulk_wait_read<4>()"),
    ("check_mbarrier_phases", "if (turn > 0)", "if (turn < 0)"),
    ("check_message_device", "ptx::store_release_device(at, value)", "*at = value"),
    ("check_message_system", "ptx::load_acquire_system(at)", "*at"),
    ("check_message_fenced", "        ptx::fence_release_system();\n", ""),
    ("check_relay", "      ptx::bulk_wait<0>();\n", ""),
    ("check_fence_system", "    ptx::fence_system();\n", ""),
    ("check_claims", "== seen)\n", "!= -1)\n"),
    ("check_atomics", "ptx::fetch_add_acq_rel", "ptx::fetch_add_relaxed"),
    ("check_in_block", "ptx::set_in_block(marks + (me ^ 1))", "ptx::set_in_block(marks + 1)"),
    ("check_warp", "(lane + 5) % 32", "(lane + 6) % 32"),
    ("check_loads", "+ 4 * lane + 3)", "+ 4 * lane + 2)"),
    ("check_clock", "expect(r, now >= last);", "expect(r, now < last);"),
]


@pytest.mark.parametrize(("name", "right", "wrong"), WRONG)
def test_what_is_wrong_is_found(
    machine: PtxMachine, tmp_path: Path, name: str, right: str, wrong: str
) -> None:
    text = SOURCE.read_text()
    begin = text.index(f"UEC_PROBE({name})")
    end = text.index("UEC_PROBE(", begin + 1)
    changed = text[begin:end].replace(right, wrong)
    assert changed != text[begin:end]
    kernels = compiled(text[:begin] + changed + text[end:], tmp_path)
    assert any(run(machine, kernels, name, seed=seed).status != RACE_FREE for seed in range(1, 5))


def test_every_check_has_something_wrong_that_it_finds() -> None:
    assert {name for name, _, _ in WRONG} | {"check_message_host"} == probes.CHECKS.keys()
