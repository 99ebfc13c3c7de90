"""replicate_experts on every engine: every mode, every byte.

Each test of `engine` or `any_engine` runs the kernels on the CPU too, and the host engine: no GPU
is needed to know that the test itself is right.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch
from emulated_device import EmulatedDevice
from loopback_ranks import LONG, Ranks, at_odd_offsets, critical_path, hold, load_of, put, put_plan
from ranks import (
    MIXED,
    bytes_stored,
    clear_slots,
    expert_bytes,
    fill_weights,
    loopback,
    make_weights,
    plan_alone,
    raw,
    slot_memory,
    start_all,
    wrong_bytes,
)
from reference.schedule import make_schedule
from tiers import cases, sampled

import ultraep_comm as uec
from ultraep_comm.bench.traffic import group_offsets
from ultraep_comm.engines.cuda import device
from ultraep_comm.group.group import session_of

Case = TypeVar("Case")
MODES = ["push", "pull", "direct", "auto"]
SEGMENTS = {"w13": 200_003, "w2": 65_536, "scale": 37, "bias": 1}


def thinned(engine: str, calls: Iterable[Case]) -> list[Case]:
    """Return all calls, but every fifth in the first tier without a GPU: some of each mode."""
    return list(calls)[:: 1 if engine == "cuda" else cases(5, 1)]


# ---- every mode, 2 to 16 ranks -------------------------------------------------------------------


@pytest.mark.cases
@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "slots", "options"),
    sampled(
        [
            (1, 3, 2, {}),
            (2, 5, 1, {}),
            (3, 7, 2, {"num_sms": 1}),
            (4, 16, 2, {"tile_bytes": 16384}),
            (5, 11, 3, {"tile_bytes": 32768, "num_sms": 2}),
            (8, 13, 2, {}),
            (8, 8, 1, {"num_sms": 2}),
            (8, 3, 2, {}),  # ranks without local experts
            (4, 6, 0, {}),  # no slots
            (16, 32, 2, {"num_sms": 2}),
            (8, 13, 2, {"domains": [0, 0, 0, 4, 4, 4, 4, 1], "allow_cross_domain": True}),
            (16, 20, 4, {"tile_bytes": 16384, "num_sms": 8}),
        ],
        lambda case: case[0] < 16,
    ),
)
def test_every_mode_moves_every_byte(
    any_engine: str, num_ranks: int, num_experts: int, slots: int, options: dict[str, Any]
) -> None:
    """From weights that are bound or not, with plans on the CPU, on the device, or some on each."""
    with Ranks(
        any_engine, num_ranks, SEGMENTS, num_experts=num_experts, slots=slots, **options
    ) as ranks:
        weights = ranks.shared()
        bound = [group.bind(own) for group, own in zip(ranks.groups, weights, strict=True)]
        calls = list(itertools.product(ranks.plans(range(3)), MODES))
        for i, (plan, mode) in enumerate(thinned(any_engine, calls)):
            ranks.fill(weights)
            moved = put_plan(ranks.groups[0], plan) if slots else plan
            mixed = [(moved, plan)[rank % 2] for rank in range(num_ranks)]
            given = (plan, moved, mixed)[i // 2 % 3]
            works = ranks.call((weights, bound)[i % 2], given, mode=mode, blocking=i % 3 == 0)
            if given is moved and session_of(ranks.groups[0]).engine.is_on_device(moved):
                assert {work.mode for work in works} <= {mode}
            assert not any(ranks.wrong(plan)), (plan.slot_expert, mode)


def test_a_single_wrong_bit_is_found(engine: str) -> None:
    """Negative control: a wrong byte in a filled slot, in an empty one and at the end is found."""
    with Ranks(engine, 2, {"w": 1001}, num_experts=4) as ranks:
        weights, plan = ranks.shared(), ranks.plan([[2, -1], [0, 1]])
        ranks.replicate(weights, plan, mode="push")
        for slot, offset in ((0, 0), (1, 1000)):
            ranks.groups[0].slots["w"][slot, offset] ^= 1
        slot_memory(ranks.groups[1])[-1] ^= 1
        assert ranks.wrong(plan) == [2, 1]
        ranks.epoch += 1
        assert ranks.wrong(plan)[0] > 900  # another epoch's bytes


@pytest.mark.cases
def test_an_uneven_home_map(any_engine: str) -> None:
    home = [0, 2, 2, 2, 0, 2, 1]  # 2, 1, 4 and no local experts
    with Ranks(any_engine, 4, SEGMENTS, num_experts=7, home=home) as ranks:
        weights = ranks.shared()
        for plan, mode in thinned(any_engine, itertools.product(ranks.plans(range(10, 14)), MODES)):
            ranks.replicate(weights, plan, mode=mode)


@pytest.mark.cases
@pytest.mark.parametrize("size", [1, 15, 16, 17, 16383, 16385, 32767, 32768, 32769, 131_075])
def test_odd_sizes(engine: str, size: int) -> None:
    with Ranks(engine, 3, {"w": size}, num_experts=5, num_sms=2) as ranks:
        weights = ranks.shared()
        for plan, mode in thinned(engine, itertools.product(ranks.plans(range(2)), MODES)):
            ranks.replicate(weights, plan, mode=mode)


def test_large_experts(engine: str) -> None:
    size = 40 << 20 if engine == "cuda" else 2 << 20
    with Ranks(engine, 4, {"w13": size + 5, "w2": size // 2}, num_experts=8) as ranks:
        weights = ranks.shared()
        for mode in MODES:
            ranks.replicate(weights, ranks.plans(range(1))[-1], mode=mode)
    expert_bytes.cache_clear()  # on a GPU of two gigabytes


def _bytes_stored(plan: uec.Plan, domains: list[int] | None, **how: Any) -> list[int]:
    """Return the bytes that each rank stores under the schedule."""
    s = make_schedule(plan.slot_expert.numpy(), home=plan.home.numpy(), domain=domains, **how)
    offsets = group_offsets(how["segment_bytes"], how["tile_bytes"])
    stored = [0] * plan.num_ranks
    for x in range(s.num_experts):
        replicas = len(list(s.replicas(x)))
        for rank, begin, end in s.hubs(x):
            size = int(offsets[end] - offsets[begin])
            at_home = rank == s.source_rank[x]
            # A hub hands its range to every replica; in pull its own copy is a store too.
            own = how["mode"] == "pull" or at_home
            stored[rank] += size * (replicas if own else replicas - 1)
            if how["mode"] == "push" and not at_home:
                stored[s.source_rank[x]] += size
    return stored


@pytest.mark.cases
@pytest.mark.parametrize("domains", [None, [0, 0, 0, 4, 4, 1]], ids=["one", "three"])
@pytest.mark.parametrize("mode", ["push", "pull", "direct"])
def test_each_rank_stores_what_the_schedule_gives_it(
    any_engine: str, mode: str, domains: list[int] | None
) -> None:
    tile, sizes = 16384, list(SEGMENTS.values())
    options = {"domains": domains, "allow_cross_domain": domains is not None}
    with Ranks(any_engine, 6, SEGMENTS, num_experts=13, tile_bytes=tile, **options) as ranks:
        weights = ranks.shared()
        for plan in thinned(any_engine, ranks.plans(range(2))[::-1]):
            before = [bytes_stored(group) for group in ranks.groups]
            ranks.replicate(weights, plan, mode=mode)
            stored = [bytes_stored(g) - b for g, b in zip(ranks.groups, before, strict=True)]
            expected = _bytes_stored(plan, domains, mode=mode, segment_bytes=sizes, tile_bytes=tile)
            assert stored == [expected[group.rank] for group in ranks.groups]


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.cases
@pytest.mark.parametrize("mode", ["push", "direct"])
def test_weights_at_odd_addresses(any_engine: str, mode: str) -> None:
    """Parameters that are views into one flat buffer, of which nothing is written."""
    sizes = {"w13": 70_001, "w2": 40_000, "scale": 37, "bias": 1}
    with Ranks(any_engine, 3, sizes, num_experts=7) as ranks:
        plan = ranks.plans(range(5, 6))[-1]
        offsets = [*((first, 3) for first in range(1, 17)), (4, 0), (8, 8), (0, 1)]
        for first, gap in thinned(any_engine, offsets):
            weights = [at_odd_offsets(group, first, gap) for group in ranks.groups]
            ranks.fill(weights)
            flat = [own["w13"][0]._base for own in weights]
            kept = [buffer.clone() for buffer in flat]
            ranks.call(weights, plan, mode=mode)
            assert not any(ranks.wrong(plan))
            assert all(map(torch.equal, flat, kept))


@pytest.mark.cases
def test_dtypes_and_layouts(any_engine: str) -> None:
    home = [0, 2, 2, 2, 0, 2, 1, 0, 1, 0]  # 4, 2, 4 and no local experts
    with Ranks(any_engine, 4, MIXED, num_experts=10, home=home) as ranks:
        shared, stacked = ranks.shared(), ranks.stacked()
        listed = [{name: list(t.unbind()) for name, t in own.items()} for own in stacked]
        views = [at_odd_offsets(group, 1, 3) for group in ranks.groups]
        mixed = [
            {name: (rows if i % 2 else own)[name] for i, name in enumerate(MIXED)}
            for rows, own in zip(listed, views, strict=True)
        ]
        given = [*((shared, mode) for mode in MODES), (stacked, "push"), (listed, "direct")]
        given += [(views, "auto"), (mixed, "auto")]
        calls = itertools.product(ranks.plans(range(2)), given)
        for plan, (own, mode) in thinned(any_engine, calls):
            ranks.replicate(own, plan, mode=mode)


@pytest.mark.cases
def test_a_selection_of_segments_leaves_the_others_untouched(any_engine: str) -> None:
    with Ranks(any_engine, 4, MIXED, num_experts=9) as ranks:
        weights = ranks.shared()
        plan = ranks.plans(range(1))[-1]
        plans = [plan, put_plan(ranks.groups[0], plan)]
        selections = [["w2"], ["bias", "w13"], ["scale"], list(MIXED)[::-1]]
        calls = thinned(any_engine, itertools.product(selections, MODES))
        for i, (names, mode) in enumerate(calls):
            ranks.replicate(weights, plans[i % 2], names=names, mode=mode)


def test_bound_weights(any_engine: str) -> None:
    with Ranks(any_engine, 4, SEGMENTS, num_experts=9) as ranks:
        weights = [at_odd_offsets(group, 1, 3) for group in ranks.groups]
        bound = [g.bind(own) for g, own in zip(ranks.groups, weights, strict=True)]
        for i, plan in enumerate(ranks.plans(range(3))):
            ranks.fill(weights)
            ranks.call(bound, plan, mode=("push", "direct", "auto")[i % 3])
            assert not any(ranks.wrong(plan))


# ---- many calls, many groups ---------------------------------------------------------------------


@pytest.mark.cases
def test_calls_submitted_ahead(any_engine: str) -> None:
    """In processes while ranks are slow in turn; only each rank's order matters."""
    with Ranks(any_engine, 4, {"w": 300_001}, num_experts=12) as ranks:
        copies = [ranks.shared() for _ in range(3)]
        plans = ranks.plans(range(3))
        for turn in thinned(any_engine, range(20)):
            works = []
            for i, weights in enumerate(copies):
                ranks.epoch += 1
                if any_engine == "processes" and (turn + i) % 4 == ranks.groups[0].rank:
                    time.sleep(0.003)
                for group, own in zip(ranks.groups, weights, strict=True):
                    fill_weights(group, own, ranks.epoch)
                plan = plans[(turn + i) % len(plans)]
                mode = MODES[(turn * 3 + i) % len(MODES)]
                works.append(ranks.start(weights, plan, mode=mode))
            for work in itertools.chain(*works):
                work.synchronize()
                assert work.is_completed()
                assert work.exception() is None
            # Slots that the last call did not fill hold what earlier ones left there.
            for group in ranks.groups:
                for slot, expert in enumerate(plan.slot_expert[group.rank].tolist()):
                    if expert >= 0:
                        wanted = expert_bytes(ranks.epoch, expert, 0, group.segments["w"])
                        assert torch.equal(group.slots["w"][slot].cpu(), wanted)


