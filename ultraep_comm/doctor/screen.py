"""The facts and findings on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ultraep_comm.doctor.diagnose import Finding, apart, dotted
from ultraep_comm.doctor.facts import Device, Facts

_LABEL = 10  # width


def format_screen(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return the text."""
    system = facts.system
    lines = [f"ultraep_comm {system.version}, Python {system.python}, {system.platform}"]
    last = ""
    for label, text in _rows(facts):
        lines.append(f"{label if label != last else '':{_LABEL}} {text}")
        last = label
    lines.append("")
    for finding in findings:
        lines.append(f"{finding.severity}: {finding.text}")
        lines += [f"  mend: {finding.mend}"] * bool(finding.mend)
    return "\n".join([*lines, _verdict(facts, findings)])


def _verdict(facts: Facts, findings: Sequence[Finding]) -> str:
    if any(finding.severity == "error" for finding in findings):
        return "result: something is broken or missing"
    if any(finding.severity == "warning" for finding in findings):
        return "result: it works, with less than this machine could do"
    if not facts.driver.devices:
        return "result: fine for a machine without a GPU: the host engine needs none"
    return "result: fine"


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    driver, torch, nvshmem, kernels = facts.driver, facts.torch, facts.nvshmem, facts.kernels
    version = ", ".join(
        part
        for part in (
            facts.nvml.version,
            f"CUDA {dotted(driver.cuda)}" if driver.cuda else "",
            driver.status,
        )
        if part
    )
    yield "driver", version or ("unknown" if driver.error else f"none ({driver.missing})")
    yield from _device_rows(facts)
    if torch.version:
        built = f"CUDA {torch.cuda}" if torch.cuda else "without CUDA"
        yield "torch", f"{torch.version}, {built}: {torch.folder}"
    else:
        yield "torch", "unknown" if torch.error else "none"
    found = f"{dotted(nvshmem.version)}: {nvshmem.path}" if nvshmem.version else "none"
    yield "NVSHMEM", f"unknown: {nvshmem.path}" if nvshmem.error else found
    bindings = facts.nvshmem_bindings
    if bindings or driver.devices:
        version = f"{bindings} {facts.system.packages[bindings]}" if bindings else "none"
        yield "NVSHMEM", f"Python bindings: {version}"
    if not kernels.cubins:
        yield "kernels", f"none in {kernels.folder}" if kernels.folder else "unknown"
    for cubin in kernels.cubins:
        built = (
            f", CUDA {dotted(cubin.cuda)}, NVSHMEM {dotted(cubin.nvshmem)}"
            if cubin.cuda and cubin.nvshmem
            else ""
        )
        yield "kernels", f"{cubin.name}{built}"
    if facts.heap.allocates is not None or facts.heap.error:
        size = facts.system.variables.get("NVSHMEM_SYMMETRIC_SIZE", "of NVSHMEM's default size")
        works = "allocates" if facts.heap.allocates else "does not allocate"
        yield "heap", f"symmetric, {size}: {works}"
    yield from _choice_rows(facts)


def _device_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    groups: dict[str, list[int]] = {}
    driver, devices, reaches = facts.driver, facts.driver.devices, facts.driver.reaches
    for index, device in enumerate(devices):
        groups.setdefault(_describe(facts, device), []).append(index)
    if not groups:
        yield "GPUs", "unknown" if driver.error else "none"
    for text, indices in groups.items():
        yield "GPUs", f"{','.join(map(str, indices))}: {text}"
    if len(reaches) < 2:
        return
    by_link = {device.pci: facts.links(device).nvlink_to for device in devices}

    def link(i: int, j: int) -> str:
        if i == j:
            return "-"
        if not reaches[i][j]:
            return "no"
        return "link" if devices[j].pci in by_link[devices[i].pci] else "pci"

    rows = [[link(i, j) for j in range(len(reaches))] for i in range(len(reaches))]
    kinds = {cell for row in rows for cell in row} - {"-"}
    if len(kinds) == 1 and not apart(facts):
        yield "P2P", f"all pairs, over {'NVLink' if kinds == {'link'} else 'PCI'}"
        return
    yield "P2P", "".join(f"{j:>6}" for j in ["", *range(len(rows))])
    for i, row in enumerate(rows):
        yield "P2P", "".join(f"{cell:>6}" for cell in [i, *row])


def _describe(facts: Facts, device: Device) -> str:
    links = facts.links(device)
    parts = [device.name, f"sm_{device.capability[0]}{device.capability[1]}"]
    parts += [f"{device.num_sms} SMs"] * (device.num_sms is not None)
    parts += [f"{device.memory_bytes / 2**30:.0f} GiB"]
    if device.cooperative is not None:
        parts.append("cooperative launch" if device.cooperative else "no cooperative launch")
    if any(links.links):
        rate = f" x {links.link_mbps / 1000:g} GB/s" if links.link_mbps else ""
        parts.append(f"{sum(links.links)} NVLinks{rate}")
    clique = f" in clique {links.clique}" * bool(links.clique)
    parts += [f"NVLink fabric {links.fabric_state}{clique}"] * bool(links.fabric_state)
    parts += ["MIG"] * bool(links.mig) + ["MPS"] * bool(device.mps)
    return ", ".join(parts)


def _choice_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    taken = facts.taken
    if taken is None:
        yield "auto", "unknown"
    else:
        others = "" if taken.engine == "host" else ", if every rank has it"
        yield "auto", f"engine {taken.engine} over {taken.fabric}{others}"
    reasons: dict[str, list[str]] = {}
    for c in facts.torch.candidates:
        if c.missing:
            reasons.setdefault(c.missing, []).append(f"{c.engine} over {c.fabric}")
    for reason, names in reasons.items():
        yield "auto", f"not {', nor '.join(names)}: {reason}"
