"""The probes of libcuda and NVML, over a driver that is none, in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ultraep_comm.doctor.probes import ask

LIMIT = 20.0
SOURCE = Path(__file__).with_name("fake_driver.cc")


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1 and libnvidia-ml.so.1."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler: install one, or name it in CXX")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    (folder / "libnvidia-ml.so.1").hardlink_to(library)
    return folder


@pytest.fixture
def told(fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Tell the driver what to say: ``told(devices=4)``."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))

    def tell(**answers: object) -> None:
        for name, answer in answers.items():
            monkeypatch.setenv(f"FAKE_{name.upper()}", str(answer))

    return tell


def one(probe: str, limit: float = LIMIT, **arguments: Any) -> dict[str, Any]:
    return ask({probe: arguments}, limit)[probe]


def is_probe(command: Path) -> bool:
    """Whether a process is this one's probe of the driver, and lives."""
    try:
        parent = (command.parent / "stat").read_text().rsplit(")")[-1].split()[1]
        return int(parent) == os.getpid() and b"\0driver\0" in command.read_bytes()
    except OSError:
        return False


def test_no_driver() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("there is one")
    found = one("driver")
    assert list(found) == ["missing"]
    assert "libcuda.so.1" in found["missing"]
    assert "libnvidia-ml.so.1" in one("nvml")["status"]


def test_a_device(told: Callable[..., None]) -> None:
    told(devices=1, compute_mode=3)
    assert one("driver") == {
        "cuda": [13, 2],
        "devices": [
            {
                "name": "Fake H",
                "pci": "0000:0b:00.0",
                "capability": [9, 0],
                "memory_bytes": 80 << 30,
                "num_sms": 132,
                "compute_mode": 3,
                "cooperative": 1,  # and no "mps", which this driver does not know
            }
        ],
        "reaches": [[True]],
    }


def test_peers_and_mps(told: Callable[..., None]) -> None:
    told(devices=4, apart=1, mps=1)
    found = one("driver")
    assert [device["mps"] for device in found["devices"]] == [1] * 4
    apart = [(i, j) for i in range(4) for j in range(4) if not found["reaches"][i][j]]
    assert apart == [(0, 3), (1, 2), (2, 1), (3, 0)]


@pytest.mark.parametrize(
    "init, status",
    [(100, "CUDA_ERROR_NO_DEVICE"), (802, "CUDA_ERROR_SYSTEM_NOT_READY"), (7, "error 7")],
)
def test_a_driver_that_refuses(told: Callable[..., None], init: int, status: str) -> None:
    told(init=init)
    assert one("driver") == {"cuda": [13, 2], "status": status}


def test_links(told: Callable[..., None]) -> None:
    told(mig=1)
    found = one("nvml")
    assert found["version"] == "580.1"
    assert [gpu["pci"][5:7] for gpu in found["devices"]] == ["4b", "3b", "2b", "1b", "0b"]
    assert found["devices"][3] == {
        "pci": "0000:1b:00.0",
        "mig": True,
        "links": [True, True, False, *[True] * 15],
        "link_mbps": 26562,
        "fabric_state": "in progress",
        "clique": "",
        "nvlink_to": ["0000:4b:00.0", "0000:3b:00.0", "0000:2b:00.0"],  # not to 0b
    }


CLUSTER = "00000000-0000-0000-0000-00000000002a"


@pytest.mark.parametrize(
    ("answers", "state", "clique"),
    [
        ({"fabric": 0}, "", ""),
        ({"fabric": 1}, "not started", ""),
        ({"fabric": 3}, "completed", ""),  # NVSwitches of one machine
        ({"fabric": 3, "cluster": 42}, "completed", f"{CLUSTER} 7"),
        ({"fabric": 3, "cluster": 42, "fabric_status": 15}, "failed (NVML error 15)", ""),
        ({"fabric": 2, "cluster": 42}, "in progress", ""),
        ({"fabric": 9}, "?", ""),
    ],
)
def test_an_nvlink_fabric(
    told: Callable[..., None], answers: dict[str, int], state: str, clique: str
) -> None:
    told(**answers)
    found = one("nvml")["devices"]
    assert {(gpu["fabric_state"], gpu["clique"]) for gpu in found} == {(state, clique)}


READ_LINKS = """
import os, sys
from ultraep_comm.calibration import describe_links, link_gbps
from ultraep_comm.driver import read_links
for case in sys.argv[1:]:
    pci, *answers = case.split()
    os.environ.update(answer.split("=") for answer in answers)
    links = read_links(pci)
    print(links and links.clique, "|", describe_links(links), "|", round(link_gbps((9, 0), links)))
"""


def test_a_groups_own_gpu(told: Callable[..., None]) -> None:
    """What the CUDA engine asks, in its own process."""
    told(fabric=3)
    unknown = "None | 18 NVLinks, assumed since NVML does not answer | 371"
    cases = {
        "0000:1B:00.0 FAKE_BRIDGES=0": " | PCIe 5: no active NVLinks | 50",
        "0000:1B:00.0 FAKE_BRIDGES=1 FAKE_CLUSTER=42": f"{CLUSTER} 7 | 17 active NVLinks | 350",
        "elsewhere": unknown,
        "0000:1B:00.0 FAKE_NVML=18": unknown,
    }
    command = [sys.executable, "-c", READ_LINKS, *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*cases.values()]


def test_nvml_that_refuses(told: Callable[..., None]) -> None:
    told(nvml=18)
    assert one("nvml") == {"status": "Driver/library version mismatch"}


def test_a_crash_leaves_what_was_found(told: Callable[..., None]) -> None:
    told(init="crash")
    assert one("driver") == {"cuda": [13, 2], "error": "was ended by SIGSEGV"}


def test_a_probe_that_hangs_is_left_behind(told: Callable[..., None]) -> None:
    """The others' answers are there, and nothing is waited for longer."""
    told(init="hang")
    found = ask({"driver": {}, "nvml": {}}, 8.0)
    assert found["driver"] == {"cuda": [13, 2], "error": "did not end within 8 s"}
    assert len(found["nvml"]["devices"]) == 5
    while [path for path in Path("/proc").glob("[0-9]*/cmdline") if is_probe(path)]:
        time.sleep(0.01)  # it was killed, and on a busy machine takes a while to be gone


def test_the_whole_command(told: Callable[..., None]) -> None:
    """From the driver to the screen."""
    if torch.version.cuda is not None:
        pytest.skip("this torch would use the driver that is none")
    told(devices=4, apart=1, mig=1)
    command = [sys.executable, "-m", "ultraep_comm.doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "driver     580.1, CUDA 13.2\n" in done.stdout
    assert "GPUs       0,1,2,3: Fake H, sm_90, 132 SMs, 80 GiB" in done.stdout
    assert ", 17 NVLinks x 26.562 GB/s, NVLink fabric in progress, MIG\n" in done.stdout
    assert "1   pci     -    no  link\n" in done.stdout
    assert "without CUDA\n  mend: pip install" in done.stdout
    assert done.stdout.endswith("result: it works, with less than this machine could do\n")


def test_what_is_no_line_of_a_probe_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('{\"half a line')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert {"status", "version"} & {*one("nvml")}


def test_an_exception_names_itself() -> None:
    error = one("kernels")["error"]
    assert error.startswith("raised TypeError: ")
    assert "capabilities" in error
