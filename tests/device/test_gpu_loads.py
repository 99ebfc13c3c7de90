"""Routings as frameworks have them, on every engine: ids, maps, counts; padded, or replicated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from loopback_ranks import finish, hold, put
from ranks import loopback, raised

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.group.group import is_on_device

G, E, S, T, K = 3, 7, 2, 40, 2
EXPERT = {"w": ((4,), torch.float32)}
NewGroups = Callable[..., list[uec.Group]]


def make_groups(engine: str, new_groups: NewGroups, **options: Any) -> list[uec.Group]:
    options = {"num_experts": E, "slots_per_rank": S, "timeout": 60.0, "num_sms": 1, **options}
    options["engine"] = "cuda" if engine == "emulated" else engine
    return new_groups(G, expert=EXPERT, **options)


@pytest.fixture
def groups(loopback_engine: str, new_groups: NewGroups) -> list[uec.Group]:
    return make_groups(loopback_engine, new_groups)


def places(group: uec.Group) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return what leaves a tensor on the CPU and, if there is one, puts it on the device."""
    there = partial(put, group)
    on_cpu: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu
    return [on_cpu, there] if is_on_device(there(torch.zeros(1)), group) else [on_cpu]


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


FORMS = {
    "ids": lambda ids: {"topk_ids": ids},
    "narrow ids": lambda ids: {"topk_ids": ids.int()},
    "map": lambda ids: {"routing_map": map_of(ids)},
    "strided map": lambda ids: {"routing_map": map_of(ids).T.contiguous().T},
    "counts": lambda ids: {"counts": counts_of(ids)},
    "narrow counts": lambda ids: {"counts": counts_of(ids).int()},
}


def given(form: str, ids: torch.Tensor, where: Callable[..., Any]) -> dict[str, torch.Tensor]:
    return {name: where(tensor) for name, tensor in FORMS[form](ids).items()}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_one_load(groups: list[uec.Group], form: str) -> None:
    expected = torch.stack([counts_of(routing(r)) for r in range(G)]).int()
    for where in places(groups[0]):
        own = [given(form, routing(r), where) for r in range(G)]
        for _ in range(2):  # what was counted is gone
            tables = loopback(G, lambda r, own=own: uec.gather_load(group=groups[r], **own[r]))
            plans = loopback(G, lambda r, own=own: uec.gather_and_plan(group=groups[r], **own[r]))
            finish(groups[0])
            for table in [*tables, *(plan.load for plan in plans)]:
                assert table.dtype == torch.int32
                assert torch.equal(table.cpu(), expected)
            on_device = where is not torch.Tensor.cpu
            for tensor in (tables[0], plans[0].load, plans[0].slot_expert):
                assert is_on_device(tensor, groups[0]) == on_device


@pytest.mark.parametrize("form", ["ids", "map"])
@pytest.mark.parametrize("rows", [0, 17, T])
def test_rows_of_padding_are_routed_nowhere(groups: list[uec.Group], form: str, rows: int) -> None:
    expected = torch.stack([counts_of(routing(r)[:rows]) for r in range(G)]).int()
    for where in places(groups[0]):
        own = [given(form, routing(r), where) for r in range(G)]
        probs = where(torch.rand((T, E)))
        for n in (rows, where(torch.tensor(rows))):
            plans = loopback(
                G,
                lambda r, own=own, n=n: uec.gather_and_plan(
                    group=groups[r], num_tokens=n, **own[r]
                ),
            )
            finish(groups[0])
            assert torch.equal(plans[0].load.cpu(), expected)
            for group, plan, routed in zip(groups, plans, own, strict=True):
                if form == "ids":
                    ids = routed["topk_ids"]
                    found = [uec.reroute(ids, plan, group=group, num_tokens=n)]
                    only = [uec.reroute(ids[:rows], plan, group=group)]
                else:
                    ids = routed["routing_map"]
                    found = [*uec.reroute_map(ids, probs, plan, group=group, num_tokens=n)]
                    only = [*uec.reroute_map(ids[:rows], probs[:rows], plan, group=group)]
                finish(group)
                for a, b in zip(found, only, strict=True):
                    assert torch.equal(a[:rows], b)
                    assert (a[rows:] == (-1 if form == "ids" else 0)).all()


