"""Other systems' plans: what becomes of them, and why some cannot be expressed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import ultraep_comm as uec
from ultraep_comm import interop
from ultraep_comm.errors import InvalidArgumentError, InvalidPlanError
from ultraep_comm.plan.topology import contiguous_home

ROOT = Path(__file__).resolve().parents[3]


def rank_tokens(plan: uec.Plan) -> list[int]:
    """The tokens that each rank computes."""
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    tokens = plan.slot_quota.sum(dim=1).long()
    return tokens.index_add(0, plan.home.long(), plan.home_quota.long()).tolist()


# ---- EPLB ---------------------------------------------------------------------------------------

# The example of EPLB's README: 12 experts, 16 rows, 8 ranks. Load and result of both layers.
WEIGHT = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


@pytest.mark.parametrize("layer", [0, 1])
def test_the_published_example_of_eplb(layer: int) -> None:
    rows, sizes = torch.tensor(PUBLISHED)[layer], {"num_ranks": 8, "num_experts": 12}
    with pytest.raises(InvalidPlanError, match="expert 0 has no row on its home, rank 0: its rows"):
        interop.from_eplb(rows, **sizes)
    home = interop.home_from_eplb(rows, **sizes)
    mains = torch.bincount(home, minlength=8)
    assert (int(mains.min()), int(mains.max())) == (1, 2)  # 12 experts on 8 ranks
    plan = interop.from_eplb(rows, **sizes, home=home, load=torch.tensor(WEIGHT)[layer])
    assert plan.num_replicas == 4
    assert plan.slots_per_rank == 1
    assert plan.load is None
    assert rank_tokens(plan) == dealt(PUBLISHED[layer], 8, WEIGHT[layer])


def dealt(rows: Sequence[int], num_ranks: int, totals: Sequence[int]) -> list[int]:
    """Tokens by rank, if each expert's are dealt out to its rows one by one."""
    tokens = [0] * num_ranks
    for expert, total in enumerate(totals):
        own = [row for row, held in enumerate(rows) if held == expert]
        for token in range(total):
            tokens[own[token % len(own)] * num_ranks // len(rows)] += 1
    return tokens


def test_slots_are_the_rows_that_are_no_mains() -> None:
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
            mains = {e for e in range(num_experts) if home[e] == rank}
            assert {e for e in slots if e >= 0} | mains == held[rank]
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
    least = min(mains.max() for mains in maps)
    sizes = {"num_ranks": num_ranks, "num_experts": num_experts}
    home = interop.home_from_eplb(rows, **sizes).tolist()
    mains = np.bincount(home, minlength=num_ranks)
    assert mains.max() == least
    if any(found.max() == math.ceil(even) and found.min() == math.floor(even) for found in maps):
        assert mains.min() == math.floor(even)
    assert interop.home_from_eplb(rows, **sizes, max_mains=least).tolist() == home
    check_eplb(rows, num_ranks, home, data)
    most = data.draw(st.integers(0, least - 1))
    if not most:
        return
    with pytest.raises(InvalidPlanError, match=f"no home map with at most {most} exp") as caught:
        interop.home_from_eplb(rows, **sizes, max_mains=most)
    few, where = (
        {int(word) for word in found.split(",")}
        for found in re.findall(r"\[(.*?)\]", str(caught.value))
    )
    # More experts than fit, all of whose rows are on these ranks.
    assert set().union(*(ranks[e] for e in few)) == where
    assert len(few) > most * len(where)


def test_experts_stay_at_home_if_they_can() -> None:
    home = interop.home_from_eplb([2, 0, 1, 3, 1, 2], num_ranks=2, num_experts=4)
    assert home.tolist() == [0, 0, 1, 1]
    assert home.dtype == torch.int32


def test_slots_hold_what_the_placement_says() -> None:
    rows = [3, 0, 1, 2, 1, 0]
    home = interop.home_from_eplb(rows, num_ranks=2, num_experts=4)
    plan = interop.from_eplb(rows, num_ranks=2, num_experts=4, home=home)
    groups = uec.new_loopback_groups(
        2, num_experts=4, slots_per_rank=1, expert={"w": ((3,), torch.float32)}, home=home
    )
    works = []
    for group in groups:
        mains = torch.tensor(group.topology.mains(group.rank)).float()
        weights = {"w": mains[:, None].expand(-1, 3).contiguous()}
        works.append(uec.replicate_experts(weights, plan, group=group, async_op=True))
    for work, group in zip(works, groups, strict=True):
        assert work is not None
        work.wait()
        expert = int(plan.slot_expert[group.rank, 0])
        assert group.slots["w"].tolist() == [[expert] * 3]
        held = {*group.topology.mains(group.rank).tolist(), expert}
        assert held == set(rows[group.rank * 3 : group.rank * 3 + 3])
    for group in groups:
        group.abort()
        group.close()


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
    num_ranks, mains = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    chunk = st.tuples(st.integers(0, num_ranks - 1), st.integers(1, 50))
    drawn = data.draw(
        st.dictionaries(st.integers(0, num_ranks * mains - 1), st.lists(chunk, max_size=4))
    )
    chunks: dict[int, list[tuple[int, int, int]]] = {}
    loads, needed = [0] * num_ranks, [set[int]() for _ in range(num_ranks)]
    for expert, parts in drawn.items():
        ends = np.cumsum([count for _, count in parts]).tolist()
        chunks[expert] = [(r, end - n, end) for (r, n), end in zip(parts, ends, strict=True)]
        for rank, count in parts:
            loads[rank] += count
            if rank != expert // mains:
                needed[rank].add(expert)
    sizes = {"num_ranks": num_ranks, "num_experts": num_ranks * mains}
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


def level(load: np.ndarray, num_ranks: int) -> np.ndarray:
    """Tokens ``[R, E]`` by MoonEP's published policy: the fullest home fills the emptiest rank."""
    num_experts, totals = load.shape[1], load.sum(0)
    mains = num_experts // num_ranks
    alloc = np.zeros((num_ranks, num_experts), np.int64)
    for expert in range(num_experts):
        alloc[expert // mains, expert] = totals[expert]
    mean = totals.sum() // num_ranks
    while True:
        over = alloc.sum(1) - mean
        giver, taker = int(over.argmax()), int(over.argmin())
        if over[giver] <= 0:
            return alloc
        left = -over[taker]
        while left:  # its hottest expert first
            expert = giver * mains + int(alloc[giver, giver * mains : (giver + 1) * mains].argmax())
            moved = min(left, alloc[giver, expert])
            alloc[giver, expert] -= moved
            alloc[taker, expert] += moved
            left -= moved


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_a_level_plan_stays_level(num_ranks: int, mains: int, tokens: int, seed: int) -> None:
    generator, num_experts = np.random.default_rng(seed), num_ranks * mains
    skew = generator.dirichlet(np.full(num_experts, 0.3))
    load = generator.multinomial(tokens, skew, size=num_ranks)
    alloc = level(load, num_ranks)
    copies = np.full((num_ranks, mains), -1)  # B = E / R always suffices
    for rank, row in enumerate(alloc):
        remote = [e for e in np.flatnonzero(row) if e // mains != rank]
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


# ---- UltraEP, Megatron-LM -----------------------------------------------------------------------

# The example in UltraEP's header: two ranks with two masters and a slot each.
ROWS = [2, 1, 3, 0, 3, 1]
PLACES = [[3, -1], [1, 5], [0, -1], [4, 2]]
QUOTA = [[7, 0], [2, 6], [1, 0], [5, 4]]
ULTRAEP = {"num_ranks": 2, "num_experts": 4, "logical_to_physical": PLACES, "quota": QUOTA}


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
    num_ranks, mains, slots = (data.draw(st.integers(*ends)) for ends in ((2, 4), (1, 3), (0, 2)))
    num_experts = num_ranks * mains
    loads = st.lists(st.integers(0, 99), min_size=num_experts, max_size=num_experts)
    load = torch.tensor([data.draw(loads) for _ in range(num_ranks)])
    plan = uec.plan_replicas(load, slots_per_rank=min(slots, num_experts))
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    rows: list[int] = []
    places = [[0] * 1 for _ in range(num_experts)]
    quota = [[int(count)] for count in plan.home_quota]
    for rank, held in enumerate(plan.slot_expert.tolist()):
        for expert in range(rank * mains, rank * mains + mains):
            places[expert] = [len(rows)]
            rows.append(expert)
        rows += held
    for rank, held in enumerate(plan.slot_expert.tolist()):
        for slot, expert in enumerate(held):
            if expert >= 0:
                places[expert].append(rank * (mains + len(held)) + mains + slot)
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
    for name, value in vars(plan).items():
        assert name == "domains" or torch.equal(getattr(again, name), value), name


def test_megatrons_table_is_slot_expert() -> None:
    # Its values are home slots, rank * H + i: experts, when those are counted by home slot.
    table = torch.tensor([[3, -1], [0, 1]], dtype=torch.int32)
    plan = uec.Plan.from_slots(table, num_experts=2 * 2)
    assert plan.home[table[0, 0]] == 1


# ---- errors -------------------------------------------------------------------------------------

EPLB, LLEP, MOONEP, READ = (
    interop.from_eplb,
    interop.from_llep,
    interop.from_moonep,
    interop.from_ultraep,
)
SIZES = {"num_ranks": 2, "num_experts": 4}
TABLE = [0, 1, 2, 2, 3, 0]


@pytest.mark.parametrize(
    "call, table, arguments, message",
    [
        (
            EPLB,
            [TABLE, TABLE],
            SIZES,
            r"shape \(2, 6\); expected \[P\], one layer's rows.*\[layer\]",
        ),
        (EPLB, TABLE[:5], SIZES, r"shape \(5,\).* a multiple of 2 ranks"),
        (EPLB, torch.tensor(TABLE) / 2, SIZES, "dtype torch.float32; expected integers"),
        (EPLB, "rows", SIZES, "physical_to_logical is not a tensor"),
        (
            EPLB,
            [*TABLE[:5], 4],
            SIZES,
            r"physical_to_logical\[5\] is 4; expected an expert in \[0, 4",
        ),
        (EPLB, [*TABLE[:5], -2], SIZES, r"\[5\] is -2; expected .* or -1"),
        (EPLB, [0, 1, 2, 2, 1, 0], SIZES, "expert 3 has no row; expected each of 4 .* the 6 rows"),
        (
            EPLB,
            TABLE,
            {**SIZES, "home": [0, 1, 1, 1]},
            r"expert 1 .* rank 1: its rows are \[1\], on",
        ),
        (EPLB, TABLE, {**SIZES, "home": [0, 0, 1]}, r"home has shape \(3,\); expected \[4\]"),
        (
            EPLB,
            TABLE,
            {**SIZES, "home": [0, 0, 1, 2]},
            r"home\[3\] is 2; expected a rank in \[0, 2\)",
        ),
        (EPLB, TABLE, {**SIZES, "load": torch.ones(3)}, "load has dtype"),
        (
            EPLB,
            TABLE,
            {**SIZES, "load": torch.tensor([1, 2])},
            r"load has shape \(2,\); expected \[4\]",
        ),
        (EPLB, TABLE, {**SIZES, "load": torch.tensor([1, 2, -3, 4])}, r"load\[2\] is -3"),
        (
            EPLB,
            TABLE,
            {**SIZES, "load": torch.full((2, 4), 2**31 - 1)},
            f"rank 0 computes {2**32 - 2} tokens of expert 1",
        ),
        (
            EPLB,
            TABLE,
            {**SIZES, "slots_per_rank": 0},
            r"rank 0 needs 1 slots, for experts \[2\], but",
        ),
        (EPLB, TABLE, {**SIZES, "slots_per_rank": -1}, "slots_per_rank is -1"),
        (EPLB, TABLE, {**SIZES, "num_ranks": 0}, "num_ranks is 0; expected 1 to"),
        (EPLB, TABLE, {**SIZES, "num_experts": 2**24 + 1}, "num_experts is 16777217"),
        (
            LLEP,
            [(0, 0, 1)],
            SIZES,
            "lpt_plan is a list; expected a mapping .* compute_llep_lpt_plan",
        ),
        (LLEP, {4: [(0, 0, 1)]}, SIZES, r"lpt_plan has expert 4; expected an expert in \[0, 4\)"),
        (
            LLEP,
            {0: [(0, 1)]},
            SIZES,
            r"lpt_plan\[0\]\[0\] is \(0, 1\); expected \(rank, start, end",
        ),
        (
            LLEP,
            {0: [(2, 0, 1)]},
            SIZES,
            r"lpt_plan\[0\]\[0\] is on rank 2; expected a rank in \[0, 2",
        ),
        (LLEP, {0: [(0, 1, 2)]}, SIZES, "on rank 0 has tokens 1 to 2; expected some from 0"),
        (LLEP, {0: [(0, 0, 2), (1, 1, 3)]}, SIZES, r"\[0\]\[1\] on rank 1 .* 1 to 3; .* from 2 on"),
        (LLEP, {0: [(0, 0, 0)]}, SIZES, "has tokens 0 to 0"),
        (LLEP, {0: [(0, 0, 2**70)]}, SIZES, rf"computes {2**70} tokens of expert 0; .* 32-bit"),
        (LLEP, {0: [(0, 0, 1.5)]}, SIZES, r"lpt_plan\[0\]\[0\] is 1.5; expected an integer"),
        (LLEP, {"a": []}, SIZES, "an expert is 'a'; expected an integer"),
        (LLEP, {0: 7}, SIZES, r"lpt_plan\[0\] is 7; expected a list"),
        (LLEP, {0: [5]}, SIZES, r"lpt_plan\[0\]\[0\] is 5; expected \(rank, start, end"),
        (LLEP, {}, {"num_ranks": 3, "num_experts": 4}, "num_experts is 4 for 3 ranks; .* LLEP"),
        (
            LLEP,
            {0: [(1, 0, 9)], 1: [(1, 0, 9)]},
            {**SIZES, "slots_per_rank": 1},
            r"rank 1 needs 2 slots, for experts \[0, 1\], but slots_per_rank is 1. .* LLEP's max",
        ),
        (
            LLEP,
            {0: [(0, 0, 9)]},
            {**SIZES, "load": torch.tensor([[4, 0, 0, 0], [4, 0, 0, 0]])},
            "quotas of expert 0 sum to 9; expected its load, 8",
        ),
        (
            MOONEP,
            [2, 3],
            {"num_experts": 4},
            r"experts_to_copy has shape \(2,\); expected \[R, B\]",
        ),
        (
            MOONEP,
            [[4], [0]],
            {"num_experts": 4},
            r"experts_to_copy\[0\]\[0\] is 4; expected an exp",
        ),
        (
            MOONEP,
            [[1], [0]],
            {"num_experts": 4},
            r"slot_expert\[0, 0\] is 1: the slot is on .* home",
        ),
        (MOONEP, [[2, 2], [0, 1]], {"num_experts": 4}, "expert 2 is twice on rank 0"),
        (MOONEP, [[2], [0]], {"num_experts": 5}, "num_experts is 5 for 2 ranks; .* MoonEP"),
        (
            MOONEP,
            [[2], [0]],
            {"num_experts": 4, "alloc": torch.ones(2, 4, dtype=torch.int32)},
            r"alloc\[0, 3\] is 1, but rank 0 is not the home of expert 3 .*\[0\] is \[2\]. Exp",
        ),
        (MOONEP, [[2], [0]], {"num_experts": 4, "alloc": [1, 2]}, r"alloc has shape \(2,\); expec"),
        (
            MOONEP,
            [[2, 3], [0, -1]],
            {"num_experts": 4, "slots_per_rank": 1},
            r"rank 0 needs 2 slots, for experts \[2, 3\].* MoonEP fills up to E / R",
        ),
        (
            READ,
            [2, 1, 3, 2, 3, 1],
            ULTRAEP,
            r"\[3\], a master of rank 1, is expert 2, as on rank 0",
        ),
        (
            READ,
            [2, -1, 3, 0, 3, 1],
            ULTRAEP,
            r"\[1\], a master of rank 0, is unused; .* first 2 rows",
        ),
        (READ, [2, 0], ULTRAEP, "a rank has 1 of 2 rows; expected its 2 masters"),
        (
            READ,
            ROWS,
            {**ULTRAEP, "quota": None},
            "only logical_to_physical was given; expected both",
        ),
        (READ, ROWS, {**ULTRAEP, "logical_to_physical": None}, "only quota was given"),
        (
            READ,
            ROWS,
            {**ULTRAEP, "quota": [[1]] * 4},
            r"shape \(4, 2\) and quota \(4, 1\); expected \[",
        ),
        (
            READ,
            ROWS,
            {**ULTRAEP, "quota": [[7, 1], *QUOTA[1:]]},
            r"quota\[0, 1\] is 1, but logical_to_physical\[0, 1\] is -1; expected 0",
        ),
        (
            READ,
            ROWS,
            {**ULTRAEP, "logical_to_physical": [[3, -1], [1, 2], [0, -1], [4, 5]]},
            r"logical_to_physical\[1, 1\] is 2, which is not a row of expert 1; .* rows \[1, 5\]",
        ),
        (
            READ,
            ROWS,
            {**ULTRAEP, "logical_to_physical": [[3, -1], [1, 1], [0, -1], [4, 2]]},
            r"logical_to_physical\[1, 1\] is 1: expert 1 is twice on rank 0",
        ),
        (
            READ,
            ROWS,
            {**ULTRAEP, "logical_to_physical": [[3, -1], [1, 5], [0, -1], [4, -9]]},
            r"logical_to_physical\[3, 1\] is -9, which is not a row of expert 3",
        ),
        (
            READ,
            ROWS,
            {
                **ULTRAEP,
                "logical_to_physical": [[3, -1], [1, -1], [0, -1], [4, 2]],
                "quota": [[7, 0], [2, 0], [1, 0], [5, 4]],
            },
            r"\[5\] on rank 1 is expert 1, but logical_to_physical\[1\] is \[1, -1\]; expe",
        ),
        (
            READ,
            ROWS,
            {"num_ranks": 3, "num_experts": 4},
            "num_experts is 4 for 3 ranks; .* UltraEP",
        ),
    ],
)
def test_what_cannot_be_expressed_is_told(
    call: Callable[..., uec.Plan], table: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call(table, **arguments)


def test_too_many_experts_in_one_place_are_named() -> None:
    with pytest.raises(
        InvalidPlanError,
        match=r"at most 1 experts on a rank: the 2 experts \[2, 3\] .* on ranks \[3\], .* 1\.",
    ):
        interop.home_from_eplb([0, 1, 0, 1, 0, 1, 2, 3], num_ranks=4, num_experts=4, max_mains=1)


def test_the_documentation_runs() -> None:
    (shown,) = re.findall(
        r"```python\n([^`]*import interop.*?)```",
        (ROOT / "docs" / "frameworks.md").read_text(),
        re.DOTALL,
    )
    exec(shown, {})
