"""reroute and reroute_map as users call them: tensors, probabilities, gradients, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import plan_alone
from reference.reroute import reroute_dense
from tiers import cases

import ultraep_comm as uec
from ultraep_comm import errors

HOME = [2, 0, 0, 2, 0]  # rank 1 has no local experts
G, E, S = 3, len(HOME), 2
P = 3 + S
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def make_groups(num_ranks: int, home: list[int]) -> list[uec.Group]:
    return uec.testing.new_loopback_groups(
        num_ranks,
        num_experts=len(home),
        slots_per_rank=S,
        home=home,
        expert={"w": ((4,), torch.float32)},
    )


@pytest.fixture(scope="module")
def groups() -> Iterator[list[uec.Group]]:
    made = make_groups(G, HOME)
    yield made
    for group in made:
        group.close()


def random_maps(seed: int, most_tokens: int) -> list[torch.Tensor]:
    """A routing map for every rank, some of them empty, with popular experts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, most_tokens + 1, (G,), generator=generator).tolist()
    popularity = torch.rand(E, generator=generator)
    return [torch.rand((t, E), generator=generator) < popularity for t in tokens]


def plan_of(maps: list[torch.Tensor]) -> uec.Plan:
    load = torch.stack([routing_map.sum(dim=0) for routing_map in maps])
    return plan_alone(load, slots_per_rank=S, num_ranks=len(maps), home=HOME, target=1.0)


def arrays_of(plan: uec.Plan) -> dict[str, np.ndarray]:
    names = ("load", "slot_expert", "slot_quota", "home_quota", "home")
    return {name: getattr(plan, name).numpy() for name in names}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