@pytest.mark.parametrize("form", ["ids", "map", "counts"])
@pytest.mark.parametrize("source", [0, 2])
def test_tokens_that_every_rank_has(groups: list[uec.Group], form: str, source: int) -> None:
    """Each rank plans and reroutes alone, and all find the same."""
    ids = routing(5)
    ids[:, 0] = ids[:, 0].clamp(max=1)  # hot experts
    ids[ids[:, 0] == ids[:, 1], 1] = -1
    expected = torch.zeros((G, E), dtype=torch.int32)
    expected[source] = counts_of(ids)
    for where in places(groups[0]):
        own = given(form, ids, where)
        plans = [uec.gather_and_plan(group=group, source=source, **own) for group in groups]
        finish(groups[0])
        rows = torch.zeros(G * groups[0].topology.instances_per_rank, dtype=torch.int64)
        for group, plan in zip(groups, plans, strict=True):
            assert torch.equal(plan.load.cpu(), expected)
            assert torch.equal(plan.slot_expert, plans[0].slot_expert)
            assert plan.num_replicas > 0
            physical = uec.reroute(where(ids), plan, group=group, source=source)
            probs = where(torch.rand((T, E))).requires_grad_()
            routed = where(map_of(ids))
            found, moved = uec.reroute_map(routed, probs, plan, group=group, source=source)
            moved.sum().backward()
            finish(group)
            by_id = torch.bincount(physical[physical >= 0], minlength=len(rows))
            assert torch.equal(found.sum(0), by_id)
            assert torch.equal(probs.grad.cpu(), map_of(ids).float())
            rows += by_id.cpu()
        assert torch.equal(rows % G, torch.zeros_like(rows))  # all ranks found the same
        quotas = rows.view(G, -1).sum(1) // G
        assert int(quotas.max()) * G <= 1.01 * int(quotas.sum()) + G
    assert [group.health().epoch for group in groups] == [0] * G  # nothing was exchanged


