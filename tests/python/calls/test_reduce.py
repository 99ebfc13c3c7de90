"""reduce_expert_grads: every bit of main + (r1 + ... + rn), in every mode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ranks import RankPool, close_all, loopback, raised, random_plan, start_all
from reference.reduce_oracle import reduced, same_bits

import ultraep_comm as uec
from ultraep_comm import Segment, errors

F32, BF16 = torch.float32, torch.bfloat16
# Two that are cut into tiles, one that is smaller than any, one with a layout of its own, and one
# without gradients.
EXPERT = {
    "w13": Segment((33, 130), BF16),
    "scale": Segment((5,), torch.uint8),
    "bias": Segment((3,), F32),
    "w_t": Segment((40, 24), BF16, (1, 40)),
}
NAMES = ("w13", "bias", "w_t")


def make_values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return values of very different sizes, so that every order of adding rounds differently."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-12, 12, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**exponent).to(dtype)


def fill_slot_grads(group: uec.Group, seed: int) -> dict[str, torch.Tensor]:
    """Give a group's slots gradients; return copies."""
    for i, (name, slots) in enumerate(group.slot_grads.items()):
        value = make_values(seed * 100 + group.rank * 10 + i, tuple(slots.shape), slots.dtype)
        group.slot_grads[name].copy_(value)
    return {name: slots.clone() for name, slots in group.slot_grads.items()}