def test_several_groups_at_once(any_engine: str) -> None:
    fewer = 4 if any_engine == "processes" else 3
    with (
        Ranks(any_engine, 4, MIXED, num_experts=9, num_sms=4) as one,
        Ranks(any_engine, 4, {"a": 1000}, num_experts=20, slots=1, num_sms=2) as two,
        Ranks(any_engine, fewer, {"w": 90_001}, num_experts=5, num_sms=4) as three,
    ):
        all_ranks = [one, two, three]
        weights = [ranks.shared() for ranks in all_ranks]
        for seed in range(8):
            plans = [ranks.plans(range(seed, seed + 1))[-1] for ranks in all_ranks]
            for ranks, own in zip(all_ranks, weights, strict=True):
                ranks.fill(own)
            started = [
                ranks.start(own, plan, mode=MODES[seed % 4])
                for _ in range(7 if seed == 7 else 1)  # more than the ring of calls holds
                for ranks, own, plan in zip(all_ranks, weights, plans, strict=True)
            ]
            for work in itertools.chain(*reversed(started)):
                work.wait()
            for ranks, plan in zip(all_ranks, plans, strict=True):
                assert not any(ranks.wrong(plan))


@pytest.mark.parametrize("num_ranks", [4])
def test_a_layer_from_routing_to_slots(any_engine: str, num_ranks: int) -> None:
    num_experts = 24
    with Ranks(any_engine, num_ranks, MIXED, num_experts=num_experts) as ranks:
        weights, groups = ranks.stacked(), ranks.groups
        generator = torch.Generator().manual_seed(3)
        for turn in range(4):
            dtype = (torch.int32, torch.int64)[turn % 2]
            skewed = torch.rand((num_ranks, 200, 4), generator=generator) ** 3 * num_experts
            ids = skewed.to(dtype)
            ids[:, ::7, 1] = -1
            there = [put(groups[0], ids[group.rank]) for group in groups]

            def path(r: int, own: Any = there, at_once: bool = turn >= 2) -> Any:
                return critical_path(groups[r], own[r], weights[r], at_once=at_once)

            ranks.fill(weights)
            found = loopback(len(groups), path)
            assert ranks.check_path(ids, found) > 0 or num_ranks == 1
            alone = plan_alone(load_of(ids, num_experts), slots_per_rank=2)
            assert alone.imbalance < 1.05
            for load, plan, physical in found:
                assert load.device == physical.device == there[0].device
                assert (load.dtype, physical.dtype) == (torch.int32, dtype)
                assert torch.equal(plan.slot_expert.cpu(), alone.slot_expert)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("on_device", [False, True])
