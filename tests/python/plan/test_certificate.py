"""verify_plan and its bounds, against every placement of small problems and every set of ranks."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import plan_alone
from reference import planner_oracle, schedule_oracle
from reference.balance_oracle import best_balance, every_load
from test_planner import problem_of
from test_schedule import problems as placements
from tiers import cases

import ultraep_comm as uec
from ultraep_comm.errors import InvalidLoadError, InvalidPlanError
from ultraep_comm.plan.bounds import find_token_bound, find_transfer_bound

# Home map, domains, slots, tokens; and how many of all such loads have a better bound than ours.
SMALL: list[tuple[list[int], list[int], int, int, int]] = [
    ([0, 0, 1], [0, 0, 0], 0, 10, 0),
    ([0, 0, 0, 0], [0, 0], 2, 14, 0),
    ([0, 0, 0, 0, 0, 0], [0, 0, 0], 1, 10, 0),
    ([0, 0, 0, 0, 1], [0, 0, 0], 1, 11, 5),
    ([0, 0, 0, 1, 2], [0, 0, 0, 0], 1, 12, 9),
    ([0, 0, 0, 0, 1], [0, 0, 0, 0], 1, 11, 1),
    ([1, 1, 1, 0, 2], [0, 1, 1], 1, 11, 0),
]


def bound_of(load: Any, home: list[int], domain: list[int], slots: int) -> int:
    return find_token_bound(np.array(load), np.array(home), np.array(domain), slots)[0]


@pytest.mark.parametrize("home, domain, slots, tokens, loose", SMALL)
def test_every_load_and_every_placement(
    home: list[int], domain: list[int], slots: int, tokens: int, loose: int
) -> None:
    loads = every_load(len(home), tokens)
    best = best_balance(loads, home, domain, slots)
    bound = np.array([bound_of(load, home, domain, slots) for load in loads])
    assert (bound <= best).all()
    print(f"the best plan reaches the bound for {(bound == best).sum()} of {len(loads)} loads")
    assert (bound < best).sum() == loose


@st.composite
def problems(draw: st.DrawFn, ranks: int = 4, experts: int = 7) -> tuple[Any, ...]:
    """Load, home, domains and slots: few ranks, of which some own many experts."""
    g = draw(st.integers(1, ranks))
    e = draw(st.integers(1, experts))
    largest = draw(st.sampled_from([3, 100, 100, 2**31 - 1]))
    load = draw(st.lists(st.integers(0, largest), min_size=e, max_size=e))
    owners = draw(st.integers(1, g))
    home = draw(st.lists(st.integers(0, owners - 1), min_size=e, max_size=e))
    domain = draw(st.sampled_from([[0] * g, [r % 2 for r in range(g)]]))
    return load, home, domain, draw(st.integers(0, 2))


@given(problem=problems())
@settings(max_examples=cases(150, 1500), deadline=None)
def test_no_placement_beats_the_bound(problem: tuple[Any, ...]) -> None:
    load, home, domain, slots = problem
    (best,) = best_balance(np.array([load], np.int64), home, domain, slots)
    tokens, reason, ranks = find_token_bound(
        np.array(load), np.array(home), np.array(domain), slots
    )
    assert tokens <= best
    assert tokens >= planner_oracle.lower_bound(
        problem_of(load, len(domain), slots, home=home, domain=domain, target=1.0)
    )
    # It is the ranks it names that need so much.
    inside = [x for x, h in zip(load, home, strict=True) if h in ranks]
    if reason == "slots":
        assert sum(inside) > len(ranks) * (tokens - 1)
    else:
        assert -(-sum(inside) // len(ranks)) == tokens


@pytest.mark.parametrize(
    "load, home, domains, slots, expected",
    [
        ([8, 4, 0], [0, 1, 2], [0, 0, 0], 1, (4, "mean", (0, 1, 2))),
        ([8, 4, 0], [0, 1, 2], [0, 0, 0], 0, (8, "slots", (0,))),
        ([8, 4, 0], [0, 1, 2], [0, 0, 1], 1, (6, "domains", (0, 1))),
        ([5, 5, 5, 5, 0], [0, 0, 0, 0, 1], [0, 0, 0], 1, (10, "slots", (0,))),
        # Each of two ranks could give two experts, but there is one slot besides theirs.
        ([6, 6, 6, 6, 6, 6, 0], [0, 0, 0, 1, 1, 1, 2], [0, 0, 0], 1, (15, "slots", (0, 1))),
        ([0, 0], [0, 1], [0, 0], 1, (0, "mean", (0, 1))),
    ],
)
def test_the_reason_of_the_bound(
    load: list[int], home: list[int], domains: list[int], slots: int, expected: tuple[Any, ...]
) -> None:
    found = find_token_bound(np.array(load), np.array(home), np.array(domains), slots)
    assert found == expected


# ---- transfers ----------------------------------------------------------------------------------


@given(problem=placements(max_ranks=7, max_experts=9))
@settings(max_examples=cases(150, 2000), deadline=None)
def test_the_transfer_bound_is_exact(problem: schedule_oracle.Problem) -> None:
    problem = dataclasses.replace(problem, residents=None)
    slots, home = problem.slot_expert, problem.home
    found = find_transfer_bound(np.array(slots, np.int32), np.array(home))
    exports, imports = schedule_oracle.exports(problem), schedule_oracle.imports(problem)
    experts, reason, ranks = found[0], found[1], set(found[2])
    assert experts == schedule_oracle.densest(problem)
    if reason == "set":
        sends = sum(exports[r] for r in ranks)
        sends += sum(
            len(at) - 1
            for e, at in problem.replicas().items()
            if ranks >= {home[e], *(rank for rank, _ in at)}
        )
        assert experts == Fraction(sends, len(ranks)) > max(*exports, *imports)
    elif reason == "none":
        assert experts == 0
        assert not ranks
    else:
        of = exports if reason == "exports" else imports
        assert ranks == {r for r, n in enumerate(of) if n == experts}


def test_which_ranks_are_the_bottleneck() -> None:
    def found(slots: list[list[int]], home: list[int]) -> tuple[Fraction, str, tuple[int, ...]]:
        return find_transfer_bound(np.array(slots), np.array(home))

    assert found([[1], [0], [-1]], [0, 1, 2]) == (1, "exports", (0, 1))
    assert found([[1, 2], [0, -1], [-1, -1]], [0, 1, 2]) == (2, "imports", (0,))
    # Each of 1 and 2 has an expert to send besides the copy that 0 or they pass on.
    assert found([[-1], [0], [0], [1], [2]], [0, 1, 2]) == (Fraction(4, 3), "set", (0, 1, 2))


# ---- certificates -------------------------------------------------------------------------------


@given(problem=problems(ranks=6, experts=12), target=st.sampled_from([1.0, 1.01, 1.5]))
@settings(max_examples=cases(100, 1000), deadline=None)
def test_plans_of_the_planner(problem: tuple[Any, ...], target: float) -> None:
    load, home, domain, slots = problem
    plan = plan_alone(
        torch.tensor(load),
        num_ranks=len(domain),
        slots_per_rank=min(slots, len(load)),
        home=home,
        domains=domain,
        target=target,
    )
    found = uec.verify_plan(plan, load)
    assert float(found.imbalance) == pytest.approx(plan.imbalance)
    assert found.bound_tokens * len(domain) == pytest.approx(plan.imbalance_bound * sum(load))
    assert found.over_bound == found.max_tokens - found.bound_tokens >= 0
    assert found.mean_tokens == Fraction(sum(load), len(domain)) <= found.max_tokens
    assert sum(found.rank_tokens) == sum(load)
    assert {found.rank_tokens[r] for r in found.fullest_ranks} == {found.max_tokens}
    assert found.num_replicas == plan.num_replicas
    assert found.max_exports == plan.max_exports
    assert found.max_imports == plan.max_imports
    low, high = sum(load) // len(domain), -(-sum(load) // len(domain))
    assert found.is_exact == (set(found.rank_tokens) <= {low, high})


LOAD = [[9, 1, 2, 0, 3], [0, 1, 2, 0, 3], [0, 1, 2, 0, 4]]  # home 0 0 1 1 2
SUMS = [9, 3, 6, 0, 10]


def by_hand(**changes: Any) -> uec.Plan:
    arguments: dict[str, Any] = {
        "slot_expert": torch.tensor([[2, -1], [0, 4], [0, -1]]),
        "slot_quota": torch.tensor([[2, 0], [3, 5], [2, 0]]),
        "home_quota": torch.tensor([4, 3, 4, 0, 5]),
        "load": torch.tensor(LOAD),
    }
    return uec.Plan.from_slots(**{**arguments, **changes}, num_experts=5)


def test_a_certificate() -> None:
    found = uec.verify_plan(by_hand(), LOAD)
    assert found == uec.verify_plan(by_hand(load=None), torch.tensor(SUMS))
    assert found.rank_tokens == (9, 12, 7)
    assert found.imbalance == Fraction(12 * 3, 28)
    assert (found.bound_tokens, found.over_bound, found.is_exact) == (10, 2, False)
    assert (found.max_exports, found.max_imports, found.transfer_experts) == (1, 2, 2)
    assert str(found) == (
        "at most 12 tokens on rank 1, imbalance 1.2857; bound 10 + 2 by mean; 4 replicas, k 1,"
        " in 2, T* 2 by imports of rank 1"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.num_replicas = 0  # type: ignore[misc]


def test_the_text_of_other_certificates() -> None:
    load = [100, 1, 1, 1, 1, 1]
    plan = plan_alone(torch.tensor(load), num_ranks=6, slots_per_rank=0)
    assert str(uec.verify_plan(plan, load)) == (
        "at most 100 tokens on rank 0, imbalance 5.7143; bound 100 by slots of rank 0;"
        " 0 replicas, k 0, in 0"
    )
    even = plan_alone(torch.ones(6, dtype=torch.int64), num_ranks=6, slots_per_rank=0)
    assert "at most 1 tokens, exact, imbalance 1.0000; bound 1 by mean;" in str(
        uec.verify_plan(even, [1] * 6)
    )
    plan = plan_alone(torch.tensor(load), num_ranks=6, slots_per_rank=1, domains=[0, 0, 0, 0, 0, 1])
    assert " by domains of ranks 0, 1, 2, 3 and 1 more; " in str(uec.verify_plan(plan, load))


def test_domains_may_be_crossed_on_request() -> None:
    crossing = by_hand(domains=[0, 1, 1], allow_cross_domain=True)
    with pytest.raises(InvalidPlanError, match="outside the domain"):
        uec.verify_plan(crossing, LOAD)
    found = uec.verify_plan(crossing, LOAD, allow_cross_domain=True)
    assert (found.bound_tokens, found.bound_reason) == (10, "mean")


def broken(**changes: Any) -> uec.Plan:
    """A plan that from_slots would have rejected."""
    as_tensors = {name: torch.tensor(x, dtype=torch.int32) for name, x in changes.items()}
    return dataclasses.replace(by_hand(), **as_tensors)


@pytest.mark.parametrize(
    "plan, part",
    [
        (broken(slot_expert=[[2, -1], [0, 5], [0, -1]]), r"slot_expert\[1, 1\] is 5"),
        (broken(domains=[0, 1, 1]), "outside the domain"),
        (broken(home_quota=[4, 3, 4, 0, 6]), "expert 4 sum to 11; expected its load, 10"),
        (by_hand(slot_quota=None, home_quota=None), "no quotas"),
        (by_hand(load=None, home_quota=[4, 3, 4, 0, 6]), "expert 4, .* rank 2, sum to 11; .*, 10"),
        (by_hand(load=torch.tensor(LOAD).roll(1, 0)), r"own load\[0, 0\] is 0; expected 9"),
        ("plan", "expected a Plan"),
    ],
)
def test_broken_plans(plan: Any, part: str) -> None:
    with pytest.raises(InvalidPlanError, match=part):
        uec.verify_plan(plan, LOAD)


@pytest.mark.parametrize(
    "load, part",
    [
        ([9, 3, 6, 0], r"shape \(4,\)"),
        ([[1.5] * 5] * 3, "float64"),
        ([[1], [2, 3]], "not an array"),
        ([9, 3, 6, -1, 11], r"load\[3\] is -1"),
        ([[0, 0, 0, 0, 2**31]] * 3, r"load\[0, 4\] is 2147483648"),
        ([[0, 0, 2**30, 0, 0]] * 3, "load of expert 2 is 3221225472"),
        ([2**70, 0, 0, 0, 0], "object"),
    ],
)
def test_bad_loads(load: Any, part: str) -> None:
    with pytest.raises(InvalidLoadError, match=part):
        uec.verify_plan(by_hand(), load)


def test_too_many_tokens() -> None:
    plan = uec.Plan.from_slots(
        torch.full((2, 1), -1), num_experts=600, slot_quota=[[0], [0]], home_quota=[2**31 - 1] * 600
    )
    with pytest.raises(InvalidLoadError, match="sum to 1288490188200"):
        uec.verify_plan(plan, [2**31 - 1] * 600)
