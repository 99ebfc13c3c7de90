"""What the doctor concludes from facts, what it prints, and what it finds here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, FakeNvshmem

from ultraep_comm import _core
from ultraep_comm.doctor import cli
from ultraep_comm.doctor import facts as facts_module
from ultraep_comm.doctor.cli import main
from ultraep_comm.doctor.diagnose import FIRST_BINDINGS, REQUIRABLE, diagnose
from ultraep_comm.doctor.facts import (
    AREAS,
    Candidate,
    Cubin,
    Device,
    Facts,
    collect,
)
from ultraep_comm.doctor.probes import probe_heap, probe_kernels
from ultraep_comm.doctor.screen import format_screen
from ultraep_comm.driver import Links
from ultraep_comm.engines.cuda import kernels, make
from ultraep_comm.engines.cuda.kernels import CubinInfo
from ultraep_comm.engines.options import PREFERRED
from ultraep_comm.errors import UnsupportedError

PCI = [f"0000:{index}b:00.0" for index in range(4)]
CUBIN = Cubin(name="ultraep_comm-sm_90.cubin", cuda=(13, 0), nvshmem=(3, 4))
CUBIN_100 = replace(CUBIN, name="ultraep_comm-sm_100.cubin")


def device(index: int, **changes: Any) -> Device:
    known: dict[str, Any] = {
        "name": "NVIDIA H200",
        "pci": PCI[index],
        "capability": (9, 0),
        "memory_bytes": 140 << 30,
        "num_sms": 132,
        "compute_mode": 0,
        "cooperative": 1,
        "mps": 0,
    }
    return Device(**{**known, **changes})


def links(index: int, **changes: Any) -> Links:
    peers = tuple(pci for pci in PCI if pci != PCI[index])
    known: dict[str, Any] = {"links": (True,) * 18, "link_mbps": 26562, "nvlink_to": peers}
    return Links(pci=PCI[index], **{"mig": False, **known, **changes})


def candidates(*missing: str) -> tuple[Candidate, ...]:
    reasons = (*missing, "", "", "")
    return tuple(Candidate(engine=e, fabric=f, missing=m) for (e, f), m in zip(PREFERRED, reasons))  # noqa: B905


def area(name: str, **found: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**AREAS[name], "error": "", **found})


PACKAGES = ("torch", "numpy", "cuda-bindings", "nvshmem4py-cu13", "cuda-core")
NODE = Facts(
    system=SimpleNamespace(
        version="0.1.0",
        python="3.12.1",
        platform="Linux",
        pci_gpus=4,
        packages=dict.fromkeys(PACKAGES, "13.1"),
        variables={},
    ),
    driver=area(
        "driver", cuda=(13, 0), devices=tuple(map(device, range(4))), reaches=((True,) * 4,) * 4
    ),
    nvml=area("nvml", version="580.65", devices=tuple(map(links, range(4)))),
    torch=area("torch", version="2.13.0", cuda="13.0", folder="/t/torch", candidates=candidates()),
    nvshmem=area("nvshmem", version=(3, 4, 5), path="/t/libnvshmem_host.so.3"),
    kernels=area("kernels", folder="/t/cubins", cubins=(CUBIN,)),
    heap=area("heap", allocates=True),
)
NO_CUDA = "this build of torch has no CUDA"
LAPTOP = replace(
    NODE,
    system=SimpleNamespace(
        **vars(NODE.system) | {"pci_gpus": 0, "packages": {"torch": "2.13.0+cpu", "numpy": "2.4.6"}}
    ),
    driver=area("driver", missing="libcuda.so.1: cannot open shared object file"),
    nvml=area("nvml", status="libnvidia-ml.so.1: cannot open shared object file"),
    torch=area(
        "torch", version="2.13.0+cpu", folder="/t/torch", candidates=candidates(NO_CUDA, NO_CUDA)
    ),
    nvshmem=area("nvshmem"),
    kernels=area("kernels", folder="/t/cubins"),
    heap=area("heap"),
)


def changed(facts: Facts, **areas: dict[str, Any]) -> Facts:
    new = {n: SimpleNamespace(**(vars(getattr(facts, n)) | c)) for n, c in areas.items()}
    return replace(facts, **new)


def without(*packages: str) -> dict[str, Any]:
    kept = {n: v for n, v in NODE.system.packages.items() if n not in packages}
    return {"packages": kept}


def test_a_node_with_everything_and_a_laptop_are_fine() -> None:
    assert diagnose(NODE, ["device", "cuda", "nvshmem", "p2p"]) == []
    assert diagnose(LAPTOP) == []
    without_bridges = tuple(links(index, links=(False,) * 12) for index in range(4))
    assert diagnose(changed(NODE, nvml={"devices": without_bridges})) == []


APART = tuple(tuple({i, j} != {0, 3} for j in range(4)) for i in range(4))
OTHER_NVSHMEM = "built with NVSHMEM 3.4, but the library here is 4.0"
CASES: dict[str, tuple[Facts, str, str, str]] = {
    "no driver": (
        changed(LAPTOP, system={"pci_gpus": 1}),
        *("warning", "there is a GPU (1 on the PCI bus), but no driver", "--gpus all"),
    ),
    "hidden devices": (
        changed(
            NODE,
            system={"variables": {"CUDA_VISIBLE_DEVICES": ""}},
            driver={"devices": (), "reaches": (), "status": "CUDA_ERROR_NO_DEVICE"},
        ),
        *("warning", "CUDA_VISIBLE_DEVICES= hides all", "unset CUDA_VISIBLE_DEVICES"),
    ),
    "no devices": (
        changed(NODE, driver={"devices": (), "reaches": ()}),
        *("warning", "the driver has no device", "nvidia-smi"),
    ),
    "a driver that refuses": (
        changed(NODE, driver={"devices": (), "status": "CUDA_ERROR_SYSTEM_NOT_READY"}),
        *("error", "CUDA_ERROR_SYSTEM_NOT_READY", "fabricmanager"),
    ),
    "an old driver": (
        changed(NODE, driver={"cuda": (11, 8)}),
        *("warning", "for CUDA 11.8; 12.0 or later", "update"),
    ),
    "no NVML": (
        changed(NODE, nvml={"status": "version mismatch", "devices": ()}),
        *("warning", "version mismatch", "nvidia-smi"),
    ),
    "partial P2P": (
        changed(NODE, driver={"reaches": APART}),
        *("warning", "between GPUs 0 and 3:", "topo -p2p"),
    ),
    "MIG": (
        changed(NODE, nvml={"devices": (links(0, mig=True),)}),
        *("note", "GPU 0: divided (MIG)", f"-i {PCI[0]} -mig 0"),
    ),
    "MPS": (
        changed(
            NODE,
            system={"variables": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}},
            driver={"devices": (device(0, mps=1),)},
        ),
        *("note", "GPU 0: shared through MPS, 50% of", ""),
    ),
    "prohibited": (
        changed(NODE, driver={"devices": (device(0), device(1, compute_mode=2))}),
        *("warning", "GPU 1: compute mode Prohibited", f"-i {PCI[1]} -c DEFAULT"),
    ),
    "no cooperative launch": (
        changed(NODE, driver={"devices": (device(0, cooperative=0),)}),
        *("warning", "GPU 0: no cooperative launches", ""),
    ),
    "links down": (
        changed(NODE, nvml={"devices": [links(i, links=(True, False, False)) for i in (2, 3)]}),
        *("warning", "GPU 2, 3: inactive NVLinks: 2 of 3", f"nvlink -s -i {PCI[2]},{PCI[3]}"),
    ),
    "a rack's fabric": (
        changed(NODE, nvml={"devices": (links(2, fabric_state="in progress"),)}),
        *("warning", "GPU 2: registration with the NVLink fabric: in progress", "fabricmanager"),
    ),
    "no torch": (
        changed(LAPTOP, torch={"version": "", "candidates": ()}),
        *("error", "torch is not installed", "pip install -c constraints.txt torch"),
    ),
    "torch without CUDA": (
        changed(
            NODE, torch={"version": "2.13.0+cpu", "cuda": None, "candidates": candidates("x", "x")}
        ),
        *("warning", "torch 2.13.0+cpu was built without CUDA", "--force-reinstall"),
    ),
    "no bindings": (
        changed(NODE, system=without("cuda-bindings")),
        *("warning", "the CUDA engine needs cuda-bindings", "'ultraep_comm[cuda13]'"),
    ),
    "no NVSHMEM": (
        changed(NODE, nvshmem={"version": None}, torch={"candidates": candidates("no NVSHMEM")}),
        *("warning", "nvshmem lacks NVSHMEM's library", "'ultraep_comm[cuda13]'"),
    ),
    "neither library nor bindings": (
        changed(NODE, system=without("nvshmem4py-cu13"), nvshmem={"version": None}),
        *("warning", "lacks NVSHMEM's library and its Python bindings, nvshmem4py", "cuda13"),
    ),
    "bindings, but no library that loads": (
        changed(NODE, nvshmem={"version": None, "error": "was ended by SIGSEGV"}),
        *("error", "the probe of nvshmem was ended by SIGSEGV", "nvidia-nvshmem-cu13"),
    ),
    "no cuda-core": (
        changed(NODE, system=without("cuda-core")),
        *("warning", "nvshmem lacks cuda-core, which nvshmem4py-cu13 needs", "cuda13"),
    ),
    "old NVSHMEM bindings": (
        changed(NODE, system={"packages": {**NODE.system.packages, "nvshmem4py-cu13": "0.3.1"}}),
        *("warning", "nvshmem4py-cu13 is 0.3.1; 0.4 or later", "--upgrade"),
    ),
    "NVSHMEM for a later driver": (
        changed(NODE, driver={"cuda": (12, 9)}),
        *("warning", "nvshmem4py-cu13 is for CUDA 13, the driver for 12.9", "to CUDA 13"),
    ),
    "a later NVSHMEM": (
        changed(NODE, nvshmem={"version": (3, 6, 5)}, kernels={"cubins": (CUBIN, CUBIN_100)}),
        *("note", "with NVSHMEM 3.4, the library is 3.6.5: safe inside", "nvshmem-cu13==3.4.*'"),
    ),
    "no nvshmem4py, CUDA 12": (
        changed(
            NODE,
            system=without("nvshmem4py-cu13"),
            driver={"cuda": (12, 4)},
            kernels={"cubins": ()},
        ),
        *("warning", "nvshmem lacks its Python bindings", "'ultraep_comm[cuda12]'"),
    ),
    "another NVSHMEM": (
        changed(NODE, kernels={"cubins": (replace(CUBIN, nvshmem_error=OTHER_NVSHMEM),)}),
        *("warning", OTHER_NVSHMEM, "pip install 'nvidia-nvshmem-cu13>=3.4,<4'"),
    ),
    "a damaged cubin": (
        changed(NODE, kernels={"cubins": (replace(CUBIN, error="is not a cubin"),)}),
        *("warning", "is not a cubin", "ULTRAEP_CUDA=ON"),
    ),
    "no cubin": (
        changed(
            NODE,
            driver={"devices": (device(0, capability=(12, 0)), device(1))},
            kernels={"missing": ((12, 0),)},
        ),
        *("warning", "no device kernels for sm_120 in /t/cubins", 'ULTRAEP_CUDA_ARCHS="120;90"'),
    ),
    "a full heap": (
        changed(NODE, heap={"allocates": False}),
        *("error", "no room", "NVSHMEM_SYMMETRIC_SIZE"),
    ),
    "NVSHMEM ends the process": (
        changed(NODE, heap={"allocates": None, "error": "ended with status 255"}),
        *("error", "the probe of heap ended with status 255", "NVSHMEM_DEBUG=INFO"),
    ),
    "a probe that hung": (
        changed(
            LAPTOP, torch={"version": "", "candidates": (), "error": "did not end within 60 s"}
        ),
        *("error", "the probe of torch did not end within 60 s", "import torch"),
    ),
    "anything else": (
        changed(NODE, torch={"candidates": candidates("the bindings are for CUDA 14", "x")}),
        *("warning", "no engine uses the GPUs here: the bindings are for CUDA 14", ""),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_fault_is_one_finding(name: str) -> None:
    facts, severity, text, mend = CASES[name]
    (finding,) = diagnose(facts)
    assert (finding.severity, text in finding.text, mend in finding.mend) == (severity, True, True)
    assert bool(finding.mend) == bool(mend)


@pytest.mark.parametrize(
    "what, facts, why",
    [
        ("device", LAPTOP, "no GPU"),
        ("device", changed(NODE, driver={"devices": (device(0, compute_mode=2),)}), "no GPU"),
        ("cuda", LAPTOP, NO_CUDA),
        ("nvshmem", changed(NODE, torch={"candidates": candidates("too old")}), "too old"),
        ("p2p", changed(NODE, driver={"reaches": APART}), "all pairs"),
        ("p2p", changed(NODE, driver={"devices": (device(0),), "reaches": ((True,),)}), "several"),
    ],
)
def test_what_is_required_and_missing_is_an_error(what: str, facts: Facts, why: str) -> None:
    others = [name for name in REQUIRABLE if name != what]
    finding, *others_found = diagnose(facts, [what])
    assert finding.severity == "error"
    assert "error" not in [other.severity for other in others_found]
    assert finding.text.startswith(f"--require {what}: ")
    assert why in finding.text
    assert f"--require {what}" not in str(diagnose(facts, others))


# ---- the screen, and the command ----------------------------------------------------------------


def test_the_screen_of_a_node() -> None:
    facts = changed(
        NODE,
        driver={"reaches": APART, "devices": (*NODE.driver.devices[:3], device(3, mps=1))},
        nvml={"devices": (*NODE.nvml.devices[:3], links(3, nvlink_to=()))},
    )
    text = format_screen(facts, diagnose(facts))
    kind = "NVIDIA H200, sm_90, 132 SMs, 140 GiB, cooperative launch, 18 NVLinks x 26.562 GB/s"
    assert f"GPUs       0,1,2: {kind}\n           3: {kind}, MPS\n" in text
    assert "     0     -  link  link    no\n" in text
    assert "     3    no   pci   pci     -\n" in text
    assert "auto       engine cuda over nvshmem, if every rank has it\n" in text
    assert text.endswith("result: it works, with less than this machine could do")
    assert "P2P        all pairs, over NVLink\n" in format_screen(NODE, [])
    assert "\n           Python bindings: nvshmem4py-cu13 13.1\n" in text
    without_bindings = changed(NODE, system=without("nvshmem4py-cu13"))
    assert "\n           Python bindings: none\n" in format_screen(without_bindings, [])


def test_the_screen_of_a_rack() -> None:
    clique = "c0ffee00-0000-0000-0000-000000000001 7"
    there = [links(i, fabric_state="completed", clique=clique) for i in (0, 1, 2)]
    rack = changed(NODE, nvml={"devices": (*there, links(3, fabric_state="not started"))})
    text = format_screen(rack, diagnose(rack))
    assert "GPUs       0,1,2: NVIDIA H200, sm_90" in text
    assert f"26.562 GB/s, NVLink fabric completed in clique {clique}\n" in text
    assert "26.562 GB/s, NVLink fabric not started\n" in text
    assert "warning: GPU 3: registration with the NVLink fabric: not started; until" in text


def test_the_oldest_bindings_are_those_that_are_installed() -> None:
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for cuda in (12, 13):
        version = ".".join(map(str, FIRST_BINDINGS))
        assert f'"nvshmem4py-cu{cuda}>={version}",' in pyproject


def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], facts: Facts, *words: str
) -> tuple[int, str]:
    monkeypatch.setattr(cli, "collect", lambda limit: facts)
    status = main(words)
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    "facts, words, status",
    [
        (LAPTOP, [], 0),
        (LAPTOP, ["--require", "device"], 1),
        (NODE, ["--require", *REQUIRABLE], 0),
        (CASES["no NVSHMEM"][0], [], 0),
        (CASES["no torch"][0], [], 1),
    ],
)
def test_the_exit_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    facts: Facts,
    words: list[str],
    status: int,
) -> None:
    assert run_main(monkeypatch, capsys, facts, *words)[0] == status
    answer, text = run_main(monkeypatch, capsys, facts, *words, "--json")
    document = json.loads(text)
    assert answer == document["status"] == status
    assert [f["severity"] for f in document["findings"]].count("error") == status


@pytest.mark.parametrize("words", [["--require", "gpu"], ["--timeout", "0"], ["--timeout", "x"]])
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(limit: float) -> Facts:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "collect", interrupted)
    assert main([]) == 130


# ---- this machine -------------------------------------------------------------------------------


def run_here(*words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "ultraep_comm.doctor", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_this_machine() -> None:
    document = json.loads(run_here("--json")[1])
    assert document["torch"]["version"] == torch.__version__
    found = document["torch"]["candidates"]
    assert [(c["engine"], c["fabric"]) for c in found] == list(PREFERRED)
    assert document["auto"] == next(c for c in found if not c["missing"])
    if not torch.cuda.is_available() and not shutil.which("nvidia-smi"):
        assert document["status"] == 0
        assert document["auto"] == {"engine": "host", "fabric": "shm", "missing": ""}


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the probe of torch needs it."""
    absent = "raise ModuleNotFoundError('No module named torch', name='torch')"
    (tmp_path / "torch.py").write_text(absent)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, text = run_here()
    assert status == 1
    assert "torch      none\n" in text
    assert "kernels    " in text
    assert "\nerror: torch is not installed" in text
    assert "error: the probe" not in text


