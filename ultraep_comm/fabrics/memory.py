"""How much memory is left to this process: of the machine, and of each cgroup that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ultraep_comm.errors import OutOfSharedMemoryError

# By the type of a mount: the files of the limit and of the usage, and how entries of memory.stat
# begin that include the groups below, as these files do.
_FILES = {
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    "cgroup2": ("memory.max", "memory.current", ""),
}
_CACHED = ("inactive_file", "active_file")  # dropped by the kernel before it is out of memory


HINT = "use fewer slots_per_rank, smaller experts, or a machine with more memory"


class Available(NamedTuple):
    """Bytes of memory that are left, and the limit that says so."""

    bytes: int
    limit: str


def available_memory(root: Path = Path("/")) -> Available:
    """Return what is left without swapping under the tightest limit; ``root``: where /proc is."""
    found = [Available(2**63 - 1, "no limit is known")]
    with suppress(OSError, ValueError, IndexError):
        text = (root / "proc/meminfo").read_text().partition("MemAvailable:")[2]
        found.append(Available(int(text.split()[0]) * 1024, "MemAvailable of /proc/meminfo"))
    groups: list[tuple[str, Path, Path]] = []
    with suppress(ValueError):  # a sandbox's /proc may have other lines
        groups.extend(_cgroups(root))
    for kind, level, top in groups:
        limit_file, used_file, start = _FILES[kind]
        for folder in (level, *level.parents):
            with suppress(OSError, ValueError):  # no limit here; v2 says "max", or has no file
                limit = int((folder / limit_file).read_text())
                used = int((folder / used_file).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").open())
                used = max(0, used - sum(int(stat.get(start + name, 0)) for name in _CACHED))
                where = f"{limit} in /{(folder / limit_file).relative_to(root)}, {used} used"
                found.append(Available(max(0, limit - used), where))
            if folder == top:
                break
    return min(found)


def require_memory(num_bytes: int, rank: int, num_ranks: int = 1) -> None:
    """Raise OutOfSharedMemoryError if this machine has not so many bytes for each of its ranks."""
    available = available_memory()
    if num_bytes * num_ranks > available.bytes:
        raise OutOfSharedMemoryError(
            f"rank {rank}: {num_bytes} bytes are needed for each of {num_ranks} rank(s) on this"
            f" machine, but only {available.bytes} bytes are available ({available.limit}); {HINT}",
            failed_rank=rank,
        )


def _cgroups(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield for each version of cgroups: its mount's type, this process's group, and the mount."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for group in groups:  # such as "4:memory:/job" of v1, "0::/job" of v2
        _, controllers, path = group.split(":", 2)
        kind = "cgroup" if "memory" in controllers.split(",") else "cgroup2"
        for mount in mounts if kind == "cgroup" or not controllers else ():
            where, _, what = mount.partition(" - ")
            type_, _, options = what.split(" ", 2)
            if type_ != kind or (kind == "cgroup" and "memory" not in options.split(",")):
                continue
            mounted, at = where.split(" ")[3:5]
            top = root / at.lstrip("/")
            try:  # a container's mount may begin at its own group
                level = top / Path(path).relative_to(mounted)
            except ValueError:
                level = top
            yield kind, level if ".." not in level.parts and level.is_dir() else top, top
