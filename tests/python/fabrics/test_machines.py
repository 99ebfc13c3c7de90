"""Machines that look alike, and machines whose id is not known."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch
from ranks import RankPool, raised

import ultraep_comm as uec
from ultraep_comm import Segment, errors, system
from ultraep_comm.engines import host
from ultraep_comm.fabrics import shm
from ultraep_comm.group import create
from ultraep_comm.group.group import session_of
from ultraep_comm.recording import recorder

OPTIONS: dict[str, Any] = {
    "num_experts": 4,
    "slots_per_rank": 1,
    "expert": {"w": Segment((8, 4), torch.bfloat16)},
    "timeout": 20.0,
}


def _no_descriptor(*_: object) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _find_nothing(*_: object) -> Any:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _make(
    rank: int, process_group: Any, fault: str, odd: tuple[int, ...], options: dict[str, Any]
) -> tuple[str, list[int], list[str], str]:
    """Return the engine, domains, warnings and error of a group on ranks of which some are odd."""
    said: list[str] = []
    create._say_engine.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(create._LOGGER, "log", lambda _, text, *args: said.append(text % args))
        if fault == "cloned" and (rank in odd) != (0 in odd):
            patch.setattr(shm, "find_shared", _find_nothing)
        elif rank in odd and fault == "unknown":
            patch.setattr(system, "_BOOT_ID", "")
        elif rank in odd and fault == "no descriptor":
            patch.setattr(os, "memfd_create", _no_descriptor)
        groups: list[uec.Group] = []
        error = raised(lambda: groups.append(uec.new_group(process_group, **OPTIONS, **options)))
    for group in groups:
        with group:
            engine = type(session_of(group).engine).__name__
            return engine, group.topology.domain.tolist(), said, ""
    return "", [], said, f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("fault", "odd", "reason", "domains"),
    [
        ("cloned", (0,), "ranks 1-2 cannot open the memory of rank 0", [0, 0, 0]),
        ("unknown", (0, 1, 2), "ranks 0-2: /proc has no boot id", [0, 1, 2]),
    ],
)
def test_auto_takes_c10d_and_says_so(
    ranks: RankPool, fault: str, odd: tuple[int, ...], reason: str, domains: list[int]
) -> None:
    results = ranks.run(3, _make, fault, odd, {})
    assert [(engine, error) for engine, _, _, error in results] == [("C10dEngine", "")] * 3
    assert results[0][1] == domains
    assert "uses the c10d engine (" in results[0][2][0]
    assert f"; {reason}" in results[0][2][0]


@pytest.mark.parametrize(
    ("fault", "odd", "options", "reason"),
    [
        ("cloned", (0,), {"engine": "host"}, "ranks 1-2 cannot open the memory of rank 0 in /proc"),
        ("unknown", (1,), {"fabric": "shm"}, "rank 1: /proc has no boot id"),
    ],
)
def test_the_host_engine_says_what_keeps_the_ranks_apart(
    ranks: RankPool, fault: str, odd: tuple[int, ...], options: dict[str, Any], reason: str
) -> None:
    for _, _, _, error in ranks.run(3, _make, fault, odd, options):
        assert error.startswith(f"UnsupportedError: {reason}")
        assert "engine='c10d'" in error


def test_the_host_engine_is_of_one_machine() -> None:
    with pytest.raises(errors.UnsupportedError, match="rank 0 and ranks 2-3 of 4 are on different"):
        host.check_machines(["a", "a", "b", "b"])


@pytest.mark.parametrize("options", [{}, {"engine": "host"}], ids=str)
def test_too_many_files_is_said_where_it_is_so(ranks: RankPool, options: dict[str, Any]) -> None:
    results = ranks.run(2, _make, "no descriptor", (1,), options)
    own, told = results[1][3], results[0][3]
    assert own.startswith("BootstrapError: rank 1: files to share memory with the ranks on")
    assert "ulimit -n" in own
    assert told.startswith("BootstrapError: rank 0: cannot continue, because rank 1 failed")


def test_one_rank_needs_no_id(ranks: RankPool) -> None:
    assert ranks.run(1, _make, "unknown", (0,), {"engine": "host"})[0][0] == "HostEngine"


def test_an_unknown_machine_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_BOOT_ID", "")
    first = shm.machine_id()
    assert first == shm.machine_id()
    assert first.startswith(shm.UNKNOWN)
    shm._unknown_machine.cache_clear()  # as in another process
    assert first != shm.machine_id()


def test_recordings_name_an_unknown_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorder._machine() == system.boot_id()
    monkeypatch.setattr(system, "_BOOT_ID", "")
    assert recorder._machine() == os.uname().nodename
