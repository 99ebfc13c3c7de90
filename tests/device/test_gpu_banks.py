"""Banks on every engine: slots keep what they hold, and what is moved is right."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from bank_cases import (
    EXPERT_BYTES,
    E,
    Held,
    S,
    check_slots,
    expected_slots,
    filled_weights,
    new_groups,
    plan_of,
    replicate,
    stored,
    walk,
)
from graphs import MAKERS, on_each
from loopback_ranks import hold, put, put_plan
from ranks import (
    MIXED,
    bytes_stored,
    close_all,
    fill_weights,
    loopback,
    plan_alone,
    raised,
    start_all,
    synchronize_all,
)
from tiers import sampled

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.engines.cuda import device
from ultraep_comm.group.group import session_of


@pytest.mark.parametrize(
    "mode", sampled(["auto", "push", "pull", "direct"], ["auto", "pull"].__contains__)
)
def test_only_what_is_missing_is_moved(loopback_engine: str, mode: str) -> None:
    num_ranks, now = 4, 0
    groups = new_groups(num_ranks, engine=loopback_engine, check=loopback_engine == "host")
    weights = loopback(num_ranks, lambda r: groups[r].empty_weights())
    for group in groups:
        fill_weights(group, weights[group.rank], 0)
    calls = walk(7, num_ranks, 12)
    kept = 0
    for (bank, epoch, slots), (held, moved) in zip(calls, expected_slots(calls), strict=True):
        if epoch != now:
            for group in groups:
                fill_weights(group, weights[group.rank], epoch)
            now = epoch
        plan = plan_of(slots, bank)
        assert replicate(groups, weights, plan, mode=mode, version=epoch) == moved
        kept += plan.num_replicas - moved
        for group in groups:
            check_slots(group, held)
            assert group.banks[bank].version == epoch
    assert kept > 10
    close_all(groups)


def test_layers_of_one_bank_share_its_slots(loopback_engine: str) -> None:
    """On a device the slots are mapped behind each layer's weights."""
    groups = new_groups(2, engine=loopback_engine, banks=1, instances=True)
    layers = [[group.banks[0].empty_instances() for group in groups] for _ in range(3)]
    count = E // 2
    for epoch, layer in enumerate(layers, 1):
        weights = [{name: t[:count] for name, t in own.items()} for own in layer]
        for group in groups:
            fill_weights(group, weights[group.rank], epoch)
        plan, mode = plan_of([[4, 7], [0, -1]]), ("pull", "push", "direct")[epoch - 1]
        assert replicate(groups, weights, plan, mode=mode, version=epoch) == 3
        for group in groups:
            check_slots(
                group, {(0, 0, 0): (4, epoch), (0, 0, 1): (7, epoch), (0, 1, 0): (0, epoch)}
            )
            for shown in layers:
                for name, tensor in shown[group.rank].items():
                    assert torch.equal(raw_bytes(tensor[count:]), raw_bytes(group.slots[name]))
    close_all(groups)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_restored_plan_moves_what_has_gone_since(loopback_engine: str) -> None:
    groups = new_groups(4, engine=loopback_engine)
    weights = filled_weights(groups, 0)
    first = plan_of([[-1, -1], [0, 1], [0, -1], [0, -1]], bank=1)
    handles = [group.save(first, layer=3) for group in groups]
    assert replicate(groups, weights, handles) == 4
    assert replicate(groups, weights, handles) == 0
    assert replicate(groups, weights, plan_of([[-1, -1], [6, -1], [6, 7], [-1, -1]], bank=1)) == 3
    assert groups[0].banks[1].residents.tolist() == [[-1, -1], [6, 1], [6, 7], [0, -1]]
    assert replicate(groups, weights, handles) == 2
    assert groups[2].banks[1].residents.tolist() == [[-1, -1], [0, 1], [0, 7], [0, -1]]
    assert groups[3].banks[0].residents.tolist() == [[-1, -1]] * 4
    for handle in handles:
        handle.release()
    close_all(groups)