def random_floats(shape: torch.Size, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return arbitrary bit patterns: NaNs with payloads, infinities, zeros of both signs."""
    width = torch.empty((), dtype=dtype).element_size()
    made = np.random.default_rng(seed).bytes(shape.numel() * width)
    return (
        torch.frombuffer(bytearray(made or b"\0"), dtype=torch.uint8)[: len(made)]
        .view(dtype)
        .view(shape)
    )


@given(
    seed=st.integers(0, 2**32 - 1), most_tokens=st.integers(0, 30), dtype=st.sampled_from(FLOATS)
)
@settings(max_examples=cases(20, 80))
def test_map_and_ids_agree_and_meet_the_quotas(
    groups: list[uec.Group], seed: int, most_tokens: int, dtype: torch.dtype
) -> None:
    maps = random_maps(seed, most_tokens)
    plan = plan_of(maps)
    received = torch.zeros(G * P, dtype=torch.int64)
    kept = 0
    for group, routing_map in zip(groups, maps, strict=True):
        probs = random_floats(routing_map.shape, dtype, seed)
        physical_map, physical_probs = uec.reroute_map(routing_map, probs, plan, group=group)
        assert physical_probs is not None
        assert physical_map.shape == physical_probs.shape == (len(routing_map), G * P)
        assert (physical_map.dtype, physical_probs.dtype) == (torch.bool, dtype)
        assert torch.equal(physical_map.sum(dim=1), routing_map.sum(dim=1))  # every token leaves
        alone, nothing = uec.reroute_map(routing_map, None, plan, group=group)
        assert nothing is None
        assert torch.equal(alone, physical_map)

        # The definition moves the bits, which NumPy has a type for whatever the dtype is.
        expected_map, expected_bits = reroute_dense(
            routing_map.numpy(), bits(probs).numpy(), rank=group.rank, **arrays_of(plan)
        )
        assert torch.equal(physical_map, torch.from_numpy(expected_map))
        assert torch.equal(bits(physical_probs), torch.from_numpy(expected_bits))

        # As a padded list: row t has token t's experts, ascending.
        columns = torch.arange(E).expand(routing_map.shape)
        ids = columns.where(routing_map, -1)
        physical_ids = uec.reroute(ids, plan, group=group)
        tokens, experts = routing_map.nonzero(as_tuple=True)
        to = physical_ids[tokens, experts]
        assert physical_map[tokens, to].all()
        assert torch.equal(bits(physical_probs)[tokens, to], bits(probs)[tokens, experts])

        received += physical_map.sum(dim=0)
        kept += int(physical_map[:, group.rank * P : (group.rank + 1) * P].sum())

    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    quota = torch.zeros(G * P, dtype=torch.int64)
    for rank in range(G):
        local = [e for e in range(E) if HOME[e] == rank]
        quota[rank * P : rank * P + len(local)] = plan.home_quota[local].long()
        slots = rank * P + len(local)
        quota[slots : slots + S] = plan.slot_quota[rank].long()
    assert torch.equal(received, quota)
    total = int(received.sum())
    assert plan.local_share == (kept / total if total else 1.0)


def test_gradients_flow_to_the_probabilities(groups: list[uec.Group]) -> None:
    maps = random_maps(3, 5)
    plan = plan_of(maps)
    for group, routing_map in zip(groups, maps, strict=True):

        def physical(
            probs: torch.Tensor, routing_map: Any = routing_map, group: Any = group
        ) -> Any:
            physical_map, found = uec.reroute_map(routing_map, probs, plan, group=group)
            assert not physical_map.requires_grad
            return found

        probs = torch.rand(routing_map.shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(physical, probs)
        assert torch.autograd.gradgradcheck(physical, probs)
        with torch.no_grad():
            assert not physical(probs).requires_grad


def test_inputs_may_lie_in_memory_as_they_like(groups: list[uec.Group]) -> None:
    maps = random_maps(5, 25)
    plan = plan_of(maps)
    routing_map, group = maps[0], groups[0]
    probs = torch.rand(routing_map.shape)
    expected = uec.reroute_map(routing_map, probs, plan, group=group)
    spread = torch.zeros((len(routing_map), 2 * E), dtype=torch.bool)
    spread[:, ::2] = routing_map
    found = uec.reroute_map(spread[:, ::2], probs.T.contiguous().T, plan, group=group)
    assert torch.equal(found[0], expected[0])
    assert found[1] is not None
    assert expected[1] is not None
    assert torch.equal(found[1], expected[1])

    ids = torch.arange(E).expand(routing_map.shape).where(routing_map, -1)
    for dtype in (torch.int32, torch.int64):
        wide = torch.full((len(ids), 2 * E), 77, dtype=dtype)
        wide[:, ::2] = ids
        assert not wide[:, ::2].is_contiguous()
        physical = uec.reroute(wide[:, ::2], plan, group=group)
        assert physical.dtype == dtype
        assert torch.equal(physical.long(), uec.reroute(ids, plan, group=group))


def test_what_is_wrong_with_a_map_is_said(groups: list[uec.Group]) -> None:
    maps = random_maps(6, 12)
    plan, routing_map, group = plan_of(maps), maps[1], groups[1]
    probs = torch.rand(routing_map.shape)

    def rejects(message: str, *arguments: object) -> None:
        with pytest.raises(errors.InvalidLoadError, match=message):
            uec.reroute_map(*arguments, plan, group=group)  # type: ignore[arg-type]

    rejects("rank 1: routing_map is torch.uint8 on cpu", routing_map.byte(), probs)
    rejects(r"rank 1: routing_map has shape \(5,\); expected \[T, 5\]", routing_map[0], probs)
    rejects("routing_map is a list", routing_map.tolist(), probs)
    rejects(r"probs has shape \(\d+, 4\); expected that of routing_map", routing_map, probs[:, 1:])
    rejects("rank 1: probs is torch.int64 on cpu", routing_map, probs.long())
    rejects("probs is torch.float32 on meta", routing_map, probs.to("meta"))
    rejects("probs is a float", routing_map, 1.0)

    counts = routing_map.sum(dim=0)
    expert = int(counts.argmax())
    token = int(routing_map[:, expert].nonzero()[0])
    changed = routing_map.clone()
    changed[token, expert] = False
    says = f"routing_map has expert {expert} {counts[expert] - 1} times, but .* {counts[expert]};"
    rejects(says, changed, probs)
    ids = torch.arange(E).expand(changed.shape).where(changed, -1)
    for bad, says in (
        (ids, f"expert {expert} {counts[expert] - 1} times.* reroute what gather_load counted"),
        (torch.tensor([[0, 9]]), "id 9 at position 1"),
    ):
        with pytest.raises(errors.InvalidLoadError, match=says):
            uec.reroute(bad, plan, group=group)


def test_what_is_wrong_with_a_plan_is_said(groups: list[uec.Group]) -> None:
    maps = random_maps(7, 12)
    plan, group = plan_of(maps), groups[0]
    ids = torch.arange(E).expand(maps[0].shape).where(maps[0], -1)

    def rejects(message: str, bad: object) -> None:
        with pytest.raises(errors.InvalidPlanError, match=message):
            uec.reroute_map(maps[0], None, bad, group=group)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidPlanError, match=message):
            uec.reroute(ids, bad, group=group)  # type: ignore[arg-type]

    assert plan.load is not None
    assert plan.home_quota is not None
    constants = {"slots_per_rank": S, "num_ranks": G, "home": HOME}
    sums = plan_alone(plan.load.sum(dim=0), **constants)
    assert np.isnan(sums.local_share)
    rejects("rank 0: a plan without quotas or .* load cannot be rerouted", sums)
    by_hand = uec.Plan.from_slots(plan.slot_expert, num_experts=E, home=HOME)
    assert np.isnan(by_hand.local_share)
    rejects("cannot be rerouted", by_hand)
    rejects("plan is a NoneType", None)
    other = plan_alone(plan.load, slots_per_rank=S + 1, num_ranks=G, home=HOME)
    rejects("the plan is for 3 ranks, 3 slots and 5 experts; expected 3, 2 and 5", other)
    plan.home_quota[0] += 1
    rejects(f"quotas of expert 0 sum to {plan.load[:, 0].sum() + 1}; expected", plan)
    plan.home_quota[0] = -1
    rejects("a load or quota of expert 0 is -1", plan)
    plan.slot_expert[1, 0] = E
    rejects(f"slot_expert has {E} at flat index {S}", plan)
