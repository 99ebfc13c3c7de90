"""Groups in one process: slots, binding, pointers, options, and what is left of them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import (
    MIXED,
    RankPool,
    close_all,
    make_weights,
    prepare_all,
    start_all,
    wrong_bytes,
)

import ultraep_comm as uec
from ultraep_comm import Segment, errors
from ultraep_comm.group.group import session_of

E, S = 6, 2
SMALL = {"w": Segment((8, 4), torch.bfloat16), "s": Segment((3,), torch.uint8)}


def _groups(num_ranks: int, **options: Any) -> list[uec.Group]:
    options = {"num_experts": E, "slots_per_rank": S, "expert": SMALL, "timeout": 20.0, **options}
    return uec.testing.new_loopback_groups(num_ranks, **options)


def test_slots_are_stable_views() -> None:
    groups = _groups(2, expert=MIXED)
    slots = groups[0].slots
    assert {n: tuple(t.shape) for n, t in slots.items()} == {
        n: (S, *s.shape) for n, s in MIXED.items()
    }
    assert slots["w_t"].stride() == (40 * 24, 1, 40)
    assert all(t.dtype == MIXED[n].dtype for n, t in slots.items())
    assert slots["w13"].data_ptr() == groups[0].slots["w13"].data_ptr()
    plan = uec.Plan.from_slots([[3, -1], [0, 1]], num_experts=E)
    weights = [make_weights(g) for g in groups]
    prepare_all(groups, weights, 1)
    for work in start_all(groups, weights, plan):
        work.wait()
        work.synchronize()
    close_all(groups)
    assert int(slots["scale"].sum()) > 0  # views outlive the group
    for call in (
        lambda: uec.replicate_experts(weights[0], plan, group=groups[0]),
        lambda: uec.gather_load(torch.zeros(1, 1).long(), group=groups[0]),
        groups[0].empty_weights,
    ):
        with pytest.raises(errors.GroupClosedError, match=r"rank 0: .+ is closed; create"):
            call()


def test_expert_pointers_are_of_local_experts_then_slots() -> None:
    groups = _groups(4)
    for group in groups:
        weights = make_weights(group)
        pointers = group.expert_pointers(weights)
        for name, segment in SMALL.items():
            local = [t.data_ptr() for t in weights[name]]
            slots = [t.data_ptr() for t in group.slots[name]]
            assert pointers[name].dtype == torch.int64
            assert pointers[name].tolist() == local + slots
            assert segment.nbytes == slots[1] - slots[0]
    close_all(groups)


@pytest.mark.parametrize("num_experts", [E, E + 1])
def test_bound_weights_are_of_one_group(num_experts: int) -> None:
    one, other = _groups(1), _groups(1, num_experts=num_experts)
    bound = one[0].bind(make_weights(one[0]))
    assert set(bound.tensors) == {"w", "s"}
    assert bound.region == -1
    assert one[0].bind(bound) is bound
    with pytest.raises(errors.InvalidWeightsError, match="another group"):
        other[0].expert_pointers(bound)
    close_all(one + other)


def test_bound_addresses_are_those_of_the_tensors() -> None:
    thin = Segment((4, 1, 3), torch.float32)
    (group,) = _groups(1, expert={**SMALL, "t": thin})
    stacked = make_weights(group)
    rows = {name: list(tensor) for name, tensor in stacked.items()}
    expected = [t.data_ptr() for name in group.segments for t in rows[name]]
    assert list(group.bind(stacked).addresses) == expected
    assert list(group.bind(rows).addresses) == expected
    # Parameters, a subclass, and strides that say nothing, of a dimension of 1, are tensors too.
    rows["w"][1] = torch.nn.Parameter(rows["w"][1])
    rows["s"][0] = rows["s"][0].as_subclass(Tagged)
    rows["t"][2] = rows["t"][2].as_strided((4, 1, 3), (3, 99, 1))
    assert list(group.bind(rows).addresses) == expected
    # One expert's bytes for all; and a segment that is left out.
    same = stacked["w"][3].expand(E, *SMALL["w"].shape)
    assert list(group.bind({"w": same}).addresses) == [same.data_ptr()] * E + [0] * 2 * E
    close_all([group])


@pytest.mark.parametrize("engine", ["host", "c10d"])
def test_an_update_is_for_later_calls(engine: str) -> None:
    groups = _groups(2, engine=engine)
    plan = uec.Plan.from_slots([[3, -1], [0, 1]], num_experts=E)
    weights: list[Any] = [make_weights(group) for group in groups]
    bound = [group.bind(own) for group, own in zip(groups, weights, strict=True)]
    for epoch in (1, 2):
        prepare_all(groups, weights, epoch)
        works = start_all(groups[:1], bound, plan)
        before, weights = weakref.ref(weights[0]["w"]), [make_weights(group) for group in groups]
        bound[0].update(weights[0])
        assert before() is not None  # the call in flight reads it
        works += start_all(groups[1:], bound, plan)
        for work in works:
            work.synchronize()
        bound[1].update(weights[1])
        assert [wrong_bytes(group, plan, epoch) for group in groups] == [0, 0]
    assert bound[0].addresses == groups[0].bind(weights[0]).addresses
    close_all(groups)


def test_an_update_is_of_the_same_segments_dtypes_and_region() -> None:
    (group,) = _groups(1, grads=torch.float32)
    first, second, plain = group.empty_weights(), group.empty_weights(), make_weights(group)
    bound, shared = group.bind({"w": plain["w"]}), group.bind(first)
    before = bound.addresses
    for other in (plain, {"s": plain["s"]}, {}):
        with pytest.raises(errors.InvalidWeightsError, match="of other names or dtypes"):
            bound.update(other)
    for other in (second, plain):
        with pytest.raises(errors.InvalidWeightsError, match="captured calls may pull from"):
            shared.update(other)
    with pytest.raises(errors.InvalidWeightsError, match="has shape"):
        bound.update({"w": plain["w"][1:]})
    assert bound.addresses is before
    bound.update({"w": first["w"]})
    assert bound.region == -1  # captured calls do not know the region
    grads = {name: tensor.float() for name, tensor in plain.items()}
    main = group.bind_grads(grads)
    with pytest.raises(errors.InvalidWeightsError, match="of other names or dtypes"):
        main.update({**grads, "w": grads["w"].bfloat16()})
    with pytest.raises(errors.InvalidWeightsError, match="bound to another group"):
        main.update(bound)
    with pytest.raises(errors.InvalidArgumentError, match="a copy of a binding"):
        copy.deepcopy(bound).update(plain)
    close_all([group])


class Tagged(torch.Tensor):
    """A plain tensor of another class."""


def test_weights_of_a_region_are_recognised() -> None:
    (group,) = _groups(1)
    first, second = group.empty_weights(), group.empty_weights()
    assert group.bind(first).region == 0
    assert group.bind(second).region == 1
    assert group.bind({"w": second["w"]}).region == 1
    assert group.bind({"w": first["w"], "s": second["s"]}).region == -1
    assert group.bind({"w": first["w"].flip(0), "s": first["s"]}).region == -1
    close_all([group])


def test_weights_of_a_call_nobody_waits_for_stay_alive() -> None:
    groups = _groups(2)
    plan = uec.Plan.from_slots([[3, -1], [0, 1]], num_experts=E)
    alive = []
    for group in groups:
        weights = make_weights(group)
        alive.append(weakref.ref(weights["w"]))
        if group.rank == 0:
            uec.replicate_experts(weights, plan, group=group, async_op=True)
            del weights
            gc.collect()
            assert alive[0]() is not None  # rank 1 has not called yet, so it is still read
        else:
            uec.replicate_experts(weights, plan, group=group)
    close_all(groups)
    del weights
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


# ---- segments and options --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, part",
    [
        ({"expert": {}}, "without a segment"),
        ({"expert": {"w": ((0, 4), torch.uint8)}}, "no bytes"),
        ({"expert": {"w": Segment((4, 4), torch.uint8, (8, 1))}}, "dense"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"home": [0] * 5}, "home has shape"),
        ({"home": [7] * 6}, r"home\[0\] is 7"),
        ({"timeout": -1}, "timeout"),
        ({"num_sms": 0}, "num_sms"),
        ({"tile_bytes": 3000}, "power of two"),
        ({"num_sms": 1.5}, "integer"),
        ({"home": [0, 0, 1, 1, 1, 2**32]}, "32 bits"),
        ({"expert": {"w": torch.uint8}}, "'w'"),
        ({"expert": {"w": (8, torch.uint8)}}, "shape is 8"),
        ({"expert": {"w": ((8.0,), torch.uint8)}}, "integers"),
        ({"expert": {"w": ((8,), "uint8")}}, "torch.dtype"),
        ({"grads": torch.float16}, "float16"),
        ({"grads": {"v": torch.float32}}, "'v'"),
        ({"grads": "float32"}, "expected a dtype"),
    ],
)
def test_bad_options(options: dict[str, Any], part: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=part):
        _groups(2, **options)


def test_environment_variables_stand_in_for_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULTRAEP_TILE_BYTES", "3000")
    with pytest.raises(errors.InvalidArgumentError, match="3000"):
        _groups(1)
    close_all(_groups(1, tile_bytes=4096))  # an argument wins
    monkeypatch.setenv("ULTRAEP_TILE_BYTES", "many")
    with pytest.raises(errors.InvalidArgumentError, match="ULTRAEP_TILE_BYTES"):
        _groups(1)


def test_new_group_needs_torch_distributed() -> None:
    with pytest.raises(errors.BootstrapError, match="init_process_group"):
        uec.new_group(num_experts=E, slots_per_rank=S, expert=SMALL)


# ---- both at once -------------------------------------------------------------------------------


def test_gather_and_plan_is_one_after_the_other() -> None:
    (group,) = _groups(1)
    ids = torch.tensor([[0, 1], [2, -1], [0, 1]])
    cost = uec.PlanCost(token=1e-6, expert_byte=1e-9)
    for options in ({}, {"target": 1.5}, {"cost": cost}):
        plan = uec.gather_and_plan(ids, group=group, **options)
        expected = uec.plan_replicas(uec.gather_load(ids, group=group), group=group, **options)
        for name, tensor in expected.tensors().items():
            assert torch.equal(getattr(plan, name), tensor), name
    with pytest.raises(errors.InvalidArgumentError, match="target"):
        uec.gather_and_plan(ids, group=group, target=0.5)
    close_all([group])


# ---- what a group leaves behind --------------------------------------------------------------


def _memory_beyond_slots(rank: int, process_group: Any) -> Any:
    def private_kib() -> int:
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1])
        raise AssertionError

    big = {"w": Segment((16 << 20,), torch.uint8)}
    options: dict[str, Any] = {"num_experts": 16, "slots_per_rank": 2, "expert": big}
    uec.new_group(process_group, **options).close()  # what the first use of torch allocates
    gc.collect()
    before = private_kib()
    with uec.new_group(process_group, **options) as group:
        weights = group.empty_weights()
        plan = uec.Plan.from_slots([[8, 9], [0, 1]], num_experts=16)
        for mode in ("push", "pull", "direct"):
            uec.replicate_experts(weights, plan, group=group, mode=mode)
        flags = session_of(group).engine.layout.slots_base
        return private_kib() - before, flags


def test_memory_beyond_slots_and_flags_is_small(ranks: RankPool) -> None:
    for grown, flags in ranks.run(2, _memory_beyond_slots):
        assert grown <= 1024
        assert flags <= 1 << 20


def test_a_group_that_is_dropped_in_a_call_ends() -> None:
    groups = _groups(2, timeout=1000.0)
    weights, plan = make_weights(groups[0]), uec.Plan.from_slots([[3, -1], [0, 1]], num_experts=E)
    uec.replicate_experts(weights, plan, group=groups[0], async_op=True)
    fabrics = [weakref.ref(session_of(group).engine.fabric) for group in groups]
    del groups
    gc.collect()
    assert [fabric() for fabric in fabrics] == [None, None]


def test_memory_that_is_refused_is_the_cause_of_what_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (group,) = _groups(1)
    refused = errors.OutOfSharedMemoryError("planted")

    def refuse(num_bytes: int) -> Any:
        raise refused

    monkeypatch.setattr(session_of(group).engine.fabric, "allocate", refuse)
    with pytest.raises(errors.OutOfSharedMemoryError):
        group.empty_weights()
    with pytest.raises(errors.GroupClosedError) as later:
        group.empty_weights()
    assert later.value.__cause__ is refused
    group.close()


def test_copies_of_what_holds_a_group_share_it_and_saved_ones_lack_it() -> None:
    (group,) = _groups(1)
    held = {"group": group, "bank": group.banks[0], "session": session_of(group)}
    for copied in (copy.copy(held), copy.deepcopy(held)):
        assert all(copied[name] is thing for name, thing in held.items())
    bound = group.bind(make_weights(group))
    for action in (copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))):
        with pytest.raises(errors.InvalidWeightsError, match="bound to another group"):
            group.expert_pointers(action(bound))
    loaded = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(held))))
    for thing in copy.deepcopy(loaded).values():
        with pytest.raises(errors.GroupClosedError, match=r"module\.group = new_group\(\.\.\.\)"):
            _ = thing.slots
    group.close()


def test_a_group_keeps_its_own_constants() -> None:
    home = torch.tensor([0, 0, 1, 1, 1, 0], dtype=torch.int32)
    groups = _groups(2, home=home)
    plan = uec.plan_replicas(torch.ones((2, E), dtype=torch.int32), group=groups[0])
    plan.home.fill_(0)
    home.fill_(0)
    assert groups[0].topology.home.tolist() == [0, 0, 1, 1, 1, 0]
    with pytest.raises(ValueError, match="read-only"):
        groups[0].topology.home[0] = 1
    close_all(groups)
