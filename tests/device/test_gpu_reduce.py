"""reduce_expert_grads on every engine: every bit of main + (r1 + ... + rn), in every mode.

Most tests run the kernel on the CPU too, and the host engine: no GPU is needed to know that the
test itself is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import ranks
import torch
from graphs import MAKERS, on_each
from loopback_ranks import EMULATED_SMS, put, put_plan
from rank_grads import RankGrads
from ranks import bytes_stored, close_all, loopback, raised, start_all, synchronize_all
from tiers import sampled

import ultraep_comm as uec
from ultraep_comm import Segment, errors
from ultraep_comm.engines.cuda import device

F32, BF16 = torch.float32, torch.bfloat16
MODES = ["pull", "direct", "auto"]
# One cut into tiles, one without gradients, one of odd size, one smaller than a row of a warp and
# one with a layout of its own.
EXPERT = {
    "w": Segment((96, 200), BF16),
    "scale": Segment((5,), torch.uint8),
    "odd": Segment((33, 47), BF16),
    "b": Segment((3,), F32),
    "w_t": Segment((40, 24), BF16, (1, 40)),
}


reduce = partial(start_all, call=uec.reduce_expert_grads)


def reduce_now(main_grads: Any, plan: uec.Plan, *, group: uec.Group, **options: Any) -> None:
    """Reduce on one rank, and wait."""
    work = uec.reduce_expert_grads(main_grads, plan, group=group, async_op=True, **options)
    assert work is not None
    work.synchronize()


def make_groups(engine: str, num_ranks: int, **options: Any) -> list[uec.Group]:
    if engine == "emulated":
        most = max(1, EMULATED_SMS // num_ranks)
        options["num_sms"] = min(options.get("num_sms") or 2, most)
    if engine in ("cuda", "emulated") and "tile_bytes" in options:
        options["tile_bytes"] = max(options["tile_bytes"], 16384)
    if not isinstance(options["grads"], dict) and "expert" not in options:
        options["grads"] = dict.fromkeys(set(EXPERT) - {"scale"}, options["grads"])
    options = {"expert": EXPERT, "slots_per_rank": 2, "timeout": 30.0, **options}
    return uec.testing.new_loopback_groups(
        num_ranks, engine="cuda" if engine == "emulated" else engine, **options
    )


def random_plan(groups: list[uec.Group], seed: int) -> uec.Plan:
    t = groups[0].topology
    return ranks.random_plan(seed, t.num_ranks, t.num_experts, t.slots_per_rank, t.home.tolist())


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "slots", "options"),
    sampled(
        [
            (2, 5, 1, {}),
            (3, 7, 2, {"num_sms": 1, "tile_bytes": 1024}),
            (3, 7, 2, {"num_sms": 3, "tile_bytes": 1024}),
            (4, 3, 2, {"tile_bytes": 4096}),  # a rank without local experts
            (5, 7, 2, {"num_sms": 2, "home": [4, 4, 0, 1, 1, 1, 2]}),
            (5, 11, 3, {"num_sms": 3}),
            (8, 3, 2, {}),  # ranks without local experts
            (16, 20, 1, {"num_sms": 8, "tile_bytes": 32768}),
            (20, 20, 1, {"num_sms": 1, "tile_bytes": 1024}),
        ],
        lambda case: case[0] in (3, 4, 5, 8),
    ),
)
def test_random_reductions(
    loopback_engine: str, num_ranks: int, num_experts: int, slots: int, options: dict[str, Any]
) -> None:
    """Thousands of reductions on a GPU."""
    if loopback_engine == "emulated" and num_ranks > EMULATED_SMS:
        pytest.skip("each rank needs a multiprocessor")
    calls = {"cuda": 100, "emulated": 2}.get(loopback_engine, 6)
    ways = itertools.cycle(itertools.product(MODES, (True, True, False)))
    for slot_dtype, main_dtype in itertools.product((F32, BF16), (F32, BF16)):
        groups = make_groups(
            loopback_engine,
            num_ranks,
            num_experts=num_experts,
            slots_per_rank=slots,
            grads=slot_dtype,
            **options,
        )
        grads = RankGrads(groups, dict.fromkeys(EXPERT, main_dtype))
        for seed in range(calls):
            plan, (mode, zero) = random_plan(groups, seed), next(ways)
            given = put_plan(groups[0], plan) if seed % 2 else plan
            grads.reduce(given, seed, mode=mode, zero=zero)
        close_all(groups)


def test_all_numbers_of_blocks_add_the_same_bits(engine: str) -> None:
    found = []
    for num_sms in (1, 2, 3, 8):
        groups = make_groups(engine, 4, num_experts=6, grads=F32, num_sms=num_sms)
        grads = RankGrads(groups, dict.fromkeys(EXPERT, BF16))
        for mode in MODES:
            grads.reduce(random_plan(groups, 3), 7, mode=mode)
        found.append(torch.cat([t.cpu().flatten() for m in grads.main_grads for t in m.values()]))
        close_all(groups)
    assert all(torch.equal(found[0], other) for other in found)


def test_large_experts(engine: str) -> None:
    rows = 4096 if engine == "cuda" else 64
    expert = {"w": Segment((rows, 4096), BF16), "b": Segment((4099,), F32)}
    groups = make_groups(engine, 4, num_experts=4, expert=expert, grads=F32)
    grads = RankGrads(groups, dict.fromkeys(expert, F32))
    for mode in MODES:
        grads.reduce(random_plan(groups, 1), 1, mode=mode)
    close_all(groups)


def test_special_values_are_added_as_torch_adds_them(loopback_engine: str) -> None:
    """Zeros of both signs, subnormal numbers, halves of the last bit, infinities and NaNs."""
    numbers = (0.0, 1e-45, 2.0**-133, 1e-38, 1.0, 1.00390625, 1.01171875, 3.4e38, float("inf"))
    special = torch.tensor([*numbers, *(-x for x in numbers), float("nan")])
    triples = torch.cartesian_prod(special, special, special)
    shape = (len(triples),)
    plan = uec.Plan.from_slots([[-1, -1], [0, -1], [-1, 0]], num_experts=3)
    for slot_dtype, main_dtype in itertools.product((F32, BF16), (F32, BF16)):
        groups = make_groups(
            loopback_engine, 3, expert={"w": (shape, F32)}, grads=slot_dtype, num_experts=3
        )
        grads = RankGrads(groups, {"w": main_dtype})
        for mode in MODES:
            grads.fill(1)
            grads.main_grads[0]["w"][0] = triples[:, 0]
            groups[1].slot_grads["w"][0] = triples[:, 1]
            groups[2].slot_grads["w"][1] = triples[:, 2]
            grads.remember()
            synchronize_all(grads.start(plan, mode=mode))
            grads.check(plan)
        close_all(groups)


def test_calls_of_all_kinds_take_turns(streams: str) -> None:
    """Plans on host and device, zeroing or not, between transfers that reuse the slots."""
    slot_dtypes = {"w": BF16, "odd": BF16, "b": F32, "w_t": F32}
    groups = make_groups(streams, 3, num_experts=7, grads=slot_dtypes)
    grads = RankGrads(groups, {"w": F32, "odd": BF16, "b": BF16, "w_t": F32})
    weights = [group.empty_weights() for group in groups]
    bound = [group.bind_grads(own) for group, own in zip(groups, grads.main_grads, strict=True)]
    for seed in range(8):
        plan = random_plan(groups, seed)
        moved = put_plan(groups[0], plan)
        start_all(groups, weights, plan)
        device.find_device().synchronize()
        grads.fill(seed)
        works = []
        for group in groups:
            given = (grads.main_grads, bound)[(seed + group.rank) % 2]
            own = moved if (seed // 2 + group.rank) % 2 else plan
            works += reduce([group], given, own, zero=seed % 4 != 0)
        synchronize_all(works)
        grads.check(plan, zero=seed % 4 != 0)
    assert all(bytes_stored(group) for group in groups)
    close_all(groups)


def test_a_graph_adds_fresh_gradients(streams: str) -> None:
    groups = make_groups(streams, 4, num_experts=6, grads=F32)
    grads = RankGrads(groups, dict.fromkeys(EXPERT, F32))
    bound = [group.bind_grads(own) for group, own in zip(groups, grads.main_grads, strict=True)]
    held = put_plan(groups[0], random_plan(groups, 0))
    graphs = MAKERS["torch" if streams == "cuda" else "emulated"]()

    def call(rank: int) -> None:
        uec.reduce_expert_grads(bound[rank], held, group=groups[rank])

    _, replay = graphs.capture(lambda: on_each(graphs, len(groups), call))
    for seed in range(20 if streams == "cuda" else 4):
        plan = random_plan(groups, seed)
        grads.fill(seed)
        held.slot_expert.copy_(plan.slot_expert)
        if seed % 2:  # the gradients have moved, and graphs follow
            grads.main_grads[:] = [
                {n: t.clone() for n, t in own.items()} for own in grads.main_grads
            ]
            for own, moved in zip(bound, grads.main_grads, strict=True):
                own.update(moved)
        if seed == 2:  # calls of both kinds take turns
            synchronize_all(grads.start(plan, bound))
        else:
            replay()
            device.find_device().synchronize()
        grads.check(plan)
    close_all(groups)


def test_what_a_capture_cannot_hold(streams: str) -> None:
    groups = make_groups(streams, 2, num_experts=4, slots_per_rank=1, grads=F32)
    plan = uec.Plan.from_slots([[-1], [0]], num_experts=4)
    grads = RankGrads(groups, dict.fromkeys(EXPERT, F32))
    bound = [group.bind_grads(own) for group, own in zip(groups, grads.main_grads, strict=True)]
    held = put_plan(groups[0], plan)
    synchronize_all(grads.start(held))  # loads the kernels
    graphs = MAKERS["torch" if streams == "cuda" else "emulated"]()

    def calls() -> None:
        with pytest.raises(errors.UnsupportedError, match=r"^rank 0: .*the plan is on the CPU"):
            reduce(groups[:1], bound, plan)
        says = r"^rank 0: .* gradients are not .* group.bind_grads\(\)"
        with pytest.raises(errors.UnsupportedError, match=says):
            reduce(groups[:1], grads.main_grads, held)

    graphs.capture(calls)
    grads.reduce(held, 1)  # the group still works
    close_all(groups)


# ---- bad input ----------------------------------------------------------------------------------

GRAD_FAULTS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "dtype": (lambda w: {"w": w.half()}, "expected torch.float32 or torch.bfloat16"),
    "shape": (lambda w: {"w": w.reshape(-1, 4, 5)}, "expected (5, 4)"),
    "device": (lambda w: {"w": w.to("meta")}, "meta"),
    "missing": (lambda w: {}, "lack segment 'w'"),
    "extra": (lambda w: {"w": w, "v": w}, "'v'"),
    "too few": (lambda w: {"w": w[1:]}, "(1, 5, 4)"),
    "no mapping": (lambda w: w, "grads is a Tensor"),
    "strides": (lambda w: {"w": w.new_zeros(2, 5, 5)[:, :, :4]}, "strides"),
    "shared rows": (lambda w: {"w": w[:1].expand(2, 5, 4)}, "share memory"),
    "a row twice": (lambda w: {"w": [w[0], w[0]]}, "share memory"),
    "two dtypes": (lambda w: {"w": [w[0], w[1].bfloat16()]}, "torch.bfloat16"),
    "of another group": (
        lambda w: small_groups("host")[0].bind_grads({"w": w.cpu()}),
        "another group",
    ),
}


def small_groups(engine: str, num_ranks: int = 2) -> list[uec.Group]:
    expert = {"w": Segment((5, 4), F32)}
    return make_groups(engine, num_ranks, num_experts=2 * num_ranks, expert=expert, grads=F32)


@pytest.mark.parametrize("fault", GRAD_FAULTS)
def test_bad_gradients_are_refused_and_peers_do_not_wait(loopback_engine: str, fault: str) -> None:
    groups = small_groups(loopback_engine)
    plan = uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4)
    main_grads: list[Any] = RankGrads(groups, {"w": F32}).main_grads
    main_grads[1] = GRAD_FAULTS[fault][0](main_grads[1]["w"])
    for group in groups:
        group.slot_grads["w"].fill_(2)

    def call(rank: int) -> BaseException | None:
        return raised(lambda: reduce_now(main_grads[rank], plan, group=groups[rank]))

    peer, own = loopback(2, call)
    assert isinstance(own, errors.InvalidWeightsError)
    assert "rank 1" in str(own)
    assert GRAD_FAULTS[fault][1] in str(own)
    assert isinstance(peer, errors.PeerRejectedError)
    assert "rank 1 rejected its own input" in str(peer)
    assert "main gradients of replicated experts are undefined" in str(peer)
    assert (groups[1].slot_grads["w"] == 2).all()
    close_all(groups)


@pytest.mark.parametrize("call", [uec.replicate_experts, uec.reduce_expert_grads])
@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("slot_expert", "slot 0 of rank 0 holds expert 1: which is"),
        ("home", "home map is not the group's, from expert 1"),
    ],
)
def test_a_plan_of_the_device_that_is_illegal(
    streams: str, call: Callable[..., Any], field: str, text: str
) -> None:
    """It is refused where the call is waited for."""
    groups = small_groups(streams)
    given = RankGrads(groups, {"w": F32}).main_grads
    legal, illegal = (
        put_plan(groups[0], uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4))
        for _ in range(2)
    )
    if field == "home":
        illegal.home[1:3] = put(groups[0], torch.tensor([1, 0]))
    else:
        illegal.slot_expert[0, 0] = 1
    works = start_all(groups, given, [illegal, legal], call=call)
    with pytest.raises(errors.InvalidPlanError, match=text):
        works[0].synchronize()
    with pytest.raises(errors.PeerRejectedError, match="rank 0 rejected its own input"):
        works[1].synchronize()
    with pytest.raises(errors.GroupClosedError) as closed:
        start_all(groups[:1], given, legal, call=call)
    assert isinstance(closed.value.__cause__, errors.InvalidPlanError)
    close_all(groups)


def test_slots_without_gradients(loopback_engine: str) -> None:
    (group,) = make_groups(loopback_engine, 1, num_experts=2, grads=None, expert=EXPERT)
    assert group.slot_grads == {}
    says = r"rank 0: the slots of this group hold no gradients.*grads=torch"
    with pytest.raises(errors.InvalidWeightsError, match=says):
        uec.reduce_expert_grads({}, uec.Plan.from_slots([[-1, -1]], num_experts=2), group=group)
    close_all([group])


OTHERS: dict[str, Callable[[uec.Group, Any, uec.Plan], object]] = {
    "another operation": lambda g, m, p: uec.replicate_experts(m, p, group=g),
    "another mode": lambda g, m, p: reduce_now(m, p, group=g, mode="direct"),
    "zero": lambda g, m, p: reduce_now(m, p, group=g, mode="pull", zero=False),
    "another plan": lambda g, m, p: reduce_now(
        m,
        uec.Plan.from_slots([[-1, -1], [0, -1], [-1, -1]], num_experts=6),
        group=g,
        mode="pull",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_ranks_that_make_different_calls_fail(loopback_engine: str, other: str) -> None:
    groups = small_groups(loopback_engine, 3)
    plan = uec.Plan.from_slots([[-1, -1], [0, -1], [0, 1]], num_experts=6)
    main_grads = RankGrads(groups, {"w": F32}).main_grads

    def call(rank: int) -> BaseException | None:
        group, main = groups[rank], main_grads[rank]
        if rank == 1:
            return raised(lambda: OTHERS[other](group, main, plan))
        return raised(lambda: reduce_now(main, plan, group=group, mode="pull"))

    found = loopback(3, call)
    assert any(isinstance(error, errors.PlanMismatchError) for error in found), found
    for error in found:
        assert isinstance(error, errors.TransferError), found
    close_all(groups)


def test_a_rank_that_does_not_call_is_named(engine: str) -> None:
    groups = make_groups(engine, 2, timeout=0.5, num_experts=4, grads=F32)
    plan = uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4)
    main_grads = RankGrads(groups, dict.fromkeys(EXPERT, F32)).main_grads
    with pytest.raises(errors.TransferTimeoutError, match=r"reduce_expert_grads.* rank 1") as error:
        reduce_now(main_grads[0], plan, group=groups[0])
    assert error.value.peer == 1
    close_all(groups)
