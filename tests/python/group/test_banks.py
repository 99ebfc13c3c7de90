"""Banks: slots keep what they hold, and what is moved is right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import (
    MIXED,
    RankPool,
    assert_mismatch,
    close_all,
    expert_bytes,
    fill_weights,
    loopback,
    make_weights,
    raised,
    random_plan,
    raw,
    start_all,
    synchronize_all,
)

import ultraep_comm as uec
from ultraep_comm import errors

E, S = 8, 2
EXPERT_BYTES = sum(segment.nbytes for segment in MIXED.values())
Held = dict[tuple[int, int, int], tuple[int, int]]  # (bank, rank, slot): expert and epoch


def _groups(num_ranks: int, **options: Any) -> list[uec.Group]:
    options = {"expert": MIXED, "timeout": 30.0, "banks": 2, **options}
    return uec.new_loopback_groups(num_ranks, num_experts=E, slots_per_rank=S, **options)


def _plan(slots: list[list[int]], bank: int | None = 0, **fields: Any) -> uec.Plan:
    return uec.Plan.from_slots(
        torch.tensor(slots, dtype=torch.int32), num_experts=E, bank=bank, **fields
    )


def _filled(groups: list[uec.Group], epoch: int) -> list[dict[str, torch.Tensor]]:
    weights = [make_weights(group) for group in groups]
    for group in groups:
        fill_weights(group, weights[group.rank], epoch)
    return weights


def _stored(groups: list[uec.Group]) -> int:
    """Return the experts that all ranks have stored since they exist."""
    total = sum(group.bytes_stored for group in groups)
    assert total % EXPERT_BYTES == 0
    return total // EXPERT_BYTES


def _replicate(groups: list[uec.Group], weights: Any, plan: Any, **options: Any) -> int:
    """Return the number of experts that were moved."""
    before = _stored(groups)
    synchronize_all(start_all(groups, weights, plan, **options))
    return _stored(groups) - before


def _check_slots(group: uec.Group, held: Held) -> None:
    """Check every byte of this rank's slots; those that held nothing are zero."""
    for bank in group.banks:
        for index, (name, segment) in enumerate(group.segments.items()):
            for slot in range(S):
                found = raw(bank.slots[name][slot], segment)
                expert, epoch = held.get((bank.index, group.rank, slot), (-1, 0))
                if expert < 0:
                    assert not found.any()
                else:
                    assert torch.equal(found, expert_bytes(epoch, expert, index, segment))


def _check_residents(bank: uec.Bank, rank: int) -> None:
    """Check every byte of what this rank's slots are said to hold, of weights of epoch 0."""
    for slot, expert in enumerate(bank.residents[rank].tolist()):
        for index, (name, segment) in enumerate(MIXED.items()):
            if expert >= 0:
                found = raw(bank.slots[name][slot], segment)
                assert torch.equal(found, expert_bytes(0, expert, index, segment))


def _walk(seed: int, num_ranks: int, steps: int) -> list[tuple[int, int, list[list[int]]]]:
    """Return (bank, epoch of the weights, slots) of calls that have much in common."""
    generator = random.Random(seed)
    plans = [random_plan(seed + bank, num_ranks, E, S).slot_expert.tolist() for bank in range(2)]
    calls, epoch = [], 0
    for step in range(steps):
        epoch += generator.random() < 0.2
        bank = generator.randrange(2)
        other = random_plan(seed + 100 + step, num_ranks, E, S).slot_expert.tolist()
        row = generator.randrange(num_ranks)
        plans[bank][row] = other[row]
        calls.append((bank, epoch, [list(slots) for slots in plans[bank]]))
    return calls


