"""What is wrong or missing, by the facts alone, and the command that mends it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ultraep_comm.doctor.facts import BINDINGS_NEED, CUDA_PACKAGES, Device, Facts
from ultraep_comm.driver import REGISTERED
from ultraep_comm.system import read_version

ERROR, WARNING, NOTE = SEVERITIES = ("error", "warning", "note")
REQUIRABLE = ("device", "cuda", "nvshmem", "p2p")
PROHIBITED = 2  # the compute mode that allows no context
_FIRST_CUDA = (12, 0)
FIRST_BINDINGS = (0, 4)  # the lowest nvshmem4py of pyproject.toml
_EXTRAS = (12, 13)  # the extras cuda12 and cuda13
_NO_DEVICE = "CUDA_ERROR_NO_DEVICE"
_CHECK = "nvidia-smi; sudo dmesg | grep -i nvrm"
_MENDS = {  # by cuInit's error
    "CUDA_ERROR_SYSTEM_NOT_READY": "sudo systemctl restart nvidia-fabricmanager",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "sudo reboot  # the driver was updated while loaded",
    "CUDA_ERROR_STUB_LIBRARY": "unset LD_LIBRARY_PATH  # it leads to the stubs of a CUDA toolkit",
    "CUDA_ERROR_MPS_CONNECTION_FAILED": "nvidia-cuda-mps-control -d",
}


@dataclass(frozen=True)
class Finding:
    """Something to know.

    Attributes:
        severity: "error": broken, or required and missing; "warning": less works than could;
            "note": no fault, but a limit.
        about: the area of the facts.
        text: what is the matter.
        mend: the command that mends it; empty: none does.
    """

    severity: str
    about: str
    text: str
    mend: str = ""


def diagnose(facts: Facts, required: Collection[str] = ()) -> list[Finding]:
    """Return the findings, the worst first; ``required``: of `REQUIRABLE`, what has to be there."""
    found = [*_broken(facts), *_driver(facts), *_software(facts), *_devices(facts), *_peers(facts)]
    taken, is_bad = facts.taken, any(finding.severity != NOTE for finding in found)
    if facts.driver.devices and taken and taken.engine == "host" and not is_bad:
        reason = facts.torch.candidates[0].missing
        found.append(Finding(WARNING, "auto", f"no engine uses the GPUs here: {reason}"))
    found += _required(facts, required)
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _extra(facts: Facts) -> str:
    built = next((cubin.cuda[0] for cubin in facts.kernels.cubins if cubin.cuda), 0)
    runs = facts.driver.cuda[0] if facts.driver.cuda else _EXTRAS[-1]
    return f"cuda{built or min(max(runs, _EXTRAS[0]), _EXTRAS[-1])}"


def _install(facts: Facts) -> str:
    return f"pip install 'ultraep_comm[{_extra(facts)}]'"


def _build(facts: Facts) -> str:
    archs = ";".join(sorted({f"{d.capability[0]}{d.capability[1]}" for d in facts.driver.devices}))
    return (
        f"ULTRAEP_CUDA=ON pip install -c constraints.txt -e '.[{_extra(facts)}]'"
        f' -C cmake.define.ULTRAEP_CUDA_ARCHS="{archs}"'
    )


def _broken(facts: Facts) -> Iterator[Finding]:
    nvshmem = f"pip install --force-reinstall nvidia-nvshmem-{_extra(facts).replace('da', '')}"
    mends = {
        "driver": _CHECK,
        "nvml": _CHECK,
        "torch": "python -c 'import torch'",
        "nvshmem": nvshmem,
        "kernels": "pip install --force-reinstall --no-deps -c constraints.txt -e .",
        "heap": "NVSHMEM_DEBUG=INFO python -m ultraep_comm.doctor.probes heap '{}'",
    }
    for area, mend in mends.items():
        error = getattr(facts, area).error
        if error:
            yield Finding(ERROR, area, f"the probe of {area} {error}", mend)
    if facts.heap.allocates is False:
        text = "NVSHMEM's symmetric heap has no room for 1 MiB"
        yield Finding(ERROR, "heap", text, "export NVSHMEM_SYMMETRIC_SIZE=1G")


def _driver(facts: Facts) -> Iterator[Finding]:
    driver, gpus = facts.driver, facts.system.pci_gpus
    visible = facts.system.variables.get("CUDA_VISIBLE_DEVICES")
    if driver.missing and gpus:
        text = f"there is a GPU ({gpus} on the PCI bus), but no driver: {driver.missing}"
        yield Finding(WARNING, "driver", text, "install NVIDIA's driver; docker run --gpus all ...")
    elif driver.status and driver.status != _NO_DEVICE:
        mend = _MENDS.get(driver.status, _CHECK)
        yield Finding(ERROR, "driver", f"the driver does not work: {driver.status}", mend)
    elif driver.cuda and not driver.devices and not driver.error:
        if visible is not None:
            text = f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs"
            yield Finding(WARNING, "driver", text, "unset CUDA_VISIBLE_DEVICES")
        elif gpus:
            text = f"there is a GPU ({gpus} on the PCI bus), but the driver has no device"
            yield Finding(WARNING, "driver", text, _CHECK)
    if driver.cuda and driver.cuda < _FIRST_CUDA:
        text = f"the driver is for CUDA {dotted(driver.cuda)}; 12.0 or later is needed"
        yield Finding(WARNING, "driver", text, "update NVIDIA's driver")
    if driver.devices and facts.nvml.status:
        text = f"NVML does not answer ({facts.nvml.status}): links and MIG are unknown"
        yield Finding(WARNING, "nvml", text, "nvidia-smi")


def _software(facts: Facts) -> Iterator[Finding]:
    torch, installed = facts.torch, facts.system.packages
    if not torch.version and not torch.error:
        text = "torch is not installed: no engine works without it"
        yield Finding(ERROR, "torch", text, "pip install -c constraints.txt torch")
    if not facts.driver.devices:
        return
    if torch.version and torch.cuda is None:
        text = f"torch {torch.version} was built without CUDA"
        mend = "pip install --force-reinstall -c constraints.txt torch"
        yield Finding(WARNING, "torch", text, mend)
    missing = [name for name in CUDA_PACKAGES if name not in installed]
    if missing:
        text = f"the CUDA engine needs {', '.join(missing)}"
        yield Finding(WARNING, "torch", text, _install(facts))
    for cubin in facts.kernels.cubins:
        if cubin.error:
            yield Finding(WARNING, "kernels", cubin.error, _build(facts))
        elif cubin.nvshmem_error and cubin.cuda and cubin.nvshmem:
            package = f"nvidia-nvshmem-cu{cubin.cuda[0]}"
            limits = f">={dotted(cubin.nvshmem)},<{cubin.nvshmem[0] + 1}"
            mend = f"pip install '{package}{limits}'"
            yield Finding(WARNING, "nvshmem", cubin.nvshmem_error, mend)
    yield from _nvshmem(facts)


def _nvshmem(facts: Facts) -> Iterator[Finding]:
    """Library, Python bindings and driver of the fabric nvshmem."""
    library, bindings, installed = facts.nvshmem, facts.nvshmem_bindings, facts.system.packages
    lacking = ["NVSHMEM's library"] * (library.version is None and not library.error)
    if not bindings:
        lacking.append("its Python bindings, nvshmem4py")
    elif BINDINGS_NEED not in installed:
        lacking.append(f"{BINDINGS_NEED}, which {bindings} needs")
    if lacking:
        text = f"fabric nvshmem lacks {' and '.join(lacking)}"
        yield Finding(WARNING, "nvshmem", text, _install(facts))
    if bindings and read_version(installed[bindings]) < FIRST_BINDINGS:
        text = f"{bindings} is {installed[bindings]}; {dotted(FIRST_BINDINGS)} or later is needed"
        yield Finding(WARNING, "nvshmem", text, f"{_install(facts)} --upgrade")
    built_for = int(bindings[-2:]) if bindings else 0
    if facts.driver.cuda and _FIRST_CUDA[0] <= facts.driver.cuda[0] < built_for:
        text = f"{bindings} is for CUDA {built_for}, the driver for {dotted(facts.driver.cuda)}"
        yield Finding(WARNING, "nvshmem", text, f"update NVIDIA's driver to CUDA {built_for}")
    fitting = [cubin for cubin in facts.kernels.cubins if not (cubin.error or cubin.nvshmem_error)]
    for cuda, built in dict.fromkeys((cubin.cuda, cubin.nvshmem) for cubin in fitting):
        if cuda and built and library.version and library.version[:2] != built:
            text = (
                f"the kernels were built with NVSHMEM {dotted(built)}, the library is"
                f" {dotted(library.version)}: safe inside a domain, but not between machines, with"
                " allow_cross_domain=True. IBGDA's queues have another layout since 3.5.19, and"
                " kernels with 3.4.5 hung there under 3.6.5"
            )
            mend = f"pip install 'nvidia-nvshmem-cu{cuda[0]}=={dotted(built)}.*'"
            yield Finding(NOTE, "nvshmem", text, mend)


def _devices(facts: Facts) -> Iterator[Finding]:
    if facts.kernels.missing:
        archs = ", ".join(f"sm_{major}{minor}" for major, minor in facts.kernels.missing)
        text = f"no device kernels for {archs} in {facts.kernels.folder}"
        yield Finding(WARNING, "kernels", text, _build(facts))
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, device in enumerate(facts.driver.devices):
        for fault in _faults(facts, device):
            groups.setdefault(fault, []).append(index)
    for (severity, about, text, mend), indices in groups.items():
        pci = ",".join(facts.driver.devices[index].pci for index in indices)
        names = ", ".join(map(str, indices))
        yield Finding(severity, about, f"GPU {names}: {text}", mend.replace("PCI", pci))


def _faults(facts: Facts, device: Device) -> Iterator[tuple[str, str, str, str]]:
    links = facts.links(device)
    if device.compute_mode == PROHIBITED:
        yield WARNING, "driver", "compute mode Prohibited", "sudo nvidia-smi -i PCI -c DEFAULT"
    if device.cooperative == 0:
        yield WARNING, "driver", "no cooperative launches, which the kernels are", ""
    if links.mig:
        text = "divided (MIG): its parts do not reach other GPUs or each other"
        yield NOTE, "nvml", text, "sudo nvidia-smi -i PCI -mig 0"
    if device.mps:
        share = facts.system.variables.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        part = f", {share}% of the multiprocessors for this process" if share else ""
        text = f"shared through MPS{part}: pass a num_sms that fits beside the others'"
        yield NOTE, "driver", text, ""
    down = links.links.count(False)
    if any(links.links) and down:  # without NVLink bridges all are down
        text = f"inactive NVLinks: {down} of {len(links.links)}"
        yield WARNING, "nvml", text, "nvidia-smi nvlink -s -i PCI"
    if links.fabric_state not in ("", REGISTERED):
        text = (
            f"registration with the NVLink fabric: {links.fabric_state}; until it is"
            f" {REGISTERED}, no other machine's GPUs are in reach, and domains are small"
        )
        yield WARNING, "nvml", text, "systemctl status nvidia-fabricmanager nvidia-imex"


def apart(facts: Facts) -> list[tuple[int, int]]:
    """Return the pairs of devices of which one does not reach the other."""
    reaches = facts.driver.reaches
    pairs = ((i, j) for i in range(len(reaches)) for j in range(i + 1, len(reaches)))
    return [(i, j) for i, j in pairs if not (reaches[i][j] and reaches[j][i])]


def _peers(facts: Facts) -> Iterator[Finding]:
    pairs = apart(facts)
    if pairs:
        names = ", ".join(f"{i} and {j}" for i, j in pairs[:4]) + ", ..." * (len(pairs) > 4)
        text = (
            f"no load/store access between GPUs {names}: fabric torch needs it between all ranks;"
            " over nvshmem those are domains of their own"
        )
        yield Finding(WARNING, "driver", text, "nvidia-smi topo -p2p r")


def _required(facts: Facts, required: Collection[str]) -> Iterator[Finding]:
    usable = [device for device in facts.driver.devices if device.compute_mode != PROHIBITED]
    candidates = facts.torch.candidates
    has = {
        "device": bool(usable),
        "cuda": any(c.engine == "cuda" and not c.missing for c in candidates),
        "nvshmem": any(c.fabric == "nvshmem" and not c.missing for c in candidates),
        "p2p": len(usable) > 1 and not apart(facts),
    }
    lacks = {
        "device": "there is no GPU that CUDA can use",
        "cuda": "engine='cuda' cannot be used",
        "nvshmem": "fabric='nvshmem' cannot be used",
        "p2p": "there are no several GPUs with load/store access between all pairs",
    }
    for name in REQUIRABLE:
        if name in required and not has[name]:
            of_name = (c for c in candidates if name in (c.engine, c.fabric))
            why = next((f": {c.missing}" for c in of_name), "")
            yield Finding(ERROR, "required", f"--require {name}: {lacks[name]}{why}")


def dotted(version: tuple[int, ...]) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, version))
