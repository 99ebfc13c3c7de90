"""Where the ranks of a run are: hosts, domains, GPUs, cores and memory nodes."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ultraep_comm.bench.machine import describe_machine
from ultraep_comm.group import Group

_NODES = Path("/sys/devices/system/node")


def own_place(device: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return where this process is; ``device`` is a GPU as its meter describes it."""
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
    """Return the memory nodes that some CPUs belong to; none where the system does not say."""
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
    """Return the numbers of Linux's lists, such as ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def gather_places(
    group: Group, *, device: Mapping[str, Any] | None = None, loopback: bool = False
) -> list[dict[str, Any]]:
    """Return every rank's place, with its number and domain. Collective, but in loopback."""
    mine = own_place(device)
    count = group.topology.num_ranks
    places = [dict(mine) for _ in range(count)] if loopback else _gather(mine)
    domains = group.topology.domain.tolist()
    return [{"rank": r, "domain": domains[r], **places[r]} for r in range(count)]


def _gather(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Give a small document to all and return everybody's. Collective."""
    text = json.dumps(mine).encode()
    ranks = range(dist.get_world_size())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(text)]))
    room = max(int(size) for size in sizes)
    rows = [torch.zeros(room, dtype=torch.uint8) for _ in ranks]
    dist.all_gather(rows, torch.frombuffer(bytearray(text.ljust(room)), dtype=torch.uint8))
    return [json.loads(bytes(row.tolist())) for row in rows]


def format_places(places: Sequence[Mapping[str, Any]], *, engine: str, fabric: str) -> list[str]:
    """Return the lines of a header: the whole, then each host, then each of several domains."""
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