def test_new_weights_move_everything(loopback_engine: str) -> None:
    groups = new_groups(3, engine=loopback_engine)
    weights, plan = filled_weights(groups, 0), plan_of([[-1, -1], [0, -1], [0, -1]])
    assert replicate(groups, weights, plan) == 2
    for group in groups:
        fill_weights(group, weights[group.rank], 1)
        group.banks[0].invalidate()
        assert group.banks[0].version == 1
        assert group.banks[0].residents.tolist() == [[-1, -1]] * 3
    assert replicate(groups, weights, plan) == 2
    held: Held = {(0, rank, 0): (0, 1) for rank in (1, 2)}
    for group in groups:
        check_slots(group, held)
    assert replicate(groups, weights, plan, version=1) == 0
    assert replicate(groups, weights, plan, version=2) == 2
    assert groups[0].banks[0].version == 2
    close_all(groups)


def test_other_segments_are_another_matter(loopback_engine: str) -> None:
    """What a bank's last call did not copy is not there."""
    groups = new_groups(3, engine=loopback_engine)
    weights, plan = filled_weights(groups, 0), plan_of([[-1, -1], [0, -1], [0, -1]])
    part = MIXED["w13"].nbytes
    synchronize_all(start_all(groups, weights, plan, segments=["w13"]))
    assert sum(bytes_stored(group) for group in groups) == 2 * part
    synchronize_all(start_all(groups, weights, plan))
    assert sum(bytes_stored(group) for group in groups) == 2 * (part + EXPERT_BYTES)
    for group in groups:
        check_slots(group, {(0, rank, 0): (0, 0) for rank in (1, 2)})
    close_all(groups)


def test_a_call_without_reuse_copies_everything(loopback_engine: str) -> None:
    """In any bank; what it leaves there is for later calls, but in bank 0."""
    groups = new_groups(3, engine=loopback_engine)
    slots = [[-1, -1], [0, -1], [0, 1]]
    for bank in (0, 1):
        plan, wiped = plan_of(slots, bank), plan_of(slots, bank, reuse=False)
        assert replicate(groups, filled_weights(groups, 0), plan) == 3
        for epoch in (1, 2):  # other weights, and nobody says so
            assert replicate(groups, filled_weights(groups, epoch), wiped) == 3
            for group in groups:
                held = {
                    (at, group.rank, s): (e, epoch if at == bank else 2)
                    for at in range(bank + 1)
                    for s, e in enumerate(slots[group.rank])
                    if e >= 0
                }
                check_slots(group, held)
        assert groups[0].banks[bank].residents.tolist() == (slots if bank else [[-1, -1]] * 3)
        load = torch.ones(3, E, dtype=torch.int32)
        made = uec.plan_replicas(load, group=groups[0], bank=bank)
        assert (made.bank, made.reuse, made.slots_to_fill) == (bank, False, None)
    close_all(groups)


def test_plans_on_top_of_a_bank_move_little(loopback_engine: str) -> None:
    num_ranks, seen = 4, 0
    groups = new_groups(num_ranks, engine=loopback_engine)
    weights = filled_weights(groups, 0)
    generator = torch.Generator().manual_seed(5)
    load = torch.randint(0, 400, (num_ranks, E), generator=generator)
    load[:, 0] += 900
    for step in range(6):
        load = load + torch.randint(0, 40, load.shape, generator=generator)
        plans = [
            uec.plan_replicas(load, group=group, bank=group.banks[1], reuse=True)
            for group in groups
        ]
        plan = plans[0]
        assert plan.bank == 1
        assert plan.slots_to_fill is not None
        assert all(torch.equal(plan.slot_expert, other.slot_expert) for other in plans)
        apart = plan_alone(
            load, num_ranks=num_ranks, slots_per_rank=S, residents=groups[0].banks[1].residents
        )
        assert torch.equal(apart.slot_expert, plan.slot_expert)
        assert torch.equal(apart.slots_to_fill, plan.slots_to_fill)
        assert not apart.reuse
        from_empty = uec.plan_replicas(load, group=groups[0])
        assert plan.imbalance <= max(1.01, from_empty.imbalance)
        if step == 0:
            assert torch.equal(plan.slot_expert, from_empty.slot_expert)
        assert (
            replicate(groups, weights, plan)
            == plan.num_slots_to_fill
            <= from_empty.num_slots_to_fill
        )
        seen += plan.num_slots_to_fill == 0
        uec.verify_plan(plan, load)
    assert seen > 0
    close_all(groups)