def make_mains(group: uec.Group, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return main gradients in a new buffer, in the layouts of the segments."""
    mains = {}
    for i, name in enumerate(group.slot_grads):
        segment = group.segments[name]
        storage = torch.zeros(group.num_local_experts * segment.nbytes * 4, dtype=torch.uint8)
        view = Segment(segment.shape, dtype, segment.layout).view(storage, group.num_local_experts)
        mains[name] = view.copy_(make_values(seed * 100 + 7000 + i, tuple(view.shape), dtype))
    return mains


def expect(
    group: uec.Group,
    plan: uec.Plan,
    mains: dict[str, torch.Tensor],
    slots: list[dict[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Return this rank's expected main gradients."""
    result = {name: main.clone() for name, main in mains.items()}
    for i, expert in enumerate(group.topology.local_experts(group.rank)):
        where = (plan.slot_expert == int(expert)).nonzero().tolist()
        for name, wanted in result.items():
            replicas = [slots[rank][name][slot] for rank, slot in where]
            wanted[i] = reduced(mains[name][i], replicas)
    return result


def check_slots(
    group: uec.Group, plan: uec.Plan, before: dict[str, torch.Tensor], zero: bool
) -> None:
    filled = plan.slot_expert[group.rank] >= 0
    for name, slots in group.slot_grads.items():
        assert same_bits(slots[~filled], before[name][~filled])
        if zero:
            assert not slots[filled].any()


def reduce_once(groups: list[uec.Group], plan: uec.Plan, seed: int, **options: Any) -> Any:
    """Reduce on all ranks of a loopback group, and check it; return the main gradients."""
    main_dtype = options.pop("main_dtype", F32)
    before = [fill_slot_grads(group, seed) for group in groups]
    mains = [make_mains(group, seed, main_dtype) for group in groups]
    expected = [
        expect(group, plan, main, before) for group, main in zip(groups, mains, strict=True)
    ]
    loopback(
        len(groups),
        lambda r: uec.reduce_expert_grads(mains[r], plan, group=groups[r], **options),
    )
    for group, main, wanted in zip(groups, mains, expected, strict=True):
        for name in NAMES:
            assert same_bits(main[name], wanted[name]), (group.rank, name)
        check_slots(group, plan, before[group.rank], options.get("zero", True))
    return mains


def make_groups(num_ranks: int, **options: Any) -> list[uec.Group]:
    options = {
        "num_experts": 7,
        "slots_per_rank": 2,
        "expert": EXPERT,
        "grads": dict.fromkeys(NAMES, F32),
        "timeout": 20.0,
    } | options
    return uec.testing.new_loopback_groups(num_ranks, **options)


@pytest.mark.parametrize(
    "num_ranks, options",
    [
        (2, {}),
        (3, {"tile_bytes": 1024}),
        (3, {"tile_bytes": 1024, "num_sms": 3}),
        (4, {"num_experts": 3, "tile_bytes": 4096}),  # a rank without mains
        (5, {"num_sms": 2, "home": [4, 4, 0, 1, 1, 1, 2]}),
        (20, {"num_experts": 20, "slots_per_rank": 1, "tile_bytes": 1024}),
    ],
)
@pytest.mark.parametrize("slot_dtype", [F32, BF16])
def test_every_bit(num_ranks: int, options: dict[str, Any], slot_dtype: torch.dtype) -> None:
    groups = make_groups(num_ranks, grads=dict.fromkeys(NAMES, slot_dtype), **options)
    t = groups[0].topology
    ways = itertools.product(("auto", "pull", "direct"), (F32, BF16), (True, False))
    for seed, (mode, main_dtype, zero) in enumerate(ways):
        plan = random_plan(seed, num_ranks, t.num_experts, t.slots_per_rank, list(t.home), fill=0.9)
        reduce_once(groups, plan, seed, mode=mode, main_dtype=main_dtype, zero=zero)
    close_all(groups)


def test_many_replicas_of_one_expert() -> None:
    # As many parts as one pass adds and more, and fan-outs with other flag groups.
    for num_ranks in (5, 6, 9, 18, 27):
        slots = torch.zeros((num_ranks, 1), dtype=torch.int32)
        slots[0] = 1
        plan = uec.Plan.from_slots(slots, num_experts=num_ranks)
        groups = make_groups(num_ranks, num_experts=num_ranks, slots_per_rank=1, tile_bytes=1024)
        modes = ("pull", "direct")
        a, b = (reduce_once(groups, plan, 3, mode=mode) for mode in modes)
        assert all(same_bits(a[0][name], b[0][name]) for name in NAMES)
        close_all(groups)


def test_special_values_are_added_as_torch_adds_them() -> None:
    numbers = (0.0, 1e-45, 2.0**-133, 1e-38, 1.0, 1.00390625, 1.01171875, 3.4e38, float("inf"))
    special = torch.tensor([*numbers, *(-x for x in numbers), float("nan")])
    triples = torch.cartesian_prod(special, special, special)
    shape = (len(triples),)
    for slot_dtype, main_dtype in itertools.product((F32, BF16), (F32, BF16)):
        groups = make_groups(3, expert={"w": (shape, F32)}, grads=slot_dtype, num_experts=3)
        plan = uec.Plan.from_slots([[-1, -1], [0, -1], [-1, 0]], num_experts=3)
        groups[1].slot_grads["w"][0] = triples[:, 1]
        groups[2].slot_grads["w"][1] = triples[:, 2]
        mains = [{"w": torch.zeros((1, *shape), dtype=main_dtype)} for _ in groups]
        mains[0]["w"][0] = triples[:, 0]
        parts = [groups[1].slot_grads["w"][0].clone(), groups[2].slot_grads["w"][1].clone()]
        wanted = reduced(mains[0]["w"][0], parts)
        for work in start_all(groups, mains, plan, call=uec.reduce_expert_grads):
            work.wait()
        assert same_bits(mains[0]["w"][0], wanted)
        close_all(groups)


def test_main_gradients_may_be_any_memory() -> None:
    groups = make_groups(2, expert={"w": ((5, 3), BF16)}, grads=BF16, num_experts=4)
    plan = uec.Plan.from_slots([[2, 3], [0, 1]], num_experts=4)
    before = [fill_slot_grads(group, 1) for group in groups]
    flat = make_values(1, (200,), BF16)  # rank 0: odd places in a flat buffer, in any order
    listed = [flat[101:116].view(5, 3), flat[7:22].view(5, 3)]
    spaced = make_values(2, (2, 2, 5, 3), F32)[:, 1]  # rank 1: rows with gaps between them
    mains: list[dict[str, Any]] = [{"w": listed}, {"w": spaced}]
    wanted = [expect(groups[0], plan, {"w": torch.stack(listed)}, before)["w"]]
    wanted.append(expect(groups[1], plan, {"w": spaced}, before)["w"])
    rest = flat.clone()
    loopback(2, lambda r: uec.reduce_expert_grads(mains[r], plan, group=groups[r]))
    assert same_bits(torch.stack(listed), wanted[0])
    assert same_bits(spaced, wanted[1])
    changed = (flat != rest).nonzero().flatten().tolist()
    assert set(changed) <= {*range(101, 116), *range(7, 22)}
    close_all(groups)


def test_the_chosen_mode_is_told_and_work_can_be_waited_for_later() -> None:
    groups = make_groups(3)
    plan = uec.Plan.from_slots([[-1, -1], [0, -1], [0, -1]], num_experts=7)
    mains = [make_mains(group, 1, F32) for group in groups]
    for work in start_all(groups, mains, plan, call=uec.reduce_expert_grads, mode="pull"):
        assert work.mode == "pull"
        work.wait()
        assert work.is_completed()
        assert work.exception() is None
    close_all(groups)


# ---- real processes, with transfers in between --------------------------------------------------


def _train(rank: int, process_group: Any, mode: str) -> Any:
    """Three steps of two layers: replicate, use, reduce. Returns what differs."""
    group = uec.new_group(
        process_group,
        num_experts=9,
        slots_per_rank=2,
        expert={"w": ((300, 40), BF16)},
        grads=F32,
        timeout=20.0,
        num_sms=2,
    )
    wrong = []
    with group:
        weights = {"w": torch.full((group.num_local_experts, 300, 40), 1.0 + rank, dtype=BF16)}
        for step in range(6):
            plan = random_plan(step, group.num_ranks, 9, 2)
            uec.replicate_experts(weights, plan, group=group)
            filled = plan.slot_expert[rank] >= 0
            # As autograd does: added to what the step before has left, which has to be zeros.
            for slot in filled.nonzero().flatten().tolist():
                seed = step * 64 + rank * 8 + slot
                group.slot_grads["w"][slot] += make_values(seed, (300, 40), F32)
            mains = {"w": make_values(step, (group.num_local_experts, 300, 40), BF16)}
            slots = []
            for r in range(group.num_ranks):
                values = [make_values(step * 64 + r * 8 + s, (300, 40), F32) for s in range(2)]
                slots.append({"w": torch.stack(values)})
            wanted = expect(group, plan, mains, slots)["w"]
            uec.reduce_expert_grads(mains, plan, group=group, mode=mode)
            if not same_bits(mains["w"], wanted):
                wrong.append((step, "main"))
            if group.slot_grads["w"].any():
                wrong.append((step, "slots"))
    return wrong


@pytest.mark.parametrize("mode", ["auto", "pull", "direct"])
def test_processes_train(ranks: RankPool, mode: str) -> None:
    for rank, wrong in enumerate(ranks.run(4, _train, mode)):
        assert wrong == [], rank


# ---- bad input ----------------------------------------------------------------------------------


def _bad_grads(name: str, w: torch.Tensor) -> Any:
    return {
        "dtype": {"w": w.half()},
        "shape": {"w": w.reshape(-1, 4, 5)},
        "device": {"w": w.to("meta")},
        "missing": {},
        "extra": {"w": w, "v": w},
        "too few": {"w": w[1:]},
        "no mapping": w,
        "strides": {"w": torch.zeros(2, 5, 5)[:, :, :4]},
        "shared rows": {"w": torch.zeros(1, 5, 4).expand(2, 5, 4)},
        "a row twice": {"w": [w[0], w[0]]},
        "two dtypes": {"w": [w[0], w[1].bfloat16()]},
    }[name]


GRAD_FAULTS = {
    "dtype": "expected torch.float32 or torch.bfloat16",
    "shape": "expected (5, 4)",
    "device": "meta",
    "missing": "lack segment 'w'",
    "extra": "'v'",
    "too few": "(1, 5, 4)",
    "no mapping": "grads is a Tensor",
    "strides": "strides",
    "shared rows": "share memory",
    "a row twice": "share memory",
    "two dtypes": "torch.bfloat16",
}


@pytest.mark.parametrize("fault", GRAD_FAULTS)
def test_bad_gradients_are_refused_and_peers_do_not_wait(fault: str) -> None:
    groups = make_groups(2, num_experts=4, expert={"w": ((5, 4), F32)}, grads=F32)
    plan = uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4)
    mains: list[Any] = [{"w": torch.ones(2, 5, 4)} for _ in groups]
    mains[1] = _bad_grads(fault, mains[1]["w"])
    for group in groups:
        group.slot_grads["w"].fill_(2)

    def call(rank: int) -> BaseException | None:
        return raised(lambda: uec.reduce_expert_grads(mains[rank], plan, group=groups[rank]))

    peer, own = loopback(2, call)
    assert isinstance(own, errors.InvalidWeightsError)
    assert "rank 1" in str(own)
    assert GRAD_FAULTS[fault] in str(own)
    assert isinstance(peer, errors.PeerRejectedError)
    assert "main gradients of replicated experts are undefined" in str(peer)
    assert (groups[1].slot_grads["w"] == 2).all()
    close_all(groups)