def _expected(
    calls: list[tuple[int, int, list[list[int]]]],
) -> list[tuple[Held, int]]:
    """Return what slots hold after each call, and how many experts it moves."""
    held: Held = {}
    resident: Held = {}
    versions = [0, 0]
    result = []
    for bank, epoch, slots in calls:
        if versions[bank] != epoch:
            resident = {at: value for at, value in resident.items() if at[0] != bank}
            versions[bank] = epoch
        moved = 0
        for rank, row in enumerate(slots):
            new = {(bank, rank, s): (expert, epoch) for s, expert in enumerate(row) if expert >= 0}
            moved += sum(resident.get(at) != value for at, value in new.items())
            # A rank has one resident of an expert.
            gone = {at for at in resident if at[:2] == (bank, rank)}
            gone = {at for at in gone if resident[at] in new.values()} - set(new)
            resident = {at: value for at, value in resident.items() if at not in gone} | new
            held |= new
        result.append((dict(held), moved))
    return result


@pytest.mark.parametrize("options", [{}, {"check": True}, {"num_sms": 2}])
@pytest.mark.parametrize("mode", ["auto", "push", "pull", "direct"])
def test_only_what_is_missing_is_moved(mode: str, options: dict[str, Any]) -> None:
    num_ranks, now = 4, 0
    groups = _groups(num_ranks, **options)
    weights = loopback(num_ranks, lambda r: groups[r].empty_weights())
    for group in groups:
        fill_weights(group, weights[group.rank], 0)
    calls = _walk(7, num_ranks, 12)
    kept = 0
    for (bank, epoch, slots), (held, moved) in zip(calls, _expected(calls), strict=True):
        if epoch != now:
            for group in groups:
                fill_weights(group, weights[group.rank], epoch)
            now = epoch
        plan = _plan(slots, bank)
        assert _replicate(groups, weights, plan, mode=mode, version=epoch) == moved
        kept += plan.num_replicas - moved
        for group in groups:
            _check_slots(group, held)
            assert group.bank(bank).version == epoch
    assert kept > 10
    close_all(groups)


def _walk_in_process(rank: int, process_group: dist.ProcessGroup, seed: int) -> list[int]:
    num_ranks, moved = process_group.size(), []
    with uec.new_group(
        process_group, num_experts=E, slots_per_rank=S, expert=MIXED, banks=2, timeout=30.0
    ) as group:
        weights, now = make_weights(group), -1
        calls = _walk(seed, num_ranks, 15)
        for (bank, epoch, slots), (held, _) in zip(calls, _expected(calls), strict=True):
            if epoch != now:
                fill_weights(group, weights, epoch)
                now = epoch
            before = group.bytes_stored
            uec.replicate_experts(weights, _plan(slots, bank), group=group, version=epoch)
            moved.append(group.bytes_stored - before)
            _check_slots(group, held)
    return moved


@pytest.mark.parametrize("seed", range(3))
def test_banks_across_processes(ranks: RankPool, seed: int) -> None:
    num_ranks = 2 + seed
    moved = ranks.run(num_ranks, _walk_in_process, seed)
    expected = [count for _, count in _expected(_walk(seed, num_ranks, 15))]
    assert [sum(of_call) for of_call in zip(*moved, strict=True)] == [
        count * EXPERT_BYTES for count in expected
    ]


def test_a_restored_plan_moves_what_has_gone_since() -> None:
    groups = _groups(4)
    weights = _filled(groups, 0)
    first = _plan([[-1, -1], [0, 1], [0, -1], [0, -1]], bank=1)
    handles = [group.save(first, layer=3) for group in groups]
    assert _replicate(groups, weights, handles) == 4
    assert _replicate(groups, weights, handles) == 0
    assert _replicate(groups, weights, _plan([[-1, -1], [6, -1], [6, 7], [-1, -1]], bank=1)) == 3
    assert groups[0].bank(1).residents.tolist() == [[-1, -1], [6, 1], [6, 7], [0, -1]]
    assert _replicate(groups, weights, handles) == 2
    assert groups[2].bank(1).residents.tolist() == [[-1, -1], [0, 1], [0, 7], [0, -1]]
    assert groups[3].bank(0).residents.tolist() == [[-1, -1]] * 4
    for handle in handles:
        handle.release()
    close_all(groups)