def test_help_loads_nothing() -> None:
    code = (
        "import sys; from ultraep_comm.doctor.cli import make_parser; make_parser().format_help()"
    )
    heavy = "print(*{'torch', 'numpy', 'ultraep_comm._core'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"


# ---- probes that need more than this machine has -------------------------------------------------


def test_the_second_round_asks_by_the_answers_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = []
    answers: dict[str, Any] = {
        "driver": {"cuda": (13, 0), "devices": [asdict(device(i)) for i in (0, 1)]},
        "nvshmem": {"version": (3, 4, 5)},
    }

    def ask(questions: Any, limit: float) -> Any:
        rounds.append(questions)
        return json.loads(json.dumps({name: answers.get(name, {}) for name in questions}))

    monkeypatch.setattr(facts_module, "ask", ask)
    for reasons in [(), ("no NVSHMEM",)]:
        answers["torch"] = {"candidates": [asdict(c) for c in candidates(*reasons)]}
        found = collect(1.0)
        assert found.driver.devices[1] == device(1)
    first, heap_too, first_again, kernels_only = rounds
    assert first == first_again
    assert list(heap_too) == ["kernels", "heap"]
    assert list(kernels_only) == ["kernels"]
    assert heap_too["kernels"]["capabilities"] == [(9, 0)]
    assert heap_too["kernels"]["nvshmem"] == (3, 4, 5)