def test_segments_with_one_gradient() -> None:
    segment = ((5, 4), F32)
    (group,) = make_groups(1, num_experts=2, expert={"gate": segment, "up": segment}, grads=F32)
    grads = torch.zeros(2, 5, 4)
    with pytest.raises(errors.InvalidWeightsError, match=r"rows of grads\['up'\] share memory"):
        group.bind_grads({"gate": grads, "up": grads})
    group.close()


def test_slots_without_gradients() -> None:
    (group,) = make_groups(1, grads=None)
    assert group.slot_grads == {}
    plan = uec.Plan.from_slots([[-1, -1]], num_experts=7)
    with pytest.raises(
        errors.InvalidWeightsError, match=r"rank 0: the slots of this group .*grads=torch"
    ):
        uec.reduce_expert_grads({"w13": torch.zeros(7, 33, 130)}, plan, group=group)


@pytest.mark.parametrize("mode", ["push", "hubs"])
def test_modes_that_there_are_not(mode: str) -> None:
    (group,) = make_groups(1)
    plan = uec.Plan.from_slots([[-1, -1]], num_experts=7)
    with pytest.raises(errors.InvalidArgumentError, match=r"expected 'auto' or one of \['pull'"):
        uec.reduce_expert_grads(make_mains(group, 0, F32), plan, group=group, mode=mode)


