"""The c10d engine on several machines: network namespaces with limited links between them."""

from __future__ import annotations

import multiprocessing as mp
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import clear_slots, fill_weights, make_weights, raised, random_plan, wrong_bytes
from tiers import sampled

import ultraep_comm as uec
from studies.netlab.lab import Lab, lab_problem
from ultraep_comm import Segment

RANKS_EACH, E, S = 2, 12, 2
EXPERT = {"w13": Segment((700, 1000), torch.uint8), "w2": Segment((300_007,), torch.uint8)}
CALLS = 3


def _crossings(plan: uec.Plan, domain: list[int]) -> int:
    """Return how many experts have to cross to how many domains, by the plan alone."""
    homes = plan.home.tolist()
    needed = {
        (expert, domain[rank])
        for rank, row in enumerate(plan.slot_expert.tolist())
        for expert in row
        if expert >= 0
    }
    return sum(domain[homes[expert]] != there for expert, there in needed)


def _join(lab: Lab, folder: str, rank: int, num_ranks: int) -> None:
    lab.enter(rank // RANKS_EACH)
    os.environ["GLOO_SOCKET_IFNAME"] = lab.interface
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=num_ranks
    )


def _rank(lab: Lab, folder: str, rank: int, num_ranks: int, answers: Any) -> None:
    machine = rank // RANKS_EACH
    _join(lab, folder, rank, num_ranks)
    group = uec.new_group(
        num_experts=E,
        slots_per_rank=S,
        expert=EXPERT,
        engine="c10d",
        allow_cross_domain=True,
    )
    domain = group.topology.domain.tolist()
    plan = random_plan(3, num_ranks, E, S, fill=1.0)
    weights, wrong = make_weights(group), 0
    fill_weights(group, weights, 1)
    dist.barrier()
    before = lab.sent_bytes(machine)
    dist.barrier()  # else the machine's other ranks could already send
    for mode in ("push", "auto", "push"):
        clear_slots(group)
        uec.replicate_experts(weights, plan, group=group, mode=mode)
        wrong += wrong_bytes(group, plan, 1)
    dist.barrier()
    sent = lab.sent_bytes(machine) - before if rank % RANKS_EACH == 0 else 0
    answers.put((domain, wrong, sent, _crossings(plan, domain), plan.num_replicas))
    group.close()
    dist.destroy_process_group()


def _without_interface(lab: Lab, folder: str, rank: int, num_ranks: int, answers: Any) -> None:
    """Let gloo take the loopback address: no other is both the host name's and in the lab."""
    _join(lab, folder, rank, num_ranks)
    del os.environ["GLOO_SOCKET_IFNAME"]
    error = raised(lambda: uec.new_group(num_experts=E, slots_per_rank=S, expert=EXPERT))
    answers.put(f"{type(error).__name__}: {error}")
    dist.barrier()
    dist.destroy_process_group()


def _run(machines: int, target: Any, folder: Path) -> list[Any]:
    """Run ``target`` on all ranks; return what they put into the queue, in any order."""
    if (problem := lab_problem()) is not None:
        pytest.skip(problem)
    num_ranks = machines * RANKS_EACH
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "studies.netlab.lab"])
    answers = context.Queue()
    with Lab(machines=machines, gbit=1.0) as lab:
        ranks = [
            context.Process(
                target=target, args=(lab, str(folder), rank, num_ranks, answers), daemon=True
            )
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        found = [answers.get(timeout=90) for _ in ranks]
        for process in ranks:
            process.join(30)
    return found


def test_a_loopback_address_is_refused_before_gloo_connects(tmp_path: Path) -> None:
    for error in _run(2, _without_interface, tmp_path):
        assert error.startswith("BootstrapError: ranks 0-3: gloo would listen at a loopback")


@pytest.mark.parametrize("machines", sampled([2, 3], lambda machines: machines == 2))
def test_an_expert_crosses_once_to_each_machine_that_needs_it(
    machines: int, tmp_path: Path
) -> None:
    num_ranks = machines * RANKS_EACH
    found = _run(machines, _rank, tmp_path)
    domains, wrong, sent, crossings, replicas = zip(*found, strict=True)
    assert wrong == (0,) * num_ranks
    assert all(domain == [r // RANKS_EACH for r in range(num_ranks)] for domain in domains)
    # Else handing on inside machines would make no difference.
    assert 0 < crossings[0] < replicas[0]
    payload = CALLS * crossings[0] * sum(segment.nbytes for segment in EXPERT.values())
    assert payload <= sum(sent) <= 1.05 * payload