def test_loads_of_many_sizes(engine: str, on_device: bool, dtype: torch.dtype) -> None:
    """From none to more than one block counts, on some ranks one more; strided ones too."""
    num_ranks, num_experts = 3, 40
    sizes = (0, 1, 33, 4096, 70_001) if engine == "cuda" else (0, 1, 33)
    with Ranks(engine, num_ranks, {"w": 64}, num_experts=num_experts) as ranks:
        generator = torch.Generator().manual_seed(4)
        for tokens in sizes:
            ids = [
                torch.randint(-1, num_experts, (tokens + r, 4), generator=generator).to(dtype)
                for r in range(num_ranks)
            ]
            there = [put(ranks.groups[0], own) for own in ids] if on_device else ids
            for rows, columns in ((1, 1), (2, 1), (1, 2)):
                loads = loopback(
                    num_ranks,
                    lambda r, own=there, rows=rows, columns=columns: uec.gather_load(
                        own[r][::rows, ::columns], group=ranks.groups[r]
                    ),
                )
                ranks.finish()
                expected = load_of([own[::rows, ::columns] for own in ids], num_experts)
                for load in loads:
                    assert torch.equal(load.cpu(), expected)
                    assert load.dtype == torch.int32
                    assert load.device == there[0].device
                    if engine != "host":
                        assert device.find_device().is_on_device(load) == on_device