@pytest.mark.parametrize("built, fits", [((3, 4), True), ((3, 9), False), ((2, 9), False)])
def test_cubins_and_nvshmem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: tuple[int, int], fits: bool
) -> None:
    path = tmp_path / CUBIN.name
    path.touch()
    info = CubinInfo(
        path=path,
        version=_core.CUDA_KERNELS_VERSION,
        cuda_major=13,
        cuda_minor=0,
        nvshmem=built,
        arch=90,
        layout_hash=_core.CUDA_LAYOUT_HASH,
    )
    monkeypatch.setenv("ULTRAEP_CUBINS", str(tmp_path))
    monkeypatch.setattr(kernels, "read_info", lambda path: info)
    here: dict[str, Any] = {"capabilities": [[9, 0], [12, 0]], "nvshmem": [3, 4, 5]}
    found = list(probe_kernels(**here, cuda_major=None))[-1]
    assert found["missing"] == [(12, 0)]
    assert [key for key in found["cubins"][0] if "error" in key] == ["nvshmem_error"] * (not fits)
    (cubin,) = list(probe_kernels(**here, cuda_major=12))[-1]["cubins"]
    assert "this installation has CUDA 12" in cubin["error"]


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_the_heap(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    fake, runtime = FakeDevice(), FakeNvshmem(room=room)
    monkeypatch.setattr(make, "find_nvshmem_device", lambda: (fake, runtime, fake.kernels))
    assert list(probe_heap()) == [{"allocates": room > 0}]
    assert runtime.pes() == (0, 1)


# ---- one decision, for groups and for the doctor ------------------------------------------------


def test_auto_is_decided_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise UnsupportedError("no NVSHMEM here")

    fake = FakeDevice()
    monkeypatch.setattr(make, "find_nvshmem_device", missing)
    monkeypatch.setattr(make, "find_torch_device", lambda: (fake, "memory", fake.kernels))
    found = list(make.probe_backends("auto", "auto"))
    assert [(w.engine, w.fabric, w.reason) for w in found] == [
        ("cuda", "nvshmem", "no NVSHMEM here"),
        ("cuda", "torch", ""),
        ("host", "shm", ""),
        ("c10d", "none", ""),
    ]
    assert found[1].found[1] == "memory"
    assert [w.fabric for w in make.probe_backends("cuda", "auto")] == ["nvshmem", "torch"]
    assert [w.engine for w in make.probe_backends("auto", "shm")] == ["host"]
