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
RAISE = ("raises",)
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
    names = ["shares a group", "keeps the group", "closes and destroys", "raises", "keeps a graph"]
    names += ["fails and goes on", "forgets work", "leaves a call", "leaves a thread"]
    assert _end(tmp_path, 2, names[: cases(5, 9)]) == []


@pytest.mark.cases
def test_programs_end_on_c10d(tmp_path: Path) -> None:
    names = ["shares a group", "keeps the group", "leaves a call", "leaves a cycle"]
    names += ["fails and goes on", "destroys", "closes and destroys", "forgets work"]
    names += ["leaves a thread", "drops a graph", "raises"]
    assert _end(tmp_path, 2, names[: cases(4, 11)], ENDING_ENGINE="c10d") == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_programs_end_beside_a_busy_machine(tmp_path: Path) -> None:
    """At least 80 processes, of each program as many."""
    names = [*PROGRAMS] * math.ceil(80 / 4 / len(PROGRAMS))
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


# The context of a custom function is not freed once the interpreter finalizes: torch leaves it.
KEEPS_GRAPHS = """
import itertools, sys
import torch, ultraep_comm as uec
from torch.utils.checkpoint import checkpoint
from ultraep_comm.group.group import session_of
from ultraep_comm.nn import ReplicatedExperts

class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad

def run(ways, closes, fails):
    (group,) = uec.testing.new_loopback_groups(
        1, num_experts=2, slots_per_rank=1, grads=torch.float32,
        expert={"w": ((2, 2), torch.float32)}, engine=sys.argv[1])
    weights = {"w": torch.nn.Parameter(torch.ones(2, 2, 2))}
    layer = ReplicatedExperts(group, lambda x, local, slots: x @ local["w"][0], weights)
    plan = uec.Plan.from_slots([[-1]], num_experts=2)
    call = lambda x: layer(x, plan, microbatch=0)
    x = Same.apply(torch.ones(2, 2, requires_grad=True))
    y = Same.apply(call(x) if ways is None else checkpoint(call, x, use_reentrant=ways))
    y.sum().backward()
    if fails:
        group.abort()
        try:
            uec.replicate_experts(weights, plan, group=group)
        except uec.errors.UltraEPError as error:
            session_of(group).first_error = error
    if closes:
        group.close()
    return y

kept = [run(*case) for case in itertools.product((None, True, False), (True, False), (True, False))]
"""


@pytest.mark.parametrize("engine", ["host", "c10d"])
def test_a_graph_in_a_global_is_no_leak(engine: str) -> None:
    done = run_python("-c", KEEPS_GRAPHS, engine)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_group_says_that_the_process_ends() -> None:
    """To an exit handler that runs after ours."""
    program = """
import atexit
@atexit.register
def last():
    group.close()
    for call in (group.health, group.empty_weights):
        try:
            call()
        except uec.errors.GroupClosedError as error:
            print(error)
import torch, ultraep_comm as uec
(group,) = uec.testing.new_loopback_groups(1, num_experts=2, slots_per_rank=1,
                                   expert={"w": ((2, 2), torch.float32)})
"""
    done = run_python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["the process is ending, and its groups are closed"] * 2
