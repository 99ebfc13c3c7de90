"""Our readings of other systems' planners: worked cases, published outputs, and invariants."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_tokens import EPLB_ROWS, EPLB_WEIGHT
from ranks import plan_alone

from studies.options import PEER_NAMES
from studies.peers import PEERS
from studies.peers.eplb import rebalance
from studies.peers.llep import spill
from studies.peers.lplb import CUBE, balance_cube
from studies.peers.moonep_cases import CASES, RANKS
from studies.peers.placement import Placed, at_home
from ultraep_comm import Plan
from ultraep_comm.plan.certificate import verify_plan
from ultraep_comm.plan.topology import contiguous_home


def place(name: str, load: list[int] | np.ndarray, num_ranks: int, slots: int = 2) -> Placed:
    """A peer's placement, with contiguous homes."""
    array = np.array(load, np.int64)
    placed = PEERS[name].place(array, contiguous_home(len(array), num_ranks), num_ranks, slots)
    assert placed is not None
    return placed


def plan_of(name: str, load: list[int] | np.ndarray, num_ranks: int, slots: int = 2) -> Plan:
    return place(name, load, num_ranks, slots).plan(contiguous_home(len(load), num_ranks))


def test_names() -> None:
    assert tuple(PEERS) == PEER_NAMES
    assert all("our reading of" in peer.reference for name, peer in PEERS.items() if name != "none")


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """A load, the number of ranks, and slots; every rank has equally many experts."""
    g, m = draw(st.sampled_from([1, 2, 3, 8, 16])), draw(st.integers(1, 4))
    load = draw(st.lists(st.integers(0, 5000), min_size=g * m, max_size=g * m))
    return np.array(load, np.int64), g, draw(st.integers(0, 5))


