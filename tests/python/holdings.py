"""What a process holds: descriptors, threads, memory and children, before and after."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path


def descriptors() -> dict[str, int]:
    """Count the open descriptors by target; all sockets count as one, as their numbers change."""
    count: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = os.readlink(entry)
        except OSError:
            continue  # the folder's own descriptor
        kind = link.split(":")[0] if ":[" in link else link
        count[kind] = count.get(kind, 0) + 1
    return count


def holdings() -> dict[str, int]:
    """Return this process's descriptors, threads, group memory mappings and children."""
    held = {f"descriptor {kind}": n for kind, n in descriptors().items()}
    held["thread"] = len(list(Path("/proc/self/task").iterdir()))
    held["mapping"] = Path("/proc/self/maps").read_text().count("memfd:ultraep_comm")
    children = Path("/proc/self/task") / str(os.getpid()) / "children"
    held["child"] = len(children.read_text().split()) if children.exists() else 0
    return held


def more_than(before: dict[str, int]) -> list[str]:
    """Return what this process holds beyond ``before``, once ending threads are gone."""
    end = time.monotonic() + 2
    while True:
        gc.collect()
        held = holdings()
        left = [
            f"{n - before.get(kind, 0)} more of {kind}"
            for kind, n in held.items()
            if n > before.get(kind, 0)
        ]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.02)