@pytest.mark.parametrize(
    "grads, part",
    [
        (torch.float16, "float16"),
        ({"v": F32}, "'v'"),
        ({}, "expected a dtype"),
        ("float32", "expected a dtype"),
        ({"w13": torch.int32}, "int32"),
    ],
)
def test_gradients_that_a_group_cannot_have(grads: Any, part: str) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        make_groups(1, grads=grads)
    assert part in str(caught.value)


OTHERS = {
    "another operation": lambda g, m, p: uec.replicate_experts(m, p, group=g),
    "another mode": lambda g, m, p: uec.reduce_expert_grads(m, p, group=g, mode="direct"),
    "zero": lambda g, m, p: uec.reduce_expert_grads(m, p, group=g, mode="pull", zero=False),
    "another plan": lambda g, m, p: uec.reduce_expert_grads(
        m, uec.Plan.from_slots([[-1], [0], [-1]], num_experts=3), group=g, mode="pull"
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_ranks_that_make_different_calls_fail(other: str) -> None:
    groups = make_groups(3, num_experts=3, slots_per_rank=1, expert={"w": ((5, 4), F32)}, grads=F32)
    plan = uec.Plan.from_slots([[-1], [0], [0]], num_experts=3)
    mains = [{"w": torch.ones(group.num_local_experts, 5, 4)} for group in groups]

    def call(rank: int) -> BaseException | None:
        group, main = groups[rank], mains[rank]
        if rank == 1:
            return raised(lambda: OTHERS[other](group, main, plan))
        return raised(lambda: uec.reduce_expert_grads(main, plan, group=group, mode="pull"))

    found = loopback(3, call)
    assert any(isinstance(error, errors.PlanMismatchError) for error in found), found
    for error in found:
        assert isinstance(error, errors.TransferError), found
    close_all(groups)


def test_a_rank_that_does_not_call_is_named() -> None:
    groups = make_groups(2, timeout=0.5, num_experts=4)
    plan = uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4)
    with pytest.raises(errors.TransferTimeoutError, match=r"reduce_expert_grads.* rank 1") as error:
        uec.reduce_expert_grads(make_mains(groups[0], 0, F32), plan, group=groups[0])
    assert error.value.peer == 1
    close_all(groups)


# ---- saved plans --------------------------------------------------------------------------------


def test_a_handle_ends_with_its_reduction() -> None:
    groups = make_groups(2, num_experts=4)
    plan = uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4)
    handles = [group.save(plan, layer=3, microbatch=5) for group in groups]
    before = [fill_slot_grads(group, 1) for group in groups]
    mains = [make_mains(group, 1, F32) for group in groups]
    wanted = [expect(group, plan, main, before) for group, main in zip(groups, mains, strict=True)]

    def call(rank: int) -> BaseException | None:
        return raised(
            lambda: uec.reduce_expert_grads(mains[rank], handles[rank], group=groups[rank])
        )

    assert loopback(2, call) == [None, None]
    for name in NAMES:
        assert same_bits(mains[0][name], wanted[0][name])
    for group in groups:
        group.assert_idle()
    again = loopback(2, call)
    assert isinstance(again[0] or again[1], errors.PlanHandleError)
    for error in again:
        assert isinstance(error, errors.PlanHandleError | errors.GroupClosedError)
        if isinstance(error, errors.PlanHandleError):
            assert "layer 3, microbatch 5" in str(error)
            assert "backward twice" in str(error)
    close_all(groups)


