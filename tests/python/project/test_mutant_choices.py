"""The copies of a source that cmake/mutants.py writes: each mutant, and none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cpp_build import ROOT, CppBuild, run

SOURCE = """
#include <cstdio>
constexpr int twice(int x) { return 2 * x; }
static_assert(twice(1) == 2);
struct Sum {
  explicit Sum(int start) : at{start} {}
  int at{0};
  int add(int n) {
    for (int i = 0; i < n; ++i) {
      if (i % 2 != 0) continue;
      at += i;  // } not a brace
    }
    const auto last = [&] { return at; };
    switch (n) {
      case 4: at += 100; break;
      default: at += 200;
    }
    return last() + twice(n);
  }
};
int main() { std::printf("%d", Sum{1}.add(4) + Sum(0).at); }
"""
MUTANTS = [  # name, find, replace, what the program prints
    ("in_a_loop", "at += i;", "at += 10;", "129"),
    ("in_the_condition_of_a_block", "i % 2 != 0", "i % 2 == 0", "113"),
    ("in_the_same_place", "at += i;", "at -= i;", "107"),
    ("around_others", "int i = 0;", "int i = 3;", "109"),
    ("while_compiling_as_it_was", "2 * x", "3 * x", "115"),
    ("in_a_lambda", "return at;", "return 0;", "8"),
    ("behind_a_switch", "return last()", "return -last()", "-95"),
    ("in_a_case", "at += 100", "at += twice(n + 1); return at", "13"),
    ("with_a_member_more", "int at{0};", "int at{0};\n  int more = 7;", "118"),
    ("with_a_member_more", "last() + ", "last() + more + ", "118"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/source.cc").write_text(SOURCE)
    return tmp_path


def copies(folder: Path, mutants: list[tuple[str, str, str, str]]) -> str:
    fields = ("\x1f".join((name, "source.cc", find, new)) for name, find, new, _ in mutants)
    (folder / "entries").write_text("".join(f"{entry}\x1e" for entry in fields))
    script = [sys.executable, ROOT / "cmake/mutants.py"]
    return run([*script, folder / "entries", folder / "copies", folder / "src"], check=False)


def test_every_mutant_is_chosen(cpp: CppBuild, folder: Path) -> None:
    assert copies(folder, MUTANTS) == ""
    folders = [f"-I{folder}/copies", f"-I{ROOT}/tests"]
    files = [folder / "copies/source.cc", ROOT / "tests/mutant.cc"]
    run([os.environ.get("CXX", "c++"), "-std=c++20", "-w", *folders, *files, "-o", folder / "a"])

    def printed(**chosen: str) -> str:
        return subprocess.run(
            [folder / "a"], env=chosen, capture_output=True, text=True, check=False
        ).stdout

    assert printed() == "111"
    assert {m[0]: printed(UEC_MUTANT=m[0]) for m in MUTANTS} == {m[0]: m[3] for m in MUTANTS}
    assert printed(UEC_MUTANT="unknown") == ""


@pytest.mark.parametrize(
    ("find", "new", "error"),
    [
        ("nowhere", "", "found 0 times, not once"),
        ("at", "", "not once"),
        ("2 * x", "2 * x", "FIND and REPLACE are the same"),
        ("int at{0}", "int at{1}", "no function is changed by {'a'}"),
    ],
)
def test_what_makes_no_mutant_is_an_error(folder: Path, find: str, new: str, error: str) -> None:
    assert error in copies(folder, [("a", find, new, "")])