def test_new_weights_move_everything() -> None:
    groups = _groups(3)
    weights, plan = _filled(groups, 0), _plan([[-1, -1], [0, -1], [0, -1]])
    assert _replicate(groups, weights, plan) == 2
    for group in groups:
        fill_weights(group, weights[group.rank], 1)
        group.bank(0).invalidate()
        assert group.bank(0).version == 1
        assert group.bank(0).residents.tolist() == [[-1, -1]] * 3
    assert _replicate(groups, weights, plan) == 2
    held: Held = {(0, rank, 0): (0, 1) for rank in (1, 2)}
    for group in groups:
        _check_slots(group, held)
    assert _replicate(groups, weights, plan, version=1) == 0
    assert _replicate(groups, weights, plan, version=2) == 2
    assert groups[0].bank(0).version == 2
    close_all(groups)


def test_other_segments_are_another_matter() -> None:
    """What a bank's last call did not copy is not there."""
    groups = _groups(3)
    weights, plan = _filled(groups, 0), _plan([[-1, -1], [0, -1], [0, -1]])
    part = MIXED["w13"].nbytes
    synchronize_all(start_all(groups, weights, plan, segments=["w13"]))
    assert sum(group.bytes_stored for group in groups) == 2 * part
    synchronize_all(start_all(groups, weights, plan))
    assert sum(group.bytes_stored for group in groups) == 2 * (part + EXPERT_BYTES)
    for group in groups:
        _check_slots(group, {(0, rank, 0): (0, 0) for rank in (1, 2)})
    close_all(groups)


def test_a_plan_without_a_bank_leaves_bank_0_empty() -> None:
    groups = _groups(3)
    weights = _filled(groups, 0)
    slots = [[-1, -1], [0, -1], [0, -1]]
    assert _replicate(groups, weights, _plan(slots)) == 2
    assert _replicate(groups, weights, _plan(slots, bank=1)) == 2
    assert _replicate(groups, weights, _plan(slots, bank=None)) == 2
    assert groups[0].bank(0).residents.tolist() == [[-1, -1]] * 3
    assert groups[0].bank(1).residents.tolist() == slots
    assert _replicate(groups, weights, _plan(slots)) == 2
    close_all(groups)


# ---- planning -------------------------------------------------------------------------------


def test_plans_on_top_of_a_bank_move_little() -> None:
    num_ranks, seen = 4, 0
    groups = _groups(num_ranks)
    weights = _filled(groups, 0)
    generator = torch.Generator().manual_seed(5)
    load = torch.randint(0, 400, (num_ranks, E), generator=generator)
    load[:, 0] += 900
    for step in range(6):
        load = load + torch.randint(0, 40, load.shape, generator=generator)
        plans = [uec.plan_replicas(load, group=group, bank=group.bank(1)) for group in groups]
        plan = plans[0]
        assert plan.bank == 1
        assert plan.moves is not None
        assert all(torch.equal(plan.slot_expert, other.slot_expert) for other in plans)
        apart = uec.plan_replicas(
            load, num_ranks=num_ranks, slots_per_rank=S, residents=groups[0].bank(1).residents
        )
        assert torch.equal(apart.slot_expert, plan.slot_expert)
        assert torch.equal(apart.moves, plan.moves)
        assert apart.bank is None
        from_empty = uec.plan_replicas(load, group=groups[0])
        assert plan.imbalance <= max(1.01, from_empty.imbalance)
        if step == 0:
            assert torch.equal(plan.slot_expert, from_empty.slot_expert)
        assert _replicate(groups, weights, plan) == plan.num_moves <= from_empty.num_moves
        seen += plan.num_moves == 0
        uec.verify_plan(plan, load)
    assert seen > 0
    close_all(groups)


