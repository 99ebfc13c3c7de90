"""One tensor for all instances: local experts, then a bank's slots, for many layers."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import (
    MIXED,
    RankPool,
    close_all,
    expert_bytes,
    fill_weights,
    make_weights,
    random_plan,
    raw,
    same_bytes,
    start_all,
    synchronize_all,
)
from reference.reduce_oracle import reduced, same_bits

import ultraep_comm as uec
from ultraep_comm import Segment, _core, errors
from ultraep_comm.fabrics import shm
from ultraep_comm.fabrics.loopback import host_memory
from ultraep_comm.group.bank import Bank
from ultraep_comm.group.group import session_of

E, S = 6, 2
MODES = ("push", "pull", "direct", "auto")
UNEVEN = [0, 0, 0, 2, 2, 0]  # rank 1 has no expert
GRADS = {"w13": torch.float32, "w_t": torch.bfloat16, "bias": torch.float32}
Tensors = dict[str, torch.Tensor]


@cache
def _filled(value: int, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def _groups(num_ranks: int = 3, **options: Any) -> list[uec.Group]:
    options = {"expert": MIXED, "instances": True, "timeout": 30.0, **options}
    return uec.testing.new_loopback_groups(num_ranks, num_experts=E, slots_per_rank=S, **options)


def _weights(group: uec.Group, instances: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor[: group.num_local_experts] for name, tensor in instances.items()}


def _check_weights(group: uec.Group, instances: Tensors, epoch: int) -> None:
    for index, (name, segment) in enumerate(group.segments.items()):
        for i, expert in enumerate(group.topology.local_experts(group.rank).tolist()):
            wanted = _filled(0, segment.nbytes)
            if epoch:
                wanted = expert_bytes(epoch, expert, index, segment)
            assert same_bytes(raw(instances[name][i], segment), wanted), (name, i)


def _check_slots(group: uec.Group, instances: Tensors, plan: uec.Plan, epoch: int) -> None:
    for index, (name, segment) in enumerate(group.segments.items()):
        for slot, expert in enumerate(plan.slot_expert[group.rank].tolist()):
            found = raw(instances[name][group.num_local_experts + slot], segment)
            wanted = _filled(0xA5, segment.nbytes)
            if expert >= 0:
                wanted = expert_bytes(epoch, expert, index, segment)
            assert same_bytes(found, wanted), (name, slot, expert)


def _clear(bank: Bank, group: uec.Group) -> None:
    for name, segment in group.segments.items():
        for row in bank.slots[name]:
            raw(row, segment).fill_(0xA5)


def _walk(
    groups: Sequence[uec.Group],
    layers: Sequence[tuple[int, Sequence[Tensors]]],
    plans: Sequence[uec.Plan],
    modes: Sequence[str] = MODES,
) -> None:
    """Transfer each layer in each mode, and look at every byte of weights and slots of all.

    ``layers``: the bank of each, and its tensors by rank.
    """
    first = groups[0].rank
    for layer, (_, tensors) in enumerate(layers):
        for group in groups:
            _check_weights(group, tensors[group.rank - first], 0)
            fill_weights(group, _weights(group, tensors[group.rank - first]), layer + 1)
    for mode in modes:
        for plan in plans:
            for layer, (bank, tensors) in enumerate(layers):
                for group in groups:
                    _clear(group.banks[bank], group)
                given = {g.rank: _weights(g, tensors[g.rank - first]) for g in groups}
                synchronize_all(start_all(groups, given, plan.in_bank(bank), mode=mode))
                for group in groups:
                    for other, (same, aliases) in enumerate(layers):
                        own = aliases[group.rank - first]
                        _check_weights(group, own, other + 1)
                        if same == bank:
                            _check_slots(group, own, plan, layer + 1)


def _plans(num_ranks: int, home: Any = None) -> list[uec.Plan]:
    return [random_plan(seed, num_ranks, E, S, home) for seed in (1, 2)]


def _layers(groups: Sequence[uec.Group], banks: Sequence[int]) -> list[tuple[int, list[Tensors]]]:
    return [(bank, [group.banks[bank].empty_instances() for group in groups]) for bank in banks]


# ---- weights --------------------------------------------------------------------------------


def test_local_experts_come_first_and_slots_are_the_tail() -> None:
    groups = _groups(banks=2)
    for bank, tensors in _layers(groups, [1, 1, 0]):
        for group, own in zip(groups, tensors, strict=True):
            for name, segment in group.segments.items():
                tensor, slots = own[name], group.banks[bank].slots[name]
                assert tensor.shape == (group.num_local_experts + S, *segment.shape)
                assert tensor.stride() == slots.stride()
                assert tensor[group.num_local_experts :].shape == slots.shape
                assert tensor.untyped_storage().nbytes() == len(tensor) * segment.nbytes
                if segment.nbytes % 16 == 0:
                    assert tensor.data_ptr() % 16 == 0
                raw(slots[0], segment)[0] += 1
                assert torch.equal(
                    raw(tensor[group.num_local_experts], segment), raw(slots[0], segment)
                )
    close_all(groups)


@pytest.mark.parametrize("check", [False, True], ids=["", "checked"])
def test_layers_of_one_bank_have_their_own_weights_and_its_slots(
    request: pytest.FixtureRequest, check: bool
) -> None:
    if check and "c10d" in request.node.name:
        pytest.skip("c10d does not check slots")
    groups = _groups(banks=2, check=check)
    layers = _layers(groups, [0, 1, 0, 0, 1])
    tails = {own[0]["big"][-1].data_ptr() for _, own in layers}
    assert len(tails) == 5
    _walk(groups, layers, _plans(3))
    close_all(groups)


def test_pull_takes_the_weights() -> None:
    groups = _groups(2)
    for _, tensors in _layers(groups, [0, 0]):
        for group, own in zip(groups, tensors, strict=True):
            weights = _weights(group, own)
            assert group.bind(weights).region >= 0
            assert group.bind({"w2": weights["w2"]}).region == group.bind(weights).region
            shifted = {name: own[name][1:][: group.num_local_experts] for name in own}
            assert group.bind(shifted).region == -1
    close_all(groups)


def test_uneven_homes_are_not_pulled() -> None:
    groups = _groups(home=UNEVEN)
    layers = _layers(groups, [0, 0])
    _walk(groups, layers, _plans(3, UNEVEN), ("push", "direct", "auto"))
    plan = _plans(3, UNEVEN)[0]
    for group in groups:
        weights = _weights(group, layers[1][1][group.rank])
        with pytest.raises(errors.InvalidWeightsError, match="numbers of experts differ, here"):
            uec.replicate_experts(weights, plan, group=group, mode="pull")
    close_all(groups)


def test_without_slots_there_are_local_experts() -> None:
    groups = uec.testing.new_loopback_groups(
        2, num_experts=E, slots_per_rank=0, expert=MIXED, instances=True, timeout=30.0
    )
    for _, tensors in _layers(groups, [0, 0]):
        assert [len(t) for own in tensors for t in own.values()] == [3] * 2 * len(MIXED)
    close_all(groups)


def test_tensors_outlive_their_group() -> None:
    groups = _groups(2, grads={"w13": torch.float32})
    one, other = (own for _, (own, _) in _layers(groups, [0, 0]))
    grads = [groups[0].banks[0].empty_instance_grads() for _ in range(2)]
    close_all(groups)
    del groups
    gc.collect()
    for first, second in ((one, other), grads):
        first["w13"].fill_(3)
        assert bool((second["w13"][-S:] == 3).all())
        assert not second["w13"][:-S].any()


# ---- gradients ------------------------------------------------------------------------------


def test_gradients_of_all_instances_are_one_tensor() -> None:
    groups = _groups(grads=GRADS, banks=3, grad_banks=2)
    plan = random_plan(3, 3, E, S)
    draw = torch.Generator().manual_seed(5)
    layers = [
        (bank, [g.banks[bank].empty_instance_grads() for g in groups]) for bank in (0, 2, 1, 1)
    ]
    before: list[list[Tensors]] = []
    for _, tensors in layers:
        for group, own in zip(groups, tensors, strict=True):
            assert list(own) == list(group.slot_grads)
            for name, tensor in own.items():
                assert tensor.dtype == GRADS[name]
                assert tensor.shape == (group.num_local_experts + S, *MIXED[name].shape)
                assert not tensor.any()
    for bank, tensors in layers:
        for group, own in zip(groups, tensors, strict=True):
            for name, tensor in own.items():  # as a GEMM writes them, those of the slots too
                tensor.copy_(torch.randn(tensor.shape, generator=draw))
                assert torch.equal(group.banks[bank].slot_grads[name], tensor[-S:])
        before.append([{name: t.clone() for name, t in own.items()} for own in tensors])
        given = [_weights(group, own) for group, own in zip(groups, tensors, strict=True)]
        synchronize_all(start_all(groups, given, plan.in_bank(bank), call=uec.reduce_expert_grads))
        rows = plan.slot_expert.tolist()
        for group, own in zip(groups, tensors, strict=True):
            for i, expert in enumerate(group.topology.local_experts(group.rank).tolist()):
                held = [
                    (r, s) for r, row in enumerate(rows) for s, e in enumerate(row) if e == expert
                ]
                for name in own:
                    addends = [before[-1][r][name][-S + s] for r, s in held]
                    wanted = reduced(before[-1][group.rank][name][i], addends)
                    assert same_bits(own[name][i], wanted), (name, expert)
    close_all(groups)


def test_a_group_without_gradients_has_none() -> None:
    (group,) = _groups(1)
    assert group.banks[0].empty_instance_grads() == {}
    group.close()


# ---- memory ---------------------------------------------------------------------------------


def _pss() -> int:
    """Return the bytes of this process's memory; a page that it maps twice counts once."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def test_more_layers_take_no_more_slots() -> None:
    slot_bytes = 16 << 20
    expert = {"w": Segment((slot_bytes // 2,), torch.bfloat16), "s": Segment((3,), torch.uint8)}
    groups = uec.testing.new_loopback_groups(
        2,
        num_experts=4,
        slots_per_rank=4,
        home=[0, 1, 1, 1],
        expert=expert,
        grads={"w": torch.bfloat16},
        instances=True,
        timeout=30.0,
    )
    group = groups[0]
    group.slots["w"].fill_(1)
    group.slot_grads["w"].fill_(1)
    before, layers = _pss(), []
    for _ in range(4):
        for made in (
            group.banks[0].empty_instances()["w"],
            group.banks[0].empty_instance_grads()["w"],
        ):
            layers.append(made)
            made[:1].fill_(2)
            assert bool((made[1:] == 1).all())
    # Each has a local expert, which is a fifth of its bytes.
    assert _pss() - before < len(layers) * slot_bytes * 3 // 2
    close_all(groups)


def test_memory_is_known_before_it_is_taken() -> None:
    sizes: dict[str, Any] = {"num_experts": E, "slots_per_rank": S, "expert": MIXED}
    sizes |= {"grads": GRADS, "banks": 3, "grad_banks": 2}
    known = uec.group_memory(3, **sizes, instances=True)
    groups = uec.testing.new_loopback_groups(3, **sizes, instances=True, timeout=30.0)
    assert groups[0].memory() == known
    assert known.total == len(session_of(groups[0]).engine.memory[0].local)
    weights = sum(segment.nbytes for segment in MIXED.values())
    gradients = sum(
        MIXED[name].nbytes // MIXED[name].dtype.itemsize * t.itemsize for name, t in GRADS.items()
    )
    assert known.slots == 3 * S * weights
    assert known.slot_grads == 2 * S * gradients
    assert known.local_experts == E // 3 * (3 * weights + 2 * gradients)
    without = uec.group_memory(3, **sizes)
    assert without.local_experts == 0
    assert (without.slots, without.slot_grads) == (known.slots, known.slot_grads)
    pointers = groups[0].expert_pointers(make_weights(groups[0]), bank=2)["w13"]
    assert pointers[-S].item() == groups[0].banks[2].slots["w13"].data_ptr()
    close_all(groups)


def test_only_shared_memory_is_mapped_again() -> None:
    page = os.sysconf("SC_PAGESIZE")
    shared, private = host_memory(2 * page), torch.zeros(4 * page, dtype=torch.uint8)
    inside = private.data_ptr() + -private.data_ptr() % page
    with pytest.raises(OSError, match="Invalid argument"):
        _core.map_again(shared.data_ptr(), inside, page)
    with pytest.raises(OSError, match="Invalid argument"):
        _core.map_again(inside, shared.data_ptr(), page)
    assert not private.any()


# ---- errors ---------------------------------------------------------------------------------


def test_errors_say_what_to_pass() -> None:
    (plain,) = _groups(1, instances=False)
    for call in (plain.banks[0].empty_instances, plain.banks[0].empty_instance_grads):
        with pytest.raises(errors.UnsupportedError, match="create it with instances=True"):
            call()
    plain.close()
    for call in (plain.banks[0].empty_instances, plain.banks[0].empty_instance_grads):
        with pytest.raises(errors.GroupClosedError, match=f"{call.__name__} on a group that is"):
            call()


def test_slots_that_cannot_be_mapped_again_end_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = _groups(2)
    _layers(groups, [0])

    def refuse(*_: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(_core, "map_again", refuse)
    with pytest.raises(errors.OutOfSharedMemoryError, match=r"vm\.max_map_count"):
        groups[0].banks[0].empty_instances()
    with pytest.raises(errors.GroupClosedError):
        groups[0].banks[0].empty_instances()
    for group in groups:
        group.abort()
        group.close()


# ---- in processes ---------------------------------------------------------------------------


def _in_process(
    rank: int, process_group: dist.ProcessGroup, engine: str, home: list[int] | None
) -> tuple[int, int]:
    """Return the bytes that the last layer's memory may take, and what it takes."""
    taken: list[int] = []
    create = shm.create_memory

    def remember(*arguments: int) -> int:
        descriptor = create(*arguments)
        taken.append(os.dup(descriptor))
        return descriptor

    shm.create_memory = remember  # type: ignore[assignment]
    try:
        group = uec.new_group(
            process_group,
            num_experts=E,
            slots_per_rank=S,
            expert=MIXED,
            home=home,
            banks=2,
            instances=True,
            engine=engine,
            timeout=30.0,
        )
        layers = [(bank, [group.banks[bank].empty_instances()]) for bank in (0, 0, 1, 1)]
    finally:
        shm.create_memory = create
    plans = _plans(group.num_ranks, home)
    _walk([group], layers, plans, MODES if home is None else ("push", "direct"))
    sizes = [os.fstat(fd).st_blocks * 512 for fd in taken]
    for fd in taken:
        os.close(fd)
    local_bytes = sum(
        session_of(group).engine.layout.max_local_experts * s.nbytes + 2 * 4096
        for s in MIXED.values()
    )
    group.close()
    for bank in (0, 1):
        aliases = [own[0]["packed"] for other, own in layers if other == bank]
        aliases[0].fill_(rank)
        assert bool((aliases[1][-S:] == rank).all())
    return local_bytes, max(sizes[1:], default=0)


@pytest.mark.parametrize("home", [None, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("engine", ["host", "c10d"])
def test_between_processes(ranks: RankPool, engine: str, home: list[int] | None) -> None:
    for local_bytes, taken in ranks.run(3, _in_process, engine, home):
        assert taken <= local_bytes
        assert (taken > 0) == (engine == "host")