@pytest.mark.parametrize("name", PEERS)
@given(problem=problems())
def test_every_plan_is_legal_and_serves_the_load(
    name: str, problem: tuple[np.ndarray, int, int]
) -> None:
    load, g, s = problem
    home = contiguous_home(len(load), g)
    placed = PEERS[name].place(load, home, g, s)
    if placed is None:
        assert name in ("eplb-hier", "lplb")
        return
    assert placed.tokens.min() >= 0
    assert np.array_equal(placed.tokens.sum(axis=0), load)
    plan = placed.plan(home)  # raises if it is not legal
    ranks = placed.tokens.sum(axis=1)
    assert plan.imbalance == pytest.approx(ranks.max() * g / load.sum() if load.any() else 1.0)
    before = at_home(load, home, g).sum(axis=1).max()
    if name in ("none", "moonep", "lplb", "ultraep"):
        assert ranks.max() <= before
    if name == "none":
        assert plan.num_replicas == 0
    elif name == "moonep":
        assert np.ptp(ranks) <= 1
        assert plan.max_imports <= len(load) // g
        senders = [np.unique(home[row[row >= 0]]) for row in plan.slot_expert.numpy()]
        assert all(len(sender) <= 1 for sender in senders)
    elif name in ("ultraep", "lplb"):
        assert plan.max_imports <= s
    elif name.startswith("eplb"):
        assert plan.max_imports <= len(load) // g + s
    if name == "lplb":
        rank, slot = np.nonzero(plan.slot_expert.numpy() >= 0)
        experts = plan.slot_expert.numpy()[rank, slot]
        assert np.array_equal(home[experts] // 8, rank // 8)  # load cannot leave a cube
        assert np.bincount(experts, minlength=1).max() <= 1


def test_moonep_by_hand() -> None:
    """Rank 0 has 10 too many; ranks 1 and 2 lack 4 and rank 3 lacks 2, in this order."""
    assert place("moonep", [10, 6, 1, 1, 2, 0, 2, 2], 4).tokens.tolist() == [
        [2, 4, 0, 0, 0, 0, 0, 0],
        [4, 0, 1, 1, 0, 0, 0, 0],  # the hottest expert has 10, then 6 like the other one
        [4, 0, 0, 0, 2, 0, 0, 0],
        [0, 2, 0, 0, 0, 0, 2, 2],  # now it is the hottest
    ]


APPLICABLE = [(i, ranks) for i, case in enumerate(CASES) for ranks in RANKS if case.applies(ranks)]


@pytest.mark.parametrize(("index", "ranks"), APPLICABLE)
def test_their_cases_are_exact(index: int, ranks: int) -> None:
    """S K tokens on every rank: by their policy, and by our planner with two slots and no more."""
    case = CASES[index]
    load = case.load(ranks)
    assert load.sum() == ranks * case.tokens * case.topk
    theirs = plan_of("moonep", load, ranks)
    ours = plan_alone(torch.from_numpy(load), num_ranks=ranks, slots_per_rank=2, target=1.0)
    assert verify_plan(theirs, load).is_exact
    assert verify_plan(ours, load).is_exact
    assert ours.num_replicas <= theirs.num_replicas


RELEASED = [  # outputs of the released planner for these counts
    ([900, 50, 300, 10, 20, 30, 40, 50], 64, {0: {0: 335, 2: 335, 3: 230}}),
    ([5000, 100, 100, 100], 1024, {0: {0: 1457, 1: 1357, 2: 1357, 3: 829}}),
    (
        [2600, 2500, 2400, 40, 30, 20, 10, 0],
        1024,
        {0: {3: 2080, 2: 520}, 1: {0: 2090, 2: 410}, 2: {1: 2050, 2: 350}},
    ),
]


@pytest.mark.parametrize(("load", "min_tokens", "expected"), RELEASED)
def test_llep_gives_what_the_original_gives(
    load: list[int], min_tokens: int, expected: dict[int, dict[int, int]]
) -> None:
    counts = np.array(load, np.int64)
    home = contiguous_home(len(load), 4)
    found = spill(counts, home, 4, 1.1, min_tokens)
    wanted = at_home(counts, home, 4)
    for expert, ranks in expected.items():
        wanted[:, expert] = 0
        for rank, tokens in ranks.items():
            wanted[rank, expert] = tokens
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize(("weights", "expected"), [*zip(EPLB_WEIGHT, EPLB_ROWS, strict=True)])
def test_eplb_gives_its_published_example(weights: list[int], expected: list[int]) -> None:
    shape = {"num_instances": 16, "num_ranks": 8, "num_groups": 4, "num_nodes": 2}
    found = rebalance(np.array(weights, np.float64), **shape)
    assert found.ravel().tolist() == expected


def test_the_cube_is_the_published_one() -> None:
    """`r2o` of its README names, for each rank, where its two redundant experts come from."""
    r2o = [[3, 0, 1, 2, 7, 4, 5, 6], [6, 7, 4, 5, 0, 1, 2, 3]]
    for to, origins in zip(CUBE, r2o, strict=True):
        assert np.argsort(to).tolist() == origins
    assert all((to != np.arange(8)).all() for to in CUBE)


def least_maximum(rank_load: np.ndarray, most: np.ndarray) -> float:
    """The optimum by duality: a set of ranks keeps its load but for what its edges carry off."""
    best = 0.0
    for chosen in itertools.product([False, True], repeat=8):
        inside = np.array(chosen)
        if inside.any():
            leaves = inside[:, None] & ~inside[CUBE.T]
            best = max(best, (rank_load[inside].sum() - most[leaves].sum()) / inside.sum())
    return best


@given(st.lists(st.integers(0, 100), min_size=24, max_size=24))
def test_the_linear_program_is_optimal(numbers: list[int]) -> None:
    most = np.array(numbers[:16], np.int64).reshape(8, 2)
    rank_load = most.sum(axis=1) + np.array(numbers[16:], np.int64)
    flow = balance_cube(rank_load, most)
    assert (flow >= -1e-7).all()
    assert (flow <= most + 1e-7).all()
    after = rank_load - flow.sum(axis=1)
    for edge in range(2):
        np.add.at(after, CUBE[edge], flow[:, edge])
    assert after.max() == pytest.approx(least_maximum(rank_load, most), abs=1e-6)


OTHERS = [("eplb", 9, 4, 1), ("eplb-hier", 12, 8, 1), ("lplb", 16, 4, 2), ("lplb", 32, 8, 1)]


@pytest.mark.parametrize(("name", "experts", "ranks", "slots"), OTHERS)
def test_sizes_to_which_a_peer_does_not_apply(
    name: str, experts: int, ranks: int, slots: int
) -> None:
    load = np.ones(experts, np.int64)
    assert PEERS[name].place(load, contiguous_home(experts, ranks), ranks, slots) is None
