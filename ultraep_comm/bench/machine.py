"""Describe what a figure was measured on: the machine, the software and the places of ranks."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ultraep_comm

if TYPE_CHECKING:
    from ultraep_comm.group.group import Group

T = TypeVar("T")
_NODES = Path("/sys/devices/system/node")


def describe_machine() -> dict[str, str | int]:
    """Return the machine and the software versions that figures depend on."""
    import numpy as np
    import torch

    from ultraep_comm.calibration import cpu_name

    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "ultraep_comm": ultraep_comm.__version__,
    }


@lru_cache(maxsize=1)
def find_commit() -> str:
    """Return the commit of this checkout, with ``-dirty`` if changed; else the version.

    Files in ``bench/results`` do not count: several may be written before they are committed.
    """
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        # An installed copy may lie in an unrelated repository.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        code = (":/", ":(top,exclude)bench/results")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *code)
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return f"v{ultraep_comm.__version__}"


# ---- places of ranks ----------------------------------------------------------------------------


def own_place(device: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the place of this process; ``device`` is a GPU's `Meter.describe`."""
    cpus = os.sched_getaffinity(0)
    return {
        "host": platform.node() or "localhost",
        "cpu": describe_machine()["cpu"],
        "cpus": len(cpus),
        "numa_nodes": memory_nodes(cpus),
        "gpu": None if device is None else device.get("gpu"),
        "gpu_id": None if device is None else device.get("gpu_id"),
    }


def memory_nodes(cpus: Iterable[int], folder: Path = _NODES) -> list[int]:
    """Return the NUMA nodes of some CPUs; empty if the system does not tell."""
    wanted, nodes = set(cpus), []
    for path in folder.glob("node[0-9]*/cpulist"):
        try:
            listed = parse_cpus(path.read_text())
        except (OSError, ValueError):
            continue
        if listed & wanted:
            nodes.append(int(path.parent.name.removeprefix("node")))
    return sorted(nodes)


def parse_cpus(text: str) -> set[int]:
    """Return the numbers in a Linux CPU list such as ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def gather_places(
    group: Group, *, device: Mapping[str, Any] | None = None, loopback: bool = False
) -> list[dict[str, Any]]:
    """Return every rank's place, with rank and domain. Collective, but in loopback."""
    mine = own_place(device)
    count = group.topology.num_ranks
    places = [dict(mine) for _ in range(count)] if loopback else gather_json(mine)
    domains = group.topology.domain.tolist()
    return [{"rank": r, "domain": domains[r], **places[r]} for r in range(count)]


def gather_json(mine: T) -> list[T]:
    """Return every rank's value, which JSON can express. Collective."""
    import torch
    import torch.distributed as dist

    text = json.dumps(mine).encode()
    ranks = range(dist.get_world_size())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(text)]))
    room = max(int(size) for size in sizes)
    rows = [torch.zeros(room, dtype=torch.uint8) for _ in ranks]
    dist.all_gather(rows, torch.frombuffer(bytearray(text.ljust(room)), dtype=torch.uint8))
    return [json.loads(bytes(row.tolist())) for row in rows]


def format_places(places: Sequence[Mapping[str, Any]], *, engine: str, fabric: str) -> list[str]:
    """Return the header lines: a summary, the hosts, and the domains if there are several."""
    hosts = _by(places, "host")
    domains = _by(places, "domain")
    lines = [
        f"topology: {len(places)} ranks on {_count(hosts, 'host')}, {_count(domains, 'domain')};"
        f" engine {engine}, fabric {fabric}"
    ]
    for host, here in hosts.items():
        nodes = sorted({node for place in here for node in place["numa_nodes"]})
        on_nodes = f", NUMA {format_numbers(nodes)}" if nodes else ""
        ranks = format_numbers([place["rank"] for place in here])
        first = here[0]
        line = f"host {host}: ranks {ranks}; {first['cpu']}, {first['cpus']} CPUs{on_nodes}"
        lines.append(line + _describe_gpus(here))
    if len(domains) > 1:
        for domain, members in domains.items():
            lines.append(f"domain {domain}: ranks {format_numbers([m['rank'] for m in members])}")
    return lines


def format_numbers(numbers: Sequence[int]) -> str:
    """Return ascending numbers as Linux writes them: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _describe_gpus(here: Sequence[Mapping[str, Any]]) -> str:
    ids = {place["gpu_id"] or place["rank"]: place["gpu"] for place in here if place["gpu"]}
    if not ids:
        return ""
    names = list(ids.values())
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"; GPUs: {kinds}" + (", shared by ranks" if len(ids) < len(here) else "")


def _by(places: Sequence[Mapping[str, Any]], key: str) -> dict[Any, list[Mapping[str, Any]]]:
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for place in places:
        found.setdefault(place[key], []).append(place)
    return found


def _count(items: Mapping[Any, Any], name: str) -> str:
    return f"{len(items)} {name}{'' if len(items) == 1 else 's'}"
