"""What a group may lose without an error: the rest of its NVLink fabric, or NVSHMEM's own order."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import cache

from ultraep_comm.driver import REGISTERED, Links
from ultraep_comm.errors import name_ranks
from ultraep_comm.plan.topology import IntArray

_LOGGER = logging.getLogger("ultraep_comm")
NO_CLIQUE, UNREGISTERED = 0, -1
Version = tuple[int, int]


def clique_number(links: Links | None) -> int:
    """Return a number for a GPU's clique, the same on all machines; else one of those above."""
    if links is None or not links.fabric_state:
        return NO_CLIQUE
    if links.fabric_state != REGISTERED:
        return UNREGISTERED
    digest = hashlib.blake2b(links.clique.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") if links.clique else NO_CLIQUE


def warn_of_split_cliques(cliques: Sequence[int], domain: IntArray) -> None:
    """Warn, once, if NVLink joins ranks that have no load/store access to each other.

    ``cliques``: `clique_number` of each rank; ``domain``: ``[G]``, found by load/store access.
    """
    if len(set(domain.tolist())) == 1:
        return
    members: dict[int, list[int]] = {}
    for rank, clique in enumerate(cliques):
        members.setdefault(clique, []).append(rank)
    members.pop(NO_CLIQUE, None)
    waiting = members.pop(UNREGISTERED, [])
    found = [
        f"{name_ranks(ranks)} are in one NVLink clique but in {count} domains"
        for ranks in members.values()
        if (count := len({int(domain[rank]) for rank in ranks})) > 1
    ]
    if waiting:
        found.append(f"the GPU of {name_ranks(waiting)} is not registered with it")
    if found:
        _warn(
            f"NVSHMEM reaches less than the NVLink fabric: {'; '.join(found)}. Replicas stay inside"
            " domains. On every machine check `systemctl status nvidia-imex` and `nvidia-smi -q`"
            " (Fabric), give containers /dev/nvidia-caps-imex-channels, unset"
            " NVSHMEM_DISABLE_MNNVL, and see `python -m ultraep_comm.doctor`. If it is meant, pass"
            " domains="
        )


def warn_of_versions(versions: Sequence[tuple[Version, Version]]) -> None:
    """Warn, once, if ranks that put over the network have NVSHMEMs of different minor versions.

    Args:
        versions: of each rank's host library, and of the device library in its kernels.
    """
    if len({version for both in versions for version in both}) == 1:
        return
    shown = next((both for both in versions if both[0] != both[1]), versions[0])
    host, device = (f"{major}.{minor}" for major, minor in shown)
    others = [rank for rank, both in enumerate(versions) if both != shown]
    _warn(
        "domains are joined over the network, where NVSHMEM is safe only if all its parts have one"
        f" minor version: the library is {host}, the kernels were built with {device}"
        + (f"; otherwise on {name_ranks(others)}" if others else "")
        + ". IBGDA's queues have another layout since 3.5.19, and kernels with 3.4.5 hung under"
        f" 3.6.5 between machines. Install NVSHMEM {device} on every rank, or build the kernels"
        " with the library's version (docs/building.md)"
    )


@cache
def _warn(text: str) -> None:
    _LOGGER.warning("%s", text)
