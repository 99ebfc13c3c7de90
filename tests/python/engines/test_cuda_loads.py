"""Loads counted and exchanged by kernels, on an emulated device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from ranks import loopback

import ultraep_comm as uec
from ultraep_comm import errors

E = 7


@pytest.fixture
def groups_of(emulated: EmulatedDevice, new_groups: Callable[..., Any]) -> Callable[..., Any]:
    options = {"expert": {"w": ((64,), torch.uint8)}, "timeout": 60.0, "num_sms": 1}
    return partial(new_groups, num_experts=E, slots_per_rank=1, engine="cuda", **options)


def each(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Return what ``call(rank)`` returns or raises, each rank in a thread."""

    def run(rank: int) -> Any:
        try:
            return call(rank)
        except errors.UltraEPError as error:
            return error

    return loopback(count, run)


def counts_of(ids: torch.Tensor) -> torch.Tensor:
    return torch.bincount(ids.flatten().long() + 1, minlength=E + 1)[1:].int()


def map_of(ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(ids + 1, E + 1)[..., 1:].sum(1) > 0


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("form", ["routing_map", "counts"])
def test_maps_and_counts(
    emulated: EmulatedDevice, groups_of: Any, form: str, on_device: bool, at_once: bool
) -> None:
    groups = groups_of(3)
    ids = [torch.rand((9 + r, E)).argsort(1)[:, :2] for r in range(3)]
    given = [map_of(i) if form == "routing_map" else counts_of(i) for i in ids]
    given = [emulated.put(g) for g in given] if on_device else given
    for _ in range(2):  # what was counted is gone

        def call(rank: int) -> torch.Tensor:
            routing = {form: given[rank]}
            if not at_once:
                return uec.gather_load(group=groups[rank], **routing)
            found = uec.gather_and_plan(group=groups[rank], **routing).load
            assert found is not None
            return found

        tables = each(3, call)
        emulated.synchronize()
        for table in tables:
            assert torch.equal(table, torch.stack([counts_of(i) for i in ids]))
            assert emulated.is_on_device(table) == on_device


def test_padding_and_a_source_on_the_device(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(3)
    ids = torch.rand((30, E)).argsort(1)[:, :2]
    ids[:20, 0] = 0
    ids[ids[:, 0] == ids[:, 1], 1] = -1
    there, num_tokens = emulated.put(ids), emulated.put(torch.tensor(21))
    tables = each(3, lambda r: uec.gather_load(there, group=groups[r], num_tokens=num_tokens))
    emulated.synchronize()
    assert torch.equal(tables[0], counts_of(ids[:21]).expand(3, E))
    plans = [uec.gather_and_plan(there, group=g, num_tokens=num_tokens, source=1) for g in groups]
    found = [
        uec.reroute(there, plan, group=group, num_tokens=num_tokens, source=1)
        for group, plan in zip(groups, plans, strict=True)
    ]
    moved = [
        uec.reroute_map(emulated.put(map_of(ids[:21])), None, plan, group=group, source=1)[0]
        for group, plan in zip(groups, plans, strict=True)
    ]
    emulated.synchronize()
    for physical, columns, plan in zip(found, moved, plans, strict=True):
        assert plan.load is not None
        assert plan.load[1].tolist() == counts_of(ids[:21]).tolist()
        assert torch.equal(physical, found[0])
        assert (physical[21:] == -1).all()
        by_id = torch.bincount(physical[physical >= 0], minlength=columns.shape[1])
        assert torch.equal(columns.sum(0), by_id)
        quotas = by_id.view(3, -1).sum(1)
        assert int(quotas.max()) < counts_of(ids[:21]).view(-1)[:3].sum()  # something has moved


@pytest.mark.parametrize("on_device", [False, True])
def test_bad_counts_reach_every_rank(
    emulated: EmulatedDevice, groups_of: Any, on_device: bool
) -> None:
    groups = groups_of(2)
    counts = [torch.arange(E), torch.tensor([1, 2, 3, -4, 5, 6, 7])]
    given = [emulated.put(c) for c in counts] if on_device else counts
    found = each(2, lambda r: uec.gather_load(group=groups[r], counts=given[r]))
    emulated.synchronize()
    if on_device:
        assert isinstance(found[0], Exception) or not found[0].any()  # a slow host knows at once
        found = each(2, lambda r: uec.gather_load(group=groups[r], counts=given[r]))
        found = [error.__cause__ for error in found]
    assert isinstance(found[1], errors.InvalidLoadError)
    assert "counts[3] is -4; expected a number of tokens" in str(found[1])
    assert isinstance(found[0], errors.PeerRejectedError)


def test_ids_that_are_none_in_a_source(emulated: EmulatedDevice, groups_of: Any) -> None:
    (group,) = groups_of(1)
    uec.gather_and_plan(emulated.put(torch.tensor([[E], [0]])), group=group, source=0)
    emulated.synchronize()
    with pytest.raises(errors.InvalidLoadError, match="entry for expert 0 outside 0"):
        group.close()


@pytest.mark.parametrize("on_device", [False, True])
def test_bad_ids_reach_every_rank(
    emulated: EmulatedDevice, groups_of: Any, on_device: bool
) -> None:
    groups = groups_of(2)
    ids = [torch.tensor([[0, 1]]), torch.tensor([[0, E], [9, 1]])]
    given = [emulated.put(i) for i in ids] if on_device else ids
    emulated.delay(50_000)  # calls on a device's ids return before they fail
    found = each(2, lambda r: uec.gather_load(given[r], group=groups[r]))
    emulated.synchronize()
    if on_device:  # the next call says it; until then the load is zeros
        assert isinstance(found[0], Exception) or not found[0].any()  # a slow host knows at once
        found = each(2, lambda r: uec.gather_load(given[r], group=groups[r]))
        found = [error.__cause__ for error in found]
    assert isinstance(found[1], errors.InvalidLoadError)
    assert "id 7 at position 1; expected [0, 7)" in str(found[1])
    assert isinstance(found[0], errors.PeerRejectedError)
    for group in groups:
        with pytest.raises(errors.GroupClosedError):
            uec.gather_load(torch.tensor([[0]]), group=group)


def test_wrong_dtype_is_refused_at_once(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(2)
    with pytest.raises(errors.InvalidLoadError, match=r"topk_ids is torch.float32"):
        uec.gather_load(emulated.put(torch.zeros(2, 2)), group=groups[0])


def test_a_rank_that_is_missing_is_named(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(2, timeout=0.1)
    with pytest.raises(errors.TransferTimeoutError, match="rank 1"):
        uec.gather_load(torch.tensor([[0]]), group=groups[0])


def test_another_call_at_the_same_point_is_a_mismatch(
    emulated: EmulatedDevice, groups_of: Any
) -> None:
    groups = groups_of(2)
    plan = uec.Plan.from_slots([[-1], [-1]], num_experts=E)
    weights = {"w": torch.zeros(groups[0].num_local_experts, 64, dtype=torch.uint8)}

    def call(rank: int) -> Any:
        if rank:
            return uec.gather_load(torch.tensor([[0]]), group=groups[1])
        return uec.replicate_experts(weights, plan, group=groups[0])

    found = each(2, call)
    assert isinstance(found[0], errors.PlanMismatchError)
    assert isinstance(found[1], errors.TransferAbortedError)


def test_graph_replays_with_fresh_ids(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(3)
    held = [emulated.put(torch.full((6, 2), -1)) for _ in range(3)]
    emulated.synchronize()
    emulated.begin_capture()
    with pytest.raises(errors.UnsupportedError, match="topk_ids is on the CPU"):
        uec.gather_load(torch.tensor([[0]]), group=groups[0])
    tables = each(3, lambda r: uec.gather_load(held[r], group=groups[r]))
    graph = emulated.end_capture()
    for round_ in range(6):
        for ids in held:
            ids.copy_(torch.randint(-1, E, ids.shape))
        if round_ == 3:  # beside the graph, the same ids
            emulated.synchronize()
            eager = each(3, lambda r: uec.gather_load(held[r], group=groups[r]))
            emulated.synchronize()
        emulated.replay(graph)
        emulated.synchronize()
        expected = torch.stack([counts_of(ids) for ids in held])
        assert all(torch.equal(table, expected) for table in tables)
        if round_ == 3:
            assert all(torch.equal(table, expected) for table in eager)
