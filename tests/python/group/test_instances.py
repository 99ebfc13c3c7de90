"""One tensor for all instances: local experts, then a bank's slots, for many layers."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_grads import RankGrads
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

import ultraep_comm as uec
from ultraep_comm import Segment, _core, errors
from ultraep_comm.fabrics import shm
from ultraep_comm.fabrics.loopback import host_memory
from ultraep_comm.group.group import session_of

E, S = 6, 2
UNEVEN = [0, 0, 0, 2, 2, 0]  # rank 1 has no expert
GRADS = {"w13": torch.float32, "w_t": torch.bfloat16, "bias": torch.float32}
Tensors = dict[str, torch.Tensor]


def _groups(num_ranks: int = 3, **options: Any) -> list[uec.Group]:
    options = {"expert": MIXED, "instances": True, "timeout": 30.0, **options}
    return uec.testing.new_loopback_groups(num_ranks, num_experts=E, slots_per_rank=S, **options)


def _weights(group: uec.Group, instances: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor[: group.num_local_experts] for name, tensor in instances.items()}


def _check(group: uec.Group, instances: Tensors, plan: uec.Plan, epoch: int) -> None:
    """Compare this rank's weights of an epoch, and the slots that a plan fills."""
    held = group.topology.local_experts(group.rank).tolist()
    held += plan.slot_expert[group.rank].tolist()
    for index, (name, segment) in enumerate(group.segments.items()):
        for row, expert in zip(instances[name], held, strict=True):
            if expert >= 0:
                wanted = expert_bytes(epoch, expert, index, segment)
                assert same_bytes(raw(row, segment), wanted), (name, expert)


def _transfer(
    groups: Sequence[uec.Group], layers: Sequence[tuple[int, Sequence[Tensors]]], *modes: str
) -> None:
    """Transfer each layer, of a bank and tensors by rank, and look at every byte of it."""
    first, home = groups[0].rank, groups[0].topology.home.tolist()
    for epoch, (bank, tensors) in enumerate(layers, 1):
        weights = {g.rank: _weights(g, tensors[g.rank - first]) for g in groups}
        for group in groups:
            fill_weights(group, weights[group.rank], epoch)
        for mode, plan in itertools.product(modes, _plans(3, home)):
            synchronize_all(start_all(groups, weights, plan.in_bank(bank), mode=mode))
            for group in groups:
                _check(group, tensors[group.rank - first], plan, epoch)
    nothing = uec.Plan.from_slots([[-1] * S] * 3, num_experts=E, home=home)
    for epoch, (_, tensors) in enumerate(layers, 1):  # those of all layers stay
        for group in groups:
            _check(group, tensors[group.rank - first], nothing, epoch)


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


def test_uneven_homes_are_not_pulled() -> None:
    groups = _groups(home=UNEVEN)
    layers = _layers(groups, [0, 0])
    _transfer(groups, layers, "auto")
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
    assert groups[0].banks[0].empty_instance_grads() == {}
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
    groups = _groups(grads=GRADS)
    plan = random_plan(3, 3, E, S)
    for layer in range(2):
        made = [group.banks[0].empty_instance_grads() for group in groups]
        for group, own in zip(groups, made, strict=True):
            assert list(own) == list(group.slot_grads)
            for name, tensor in own.items():
                assert tensor.dtype == GRADS[name]
                assert tensor.shape == (group.num_local_experts + S, *MIXED[name].shape)
                assert not tensor[: group.num_local_experts].any()
        grads = RankGrads(groups, GRADS)
        grads.main_grads = [_weights(group, own) for group, own in zip(groups, made, strict=True)]
        grads.fill(layer)
        for group, own in zip(groups, made, strict=True):
            for name, tensor in own.items():
                assert torch.equal(group.slot_grads[name], tensor[-S:])
        synchronize_all(grads.start(plan))
        grads.check(plan)
    close_all(groups)


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
    _transfer([group], layers, "push", "direct", *(["pull"] if home is None else []))
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