def test_slots_without_tokens_have_no_gradient(loopback_engine: str) -> None:
    """What a slot keeps for later is neither added up nor cleared."""
    groups = uec.testing.new_loopback_groups(
        3,
        engine="cuda" if loopback_engine == "emulated" else loopback_engine,
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
            assert group.banks[2].slot_grads["w"].data_ptr() == group.slot_grads["w"].data_ptr()
            group.banks[index].slot_grads["w"].fill_(group.rank + 1)
        plan = uec.Plan.from_slots(
            [[-1], [0], [0]],
            num_experts=3,
            slot_quota=torch.tensor([[0], [5], [0]]),
            home_quota=torch.tensor([5, 0, 0]),
            bank=index,
            reuse=True,
        )
        main_grads = [{"w": torch.full((1, 4), 100.0, device=group.device)} for group in groups]
        synchronize_all(start_all(groups, main_grads, plan, call=uec.reduce_expert_grads))
        assert [main["w"].unique().tolist() for main in main_grads] == [[102.0], [100.0], [100.0]]
        left = [group.banks[index].slot_grads["w"].unique().tolist() for group in groups]
        assert left == [[1.0], [0.0], [3.0]]
        other = groups[0].banks[1 - index % 2].slot_grads["w"]
        assert other.unique().tolist() != [0.0]
    close_all(groups)


# ---- what only a device has -----------------------------------------------------------------


def _slots_on_device(group: uec.Group, slots: list[list[int]], bank: int = 0) -> uec.Plan:
    plan = put_plan(group, plan_of(slots))
    return replace(plan, home=session_of(group).engine.home, bank=bank, reuse=True)


def test_a_load_on_the_device_is_planned_on_top_of_a_bank(streams: str) -> None:
    """The host waits for nothing: the kernel reads what the calls before it have left."""
    groups = new_groups(4, engine=streams)
    weights, load = filled_weights(groups, 0), torch.ones(4, E, dtype=torch.int32)
    slots = torch.full((4, S), -1)
    still = 0
    for step in range(6):
        load[:, step // 2] += 20
        if step == 4:
            slots.fill_(-1)
            for group in groups:
                group.banks[1].invalidate()
        loads = [put(group, load) for group in groups]
        hold(streams)
        plans = [
            uec.plan_replicas(own, group=group, bank=1, reuse=True)
            for own, group in zip(loads, groups, strict=True)
        ]
        works = start_all(groups, weights, plans)
        assert not works[0].is_completed()
        synchronize_all(works)
        apart = plan_alone(load, num_ranks=4, slots_per_rank=S, residents=slots)
        for plan in plans:
            assert session_of(groups[0]).engine.is_on_device(plan)
            assert plan.bank == 1
            for name, tensor in apart.tensors().items():
                assert torch.equal(getattr(plan, name).cpu(), tensor), name
        slots = apart.slot_expert
        still += apart.num_slots_to_fill == 0
        for group in groups:
            assert torch.equal(group.banks[1].residents, slots)
    assert still == 2
    load[1, 2] = -1
    group = groups[0]
    plan = uec.plan_replicas(put(group, load), group=group, bank=1, reuse=True)
    device.find_device().synchronize()
    assert plan.num_slots_to_fill == 0
    with pytest.raises(errors.InvalidLoadError, match="expert 2 outside"):
        uec.plan_replicas(load, group=group, bank=1, reuse=True)
    close_all(groups)


def test_plans_of_a_bank_in_a_graph(streams: str) -> None:
    """Each replay plans its load on top of what the one before has left."""
    groups = new_groups(4, engine=streams)
    graphs = MAKERS["torch" if streams == "cuda" else "emulated"]()
    weights = filled_weights(groups, 0)
    bound = [group.bind(own) for group, own in zip(groups, weights, strict=True)]
    loads = [put(group, torch.ones(4, E, dtype=torch.int32)) for group in groups]
    plans: dict[int, uec.Plan] = {}

    def calls(rank: int) -> None:
        plans[rank] = uec.plan_replicas(loads[rank], group=groups[rank], bank=1, reuse=True)
        uec.replicate_experts(bound[rank], plans[rank], group=groups[rank])

    device.find_device().synchronize()
    replicate(groups, weights, plan_of([[-1, -1]] * 4))  # loads the kernels
    _, replay = graphs.capture(lambda: on_each(graphs, len(groups), calls))
    load, slots = torch.ones(4, E, dtype=torch.int32), torch.full((4, S), -1)
    for step in range(5):
        load[:, step // 2] += 20
        for own in loads:
            own.copy_(load)
        before = stored(groups)
        replay()
        device.find_device().synchronize()
        apart = plan_alone(load, num_ranks=4, slots_per_rank=S, residents=slots)
        slots = apart.slot_expert
        assert stored(groups) - before == apart.num_slots_to_fill
        for rank, group in enumerate(groups):
            assert torch.equal(plans[rank].slot_expert.cpu(), slots)
            assert torch.equal(group.banks[1].residents, slots)
    close_all(groups)


def test_the_host_knows_what_it_has_planned(streams: str) -> None:
    """It waits for the device only where it does not: behind plans that are there alone."""
    groups = new_groups(4, engine=streams)
    weights, slots = filled_weights(groups, 0), [[-1, -1], [0, 1], [0, -1], [0, -1]]
    hold(streams)
    works = start_all(groups, weights, plan_of(slots))
    assert groups[0].banks[0].residents.tolist() == slots
    assert not works[0].is_completed()
    synchronize_all(works)
    other = [[-1, -1], [4, 1], [0, -1], [0, -1]]
    plans = [_slots_on_device(group, other) for group in groups]
    hold(streams)
    works = start_all(groups, weights, plans)
    assert groups[0].banks[0].residents.tolist() == other
    assert all(work.is_completed() for work in works)
    close_all(groups)


def test_who_has_read_the_table_knows_what_the_others_know(streams: str) -> None:
    groups = new_groups(3, engine=streams)
    weights = filled_weights(groups, 0)
    for group in groups:
        group.banks[0].invalidate()
    slots = [[-1, -1], [0, 1], [0, -1]]
    assert replicate(groups, weights, [_slots_on_device(group, slots) for group in groups]) == 3
    assert groups[0].banks[0].residents.tolist() == slots
    assert replicate(groups, weights, plan_of([[-1, -1], [6, -1], [-1, -1]])) == 1
    for group in groups:
        assert group.banks[0].residents.tolist() == [[-1, -1], [6, 1], [0, -1]]
    close_all(groups)


def test_invalidate_follows_the_calls_on_the_stream(streams: str) -> None:
    """A call under way still finds what slots hold; the next one does not."""
    groups = new_groups(3, engine=streams)
    weights, plan = filled_weights(groups, 0), plan_of([[-1, -1], [0, -1], [0, -1]])
    assert replicate(groups, weights, plan) == 2
    before = stored(groups)
    hold(streams)
    works = start_all(groups, weights, plan)
    for group in groups:
        group.banks[0].invalidate()
    assert not works[0].is_completed()
    works += start_all(groups, weights, plan)
    synchronize_all(works)
    assert stored(groups) - before == 2
    close_all(groups)


def test_who_asks_for_the_version_leaves_the_interpreter_to_others(streams: str) -> None:
    """The engine's lock is held while the host waits for the device, and looks for Ctrl-C."""
    groups = new_groups(3, engine=streams)
    weights, slots = filled_weights(groups, 0), [[-1, -1], [0, -1], [0, -1]]
    bank, graphs = groups[0].banks[0], MAKERS["torch" if streams == "cuda" else "emulated"]()
    other, _ = graphs.new_stream()

    def ask() -> None:
        with graphs.on(other):  # which holds nothing: the host polls the call
            bank.residents  # noqa: B018

    for _ in range(3):
        hold(streams)
        works = start_all(groups, weights, [_slots_on_device(group, slots) for group in groups])
        threads = [threading.Thread(target=ask, daemon=True)]
        threads += [threading.Thread(target=lambda: bank.version, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
            assert not thread.is_alive()
        synchronize_all(works)
    close_all(groups)


@pytest.mark.parametrize("tells", [False, True], ids=["", "invalidate"])
def test_replays_move_what_is_missing(streams: str, tells: bool) -> None:
    """The table is the device's, so that a graph of two plans of a bank goes on where it was."""
    groups = new_groups(3, engine=streams)
    graphs = MAKERS["torch" if streams == "cuda" else "emulated"]()
    weights = filled_weights(groups, 0)
    bound = [group.bind(own) for group, own in zip(groups, weights, strict=True)]
    first = [_slots_on_device(g, [[-1, -1], [0, -1], [0, 1]]) for g in groups]
    second = [_slots_on_device(g, [[-1, -1], [0, 6], [-1, -1]]) for g in groups]
    device.find_device().synchronize()

    def calls(rank: int) -> None:
        for plan in (first[rank], second[rank]):
            uec.replicate_experts(bound[rank], plan, group=groups[rank])
        if tells:
            groups[rank].banks[0].invalidate()

    replicate(groups, weights, first)  # loads the kernels
    _, replay = graphs.capture(lambda: on_each(graphs, len(groups), calls))
    moved = []
    for _ in range(3):
        before = stored(groups)
        replay()
        device.find_device().synchronize()
        moved.append(stored(groups) - before)
    assert moved == ([1, 4, 4] if tells else [1, 0, 0])
    held: Held = {(0, 1, 0): (0, 0), (0, 2, 0): (0, 0), (0, 2, 1): (1, 0), (0, 1, 1): (6, 0)}
    for group in groups:
        check_slots(group, held)
    expected = [[-1, -1]] * 3 if tells else [[-1, -1], [0, 6], [0, 1]]
    assert groups[0].banks[0].residents.tolist() == expected
    # Behind a replay nobody knows but the device.
    assert replicate(groups, weights, plan_of([[-1, -1], [0, 6], [0, 1]])) == (4 if tells else 0)
    close_all(groups)


def test_a_stream_waits_for_single_slots(streams: str) -> None:
    groups = new_groups(4, engine=streams)
    weights = filled_weights(groups, 0)
    replicate(groups, weights, plan_of([[-1, -1], [-1, 4], [-1, -1], [-1, -1]], bank=1))
    hold(streams)
    works = start_all(groups, weights, plan_of([[-1, -1], [0, 4], [6, -1], [-1, -1]], bank=1))
    assert not works[1].slot_ready(1)  # the host learns of the whole call
    works[1].wait(slots=[0, 1])
    works[2].wait(slots=[0])
    with pytest.raises(errors.InvalidArgumentError, match=r"fills the slots \[0\]"):
        works[2].wait(slots=[1])
    device.find_device().synchronize()  # what the stream waits for has come
    assert works[1].slot_ready(1)
    ready = [group.banks[1].ready.tolist() for group in groups]
    assert ready == [[0, 0], [3, 3], [3, 0], [0, 0]]
    assert works[0].epoch == 2
    assert groups[1].banks[0].ready.tolist() == [0, 0]
    held: Held = {(1, 1, 0): (0, 0), (1, 1, 1): (4, 0), (1, 2, 0): (6, 0)}
    for group in groups:
        check_slots(group, held)
    close_all(groups)


def test_what_a_capture_cannot_hold(streams: str) -> None:
    groups = new_groups(2, engine=streams)
    graphs = MAKERS["torch" if streams == "cuda" else "emulated"]()
    bound = [group.bind(own) for group, own in zip(groups, filled_weights(groups, 0), strict=True)]
    plan, found = plan_of([[-1, -1], [0, -1]]), []
    replicate(groups, bound, [_slots_on_device(g, [[-1, -1], [0, -1]]) for g in groups])

    def calls() -> None:
        found.append(raised(lambda: groups[0].banks[0].residents))
        found.append(raised(lambda: uec.replicate_experts(bound[0], plan, group=groups[0])))

        found.append(raised(lambda: work.wait(slots=[0])))

    (_, work) = start_all(groups, bound, plan)
    work.synchronize()
    graphs.capture(calls)
    assert [type(error) for error in found] == [errors.UnsupportedError] * 3
    assert "what a bank holds is read by the host" in str(found[0])
    assert "a plan of bank 0 is on the CPU" in str(found[1])
    assert "wait for the whole call" in str(found[2])
    close_all(groups)
