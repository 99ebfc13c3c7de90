"""Routings in the forms that frameworks have: ids, maps, counts; padded, or replicated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import loopback, raised

import ultraep_comm as uec
from ultraep_comm import errors

G, E, S, T, K = 3, 7, 2, 40, 2
EXPERT = {"w": ((4,), torch.float32)}


@pytest.fixture
def groups() -> Iterator[list[uec.Group]]:
    made = uec.testing.new_loopback_groups(G, num_experts=E, slots_per_rank=S, expert=EXPERT)
    yield made
    for group in made:
        group.abort()
        group.close()


def routing(rank: int) -> torch.Tensor:
    """Ids of T tokens, each expert once at most, some of them padding."""
    draw = torch.Generator().manual_seed(rank)
    ids = torch.rand((T, E), generator=draw).argsort(1)[:, :K]
    ids[torch.rand((T, K), generator=draw) < 0.1] = -1
    return ids


def map_of(ids: torch.Tensor) -> torch.Tensor:
    routed = torch.zeros((len(ids), E + 1), dtype=torch.bool)
    routed.scatter_(1, torch.where(ids < 0, E, ids), True)
    return routed[:, :E]


def counts_of(ids: torch.Tensor) -> torch.Tensor:
    return torch.bincount(ids[ids >= 0], minlength=E)


def gather(groups: list[uec.Group], given: Any) -> list[torch.Tensor]:
    return loopback(G, lambda r: uec.gather_load(group=groups[r], **given(r)))


FORMS = {
    "ids": lambda ids: {"topk_ids": ids},
    "narrow ids": lambda ids: {"topk_ids": ids.int()},
    "map": lambda ids: {"routing_map": map_of(ids)},
    "strided map": lambda ids: {"routing_map": map_of(ids).T.contiguous().T},
    "counts": lambda ids: {"counts": counts_of(ids)},
    "narrow counts": lambda ids: {"counts": counts_of(ids).int()},
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_one_load(groups: list[uec.Group], form: str) -> None:
    expected = torch.stack([counts_of(routing(r)) for r in range(G)]).int()
    for table in gather(groups, lambda r: FORMS[form](routing(r))):
        assert table.dtype == torch.int32
        assert torch.equal(table, expected)
    plans = loopback(G, lambda r: uec.gather_and_plan(group=groups[r], **FORMS[form](routing(r))))
    assert all(torch.equal(plan.load, expected) for plan in plans)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("form", ["ids", "map"])
@pytest.mark.parametrize("rows", [0, 17, T])
def test_rows_of_padding_are_routed_nowhere(
    groups: list[uec.Group], form: str, rows: int, as_tensor: bool
) -> None:
    num_tokens = torch.tensor(rows) if as_tensor else rows
    expected = torch.stack([counts_of(routing(r)[:rows]) for r in range(G)]).int()
    given = [FORMS[form](routing(r)) for r in range(G)]
    plans = loopback(
        G, lambda r: uec.gather_and_plan(group=groups[r], num_tokens=num_tokens, **given[r])
    )
    assert torch.equal(plans[0].load, expected)
    for rank, (group, plan) in enumerate(zip(groups, plans, strict=True)):
        ids = routing(rank)
        if form == "ids":
            found = uec.reroute(ids, plan, group=group, num_tokens=num_tokens)
            assert torch.equal(found[:rows], uec.reroute(ids[:rows], plan, group=group))
            assert (found[rows:] == -1).all()
        else:
            probs = torch.rand((T, E))
            found, moved = uec.reroute_map(
                map_of(ids), probs, plan, group=group, num_tokens=num_tokens
            )
            only = uec.reroute_map(map_of(ids)[:rows], probs[:rows], plan, group=group)
            assert torch.equal(found[:rows], only[0])
            assert torch.equal(moved[:rows], only[1])
            assert not found[rows:].any()
            assert not moved[rows:].any()


@pytest.mark.parametrize("form", ["ids", "map", "counts"])
@pytest.mark.parametrize("source", [0, 2])
def test_tokens_that_every_rank_has(groups: list[uec.Group], form: str, source: int) -> None:
    """Each rank plans and reroutes alone, and all find the same."""
    ids = routing(5)
    ids[:, 0] = ids[:, 0].clamp(max=1)  # hot experts
    ids[ids[:, 0] == ids[:, 1], 1] = -1
    plans = [
        uec.gather_and_plan(group=group, source=source, **FORMS[form](ids)) for group in groups
    ]
    assert [group.health().epoch for group in groups] == [0] * G  # nothing was exchanged
    expected = torch.zeros((G, E), dtype=torch.int32)
    expected[source] = counts_of(ids)
    rows = torch.zeros(G * groups[0].topology.instances_per_rank, dtype=torch.int64)
    for group, plan in zip(groups, plans, strict=True):
        assert torch.equal(plan.load, expected)
        assert torch.equal(plan.slot_expert, plans[0].slot_expert)
        assert plan.num_replicas > 0
        physical = uec.reroute(ids, plan, group=group, source=source)
        rows += torch.bincount(physical[physical >= 0], minlength=len(rows))
        probs = torch.rand((T, E), requires_grad=True)
        found, moved = uec.reroute_map(map_of(ids), probs, plan, group=group, source=source)
        by_id = torch.bincount(physical[physical >= 0], minlength=len(rows))
        assert torch.equal(found.sum(0), by_id)
        moved.sum().backward()
        assert torch.equal(probs.grad, map_of(ids).float())
    assert torch.equal(rows % G, torch.zeros_like(rows))  # all ranks found the same
    quotas = rows.view(G, -1).sum(1) // G
    assert int(quotas.max()) * G <= 1.01 * int(quotas.sum()) + G


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "ids of one dimension": (
        {"topk_ids": torch.tensor([0, 1, 1])},
        errors.InvalidLoadError,
        r"topk_ids has shape \(3,\); expected \[T, k\]; tokens of each expert are given as counts=",
    ),
    "a map of other experts": (
        {"routing_map": torch.ones((2, E + 1), dtype=torch.bool)},
        errors.InvalidLoadError,
        rf"routing_map has shape \(2, {E + 1}\); expected \[T, {E}\]",
    ),
    "a map of numbers": (
        {"routing_map": torch.ones((2, E))},
        errors.InvalidLoadError,
        "routing_map is torch.float32 on cpu; expected bool",
    ),
    "counts of other experts": (
        {"counts": torch.ones(E + 1, dtype=torch.int32)},
        errors.InvalidLoadError,
        rf"counts has shape \({E + 1},\); expected \[{E}\]",
    ),
    "a count below 0": (
        {"counts": torch.tensor([1, 2, -3, 0, 0, 0, 0])},
        errors.InvalidLoadError,
        r"counts\[2\] is -3; expected a number of tokens",
    ),
    "a count that is too large": (
        {"counts": torch.tensor([1, 2, 3, 0, 2**31, 0, 0])},
        errors.InvalidLoadError,
        r"counts\[4\] is 2147483648",
    ),
    "no routing": ({}, errors.InvalidArgumentError, r"given as \[\]; expected one of"),
    "two routings": (
        {"topk_ids": torch.zeros((2, 1), dtype=torch.int64), "counts": torch.ones(E)},
        errors.InvalidArgumentError,
        "given as .'topk_ids', 'counts'.",
    ),
    "more tokens than rows": (
        {"topk_ids": torch.zeros((2, 1), dtype=torch.int64), "num_tokens": 3},
        errors.InvalidLoadError,
        "num_tokens is 3; expected 0 to 2, the rows given",
    ),
    "a fraction of a token": (
        {"topk_ids": torch.zeros((2, 1), dtype=torch.int64), "num_tokens": torch.tensor(1.5)},
        errors.InvalidLoadError,
        "num_tokens is torch.float32",
    ),
    "padding of counts": (
        {"counts": torch.ones(E, dtype=torch.int32), "num_tokens": 1},
        errors.InvalidArgumentError,
        "num_tokens was given with counts",
    ),
    "a source that is no rank": (
        {"topk_ids": torch.zeros((2, 1), dtype=torch.int64), "source": G},
        errors.InvalidArgumentError,
        f"source is {G}; expected a rank of the group, 0 to {G - 1}",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_routings_fail_on_every_rank(groups: list[uec.Group], case: str) -> None:
    given, error, text = BAD[case]
    good = {"topk_ids": routing(0)}

    def call(rank: int) -> BaseException | None:
        own = given if rank == 1 else good
        return raised(lambda: uec.gather_load(group=groups[rank], **own))

    found = loopback(G, call)
    assert isinstance(found[1], error)
    with pytest.raises(error, match=text):
        raise found[1]
    assert all(isinstance(found[rank], errors.PeerRejectedError) for rank in (0, 2))


def test_a_compiled_function_has_them_too(groups: list[uec.Group]) -> None:
    (group,) = uec.testing.new_loopback_groups(1, num_experts=E, slots_per_rank=0, expert=EXPERT)
    ids = routing(0)

    def loads(ids: torch.Tensor, routed: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        counts = torch.bincount(ids.clamp(min=0).flatten(), minlength=E)
        return [
            uec.gather_load(ids, group=group, num_tokens=n),
            uec.gather_load(group=group, routing_map=routed, num_tokens=n),
            uec.gather_load(group=group, counts=counts),
            uec.gather_load(ids, group=group, source=0),
            uec.reroute(
                ids, uec.gather_and_plan(ids, group=group, source=0), group=group, source=0
            ),
        ]

    arguments = (ids, map_of(ids), torch.tensor(9))
    compiled = torch.compile(loads, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*arguments), loads(*arguments), strict=True):
        assert torch.equal(found, expected)
    group.close()
