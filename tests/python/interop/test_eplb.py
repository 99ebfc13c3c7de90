"""EPLB's placements: what becomes of them, and why some cannot be expressed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_tokens import rank_tokens

import ultraep_comm as uec
from ultraep_comm import interop
from ultraep_comm.errors import InvalidPlanError
from ultraep_comm.plan.topology import contiguous_home


def dealt(rows: Sequence[int], num_ranks: int, totals: Sequence[int]) -> list[int]:
    """Tokens by rank, if each expert's are dealt out to its rows one by one."""
    tokens = [0] * num_ranks
    for expert, total in enumerate(totals):
        own = [row for row, held in enumerate(rows) if held == expert]
        for token in range(total):
            tokens[own[token % len(own)] * num_ranks // len(rows)] += 1
    return tokens


def test_slots_are_the_rows_of_no_local_expert() -> None:
    # Rank 0 has rows 0 to 3. Of expert 1's two rows there one is its main.
    rows = [2, 1, -1, 0, 3, 2, 0, 0]
    load = torch.tensor([[4, 1, 6, 0], [3, 0, 1, 2]])
    with pytest.raises(InvalidPlanError, match="expert 0 is twice on rank 1, in rows 6 and 7"):
        interop.from_eplb(rows, num_ranks=2, num_experts=4, load=load)
    plan = interop.from_eplb(rows, num_ranks=2, num_experts=4, load=load, merge=True)
    assert plan.slot_expert.tolist() == [[2, -1], [0, -1]]
    assert plan.home.tolist() == [0, 0, 1, 1]
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    assert plan.slot_quota.tolist() == [[4, 0], [4, 0]]  # 7 tokens in three rows are 3, 2 and 2
    assert plan.home_quota.tolist() == [3, 1, 3, 2]
    assert plan.load is not None
    assert plan.load.tolist() == load.tolist()
    wide = interop.from_eplb(rows, num_ranks=2, num_experts=4, merge=True, slots_per_rank=3)
    assert wide.slot_expert.tolist() == [[2, -1, -1], [0, -1, -1]]
    assert wide.slot_quota is None
    narrow = interop.from_eplb(rows, num_ranks=2, num_experts=4, merge=True, slots_per_rank=1)
    assert narrow.slot_expert.tolist() == [[2], [0]]


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Rows, ranks and experts; most experts have a row."""
    num_ranks = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 7))
    least = -(-num_experts // num_ranks)
    size = draw(st.integers(least, least + 2)) * num_ranks
    spare = draw(st.lists(st.integers(-1, num_experts - 1), min_size=size, max_size=size))
    rows = [*range(draw(st.sampled_from([0, num_experts]))), *spare][:size]
    return draw(st.permutations(rows)), num_ranks, num_experts


def check_eplb(rows: list[int], num_ranks: int, home: Sequence[int], data: st.DataObject) -> None:
    """It converts, with the tokens of each rank that EPLB gives it, or says truly why not."""
    num_experts, per_rank = len(home), len(rows) // num_ranks
    held = [set(rows[r * per_rank : (r + 1) * per_rank]) - {-1} for r in range(num_ranks)]
    missing = [e for e in range(num_experts) if e not in rows]
    moved = [e for e in range(num_experts) if e not in held[home[e]]]
    twice = sum(map(len, held)) < sum(row >= 0 for row in rows)
    loads = st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts)
    load = torch.tensor([data.draw(loads) for _ in range(num_ranks)])

    def convert(*, merge: bool) -> uec.Plan:
        return interop.from_eplb(
            rows, num_ranks=num_ranks, num_experts=num_experts, home=home, load=load, merge=merge
        )

    if missing or moved or twice:
        with pytest.raises(InvalidPlanError) as caught:
            convert(merge=False)
        if missing:
            assert f"expert {missing[0]} has no row;" in str(caught.value)
        elif moved:
            assert f"expert {moved[0]} has no row on its home" in str(caught.value)
        else:
            named = re.match(r"expert (\d+) is twice on rank (\d+), in", str(caught.value))
            assert named
            expert, rank = map(int, named.groups())
            assert rows[rank * per_rank : (rank + 1) * per_rank].count(expert) > 1
    if not missing and not moved:
        plan = convert(merge=True)
        plan.validate()
        assert rank_tokens(plan) == dealt(rows, num_ranks, load.sum(0).tolist())
        for rank, slots in enumerate(plan.slot_expert.tolist()):
            local = {e for e in range(num_experts) if home[e] == rank}
            assert {e for e in slots if e >= 0} | local == held[rank]
        if not twice:
            assert torch.equal(plan.slot_expert, convert(merge=False).slot_expert)


@given(placements(), st.data())
def test_any_placement_converts_or_says_why_not(
    placement: tuple[list[int], int, int], data: st.DataObject
) -> None:
    rows, num_ranks, num_experts = placement
    per_rank = len(rows) // num_ranks
    anywhere = st.integers(0, num_ranks - 1)
    homes = [
        st.sampled_from([r // per_rank for r, e in enumerate(rows) if e == expert]) | anywhere
        if expert in rows
        else anywhere
        for expert in range(num_experts)
    ]
    check_eplb(rows, num_ranks, [data.draw(home) for home in homes], data)
    check_eplb(rows, num_ranks, contiguous_home(num_experts, num_ranks).tolist(), data)


@given(placements(), st.data())
def test_the_most_even_home_map_is_found(
    placement: tuple[list[int], int, int], data: st.DataObject
) -> None:
    rows, num_ranks, num_experts = placement
    assume(set(range(num_experts)) <= set(rows))
    per_rank, even = len(rows) // num_ranks, num_experts / num_ranks
    ranks = [{r // per_rank for r, e in enumerate(rows) if e == x} for x in range(num_experts)]
    maps = [np.bincount(home, minlength=num_ranks) for home in product(*ranks)]
    least = min(local.max() for local in maps)
    sizes = {"num_ranks": num_ranks, "num_experts": num_experts}
    home = interop.home_from_eplb(rows, **sizes).tolist()
    local = np.bincount(home, minlength=num_ranks)
    assert local.max() == least
    if any(found.max() == math.ceil(even) and found.min() == math.floor(even) for found in maps):
        assert local.min() == math.floor(even)
    check_eplb(rows, num_ranks, home, data)


def test_experts_stay_at_home_if_they_can() -> None:
    home = interop.home_from_eplb([2, 0, 1, 3, 1, 2], num_ranks=2, num_experts=4)
    assert home.tolist() == [0, 0, 1, 1]
    assert home.dtype == torch.int32
