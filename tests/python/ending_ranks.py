"""Ranks that end as Python programs do.

The ranks of all programs are forked from one process that has imported what they need, and return
from `main`, after which that process's script has to end: then all that an interpreter does at its
end happens in each.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ultraep_comm as uec
from ultraep_comm import _core, nn
from ultraep_comm.group.layers import group_for

LIMIT = 60.0  # seconds for a program
SLOW_MS = int(os.environ.get("SLOW_GLOO_MS", "0"))  # slow_gloo.cc is preloaded
ENGINE = os.environ.get("ENDING_ENGINE", "host")
E, S, H = 8, 1, 64
KEPT: list[Any] = []  # to the end of the interpreter


def _experts(x: torch.Tensor, local: Any, slots: Any) -> torch.Tensor:
    return x @ torch.cat([local["w"], slots["w"]]).sum(0)


class Rank:
    """A group and one training step with it: hooks, a backward pass, an exchange over gloo."""

    def __init__(self) -> None:
        self.group = uec.new_group(
            num_experts=E,
            slots_per_rank=S,
            expert={"w": ((H, H), torch.float32)},
            grads=torch.float32,
            engine=ENGINE,
        )
        weight = torch.nn.Parameter(torch.ones(self.group.num_local_experts, H, H))
        self.layer = nn.ReplicatedExperts(self.group, _experts, {"w": weight})
        ranks = self.group.num_ranks
        first = [(rank + 1) % ranks * E // ranks for rank in range(ranks)]  # the next rank's
        self.plan = uec.Plan.from_slots([[expert] for expert in first], num_experts=E)

    def step(self) -> None:
        if SLOW_MS:
            ctypes.CDLL(None).slow_gloo(SLOW_MS)
        x = torch.ones(4, H, requires_grad=True)
        self.layer(x, self.plan).sum().backward()
        for tensor in (x, *self.layer.parameters()):
            assert tensor.grad is not None
            dist.all_reduce(tensor.grad)
        self.exchange()

    def exchange(self) -> None:
        uec.gather_load(torch.zeros(4, 1, dtype=torch.int64), group=self.group)

    def start(self) -> uec.Work:
        work = uec.replicate_experts(self._weights(), self.plan, group=self.group, async_op=True)
        assert work is not None
        return work

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach() for name, weight in self.layer.weights.items()}


def _nothing() -> None:
    Rank().step()


def _keeps() -> None:
    KEPT.append(Rank())
    KEPT[0].step()


def _closes() -> None:
    _keeps()
    KEPT[0].group.close()


def _shares() -> None:
    """A group of `group_for`, with a plan that is still saved; rank 0 leaves no process group."""
    like = {"w": torch.ones(E // dist.get_world_size(), H)}
    group, _ = group_for(like=like, slots_per_rank=S, grads=torch.float32, engine=ENGINE)
    KEPT.append(group.save(uec.gather_and_plan(torch.zeros(8, 1).long(), group=group)))
    uec.replicate_experts(like, KEPT[0], group=group)
    if dist.get_rank() == 0:
        dist.destroy_process_group()


def _destroys() -> None:
    _keeps()
    dist.destroy_process_group()


def _closes_and_destroys() -> None:
    _closes()
    dist.destroy_process_group()
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert not [name for name in names if "gloo" in name], names


def _raises() -> None:
    _keeps()
    work = KEPT[0].start()
    raise KeyError(work)


def _fails() -> None:
    """Rank 0's input is bad: its own error and, when all meet at the latest, the others'."""
    _keeps()
    if dist.get_rank() == 0:
        uec.replicate_experts({}, KEPT[0].plan, group=KEPT[0].group)
    KEPT[0].start().wait()  # succeeds where rank 0 was not needed
    KEPT[0].exchange()


def _fails_and_goes_on() -> None:
    try:
        _fails()
    except uec.errors.UltraEPError as error:
        KEPT.append(error)  # and its traceback


def _forgets_work() -> None:
    _keeps()
    KEPT.append(KEPT[0].start())


def _leaves_call() -> None:
    """Rank 0 never makes the call that the others have in flight."""
    _keeps()
    if dist.get_rank() != 0:
        KEPT.append(KEPT[0].start())


def _leaves_thread() -> None:
    """The same, with a thread that is never joined waiting for the call."""
    _leaves_call()
    if dist.get_rank() != 0:
        threading.Thread(target=KEPT[1].wait, daemon=True).start()
        time.sleep(0.1)


def _leaves_planner() -> None:
    """A thread that is never joined keeps calling the core."""

    load, home = np.arange(256) % 7, np.arange(256, dtype=np.int32) // 4
    domain = np.zeros(64, np.int32)

    def plan() -> None:
        while True:
            _core.plan_replicas(load, home, domain, 2, False, 1_010_000)

    threading.Thread(target=plan, daemon=True).start()
    time.sleep(0.1)


def _keeps_graph() -> None:
    """As a script does whose last loss is a global: torch lets go of it too late for Python."""
    _keeps()
    rank: Rank = KEPT[0]
    globals()["LOSS"] = rank.layer(torch.ones(4, H, requires_grad=True), rank.plan).sum()
    globals()["LOSS"].backward()


def _drops_graph() -> None:
    """The last exchanged tensor refers to the group through its autograd graph."""
    rank = Rank()
    rank.step()
    y = rank.layer(torch.ones(4, H, requires_grad=True), rank.plan)
    with torch.no_grad():
        dist.all_reduce(y)


def _leaves_cycle() -> None:
    gc.disable()
    rank: Any = Rank()
    rank.step()
    rank.layer.cycle = [rank, rank.start()]


PROGRAMS: dict[str, Callable[[], None]] = {
    "drops the group": _nothing,
    "keeps the group": _keeps,
    "shares a group": _shares,
    "destroys": _destroys,
    "closes and destroys": _closes_and_destroys,
    "raises": _raises,
    "fails and goes on": _fails_and_goes_on,
    "forgets work": _forgets_work,
    "leaves a call": _leaves_call,
    "leaves a thread": _leaves_thread,
    "leaves a planner": _leaves_planner,
    "drops a graph": _drops_graph,
    "leaves a cycle": _leaves_cycle,
    "keeps a graph": _keeps_graph,
}


def main(folder: Path, num_ranks: int, names: list[str]) -> None:
    """Run programs, and return in every rank and, when all have ended, in their parent.

    Prints a line for each program: what its ranks have ended with. What they write goes to
    `<folder>/<number>.<rank>`.
    """
    for number, name in enumerate(names):
        processes = []
        for rank in range(num_ranks):
            process = os.fork()
            if process == 0:
                out = os.open(folder / f"{number}.{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(out, 1)
                os.dup2(out, 2)
                torch.set_num_threads(1)
                store = f"file://{folder}/{number}.store"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
                PROGRAMS[name]()
                return
            processes.append(process)
        end, ended = time.monotonic() + LIMIT, dict[int, int]()
        while len(ended) < num_ranks:
            for process in set(processes) - set(ended):
                pid, status = os.waitpid(process, os.WNOHANG)
                if pid == process:
                    ended[process] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        print(*(ended[process] for process in processes), flush=True)