# ---- what is refused ------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "ids of one dimension": (
        {"topk_ids": torch.tensor([0, 1, 1])},
        errors.InvalidLoadError,
        r"topk_ids has shape \(3,\); expected \[T, k\]; tokens of each expert are given as counts=",
    ),
    "ids that are no integers": (
        {"topk_ids": torch.zeros(2, 2)},
        errors.InvalidLoadError,
        r"topk_ids is torch.float32",
    ),
    "a map of other experts": (
        {"routing_map": torch.ones((2, E + 1), dtype=torch.bool)},
        errors.InvalidLoadError,
        rf"routing_map has shape \(2, {E + 1}\); expected \[T, {E}\]",
    ),
    "a map of numbers": (
        {"routing_map": torch.ones((2, E))},
        errors.InvalidLoadError,
        r"routing_map is torch.float32 on \w+(:\d)?; expected bool",
    ),
    "counts of other experts": (
        {"counts": torch.ones(E + 1, dtype=torch.int32)},
        errors.InvalidLoadError,
        rf"counts has shape \({E + 1},\); expected \[{E}\]",
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
# Of tensors on a device the kernel finds these, when the call has returned.
BAD_NUMBERS = {
    "an id that is no expert": (
        {"topk_ids": torch.tensor([[0, E], [9, 1]])},
        errors.InvalidLoadError,
        r"id 7 at position 1; expected \[0, 7\)",
    ),
    "a count below 0": (
        {"counts": torch.tensor([1, 2, -3, 0, 0, 0, 0])},
        errors.InvalidLoadError,
        r"counts\[2\] is -3; expected a number of tokens",
    ),
    "a count that is too large": (
        {"counts": torch.tensor([1, 2, 3, 0, 2**31, 0, 0])},
        errors.InvalidLoadError,
        r"counts\[4\] is (2147483648|-1); expected",  # -1 is what the kernel counts for it
    ),
}


def gather(groups: list[uec.Group], bad: dict[str, Any], where: Callable[..., Any]) -> list[Any]:
    """Gather loads, of which rank 1's is bad; return loads and errors."""

    def call(rank: int) -> Any:
        own = bad if rank == 1 else {"topk_ids": routing(rank)}
        own = {n: where(v) if isinstance(v, torch.Tensor) else v for n, v in own.items()}
        try:
            return uec.gather_load(group=groups[rank], **own)
        except errors.UltraEPError as error:
            return error

    return loopback(G, call)


@pytest.mark.parametrize("case", [*BAD, *BAD_NUMBERS])
def test_bad_routings_fail_on_every_rank(groups: list[uec.Group], case: str) -> None:
    bad, error, text = (BAD | BAD_NUMBERS)[case]
    found = gather(groups, bad, places(groups[0])[0 if case in BAD_NUMBERS else -1])
    assert isinstance(found[1], error)
    with pytest.raises(error, match=text):
        raise found[1]
    assert all(isinstance(found[rank], errors.PeerRejectedError) for rank in (0, 2))
    for group in groups:
        with pytest.raises(errors.GroupClosedError):
            uec.gather_load(routing(0), group=group)


@pytest.mark.parametrize("case", BAD_NUMBERS)
def test_bad_numbers_on_the_device_fail_the_next_call(
    streams: str, new_groups: NewGroups, case: str
) -> None:
    """Until then the load is zeros, and the plan is empty."""
    bad, error, text = BAD_NUMBERS[case]
    groups = make_groups(streams, new_groups)
    hold(streams)
    found = gather(groups, bad, partial(put, groups[0]))
    finish(groups[0])
    for load in found:
        assert isinstance(load, Exception) or not load.any()  # a slow host knows at once
    found = [again.__cause__ for again in gather(groups, bad, partial(put, groups[0]))]
    with pytest.raises(error, match=text):
        raise found[1]
    assert all(isinstance(found[rank], errors.PeerRejectedError) for rank in (0, 2))


def test_ids_that_are_none_in_a_source(streams: str, new_groups: NewGroups) -> None:
    group, *_ = make_groups(streams, new_groups)
    uec.gather_and_plan(put(group, torch.tensor([[E], [0]])), group=group, source=0)
    finish(group)
    with pytest.raises(errors.InvalidLoadError, match="entry for expert 0 outside 0"):
        group.close()


def test_a_rank_that_is_missing_is_named(loopback_engine: str, new_groups: NewGroups) -> None:
    groups = make_groups(loopback_engine, new_groups, timeout=0.1)
    with pytest.raises(errors.TransferTimeoutError, match=r"rank [12]"):
        uec.gather_load(routing(0), group=groups[0])


def test_another_call_at_the_same_point_is_a_mismatch(groups: list[uec.Group]) -> None:
    plan = uec.Plan.from_slots([[-1, -1], [0, -1], [3, -1]], num_experts=E)

    def call(rank: int) -> BaseException | None:
        group = groups[rank]
        if rank != 1:
            return raised(lambda: uec.gather_load(routing(0), group=group))
        weights = {"w": torch.zeros(group.num_local_experts, 4, device=group.device)}
        return raised(lambda: uec.replicate_experts(weights, plan, group=group))

    found = loopback(G, call)
    assert all(isinstance(error, errors.TransferError) for error in found), found
    assert errors.PlanMismatchError in map(type, found)


def test_ranks_that_plan_for_another_target_are_a_mismatch(
    streams: str, new_groups: NewGroups
) -> None:
    """Where the load's kernel plans too."""
    groups = make_groups(streams, new_groups)
    ids = put(groups[0], routing(0))

    def call(rank: int) -> BaseException | None:
        target = 1.01 + rank / 10
        return raised(lambda: uec.gather_and_plan(ids, group=groups[rank], target=target))

    found = loopback(G, call)
    assert {type(error) for error in found} == {
        errors.PlanMismatchError,
        errors.TransferAbortedError,
    }


def test_a_compiled_function_has_them_too(new_groups: NewGroups) -> None:
    (group,) = new_groups(1, num_experts=E, slots_per_rank=0, expert=EXPERT)
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