# ---- streams -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("own_stream", [False, True], ids=["default", "side"])
@pytest.mark.parametrize("blocking", [False, True], ids=["async", "sync"])
def test_a_call_comes_between_what_its_stream_held_and_what_it_gets(
    gpu: torch.device, mode: str, own_stream: bool, blocking: bool
) -> None:
    """Weights become final on the stream just before the call, and are wiped just behind it."""
    with Ranks("cuda", 4, SEGMENTS, num_experts=9) as ranks:
        weights = ranks.shared()
        plans = ranks.plans(range(2))
        contents = []
        for _ in plans:
            ranks.fill(weights)
            contents.append([{n: t.clone() for n, t in own.items()} for own in weights])
        stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
        torch.cuda.synchronize()
        seen = []
        for plan, content in zip(plans, contents, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG // 20)
                for group, own, new in zip(ranks.groups, weights, content, strict=True):
                    clear_slots(group)
                    for name, tensor in new.items():
                        own[name].copy_(tensor)
            if blocking:

                def call(r: int, plan: uec.Plan = plan) -> None:
                    with torch.cuda.stream(stream):
                        uec.replicate_experts(weights[r], plan, group=ranks.groups[r], mode=mode)

                loopback(4, call)
            else:
                with torch.cuda.stream(stream):
                    ranks.call(weights, plan, mode=mode)
            with torch.cuda.stream(stream):
                seen.append([slot_memory(group).clone() for group in ranks.groups])
                for own in weights:
                    for tensor in own.values():
                        tensor.zero_()
        torch.cuda.synchronize()
        for epoch, (plan, slots) in enumerate(zip(plans, seen, strict=True), start=1):
            for group, found in zip(ranks.groups, slots, strict=True):
                assert not wrong_bytes(group, plan, epoch, found=found)


def test_the_host_does_not_wait(streams: str) -> None:
    with Ranks(streams, 4, SEGMENTS, num_experts=9) as ranks:
        weights, plan = ranks.shared(), ranks.plans(range(1))[-1]
        ranks.replicate(weights, plan)  # load lazily loaded kernels first
        ranks.fill(weights)
        ranks.finish()
        hold(streams)
        works = ranks.start(weights, plan)
        for work in works:
            work.wait()
            assert not work.is_completed()
            assert work.exception() is None
        for work in works:
            work.synchronize()
            assert work.is_completed()
        assert ranks.wrong(plan) == [0] * 4


def test_calls_come_between_the_work_of_the_callers_stream(
    emulated: EmulatedDevice, new_groups: Callable[..., list[uec.Group]]
) -> None:
    expert = {"w": uec.Segment((40_000,), torch.uint8)}
    groups = new_groups(
        2, num_experts=2, slots_per_rank=1, expert=expert, engine="cuda", num_sms=2, timeout=60.0
    )
    plan = uec.Plan.from_slots([[1], [0]], num_experts=2)
    weights = [make_weights(group) for group in groups]
    for epoch in range(1, 4):
        fresh, seen, works = [], [], []
        for group in groups:
            emulated.stream = 100 + group.rank
            own = expert_bytes(epoch, group.rank, 0, expert["w"])
            fresh.append(own)
            emulated.delay(200_000)  # the weights come late,
            emulated.copy(raw(weights[group.rank]["w"][0], expert["w"]), own)
            works += start_all([group], weights, plan)
        for group, work in zip(groups, works, strict=True):
            emulated.stream = 100 + group.rank
            work.wait()  # orders the stream, and returns at once
            assert not work.is_completed()
            seen.append(torch.empty(40_000, dtype=torch.uint8))
            emulated.copy(seen[-1], raw(group.slots["w"][0], expert["w"]))
            emulated.copy(weights[group.rank]["w"], torch.zeros_like(weights[group.rank]["w"]))
        emulated.synchronize()
        assert torch.equal(seen[0], fresh[1])
        assert torch.equal(seen[1], fresh[0])


@pytest.mark.gpu
def test_an_async_call_runs_beside_what_the_stream_gets_next(gpu: torch.device) -> None:
    # With all multiprocessors requested, one of them may already run the other kernel.
    with Ranks("cuda", 4, SEGMENTS, num_experts=9, num_sms=4) as ranks:
        weights, plan = ranks.shared(), ranks.plans(range(1))[-1]
        ranks.replicate(weights, plan)
        ranks.fill(weights)
        torch.cuda.synchronize()
        works = ranks.start(weights, plan)
        torch.cuda._sleep(LONG)
        end = torch.cuda.Event()
        end.record()
        for work in works:
            work.synchronize()
        assert not end.query()
        torch.cuda.synchronize()
        assert ranks.wrong(plan) == [0] * 4
