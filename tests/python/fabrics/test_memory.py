"""Memory that is left, under the limits of a made-up machine's cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ultraep_comm import errors
from ultraep_comm.bench import options
from ultraep_comm.fabrics import memory, private, shm

MACHINE = 1 << 20  # KiB
V1 = "32 31 0:32 {} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2 = "41 31 0:38 {} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V2_MIXED = "41 31 0:38 {} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def _machine(root: Path, groups: str, *mounts: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {2 * MACHINE} kB\nMemFree: 1 kB\nMemAvailable:   {MACHINE} kB\nBuffers: 0 kB\n"
    )
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text("".join(f"{mount}\n" for mount in mounts))


def _level(folder: Path, version: int, limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, used_file, start = FILES[version]
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 5\n{start}inactive_file {cached // 3}\n{start}active_file {cached - cached // 3}\n"
        + ("inactive_file 1\nactive_file 9\n" if start else "")
    )


@pytest.mark.parametrize(
    ("groups", "mount", "top", "version"),
    [
        ("0::/slurm/job/step\n", V2, "sys/fs/cgroup", 2),
        ("9:name=systemd:/x\n4:memory:/slurm/job/step\n0::/\n", V1, "sys/fs/cgroup/memory", 1),
    ],
    ids=["v2", "v1"],
)
@pytest.mark.parametrize("limited", ["slurm/job/step", "slurm/job", "slurm", ""])
def test_a_limit_of_any_level_counts_without_cached_files(
    tmp_path: Path, groups: str, mount: str, top: str, version: int, limited: str
) -> None:
    _machine(tmp_path, groups, mount.format("/"), V2_MIXED.format("/"))
    unlimited = {1: "9223372036854771712", 2: "max"}[version]
    for level in ("", "slurm", "slurm/job", "slurm/job/step"):
        _level(tmp_path / top / level, version, unlimited, 700)
    _level(tmp_path / top / limited, version, "1000", 900, cached=600)
    found = memory.available_memory(tmp_path)
    assert found.bytes == 1000 - (900 - 600)
    where = Path("/", top, limited, FILES[version][0])
    assert found.limit == f"1000 in {where}, 300 used"


@pytest.mark.parametrize(
    ("path", "mounted"),
    [("/kubepods/pod/c", "/kubepods/pod/c"), ("/kubepods/pod/c", "/"), ("/../../c", "/")],
    ids=["bind", "not below", "namespace"],
)
def test_a_containers_mount_begins_at_its_own_group(
    tmp_path: Path, path: str, mounted: str
) -> None:
    _machine(tmp_path, f"4:cpu,memory:{path}\n", V1.format(mounted))
    _level(tmp_path / "sys/fs/cgroup/memory", 1, "1000", 900)
    _level(tmp_path / "sys/fs/c", 1, "10", 9)  # not a cgroup
    assert memory.available_memory(tmp_path).bytes == 100


@pytest.mark.parametrize(("groups", "mount"), [("odd\n", V2.format("/")), ("0::/\n", "odd")])
def test_lines_of_another_form_limit_nothing(tmp_path: Path, groups: str, mount: str) -> None:
    _machine(tmp_path, groups, mount)
    assert memory.available_memory(tmp_path).bytes == MACHINE * 1024


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    _machine(tmp_path, "0::/\n", V2.format("/"))
    _level(tmp_path / "sys/fs/cgroup", 2, "1000", 1200)
    assert memory.available_memory(tmp_path).bytes == 0


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    assert memory.available_memory(tmp_path).bytes == 2**63 - 1  # nothing is known
    _machine(tmp_path, "4:memory:/\n0::/gone\n", V1.format("/"), V2.format("/"))
    expected = memory.Available(MACHINE * 1024, "MemAvailable of /proc/meminfo")
    assert memory.available_memory(tmp_path) == expected


def test_errors_name_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    left = memory.Available(1000, "2000 in /sys/fs/cgroup/job/memory.max, 1000 used")
    monkeypatch.setattr(memory, "available_memory", lambda: left)
    fabric = private.PrivateFabric(0, 1, torch.device("cpu"))
    for call in (lambda: shm.create_memory(501, 2, 0), lambda: fabric.allocate(1001)):
        with pytest.raises(errors.OutOfSharedMemoryError, match=r"rank 0: .*1000 bytes .*job/mem"):
            call()
    with pytest.raises(errors.InvalidArgumentError, match=r"1000 B of memory.*job/mem"):
        options.check_memory(1001, "host")
