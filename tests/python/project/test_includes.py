"""Which folder of src/ may include which (tools/includes.py), and what the core does without."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src"
sys.path.insert(0, str(ROOT / "tools"))

from includes import violations  # noqa: E402


def write(source: Path, files: dict[str, str]) -> None:
    for name, header in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#pragma once\n\n#include {header}\n" if header else "#pragma once\n")


def test_no_file_includes_what_it_may_not() -> None:
    assert list(violations(SOURCE)) == []


@pytest.mark.parametrize(
    ("name", "header", "message"),
    [
        ("core/plan/a.hpp", '"core/reroute/b.hpp"', "core/plan may not include core/reroute/b.hpp"),
        ("core/transfer/a.hpp", "<engine/b.hpp>", "core/transfer may not include engine/b.hpp"),
        ("cuda/device/a.cuh", '"cuda/b.hpp"', "cuda/device may not include cuda/b.hpp"),
        ("host/a.cc", '"cuda/b.hpp"', "host may not include cuda/b.hpp"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, name: str, header: str, message: str) -> None:
    write(tmp_path, {name: header, header.strip('"<>'): ""})
    assert list(violations(tmp_path)) == [f"{tmp_path / name}:3: {message}"]


def test_files_outside_the_order_are_found(tmp_path: Path) -> None:
    write(tmp_path, {"core/a.hpp": "", "host/a.cc": '"b.hpp"', "host/b.hpp": ""})
    assert list(violations(tmp_path)) == [
        f"{tmp_path}/core/a.hpp:1: core has no place in the order",
        f"{tmp_path}/host/a.cc:3: b.hpp is not a path below {tmp_path.name}/",
    ]


def test_a_circle_is_found(tmp_path: Path) -> None:
    write(tmp_path, {"host/a.hpp": '"host/b.hpp"', "host/b.hpp": '"host/a.hpp"'})
    (found,) = violations(tmp_path)
    assert "includes itself: host/" in found


@pytest.mark.parametrize(
    "path",
    sorted((SOURCE / "core").rglob("*.*")),
    ids=lambda path: path.relative_to(SOURCE).as_posix(),
)
def test_core_is_header_only_and_free_of_platforms(path: Path) -> None:
    assert path.suffix == ".hpp"
    text = path.read_text()
    system = re.findall(r"^\s*#\s*include\s*<([^>]+)>", text, re.MULTILINE)
    assert set(system) <= {"cstddef", "cstdint"}, system  # no CUDA, no threads, no operating system
    assert text.count("#pragma once") == 1
