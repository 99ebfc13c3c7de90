"""The model of transfers: never below the bound, every byte once, published direct times."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import plan_alone
from reference import schedule
from reference.schedule_oracle import Problem, imports, most_sent
from tiers import cases

from studies.model.published import PUBLISHED_RUNS, PublishedRun
from studies.peers.relay import CHUNK_TILES, MIN_RELAYED, predict_relay, relay_parents
from ultraep_comm import Plan, _core
from ultraep_comm.bench.loads import adversarial_loads, tuned_load
from ultraep_comm.calibration import MAX_FIGURE, MeasuredCosts
from ultraep_comm.errors import InvalidArgumentError, InvalidPlanError, UnsupportedError
from ultraep_comm.model import MACHINES, Machine, find_machine, predict
from ultraep_comm.model.predict import run_transfer
from ultraep_comm.model.timeline import SPAN, Span

W = 37_748_736
MODES = ("push", "pull", "direct")
NVL72 = MACHINES["nvl72-links"]  # links alone: what a schedule can reach


def make_plan(slots: list[list[int]], num_experts: int, **more: object) -> Plan:
    return Plan.from_slots(torch.tensor(slots), num_experts=num_experts, **more)


def planned(num_ranks: int, num_experts: int, slots_per_rank: int, load: np.ndarray) -> Plan:
    return plan_alone(
        torch.from_numpy(load.copy()), slots_per_rank=slots_per_rank, num_ranks=num_ranks
    )


def skewed(num_ranks: int, num_experts: int, slots_per_rank: int, imbalance: float) -> Plan:
    load = tuned_load(num_ranks, num_experts, imbalance, num_ranks * 32_768, 0)
    return planned(num_ranks, num_experts, slots_per_rank, load)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_ranks, num_experts = draw(st.integers(1, 9)), draw(st.integers(1, 16))
    slots_per_rank = draw(st.integers(0, 3))
    homes = st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts)
    home = draw(homes)
    few = draw(st.integers(1, num_experts))
    rows = []
    for rank in range(num_ranks):
        drawn = draw(st.lists(st.integers(-1, few - 1), max_size=2 * slots_per_rank))
        legal = [e for e in dict.fromkeys(drawn) if e < 0 or home[e] != rank][:slots_per_rank]
        rows.append(legal + [-1] * (slots_per_rank - len(legal)))
    slots = torch.tensor(rows, dtype=torch.int32).reshape(num_ranks, slots_per_rank)
    return Plan.from_slots(slots, num_experts=num_experts, home=home)


@st.composite
def plans_on_residents(draw: st.DrawFn) -> tuple[Plan, list[list[int]] | None]:
    plan = draw(plans())
    held = st.none() | st.integers(-1, 16)  # None: what the plan has there
    residents = [
        [own if other is None else other for own in row for other in [draw(held)]]
        for row in plan.slot_expert.tolist()
    ]
    return plan, draw(st.sampled_from([None, residents]))


def moves(plan: Plan, residents: list[list[int]] | None) -> np.ndarray:
    slots = plan.slot_expert.numpy()
    return (slots >= 0) & (slots != (-1 if residents is None else np.array(residents)))


def crosses_domains(plan: Plan, machine: Machine) -> bool:
    size = machine.domain_size or plan.slot_expert.shape[0]
    return any(
        expert >= 0 and rank // size != int(plan.home[expert]) // size
        for rank, row in enumerate(plan.slot_expert.tolist())
        for expert in row
    )


machines = st.builds(
    Machine,
    egress_gbps=st.sampled_from([50.0, 710.0]),
    ingress_gbps=st.sampled_from([100.0, 710.0]),
    deliver_us=st.sampled_from([0.0, 1.3, 20.0]),
    flag_us=st.sampled_from([0.0, 0.7]),
    load_us=st.sampled_from([0.0, 2.0]),
    write_efficiency=st.sampled_from([0.5, 1.0]),
    read_efficiency=st.sampled_from([0.5, 1.0]),
    num_sms=st.sampled_from([1, 3, 32]),
    tiles_in_flight=st.sampled_from([96, 192]),
    tile_bytes=st.sampled_from([1 << 12, 1 << 15]),
    fair_loads=st.booleans(),
    domain_size=st.sampled_from([None, 2, 5]),
    cross_gbps=st.sampled_from([10.0, 400.0]),
    cross_us=st.sampled_from([0.0, 5.0]),
)
calibrated = st.builds(
    MeasuredCosts,
    device=st.just("any"),
    ranks=st.integers(2, 8),
    store_gbps=st.sampled_from([0.5, 10.0, 300.0]),
    load_gbps=st.sampled_from([1.0, 40.0, MAX_FIGURE]),
    flag_us=st.sampled_from([0.0, 0.5, 20.0]),
    hop_us=st.sampled_from([0.0, 5.0, 300.0]),
    parallel=st.sampled_from([1.0, 1.2, 2.0, 8.0]),
    call_us=st.sampled_from([0.0, 6.0]),
).map(Machine.from_calibration)


# ---- what is right on any machine ---------------------------------------------------------------


@given(
    plans_on_residents(),
    machines | calibrated,
    st.lists(st.integers(1, 700_000), min_size=1, max_size=3),
)
@settings(max_examples=cases(75, 400))
def test_every_byte_once_and_never_below_the_bound(
    case: tuple[Plan, list[list[int]] | None], machine: Machine, segments: list[int]
) -> None:
    plan, residents = case
    moved = moves(plan, residents)
    crosses = crosses_domains(plan, machine)
    for mode in (*MODES, "auto"):
        if mode == "pull" and crosses:
            with pytest.raises(UnsupportedError, match="cannot load from"):
                predict(plan, segments, machine, mode, residents=residents)
            continue
        found = predict(plan, segments, machine, mode, residents=residents, may_pull=True)
        assert mode in (found.mode, "auto")
        assert found.mode != "pull" or not crosses
        assert np.array_equal(found.received_bytes, np.where(moved, sum(segments), 0))
        assert found.sent_bytes.sum() == found.received_bytes.sum()
        assert found.time_us >= (found.bound_us + machine.call_us) * (1 - 1e-9)
        assert found.time_us == found.finish_us.max()
        assert found.finish_us.min() >= machine.call_us
        assert (found.egress_us <= found.time_us * 2 + 1e-9).all()  # near and far links
        # Calls finish only after their hellos, if anybody is expected at all.
        assert (found.time_us > machine.call_us) == bool(moved.any())


@given(
    plans_on_residents(),
    st.sampled_from([[600_000], [40_000, 300_001, 7]]),
    st.sampled_from([72, 2, 3]),
)
@settings(max_examples=cases(60, 200))
def test_ranks_send_what_the_schedule_says(
    case: tuple[Plan, list[list[int]] | None], segments: list[int], domain_size: int
) -> None:
    """Groups of the schedule, counted here: sent by the hub, and to the hub by the source."""
    plan, residents = case
    tile = NVL72.tile_bytes
    machine = dataclasses.replace(NVL72, domain_size=domain_size, cross_gbps=71.0)
    domain = np.arange(len(plan.slot_expert)) // domain_size
    crosses = (domain != domain[0]).any()
    for mode in [mode for mode in MODES if mode != "pull" or not crosses]:
        made = schedule.make_schedule(
            plan.slot_expert,
            home=plan.home,
            segment_bytes=segments,
            tile_bytes=tile,
            mode=mode,
            residents=residents,
            domain=domain,
        )
        tiles = [min(tile, size - at) for size in segments for at in range(0, size, tile)]
        sent = np.zeros(plan.slot_expert.shape[0], np.int64)
        for x, source in enumerate(made.source_rank.tolist()):
            ranks = dict(made.replicas(x))
            groups = schedule.num_groups(segment_bytes=segments, tile_bytes=tile)
            assert groups == len(tiles)
            for i, (rank, begin, end) in enumerate(made.hubs(x)):
                size = sum(tiles[begin:end])
                sent[rank] += size * (len(ranks) if i == 0 else len(ranks) - 1)
                sent[source] += size if i > 0 else 0
        found = predict(plan, segments, machine, mode, residents=residents)
        assert found.sent_bytes.tolist() == sent.tolist()


def test_by_hand() -> None:
    """One replica: its rank opens, the home sends 2 tiles, learns of their end and says so."""
    plan = make_plan([[-1], [0]], 2)
    machine = Machine(
        egress_gbps=100.0, ingress_gbps=50.0, deliver_us=5.0, flag_us=3.0, tile_bytes=50_000
    )
    for mode in ("push", "direct"):
        found = predict(plan, 100_000, machine, mode)
        assert found.time_us == pytest.approx(3 + 2 + 5 + 3)
        assert found.finish_us.tolist() == pytest.approx([10, 13])
        assert found.egress_us.tolist() == pytest.approx([1, 0])
        assert found.ingress_us.tolist() == pytest.approx([0, 2])
        assert found.bound_us == pytest.approx(2)
    # With one replica everything is left to the home, so pull pulls nothing.
    assert predict(plan, 100_000, machine, "pull").time_us == pytest.approx(13)


def test_a_remote_load_by_hand() -> None:
    """Two replicas, a tile for each: asked for, read, kept, stored to the other, and told."""
    plan = make_plan([[-1], [0], [0]], 1, home=[0])
    machine = Machine(egress_gbps=100.0, ingress_gbps=100.0, tile_bytes=64 << 10)
    each = (64 << 10) / 100e3
    found = predict(plan, 128 << 10, machine, "pull")
    assert found.time_us == pytest.approx(0.7 + 2.0 + 2 * each + each + 1.3 + 0.7)
    assert found.sent_bytes.tolist() == [128 << 10, 64 << 10, 64 << 10]


def test_few_tiles_in_flight_starve_a_link() -> None:
    """The window over the time that a tile keeps its stage is all the rate there can be."""
    plan = make_plan([[-1], [0]], 1, home=[0])
    machine = dataclasses.replace(NVL72, num_sms=4, tiles_in_flight=4, deliver_us=10.0)
    window, tile = 4 * machine.tile_bytes, machine.tile_bytes / 710e3
    assert predict(plan, W, machine).time_us == pytest.approx(
        W / window * (4 * tile + 10), rel=0.03
    )


def test_unfair_loads_cost_time() -> None:
    load = adversarial_loads(32, 64, 1 << 20)[0]
    plan = planned(32, 64, 1, load)
    unfair = dataclasses.replace(NVL72, fair_loads=False)
    assert predict(plan, W, unfair, "pull").over_bound > 1.5
    assert predict(plan, W, NVL72, "pull").over_bound < 1.25
    assert predict(plan, W, unfair, "push").time_us == predict(plan, W, NVL72, "push").time_us


def test_slower_links_between_domains() -> None:
    near, far = make_plan([[-1], [0], [-1]], 3), make_plan([[-1], [-1], [0]], 3)
    machine = dataclasses.replace(NVL72, domain_size=2, cross_gbps=71.0, cross_us=4.0)
    assert predict(near, W, machine).time_us == predict(near, W, NVL72).time_us
    found = predict(far, W, machine, "direct")
    assert found.time_us == pytest.approx(W / 71e3 + 0.7 + 2.0 + 3 * 4.0, rel=1e-3)
    assert found.bound_us == pytest.approx(W / 2 / 71e3)  # of the two ranks that may receive
    with pytest.raises(UnsupportedError, match=r"rank 2 has a replica of expert 0 from rank 0"):
        predict(far, W, dataclasses.replace(machine, cross_gbps=None))


def test_the_bound_of_a_resident_in_another_domain() -> None:
    """What a domain holds need not enter it, and leaves a domain only if no other has it."""
    machine = dataclasses.replace(NVL72, domain_size=2, cross_gbps=71.0)
    residents = [[-1], [-1], [0], [-1], [-1]]
    for slots, bound in [
        ([-1, -1, 0, 0, -1], W / (710e3 + 71e3)),  # inside domain 1
        ([-1, -1, 0, -1, 0], W / 2 / 71e3),  # into domain 2
        ([-1, -1, 0, 1, 0], W / 2 / 71e3),  # out of domain 0, and of that or 1
        ([-1, -1, 1, -1, 0], 2 * W / 2 / 71e3),  # rank 2 is to lose it: both out of domain 0
    ]:
        plan = make_plan([[expert] for expert in slots], 3, home=[0, 1, 1])
        found = predict(plan, W, machine, residents=residents)
        assert found.bound_us == pytest.approx(bound)
        assert found.time_us > found.bound_us


@pytest.mark.parametrize("wrong", [[[-1, 0]], [-1, 0], [[-1.0], [0.0]], [[None], [0]]], ids=str)
def test_residents_that_are_none(wrong: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"residents .* expected integers of shape"):
        predict(make_plan([[-1], [0]], 2), W, residents=wrong)


def test_residents_are_of_the_library_s_transfers_alone() -> None:
    plan = make_plan([[-1], [0]], 2)
    for more in ({"parent": [0]}, {"grads": torch.float32}):
        run_transfer(plan, W, NVL72, mode=_core.Mode.DIRECT, **more)
        with pytest.raises(ValueError, match="expected None with parent or grad_types"):
            run_transfer(plan, W, NVL72, mode=_core.Mode.DIRECT, residents=[[-1], [-1]], **more)


def test_the_schedule_of_auto() -> None:
    wide = make_plan([[0] if r else [-1] for r in range(8)], 8)
    assert predict(wide, W).mode == "push"
    assert predict(wide, W, may_pull=True).mode == "pull"
    assert predict(wide, 4096).mode == "direct"


def test_auto_on_links_so_slow_that_costs_would_not_fit() -> None:
    wide = make_plan([[0] if r else [-1] for r in range(8)], 8)
    slow = Machine(egress_gbps=1e-3, ingress_gbps=1e-3)
    assert predict(wide, 1_000_000_000, slow).mode == "push"


def test_what_cannot_be_modelled_is_refused() -> None:
    plan = make_plan([[-1], [0]], 2)
    large = Machine(egress_gbps=1.0, ingress_gbps=1.0, tile_bytes=1 << 30)
    slow = dataclasses.replace(large, egress_gbps=1e-3, write_efficiency=1e-3)
    assert predict(plan, 1000, slow).time_us == pytest.approx(1e6, rel=1e-3)
    for sizes, machine, message in [
        (1 << 36, slow, "26 days"),
        ([1 << 36] * 200, large, "a rank's slots"),
        ([1 << 36] * 65, dataclasses.replace(large, tile_bytes=1 << 20), "at most 4194304 tiles"),
        (W, dataclasses.replace(NVL72, num_sms=1024, tiles_in_flight=1 << 20), "tiles in flight"),
        ([1] * 1025, NVL72, "1025 segments"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            predict(plan, sizes, machine)


def test_empty_plans_take_no_time() -> None:
    found = predict(make_plan([[-1], [-1]], 2), W, NVL72)
    assert (found.time_us, found.bound_us, found.over_bound) == (0, 0, 1)


# ---- what workers spend -------------------------------------------------------------------------

COSTS = (
    *("launch_us", "call_us", "leave_us", "poll_us"),
    *("fetch_us", "store_us", "publish_us"),
)


@pytest.mark.parametrize("name", COSTS)
def test_what_workers_spend_takes_time(name: str) -> None:
    plan = make_plan([[-1], [0], [0], [0]], 4)
    slower = dataclasses.replace(NVL72, **{name: 5.0})
    free, charged = (predict(plan, 4 << 20, on, "push") for on in (NVL72, slower))
    assert charged.time_us >= free.time_us + 4.9
    assert charged.sent_bytes.tolist() == free.sent_bytes.tolist()
    assert charged.bound_us == free.bound_us


def test_workers_of_a_hub_look_side_by_side() -> None:
    """With two replicas each hub passes on half of the groups: a worker those of its own."""
    plan = make_plan([[-1], [0], [0]], 3)
    for num_sms in (16, 64):
        on = dataclasses.replace(NVL72, poll_us=10.0, num_sms=num_sms)
        groups = (4 << 20) // on.tile_bytes // 2  # of two tiles
        own = -(-groups // 2 // num_sms)
        time = predict(plan, 4 << 20, on, "push").time_us
        assert own * 10 < time < own * 10 + 60


def test_a_link_alone_is_faster() -> None:
    two = make_plan([[-1], [0], [-1], [-1]], 4)
    all_send = make_plan([[3], [0], [1], [2]], 4)
    on = dataclasses.replace(NVL72, unloaded_gbps=1420.0)
    hops = NVL72.hop_us + NVL72.flag_us
    free = predict(two, W, NVL72, "direct").time_us - hops
    assert predict(two, W, on, "direct").time_us == pytest.approx(free / 2 + hops, rel=0.02)
    assert predict(all_send, W, on, "direct").time_us == pytest.approx(
        predict(all_send, W, NVL72, "direct").time_us, rel=0.05
    )
    assert predict(two, W, on, "direct").bound_us == predict(two, W, NVL72).bound_us


def test_a_published_copy_alone() -> None:
    """22 MB took 34.5 us, a launch and what a call of ours spends besides not included."""
    on = MACHINES["gb200"]
    found = predict(make_plan([[-1], [0]], 2), 22_000_000, on, "direct")
    ours = on.call_us + on.leave_us + on.poll_us + on.fetch_us + on.store_us + on.publish_us
    assert found.time_us - ours == pytest.approx(34.5, rel=0.1)


def test_a_kernel_makes_the_schedule_of_a_device_plan() -> None:
    on, plan = MACHINES["nvl72"], make_plan([[-1], [0], [0]], 3)
    for residents, num_moves in ((None, 2), ([[-1], [0], [1]], 1)):
        times = [
            predict(plan, W, residents=residents, device_plan=device_plan).time_us
            for device_plan in (False, True)
        ]
        more = on.schedule_us + num_moves * on.schedule_replica_us
        assert times[1] - times[0] == pytest.approx(more)


# ---- the bound ----------------------------------------------------------------------------------


def drawn_residents(plan: Plan, seed: int) -> list[list[int]]:
    rng, slots = np.random.default_rng(seed), plan.slot_expert.numpy()
    held = np.where(rng.random(slots.shape) < 0.3, rng.integers(-1, 10, slots.shape), slots)
    return np.where(rng.random(slots.shape) < 0.4, -1, held).tolist()


def bound_by_sets(
    plan: Plan, egress: float, ingress: float, residents: list[list[int]] | None = None
) -> float:
    """T* of an expert of 1000 bytes in microseconds: its definition, over all sets of ranks."""
    slots = plan.slot_expert.tolist()
    problem = Problem(slot_expert=slots, home=plan.home.tolist(), residents=residents)
    return max(float(most_sent(problem)) / egress, max(imports(problem)) / ingress)


def test_the_bound_is_that_over_all_sets_of_ranks() -> None:
    rng = np.random.default_rng(5)
    unlike = {True: 0, False: 0}
    for i in range(60):
        chained = bool(i % 2)
        home = rng.integers(0, 6 if chained else 3, 10)
        rows = []
        for rank in range(6):
            legal = [e for e in rng.permutation(10).tolist() if home[e] != rank][:4]
            imports = chained or rank >= 4
            row = [e if imports and rng.random() < 0.7 else -1 for e in legal]
            rows.append(row + [-1] * (4 - len(row)))
        plan = make_plan(rows, 10, home=home)
        for egress, ingress in [(100.0, 100.0), (100.0, 400.0), (400.0, 100.0), (30.0, 7000.0)]:
            machine = Machine(egress_gbps=egress, ingress_gbps=ingress)
            expected = bound_by_sets(plan, egress, ingress)
            assert predict(plan, 1000, machine).bound_us == pytest.approx(expected, rel=1e-7)
            simple = max(plan.max_exports / egress, plan.max_imports / ingress)
            unlike[chained] += expected > simple * (1 + 1e-9)
            residents = drawn_residents(plan, i)
            expected = bound_by_sets(plan, egress, ingress, residents)
            found = predict(plan, 1000, machine, residents=residents)
            assert found.bound_us == pytest.approx(expected, rel=1e-7)
    assert all(unlike.values())  # sets of several ranks decided, in both kinds


# ---- timelines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_timeline_tells_the_same(mode: str) -> None:
    plan = skewed(16, 64, 2, 3.0)
    found = predict(plan, 4 << 20, mode=mode, timeline=True)
    assert found.timeline is not None
    spans = found.timeline
    assert spans.dtype == SPAN
    assert (np.diff(spans["rank"]) >= 0).all()
    assert (spans["end_us"] > spans["begin_us"]).all()
    calls = spans[spans["kind"] == Span.CALL]
    assert calls["end_us"].tolist() == found.finish_us[found.finish_us > 0].tolist()
    stores, loads = (spans[spans["kind"] == kind] for kind in (Span.STORE, Span.LOAD))
    sent = np.zeros(16, np.int64)
    np.add.at(sent, stores["rank"], stores["bytes"])
    np.add.at(sent, loads["peer"], loads["bytes"])
    assert sent.tolist() == found.sent_bytes.tolist()
    assert len(loads) > 0 if mode == "pull" else len(loads) == 0
    for rank, waits in enumerate([spans[spans["kind"] == Span.WAIT]] * 16):
        own = waits[waits["rank"] == rank]
        assert (own["begin_us"][1:] >= own["end_us"][:-1]).all()
        busy = stores[stores["rank"] == rank]
        for wait in own:  # nothing leaves a rank that waits
            assert not (
                (busy["begin_us"] < wait["end_us"]) & (busy["end_us"] > wait["begin_us"])
            ).any()
    assert predict(plan, 4 << 20, mode=mode).timeline is None


# ---- the published figures ----------------------------------------------------------------------


@pytest.mark.parametrize("run", PUBLISHED_RUNS, ids=lambda run: str(run.imbalance))
def test_direct_times_are_the_published_ones(run: PublishedRun) -> None:
    plan = run.make_plan()
    fanout = plan.slot_expert[plan.slot_expert >= 0].bincount()
    assert (plan.num_replicas, fanout.max()) == (run.num_replicas, run.max_replicas)
    assert (plan.max_exports, plan.max_imports) == (1, 1)
    assert predict(plan, W, mode="direct").time_us == pytest.approx(run.direct_us, rel=0.05)


def test_the_relay_as_published() -> None:
    wide = make_plan([[-1]] + [[0]] * 9, 10)
    parents = relay_parents(wide)
    relays = sorted(set(parents) - {0})
    assert len(relays) == math.isqrt(9)
    assert [parents[r - 1] for r in relays] == [0, 0, 0]
    assert sorted(parents.count(r) for r in relays) == [2, 2, 2]
    narrow = make_plan([[-1]] + [[0]] * (MIN_RELAYED - 1), 4)
    assert relay_parents(narrow) == [0] * (MIN_RELAYED - 1)
    assert predict_relay(narrow, W).sent_bytes.tolist() == [3 * W, 0, 0, 0]

    found = predict_relay(wide, W, NVL72)
    assert found.sent_bytes.tolist() == [
        3 * W if r in (0,) else 2 * W * (r in relays) for r in range(10)
    ]
    assert found.received_bytes.tolist() == [[0]] + [[W]] * 9
    # The last chunks of all workers arrive together.
    chunks = NVL72.num_sms * CHUNK_TILES * NVL72.tile_bytes / 710e3
    assert 3 * W / 710e3 < found.time_us < 3 * W / 710e3 + 2 * NVL72.hop_us + chunks


def test_relays_are_chosen_by_what_they_send() -> None:
    slots = [[-1, -1], [-1, -1]] + [[0, 1]] * 8
    parents = relay_parents(make_plan(slots, 10))
    assert not (set(parents[:8]) & set(parents[8:]))  # the second expert takes other relays


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"egress_gbps": 0.0},
        {"ingress_gbps": math.nan},
        {"deliver_us": -0.1},
        {"read_efficiency": 1.01},
        {"num_sms": 0},
        {"num_sms": 3, "tiles_in_flight": 256},  # no multiple
        {"tiles_in_flight": 1.0},
        {"domain_size": 0},
        {"fair_loads": "no"},
        {"name": None},
        {"parallel": 0.5},
        {"parallel": 2.0, "read_gbps": 0.0},
        {"parallel": 2.0, "domain_size": 2},
        {"read_gbps": 10.0},  # without parallel
    ],
    ids=str,
)
def test_impossible_machines(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match=[*wrong][-1]):
        Machine(**{"egress_gbps": 710.0, "ingress_gbps": 710.0, **wrong})


def test_unknown_names() -> None:
    plan = make_plan([[-1], [0]], 2)
    with pytest.raises(InvalidArgumentError, match=r"'nvl73'.*nvl72"):
        predict(plan, W, "nvl73")
    with pytest.raises(InvalidArgumentError, match=r"'relay'.*auto, push"):
        predict(plan, W, mode="relay")
    assert find_machine(NVL72) is NVL72
    assert NVL72.hop_us == pytest.approx(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        NVL72.egress_gbps = 1.0
    with pytest.raises(TypeError):
        Machine(710.0, 710.0)


@pytest.mark.parametrize("wrong", [0, [], [W, 0], 1.5, [1 << 37]], ids=str)
def test_impossible_sizes(wrong: object) -> None:
    with pytest.raises(InvalidArgumentError, match="expert_bytes"):
        predict(make_plan([[-1], [0]], 2), wrong)


def test_sizes_by_name() -> None:
    plan = make_plan([[-1], [0]], 2)
    found = predict(plan, {"w13": 70_000, "w2": 35_001})
    assert found.received_bytes.tolist() == [[0], [105_001]]
    assert found.time_us == predict(plan, [70_000, 35_001]).time_us


def test_a_plan_that_is_none() -> None:
    with pytest.raises(InvalidArgumentError, match=r"plan is \[\[-1\], \[0\]\]; expected a Plan"):
        predict([[-1], [0]], W)
    plan = make_plan([[-1], [0]], 2)
    plan.slot_expert[0, 0] = 0  # at home there
    with pytest.raises(InvalidPlanError):
        predict(plan, W)
