"""The ends of processes: no abort, no hang, no leaks, whatever a program leaves behind."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ending_ranks import LIMIT, PROGRAMS
from ranks import run_python
from tiers import cases

HERE = Path(__file__).parents[1]
RAISE = ("raises", "raises in context", "fails")
BAD = ("terminate", "nanobind", "Fatal", "Segmentation", "Exception ignored")
# Holds the interpreter lock in the last exit handler: other threads have to wait for it.
HOLD_LOCK = "import atexit; atexit.register(sum, range(5 * 10**7))"
# Keeps the final garbage collection away from torch's own objects, which take most of its time.
LEAVE_TORCH = "import gc, torch; gc.freeze()"


def _end(
    folder: Path, num_ranks: int, names: list[str], before: str = "", **environment: str
) -> list[str]:
    """Run programs; return those that ended wrongly, with their output."""
    program = f"{before}\nimport ending_ranks, pathlib\n"
    program += f"ending_ranks.main(pathlib.Path({str(folder)!r}), {num_ranks}, {names})"
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    done = run_python("-c", program, timeout=LIMIT * len(names), **environment)
    wrong = [] if done.returncode == 0 else [done.stderr]
    wrong += [line for line in done.stderr.splitlines() if any(bad in line for bad in BAD)]
    ends = done.stdout.splitlines()
    assert len(ends) == len(names)
    for number, (name, end) in enumerate(zip(names, ends, strict=True)):
        texts = [(folder / f"{number}.{rank}").read_text() for rank in range(num_ranks)]
        expected = " ".join(["1" if name in RAISE else "0"] * num_ranks)
        if end != expected or any(bad in text for bad in BAD for text in texts):
            wrong.append(f"run {number}, {name}: {end}\n" + "\n".join(texts))
    return wrong


@pytest.mark.cases
def test_programs_end(tmp_path: Path) -> None:
    names = ["keeps the group", "closes and destroys", "raises", "keeps a graph"]
    names += ["fails and goes on", "forgets work", "leaves a call", "leaves a thread"]
    assert _end(tmp_path, 2, names[: cases(4, 8)]) == []


@pytest.mark.cases
def test_programs_end_on_c10d(tmp_path: Path) -> None:
    names = ["keeps the group", "leaves a call", "leaves a cycle", "fails and goes on", "destroys"]
    names += ["closes and destroys", "forgets work", "leaves a thread", "drops a graph", "raises"]
    assert _end(tmp_path, 2, names[: cases(3, 10)], ENDING_ENGINE="c10d") == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_programs_end_beside_a_busy_machine(tmp_path: Path) -> None:
    """At least 300 processes, of each program as many."""
    names = [*PROGRAMS] * math.ceil(300 / 4 / len(PROGRAMS))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            assert _end(tmp_path, 4, names, LEAVE_TORCH) == []
        finally:
            busy.kill()


@pytest.fixture(scope="module")
def slow_gloo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler: install one, or name it in CXX")
    library = tmp_path_factory.mktemp("preload") / "slow_gloo.so"
    source = HERE / "slow_gloo.cc"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_who_asks_for_the_lock_gets_it_before_the_end_begins(
    tmp_path: Path, slow_gloo: Path
) -> None:
    """These processes used to abort."""
    slow = {"LD_PRELOAD": str(slow_gloo), "SLOW_GLOO_MS": "300"}
    assert _end(tmp_path, 2, ["drops the group", "leaves a planner"], HOLD_LOCK, **slow) == []


@pytest.mark.exhaustive
def test_who_would_ask_later_is_waited_for(tmp_path: Path, slow_gloo: Path) -> None:
    """It would be refused; what the graph refers to used to leak."""
    slow = {"LD_PRELOAD": str(slow_gloo), "SLOW_GLOO_MS": "1000"}
    assert _end(tmp_path, 2, ["drops a graph"], **slow) == []