@pytest.mark.parametrize("operation", ["reduce_expert_grads", "replicate_experts"])
def test_bad_input_names_the_saved_plan(operation: str) -> None:
    groups = make_groups(2, num_experts=4)
    plan = uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4)
    handles = [group.save(plan, layer=3, microbatch=5) for group in groups]

    def call(rank: int) -> BaseException | None:
        tensors = make_mains(groups[rank], 1, F32)
        tensors = {name: tensor.to(torch.int16) for name, tensor in tensors.items()}
        made = getattr(uec, operation)
        return raised(lambda: made(tensors, handles[rank], group=groups[rank]))

    found = loopback(2, call)
    assert any(isinstance(error, errors.InvalidArgumentError) for error in found)
    for rank, error in enumerate(found):
        if isinstance(error, errors.InvalidArgumentError):
            assert str(error).startswith(f"rank {rank}: ")
            assert str(error).endswith(f" (in {operation} of layer 3, microbatch 5)")
    for handle, group in zip(handles, groups, strict=True):
        handle.release()
        group.close()


def test_layers_reduced_in_another_order_do_not_match() -> None:
    groups = make_groups(2, num_experts=4)
    plan = uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4)  # the same for both layers
    handles = [[group.save(plan, layer=layer) for layer in (3, 4)] for group in groups]
    mains = [make_mains(group, 1, F32) for group in groups]

    def call(rank: int) -> BaseException | None:
        return raised(
            lambda: uec.reduce_expert_grads(mains[rank], handles[rank][rank], group=groups[rank])
        )

    for rank, error in enumerate(loopback(2, call)):
        assert isinstance(error, errors.PlanMismatchError | errors.TransferAbortedError)
        assert f"rank {rank}: reduce_expert_grads of layer {3 + rank}, microbatch 0" in str(error)
    close_all(groups)
