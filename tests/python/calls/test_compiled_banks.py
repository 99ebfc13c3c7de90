"""Banks under torch.compile: the moves, slots and residents of eager calls, without a break."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from compilers import BACKENDS, COMPILE_TIMEOUT, COMPILES, assert_same
from ranks import bytes_stored, close_all, loopback, start_all, synchronize_all
from torch._dynamo.testing import CompileCounterWithBackend

import ultraep_comm as uec
from ultraep_comm import errors, ops
from ultraep_comm.calls.traced import ORDER, TracedWork

RANKS, EXPERTS, SLOTS, BANKS = 3, 9, 2, 2
SHAPE = (16, 16)
Tensors = list[torch.Tensor]

pytestmark = COMPILES


def make_groups(num_ranks: int = RANKS, **options: Any) -> list[uec.Group]:
    return uec.testing.new_loopback_groups(
        num_ranks,
        num_experts=EXPERTS,
        slots_per_rank=SLOTS,
        expert={"w": (SHAPE, torch.float32), "b": ((16,), torch.bfloat16)},
        grads=torch.float32,
        banks=BANKS,
        timeout=COMPILE_TIMEOUT,
        **options,
    )


def make_weights(rank: int, num_ranks: int = RANKS, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * seed + rank)
    count = EXPERTS // num_ranks
    return {
        "w": torch.randn(count, *SHAPE, generator=draw),
        "b": torch.randn(count, 16, generator=draw).bfloat16(),
    }


def make_loads(seed: int) -> Tensors:
    """Three loads that have most in common; the last two are equal."""
    draw = torch.Generator().manual_seed(seed)
    load = torch.randint(0, 400, (RANKS, EXPERTS), generator=draw)
    load[:, seed % EXPERTS] += 900
    other = load.clone()
    other[:, (seed + 1) % EXPERTS] += 900
    return [load, other, other.clone()]


def steps(
    loads: Tensors, weights: Any, group: uec.Group, bank: Any, async_op: bool
) -> list[torch.Tensor]:
    """Plan each load on top of what the last one has left, and use the slots before and after.

    The weights change once they have been moved, as those of another layer would.
    """
    slots = group.banks[bank].slots if isinstance(bank, int) else bank.slots
    results = []
    for load in loads:
        plan = uec.plan_replicas(load, group=group, bank=bank, reuse=True)
        before = slots["w"] * 2
        work = uec.replicate_experts(weights, plan, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        assert plan.slots_to_fill is not None
        assert plan.slot_quota is not None
        results += [
            plan.slot_expert + 0,
            plan.slot_quota + 0,
            ~plan.slots_to_fill,
            before,
            slots["w"] + 1,
        ]
        weights["w"].add_(1)
    return results


def stored(groups: list[uec.Group]) -> int:
    return sum(bytes_stored(group) for group in groups)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("async_op", [False, True])
def test_compiled_steps_move_what_eager_ones_do(
    backend: str, async_op: bool, groups: list[uec.Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    find_copies = ops._find_copies

    def spy(*arguments: Any) -> ops.Copies:
        found = find_copies(*arguments)
        copies.append(len(found))
        return found

    monkeypatch.setattr(ops, "_find_copies", spy)
    compiled = torch.compile(steps, fullgraph=True, backend=backend)
    others, kept = make_groups(), 0
    for seed in range(4):
        loads, index = make_loads(seed), seed % BANKS

        def run(
            fn: Callable[..., Tensors], among: list[uec.Group], loads: Any = loads, at: int = index
        ) -> list[Tensors]:
            banks = [group.banks[at] if at else at for group in among]
            return loopback(
                RANKS, lambda r: fn(loads, make_weights(r), among[r], banks[r], async_op)
            )

        before = stored(others)
        got, expected = run(compiled, groups), run(steps, others)
        assert_same(got, expected)
        assert_same(
            *(
                [[bank.residents, dict(bank.slots)] for group in among for bank in group.banks]
                for among in (groups, others)
            )
        )
        assert stored(groups) == stored(others) > before
        slots, _, stays, *_ = expected[0][5:]
        kept += int((stays & (slots >= 0)).sum())
        assert expected[0][12].all()  # the third load finds everything there
    assert kept > 0
    # inductor transfers into the slots themselves, the other backend into copies.
    assert copies
    assert any(copies) == (backend != "inductor")
    close_all(others)


@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_of_one_load_are_made_one_by_one(backend: str, groups: list[uec.Group]) -> None:
    """Equal arguments, and different results: the transfer between them fills the bank.

    With a gradient, as compilers merge equal operators in training graphs.
    """

    def calls(x: torch.Tensor, load: torch.Tensor, weights: Any, group: uec.Group) -> Tensors:
        first = uec.plan_replicas(load, group=group, reuse=True)
        uec.replicate_experts(weights, first, group=group)
        second = uec.plan_replicas(load, group=group, reuse=True)
        uec.replicate_experts(weights, first, group=group)  # restores, and moves nothing
        assert first.slots_to_fill is not None
        assert second.slots_to_fill is not None
        y = (x * group.slots["w"]).sum()
        return [
            first.slots_to_fill.sum(),
            second.slots_to_fill.sum(),
            second.slot_expert - first.slot_expert,
            y,
        ]

    load, compiled = make_loads(1)[0], torch.compile(calls, fullgraph=True, backend=backend)
    x = torch.ones(SHAPE, requires_grad=True)
    found = loopback(RANKS, lambda r: compiled(x, load, make_weights(r), groups[r]))
    for first, second, difference, _ in found:
        assert first > 0
        assert second == 0
        assert not difference.any()
    expert = sum(segment.nbytes for segment in groups[0].segments.values())
    assert stored(groups) == int(found[0][0]) * expert


def test_another_version_compiles_nothing_anew(groups: list[uec.Group]) -> None:
    def calls(load: torch.Tensor, weights: Any, group: uec.Group, version: int) -> None:
        plan = uec.plan_replicas(load, group=group, bank=1, reuse=True)
        uec.replicate_experts(weights, plan, group=group, version=version)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(calls, fullgraph=True, backend=counter)
    load = make_loads(1)[0]
    counts = []
    for version in (3, 3, 4, 7, 8, 9):
        weights = [make_weights(r, seed=version) for r in range(RANKS)]
        before = stored(groups)
        loopback(RANKS, lambda r: compiled(load, weights[r], groups[r], version))  # noqa: B023
        moved = stored(groups) - before
        assert (moved == 0) == (len(counts) == 1)
        counts.append(counter.frame_count)
        for group in groups:
            bank = group.banks[1]
            assert bank.version == version
            for slot, expert in enumerate(bank.residents[group.rank].tolist()):
                if expert >= 0:
                    home, main = divmod(expert, EXPERTS // RANKS)
                    assert torch.equal(bank.slots["w"][slot], weights[home]["w"][main])
    assert counts[1] == RANKS
    assert counts[2] == counts[-1]


# ---- operators and errors -------------------------------------------------------------------


def test_every_kind_of_work_keeps_what_a_work_promises(groups: list[uec.Group]) -> None:
    plan = uec.Plan.from_slots(
        [[-1, -1], [0, -1], [-1, -1]], num_experts=EXPERTS, bank=1, reuse=True
    )
    works = start_all(groups, [make_weights(rank) for rank in range(RANKS)], plan)
    synchronize_all(works)
    group, work = groups[1], works[1]
    waited = (torch.tensor(work.epoch), [], plan.slot_expert, [], [], ORDER, 1, group.name)
    traced = TracedWork("replicate_experts", "auto", group.name, waited)
    in_place = TracedWork("reduce_expert_grads", "", group.name)
    names = ["mode", *(name for name in vars(uec.Work) if not name.startswith("_"))]
    for kind in (work, traced, in_place):
        assert kind.is_completed()
        for name in names:
            member = getattr(kind, name)
            if name == "slot_ready":
                assert kind is in_place or member(0)
                with pytest.raises(errors.InvalidArgumentError, match=r"slot 1 of a re"):
                    member(1)
            elif callable(member) and not (kind is traced and name in ("wait", "synchronize")):
                member()  # those two are operators of a compiled function
    assert traced.epoch == work.epoch
    for done in (work, in_place):
        done.wait(timedelta(seconds=5), slots=())


def test_errors_of_banks_keep_their_types() -> None:
    (group,), (other,) = make_groups(1), make_groups(1)
    load, weights = make_loads(0)[0].sum(0), make_weights(0, 1)

    def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(fn, fullgraph=True, backend="aot_eager")

    def plan(bank: Any, cost: Any = None) -> torch.Tensor:
        return uec.plan_replicas(load, group=group, bank=bank, reuse=True, cost=cost).slot_expert

    cost = uec.PlanCost(token=1.0, expert_byte=1.0)
    with pytest.raises(errors.InvalidArgumentError, match="a cost and residents, or reuse=True"):
        compiled(plan)(1, cost)
    with pytest.raises(Exception, match=r"Bank\(0 of group"):
        compiled(plan)(other.banks[0])
    with pytest.raises(Exception, match=r"invalidate\(\) of bank 1 in a compiled function"):
        compiled(group.banks[1].invalidate)()
    elsewhere = uec.Plan.from_slots([[-1, -1]], num_experts=EXPERTS, bank=BANKS)
    with pytest.raises(errors.InvalidPlanError, match="the plan is for bank 2"):
        compiled(lambda: uec.replicate_experts(weights, elsewhere, group=group))()
    close_all([other])
    group.abort()
    group.close()
