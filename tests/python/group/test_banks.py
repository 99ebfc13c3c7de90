"""Banks: readiness slot by slot, misuse, memory, and prefetch for a forecast of the load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bank_cases import (
    E,
    Held,
    S,
    check_residents,
    check_slots,
    filled_weights,
    new_groups,
    plan_of,
    replicate,
    stored,
)
from ranks import (
    MIXED,
    close_all,
    expert_bytes,
    fill_weights,
    loopback,
    plan_alone,
    raised,
    random_plan,
    raw,
    start_all,
    synchronize_all,
)

import ultraep_comm as uec
from ultraep_comm import errors

# ---- planning -------------------------------------------------------------------------------


def test_residents_have_to_be_legal() -> None:
    load, sizes = torch.ones(4, E, dtype=torch.int32), {"num_ranks": 4, "slots_per_rank": S}
    for residents, text in (
        ([[0, -1], [-1, -1], [-1, -1], [-1, -1]], "on the expert's home"),
        ([[-1, -1]] * 3, r"shape \(3, 2\); expected \(4, 2\)"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=text):
            plan_alone(load, residents=torch.tensor(residents), **sizes)
    free = torch.full((4, S), -1)
    cost = uec.PlanCost(token=1.0, expert_byte=1.0, expert_bytes=1)
    with pytest.raises(errors.InvalidArgumentError, match="a cost and residents"):
        plan_alone(load, residents=free, cost=cost, **sizes)
    with pytest.raises(errors.InvalidArgumentError, match="bank= and reuse= with a group"):
        plan_alone(load, reuse=True, **sizes)


# ---- slot by slot ---------------------------------------------------------------------------


def test_slots_are_ready_one_by_one() -> None:
    """Rank 1 gets expert 0 while expert 6 cannot come: its home has not called."""
    groups = new_groups(4, engine="host")  # c10d waits for every rank's call
    weights = filled_weights(groups, 0)
    assert replicate(groups, weights, plan_of([[-1, -1], [-1, 4], [-1, -1], [-1, -1]])) == 1
    plan = plan_of([[-1, -1], [0, 4], [6, -1], [-1, -1]])
    works = start_all(groups[:3], weights, plan, mode="direct")
    assert works[1].slot_ready(1)  # it held expert 4
    works[1].wait(slots=[1, 0])
    assert works[1].slot_ready(0)
    assert not works[2].slot_ready(0)
    assert not works[2].is_completed()
    for index, (name, segment) in enumerate(MIXED.items()):
        found = raw(groups[1].slots[name][0], segment)
        assert torch.equal(found, expert_bytes(0, 0, index, segment))
    for call in (works[1].slot_ready, lambda slot: works[1].wait(slots=[slot])):
        with pytest.raises(errors.InvalidArgumentError, match=r"fills the slots \[0, 1\]"):
            call(2)
    with pytest.raises(errors.InvalidArgumentError, match=r"fills the slots \[\]"):
        works[0].wait(slots=[0])
    (last,) = start_all(groups[3:], [None] * 3 + [weights[3]], plan, mode="direct")
    works[2].wait(slots=[0])
    synchronize_all([*works, last])
    assert all(works[1].slot_ready(slot) for slot in (0, 1))
    held: Held = {(0, 1, 0): (0, 0), (0, 1, 1): (4, 0), (0, 2, 0): (6, 0)}
    for group in groups:
        check_slots(group, held)
    close_all(groups)


@pytest.mark.parametrize("mode", ["push", "pull", "direct"])
def test_what_is_ready_is_complete(mode: str) -> None:
    num_ranks = 5
    groups = uec.testing.new_loopback_groups(
        num_ranks,
        num_experts=E,
        slots_per_rank=S,
        expert={"w": ((3 << 18,), torch.uint8)},
        timeout=30.0,
    )
    weights = loopback(num_ranks, lambda r: groups[r].empty_weights())
    for epoch in range(8):
        plan = random_plan(epoch, num_ranks, E, S)
        for group in groups:
            fill_weights(group, weights[group.rank], epoch)

        def wait_and_look(
            rank: int, epoch: int = epoch, plan: uec.Plan = plan
        ) -> list[tuple[int, bool]]:
            group, seen = groups[rank], []
            work = uec.replicate_experts(weights[rank], plan, group=group, async_op=True, mode=mode)
            assert work is not None
            for slot, expert in enumerate(plan.slot_expert[rank].tolist()):
                if expert >= 0:
                    work.wait(slots=[slot])
                    right = expert_bytes(epoch, expert, 0, group.segments["w"])
                    seen.append((expert, torch.equal(group.slots["w"][slot], right)))
            work.wait()
            return seen

        for seen in loopback(num_ranks, wait_and_look):
            assert all(right for _, right in seen)
    close_all(groups)


def test_waiting_for_slots_of_a_call_that_fails() -> None:
    groups = new_groups(2)
    weights = filled_weights(groups, 0)
    works = start_all(groups[1:], weights, plan_of([[-1, -1], [0, -1]]))
    groups[0].abort()
    with pytest.raises(errors.TransferError):
        works[0].wait(slots=[0])
    assert not works[0].slot_ready(0)
    for group in groups:
        raised(group.close)


def test_a_call_without_a_version_has_that_of_its_bank() -> None:
    groups = new_groups(2)
    weights, plan = filled_weights(groups, 0), plan_of([[-1, -1], [0, -1]], bank=1)
    synchronize_all(start_all(groups, weights, plan, version=5))
    assert replicate(groups, weights, plan) == 0
    assert [group.banks[1].version for group in groups] == [5, 5]
    close_all(groups)


# ---- misuse ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "options", "text"),
    [
        (1, {}, "version is 1, and bank 0 holds weights of version 2"),
        (2, {"reuse": False}, "without reuse"),
        (2, {"bank": 2}, "banks=2"),
    ],
)
def test_peers_hear_of_a_bad_call(version: int, options: dict[str, Any], text: str) -> None:
    groups = new_groups(2)
    weights, slots = filled_weights(groups, 0), [[-1, -1], [0, -1]]
    (started,) = start_all(groups[1:], weights, plan_of(slots))
    for _ in range(2):
        groups[0].banks[0].invalidate()
    with pytest.raises(errors.UltraEPError, match=text):
        uec.replicate_experts(
            weights[0], plan_of(slots, **options), group=groups[0], version=version
        )
    with pytest.raises(errors.PeerRejectedError):
        started.synchronize()
    assert stored(groups) == 0
    assert groups[1].banks[0].residents.tolist() == [[-1, -1]] * 2
    for group in groups:
        raised(group.close)


def test_bad_banks_are_named() -> None:
    groups, others = new_groups(2), new_groups(2)
    load = torch.ones(2, E, dtype=torch.int32)
    with pytest.raises(errors.InvalidArgumentError, match=r"expected one of \[Bank"):
        uec.plan_replicas(load, group=groups[0], bank=others[0].banks[0])
    for index in (-1, 2):
        with pytest.raises(errors.InvalidArgumentError, match=f"bank is {index}; expected 0 to 1"):
            uec.plan_replicas(load, group=groups[0], bank=index)
    with pytest.raises(errors.UnsupportedError, match=r"use work\.wait\(slots=\)"):
        groups[0].banks[0].ready  # noqa: B018
    with pytest.raises(errors.InvalidArgumentError, match="grad_banks is 3; expected 1 to 2"):
        new_groups(2, grad_banks=3)
    with pytest.raises(errors.InvalidArgumentError, match="banks is 0"):
        new_groups(2, banks=0)
    close_all(groups + others)


def test_a_bank_in_use_is_not_invalidated() -> None:
    groups = new_groups(2)
    weights = filled_weights(groups, 0)
    plan = plan_of([[-1, -1], [0, -1]])
    (work,) = start_all(groups[:1], weights, plan)
    with pytest.raises(errors.GroupBusyError, match="call 1, which fills it"):
        groups[0].banks[0].invalidate()
    groups[0].banks[1].invalidate()
    uec.replicate_experts(weights[1], plan, group=groups[1])
    work.synchronize()
    groups[0].banks[0].invalidate()
    groups[1].banks[0].invalidate()
    for group in groups:
        group.close()
    with pytest.raises(errors.GroupClosedError):
        groups[0].banks[0].invalidate()


def test_check_mode_finds_weights_that_changed_behind_the_bank() -> None:
    groups = new_groups(2, engine="host", check=True)
    weights, plan = filled_weights(groups, 0), plan_of([[-1, -1], [0, -1]])
    assert replicate(groups, weights, plan) == 1
    fill_weights(groups[0], weights[0], 1)  # and no invalidate()
    works = start_all(groups, weights, plan)
    with pytest.raises(errors.CorruptSlotError, match=r"bank\.invalidate\(\) first") as found:
        works[1].synchronize()
    assert (found.value.expert, found.value.slot, found.value.peer) == (0, 0, 0)
    assert isinstance(raised(works[0].synchronize), errors.TransferError)
    for group in groups:
        raised(group.close)


# ---- prefetch -------------------------------------------------------------------------------


def _loads(num_ranks: int, steps: int, seed: int = 3) -> list[torch.Tensor]:
    """Return loads of one layer that drift."""
    generator = torch.Generator().manual_seed(seed)
    level = torch.randn(E, generator=generator)
    loads = []
    for _ in range(steps):
        level = 0.95 * level + 0.3 * torch.randn(E, generator=generator)
        share = torch.softmax(2 * level, 0)
        noise = torch.randint(0, 20, (num_ranks, E), generator=generator)
        loads.append((share * 4000).int()[None] + noise.int())
    return loads


@pytest.mark.parametrize("method", ["last", "mean", lambda loads: loads[-1].flip(0)])
def test_the_exact_plan_moves_what_the_forecast_missed(method: Any) -> None:
    num_ranks = 4
    groups = new_groups(num_ranks)
    weights = filled_weights(groups, 0)
    forecasts = [uec.LoadForecast(method) for _ in groups]
    fetched, missed = [], []
    for step, load in enumerate(_loads(num_ranks, 8)):
        other = random_plan(step, num_ranks, E, S).slot_expert.tolist()
        replicate(groups, weights, plan_of(other, bank=1))  # another layer shares the bank
        before = stored(groups)
        works = [
            uec.prefetch_experts(weights[r], forecasts[r], bank=1, group=groups[r], async_op=True)
            for r in range(num_ranks)
        ]
        plans = [uec.plan_replicas(load, group=group, bank=1, reuse=True) for group in groups]
        exact = start_all(groups, weights, plans)  # while the prefetch is under way
        synchronize_all(exact)
        for work in works:
            assert (work is None) == (not fetched)
            assert work is None or work.is_completed()
        missed.append(plans[0].num_slots_to_fill)
        fetched.append(stored(groups) - before - missed[-1])
        assert plans[0].imbalance <= max(1.01, uec.plan_replicas(load, group=groups[0]).imbalance)
        for group in groups:
            check_residents(group.banks[1], group.rank)
        for forecast in forecasts:
            forecast.update(load)
    assert fetched[0] == 0
    assert sum(fetched) > 0
    close_all(groups)


def test_a_bad_forecast_is_told_to_the_peers() -> None:
    groups = new_groups(2)
    weights = filled_weights(groups, 0)
    load = torch.tensor([900] + [1] * (E - 1))  # rank 1 is to have expert 0
    work = uec.prefetch_experts(weights[1], load, bank=0, group=groups[1], async_op=True)
    with pytest.raises(errors.InvalidLoadError, match="shape"):
        uec.prefetch_experts(weights[0], torch.ones(E + 1).int(), bank=0, group=groups[0])
    assert work is not None
    with pytest.raises(errors.PeerRejectedError):
        work.synchronize()
    for group in groups:
        raised(group.close)