def test_residents_have_to_be_legal() -> None:
    load, sizes = torch.ones(4, E, dtype=torch.int32), {"num_ranks": 4, "slots_per_rank": S}
    for residents, text in (
        ([[0, -1], [-1, -1], [-1, -1], [-1, -1]], "on the expert's home"),
        ([[2, 2], [-1, -1], [-1, -1], [-1, -1]], "twice on rank 0"),
        ([[-1, -1]] * 3, r"shape \(3, 2\); expected \(4, 2\)"),
        ([[E, -1], [-1, -1], [-1, -1], [-1, -1]], r"slot_expert\[0, 0\] is 8"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=text):
            uec.plan_replicas(load, residents=torch.tensor(residents), **sizes)
    free = torch.full((4, S), -1)
    cost = uec.PlanCost(token=1.0, expert_byte=1.0, expert_bytes=1)
    with pytest.raises(errors.InvalidArgumentError, match="a cost and residents"):
        uec.plan_replicas(load, residents=free, cost=cost, **sizes)
    with pytest.raises(errors.InvalidArgumentError, match="bank= with a group"):
        uec.plan_replicas(load, bank=0, **sizes)


# ---- gradients ------------------------------------------------------------------------------


def test_slots_without_tokens_have_no_gradient() -> None:
    """What a slot keeps for later is neither added up nor cleared."""
    groups = uec.new_loopback_groups(
        3,
        num_experts=3,
        slots_per_rank=1,
        expert={"w": ((4,), torch.float32)},
        grads=torch.float32,
        banks=3,
        grad_banks=2,
        timeout=30.0,
    )
    for index in range(3):
        for group in groups:
            for rank, bank in enumerate(group.banks):
                bank.slot_grads["w"].fill_(10.0 * (rank + 1))
            assert group.bank(2).slot_grads["w"].data_ptr() == group.slot_grads["w"].data_ptr()
            group.bank(index).slot_grads["w"].fill_(group.rank + 1)
        plan = uec.Plan.from_slots(
            [[-1], [0], [0]],
            num_experts=3,
            slot_quota=torch.tensor([[0], [5], [0]]),
            home_quota=torch.tensor([5, 0, 0]),
            bank=index,
        )
        mains = [{"w": torch.full((1, 4), 100.0)} for _ in groups]
        synchronize_all(start_all(groups, mains, plan, call=uec.reduce_expert_grads))
        assert [main["w"].unique().tolist() for main in mains] == [[102.0], [100.0], [100.0]]
        left = [group.bank(index).slot_grads["w"].unique().tolist() for group in groups]
        assert left == [[1.0], [0.0], [3.0]]
        other = groups[0].bank(1 - index % 2).slot_grads["w"]
        assert other.unique().tolist() != [0.0]
    close_all(groups)


# ---- slot by slot ---------------------------------------------------------------------------


def test_slots_are_ready_one_by_one() -> None:
    """Rank 1 gets expert 0 while expert 6 cannot come: its home has not called."""
    groups = _groups(4)
    weights = _filled(groups, 0)
    assert _replicate(groups, weights, _plan([[-1, -1], [-1, 4], [-1, -1], [-1, -1]])) == 1
    plan = _plan([[-1, -1], [0, 4], [6, -1], [-1, -1]])
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
        _check_slots(group, held)
    close_all(groups)


@pytest.mark.parametrize("mode", ["push", "pull", "direct"])
def test_what_is_ready_is_complete(mode: str) -> None:
    num_ranks = 5
    groups = uec.new_loopback_groups(
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
    groups = _groups(2)
    weights = _filled(groups, 0)
    works = start_all(groups[1:], weights, _plan([[-1, -1], [0, -1]]))
    groups[0].abort()
    with pytest.raises(errors.TransferError):
        works[0].wait(slots=[0])
    assert not works[0].slot_ready(0)
    for group in groups:
        raised(group.close)


# ---- misuse ---------------------------------------------------------------------------------


def _fails(groups: list[uec.Group], call: Callable[[uec.Group], Any], text: str) -> None:
    """Check that rank 0's call raises, and that its peer hears of it and no byte is written."""
    plan = _plan([[-1, -1], [0, -1]])
    weights = _filled(groups, 0)
    started = start_all(groups[1:], weights, plan)
    error = raised(lambda: call(groups[0]))
    assert isinstance(error, errors.UltraEPError)
    assert text in str(error)
    with pytest.raises(errors.PeerRejectedError):
        started[0].synchronize()
    assert _stored(groups) == 0
    assert groups[1].bank(0).residents.tolist() == [[-1, -1]] * 2
    for group in groups:
        raised(group.close)


def test_peers_hear_of_a_bad_call() -> None:
    def with_version(version: int, plan: uec.Plan) -> Callable[[uec.Group], Any]:
        def call(group: uec.Group) -> None:
            group.bank(0).invalidate()
            group.bank(0).invalidate()
            uec.replicate_experts(make_weights(group), plan, group=group, version=version)

        return call

    plan = _plan([[-1, -1], [0, -1]])
    _fails(_groups(2), with_version(1, plan), "version is 1, and bank 0 holds weights of version 2")
    _fails(_groups(2), with_version(2, _plan([[-1, -1], [0, -1]], None)), "without a bank")
    _fails(_groups(2), with_version(2, _plan([[-1, -1], [0, -1]], 2)), "banks=2")


def test_bad_banks_are_named() -> None:
    groups, others = _groups(2), _groups(2)
    load = torch.ones(2, E, dtype=torch.int32)
    with pytest.raises(errors.InvalidArgumentError, match="expected one of group"):
        uec.plan_replicas(load, group=groups[0], bank=others[0].bank(0))
    for index in (-1, 2):
        with pytest.raises(errors.InvalidArgumentError, match=f"bank is {index}; expected 0 to 1"):
            groups[0].bank(index)
    with pytest.raises(errors.InvalidArgumentError, match="grad_banks is 3; expected 1 to 2"):
        _groups(2, grad_banks=3)
    with pytest.raises(errors.InvalidArgumentError, match="banks is 0"):
        _groups(2, banks=0)
    close_all(groups + others)


def test_a_rank_that_invalidates_alone_is_found() -> None:
    groups = _groups(3)
    weights = _filled(groups, 0)
    assert _replicate(groups, weights, _plan([[-1, -1], [0, -1], [-1, -1]])) == 1
    groups[0].bank(0).invalidate()
    works = start_all(groups, weights, _plan([[-1, -1], [0, -1], [0, -1]]))
    assert_mismatch([works[0], works[2]])  # rank 1 has all that it takes itself to need
    assert _stored(groups) == 1
    assert groups[2].bank(0).residents.tolist() == [[-1, -1]] * 3
    for group in groups:
        raised(group.close)


def test_a_bank_in_use_is_not_invalidated() -> None:
    groups = _groups(2)
    weights = _filled(groups, 0)
    plan = _plan([[-1, -1], [0, -1]])
    (work,) = start_all(groups[:1], weights, plan)
    with pytest.raises(errors.GroupBusyError, match="call 1, which fills it"):
        groups[0].bank(0).invalidate()
    groups[0].bank(1).invalidate()
    uec.replicate_experts(weights[1], plan, group=groups[1])
    work.synchronize()
    groups[0].bank(0).invalidate()
    groups[1].bank(0).invalidate()
    for group in groups:
        group.close()
    with pytest.raises(errors.GroupClosedError):
        groups[0].bank(0).invalidate()


def test_check_mode_finds_weights_that_changed_behind_the_bank() -> None:
    groups = _groups(2, check=True)
    weights, plan = _filled(groups, 0), _plan([[-1, -1], [0, -1]])
    assert _replicate(groups, weights, plan) == 1
    fill_weights(groups[0], weights[0], 1)  # and no invalidate()
    works = start_all(groups, weights, plan)
    with pytest.raises(errors.CorruptSlotError, match=r"bank\.invalidate\(\) first") as found:
        works[1].synchronize()
    assert (found.value.expert, found.value.slot, found.value.peer) == (0, 0, 0)
    assert isinstance(raised(works[0].synchronize), errors.TransferError)
    for group in groups:
        raised(group.close)


# ---- memory ---------------------------------------------------------------------------------


def test_memory_is_known_before_it_is_taken() -> None:
    expert = {"w": ((256, 256), torch.bfloat16)}
    sizes: dict[str, Any] = {"num_experts": E, "slots_per_rank": S, "expert": expert}
    sizes |= {"grads": torch.float32, "banks": 5, "grad_banks": 2}
    before = uec.group_memory(3, **sizes)
    groups = uec.new_loopback_groups(3, timeout=30.0, **sizes)
    after = groups[1].memory()
    assert before == after
    assert after.slots == 5 * S * 2 * 256 * 256
    assert after.slot_grads == 2 * S * 4 * 256 * 256
    assert after.total == len(groups[1].session.memory[0].local)
    views = [bank.slots["w"].data_ptr() for bank in groups[0].banks]
    assert [b - a for a, b in itertools.pairwise(views)] == [S * 2 * 256 * 256] * 4
    pointers = groups[0].expert_pointers(make_weights(groups[0]), bank=3)["w"]
    assert pointers[-S].item() == views[3]
    close_all(groups)


def _too_many_banks(rank: int, process_group: dist.ProcessGroup) -> str:
    try:
        uec.new_group(
            process_group,
            num_experts=E,
            slots_per_rank=S,
            expert={"w": ((1 << 20,), torch.bfloat16)},
            banks=1 << 16,
        )
    except errors.OutOfSharedMemoryError as error:
        return str(error)
    return ""


def test_more_banks_than_memory(ranks: RankPool) -> None:
    for text in ranks.run(2, _too_many_banks):
        assert f"{1 << 16} banks of 2 slots" in text


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
    groups = _groups(num_ranks)
    weights = _filled(groups, 0)
    forecasts = [uec.LoadForecast(method) for _ in groups]
    fetched, missed = [], []
    for step, load in enumerate(_loads(num_ranks, 8)):
        other = random_plan(step, num_ranks, E, S).slot_expert.tolist()
        _replicate(groups, weights, _plan(other, bank=1))  # another layer shares the bank
        before = _stored(groups)
        works = [
            uec.prefetch_experts(weights[r], forecasts[r], bank=1, group=groups[r])
            for r in range(num_ranks)
        ]
        plans = [uec.plan_replicas(load, group=group, bank=1) for group in groups]
        exact = start_all(groups, weights, plans)  # while the prefetch is under way
        synchronize_all(exact)
        for work in works:
            assert (work is None) == (not fetched)
            assert work is None or work.is_completed()
        missed.append(plans[0].num_moves)
        fetched.append(_stored(groups) - before - missed[-1])
        assert plans[0].imbalance <= max(1.01, uec.plan_replicas(load, group=groups[0]).imbalance)
        for group in groups:
            _check_residents(group.bank(1), group.rank)
        for forecast in forecasts:
            forecast.update(load)
    assert fetched[0] == 0
    assert sum(fetched) > 0
    close_all(groups)


def test_a_forecast_that_comes_true_leaves_nothing_to_move() -> None:
    groups = _groups(4)
    weights, (load,) = _filled(groups, 0), _loads(4, 1)
    for group in groups:
        uec.prefetch_experts(weights[group.rank], load, bank=group.bank(0), group=group)
    plan = uec.plan_replicas(load, group=groups[0], bank=0)
    assert plan.num_moves == 0
    assert plan.num_replicas > 0
    assert _replicate(groups, weights, plan) == plan.num_replicas  # the prefetch, which was waiting
    close_all(groups)


def test_a_bad_forecast_is_told_to_the_peers() -> None:
    groups = _groups(2)
    weights = _filled(groups, 0)
    load = torch.tensor([900] + [1] * (E - 1))  # rank 1 is to have expert 0
    work = uec.prefetch_experts(weights[1], load, bank=0, group=groups[1])
    with pytest.raises(errors.InvalidLoadError, match="shape"):
        uec.prefetch_experts(weights[0], torch.ones(E + 1).int(), bank=0, group=groups[0])
    assert work is not None
    with pytest.raises(errors.PeerRejectedError):
        work.synchronize()
    for group in groups:
        raised(group.close)
