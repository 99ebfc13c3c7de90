"""Plans of LLEP, MoonEP and UltraEP keep their tokens and their slots."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_tokens import ROWS, ULTRAEP, rank_tokens
from ranks import plan_alone

import ultraep_comm as uec
from studies.peers.moonep import tokens_moonep
from ultraep_comm import interop
from ultraep_comm.errors import InvalidPlanError
from ultraep_comm.plan.topology import contiguous_home

ROOT = Path(__file__).resolve().parents[3]

# ---- LLEP ---------------------------------------------------------------------------------------


def test_chunks_become_instances() -> None:
    # Expert 1 goes to rank 1 in two chunks, as when all helpers are full; expert 2 has no tokens.
    chunks = {1: [(0, 0, 4), (1, 4, 9), (1, 9, 10)], 0: [(1, 0, 3)], 3: [(1, 0, 1)]}
    load = torch.tensor([[3, 4, 0, 0], [0, 6, 0, 1]])
    plan = interop.from_llep(chunks, num_ranks=2, num_experts=4, load=load)
    assert plan.slot_expert.tolist() == [[-1, -1], [0, 1]]
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    assert plan.slot_quota.tolist() == [[0, 0], [3, 6]]
    assert plan.home_quota.tolist() == [0, 4, 0, 1]
    assert interop.from_llep({}, num_ranks=2, num_experts=4).slots_per_rank == 0


@given(st.data())
def test_any_assignment_keeps_its_tokens(data: st.DataObject) -> None:
    num_ranks, local = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    chunk = st.tuples(st.integers(0, num_ranks - 1), st.integers(1, 50))
    drawn = data.draw(
        st.dictionaries(st.integers(0, num_ranks * local - 1), st.lists(chunk, max_size=4))
    )
    chunks: dict[int, list[tuple[int, int, int]]] = {}
    loads, needed = [0] * num_ranks, [set[int]() for _ in range(num_ranks)]
    for expert, parts in drawn.items():
        ends = np.cumsum([count for _, count in parts]).tolist()
        chunks[expert] = [(r, end - n, end) for (r, n), end in zip(parts, ends, strict=True)]
        for rank, count in parts:
            loads[rank] += count
            if rank != expert // local:
                needed[rank].add(expert)
    sizes = {"num_ranks": num_ranks, "num_experts": num_ranks * local}
    plan = interop.from_llep(chunks, **sizes)
    assert rank_tokens(plan) == loads
    most = max(map(len, needed))
    assert plan.slots_per_rank == most
    assert [set(row) - {-1} for row in plan.slot_expert.tolist()] == needed
    if most:
        with pytest.raises(
            InvalidPlanError, match=rf"needs \d+ slots.* slots_per_rank is {most - 1}"
        ):
            interop.from_llep(chunks, **sizes, slots_per_rank=most - 1)


# ---- MoonEP -------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_a_level_plan_stays_level(num_ranks: int, local: int, tokens: int, seed: int) -> None:
    generator, num_experts = np.random.default_rng(seed), num_ranks * local
    skew = generator.dirichlet(np.full(num_experts, 0.3))
    load = generator.multinomial(tokens, skew, size=num_ranks)
    home = contiguous_home(num_experts, num_ranks)
    alloc = tokens_moonep(load.sum(axis=0), home, num_ranks, local).tokens
    copies = np.full((num_ranks, local), -1)  # B = E / R always suffices
    for rank, row in enumerate(alloc):
        remote = [e for e in np.flatnonzero(row) if e // local != rank]
        copies[rank, : len(remote)] = sorted(remote, key=lambda e: -row[e])
    plan = interop.from_moonep(
        torch.tensor(copies), num_experts=num_experts, alloc=alloc, load=torch.tensor(load)
    )
    assert rank_tokens(plan) == [tokens] * num_ranks
    assert plan.imbalance == 1.0
    assert plan.slot_expert.tolist() == copies.tolist()
    bare = interop.from_moonep(copies, num_experts=num_experts)
    assert bare.slot_quota is None
    used = int((copies >= 0).sum(1).max())
    tight = interop.from_moonep(copies, num_experts=num_experts, slots_per_rank=used)
    assert tight.slots_per_rank == used


# ---- UltraEP ------------------------------------------------------------------------------------


def test_the_published_example_of_ultraep() -> None:
    load = torch.tensor([[3, 4, 0, 9], [4, 4, 1, 0]])
    plan = interop.from_ultraep(ROWS, **ULTRAEP, load=load)
    assert plan.home.tolist() == [1, 0, 0, 1]
    assert plan.slot_expert.tolist() == [[3], [1]]
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    assert plan.slot_quota.tolist() == [[4], [6]]
    assert plan.home_quota.tolist() == [7, 2, 1, 5]
    ready = uec.Plan.from_slots(plan.slot_expert, num_experts=4, home=plan.home)
    bare = interop.from_ultraep(torch.tensor(ROWS), num_ranks=2, num_experts=4)
    assert torch.equal(bare.slot_expert, ready.slot_expert)
    assert bare.slot_quota is None


@given(st.data())
def test_plans_come_back_from_ultraeps_tensors(data: st.DataObject) -> None:
    """A plan of ours, written as UltraEP does, and read again."""
    num_ranks, local, slots = (data.draw(st.integers(*ends)) for ends in ((2, 4), (1, 3), (0, 2)))
    num_experts = num_ranks * local
    loads = st.lists(st.integers(0, 99), min_size=num_experts, max_size=num_experts)
    load = torch.tensor([data.draw(loads) for _ in range(num_ranks)])
    plan = plan_alone(load, slots_per_rank=min(slots, num_experts))
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    rows: list[int] = []
    places = [[0] * 1 for _ in range(num_experts)]
    quota = [[int(count)] for count in plan.home_quota]
    for rank, held in enumerate(plan.slot_expert.tolist()):
        for expert in range(rank * local, rank * local + local):
            places[expert] = [len(rows)]
            rows.append(expert)
        rows += held
    for rank, held in enumerate(plan.slot_expert.tolist()):
        for slot, expert in enumerate(held):
            if expert >= 0:
                places[expert].append(rank * (local + len(held)) + local + slot)
                quota[expert].append(int(plan.slot_quota[rank, slot]))
    widest = max(map(len, places))
    again = interop.from_ultraep(
        rows,
        num_ranks=num_ranks,
        num_experts=num_experts,
        logical_to_physical=[own + [-1] * (widest - len(own)) for own in places],
        quota=[own + [0] * (widest - len(own)) for own in quota],
        load=load,
    )
    for name, value in plan.tensors().items():
        assert name == "domains" or torch.equal(getattr(again, name), value), name


# ---- the documentation --------------------------------------------------------------------------


def test_the_documentation_runs() -> None:
    (shown,) = re.findall(
        r"```python\n([^`]*import interop.*?)```",
        (ROOT / "docs" / "frameworks" / "README.md").read_text(),
        re.DOTALL,
    )
    exec(shown, {})
