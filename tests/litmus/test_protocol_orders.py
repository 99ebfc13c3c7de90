"""What the kernels rely on holds in the PTX memory model, and only thanks to their instructions.

An order is a program of at most a few threads, an outcome that must be impossible, and what makes
it possible: changes of one instruction in ptx.cuh. ``{name}`` in a program is the instruction of
ptx.cuh's function of that name, as the file has it. ``calls`` says where the kernels have these
orders: files of src/, functions, and what they call, in this order.

The GPUs g0, g1, g2 are ranks; f0 and f1 are lanes of a block's fetching warp, s0 and s1 of its
storing warp, t0 and t1 any threads. A lane with 0 is the leader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import pytest

pytest.importorskip("z3", reason="no z3-solver: pip install '.[test]'")
from memory_model import find_execution
from ptx_source import PTX, Weakening, body, fill_in, instructions, weakened


@dataclass(frozen=True, kw_only=True)
class Order:
    program: str
    never: tuple[str, ...]
    weak: tuple[Weakening, ...]
    calls: dict[str, str] = field(default_factory=dict)
    implicit_fence: bool = False  # it rests on the proxy fence that a bulk copy ends with


# ---- weakenings --------------------------------------------------------------------------------

RELEASE_SYSTEM: tuple[Weakening, ...] = (
    ("store_release_system", "st.release", "st.relaxed"),
    ("store_release_system", ".sys", ".gpu"),
)
ACQUIRE_SYSTEM: tuple[Weakening, ...] = (
    ("load_acquire_system", "ld.acquire", "ld.relaxed"),
    ("load_acquire_system", ".sys", ".gpu"),
)
FLAGS = RELEASE_SYSTEM + ACQUIRE_SYSTEM
# One fence, and relaxed stores of several words.
BATCH: tuple[Weakening, ...] = (
    ("fence_release_system", "fence.acq_rel", "fence.acquire"),
    ("fence_release_system", ".sys", ".gpu"),
    ("store_relaxed_system", ".sys", ".gpu"),
)
ARRIVAL: tuple[Weakening, ...] = (
    ("fetch_add_acq_rel", ".acq_rel", ".relaxed"),
    ("fetch_add_acq_rel", ".acq_rel", ".acquire"),
    ("fetch_add_acq_rel", ".acq_rel", ".release"),
    ("fetch_add_acq_rel", ".gpu", ".cta"),
)
NO_WARP_BARRIER = ("sync_warp", "__syncwarp();", "")
NO_BLOCK_BARRIER = ("sync_block", "__syncthreads();", "")
NO_GLOBAL_FENCE = ("fence_proxy_async_global", "fence.proxy.async.global;", "")
NO_SHARED_FENCE = ("fence_proxy_async_shared", "fence.proxy.async.shared::cta;", "")
ONLY_READ = ("bulk_wait", "wait_group", "wait_group.read")
ARRIVE_RELAXED = ("mbarrier_arrive", "arrive.shared", "arrive.relaxed.cta.shared")
EXPECT_RELAXED = ("mbarrier_arrive_expect", "expect_tx", "expect_tx.relaxed.cta")
TEST_RELAXED = ("mbarrier_test", "wait.parity", "wait.parity.relaxed.cta")

# ---- orders ------------------------------------------------------------------------------------

MEMORY, MOVER, ADDER = (f"cuda/device/{name}.cuh" for name in ("memory", "mover", "adder"))

ORDERS = {
    # Bytes stored by ordinary stores of any lane: the ends of tiles, sums of gradients.
    "published and observed": Order(
        program="""
            g0.b0.s1: st x 1; {sync_warp} a
            g0.b0.s0: {sync_warp} a; {store_release_system} done 1
            g1.b0.t0: {load_acquire_system} done 1; {sync_warp} b
            g1.b0.t1: {sync_warp} b; r = {load_global} x""",
        never=("r=0",),
        weak=(*FLAGS, NO_WARP_BARRIER),
        calls={
            f"{MEMORY} publish": "store_release_system",
            f"{MEMORY} observe": "load_acquire_system",
            f"{ADDER} try_delivered": "sync_warp then",
            "cuda/device/warp.cuh read_from": "sync_warp shuffle",
        },
    ),
    # Bytes stored by bulk stores of any lane.
    "delivered, then published": Order(
        program="""
            g0.b0.s1: st %tile 1; {fence_proxy_async_shared}; {bulk_store} x %tile; {bulk_commit};
            g0.b0.s1: {bulk_wait} 0; {fence_proxy_async_global}; {sync_warp} a
            g0.b0.s0: {sync_warp} a; {store_release_system} done 1
            g1.b0.t0: {load_acquire_system} done 1; end call
            g1.b1.t0: start call; r = ld x""",
        never=("r=0",),
        weak=(*FLAGS, ONLY_READ, NO_GLOBAL_FENCE, NO_SHARED_FENCE, NO_WARP_BARRIER),
        calls={
            f"{MOVER} wait_delivered": "wait_for_all_but fence_proxy_async_global sync_warp then",
            f"{MOVER} wait_for_all_but": "bulk_wait",
            f"{MOVER} commit_and_wait_source": "bulk_commit",
        },
    ),
    # Two hops: the hub loads what the home has stored, and hands it on.
    "handed on by a hub": Order(
        program="""
            g0.b0.s0: st %h 1; {fence_proxy_async_shared}; {bulk_store} x %h; {bulk_wait} 0;
            g0.b0.s0: {fence_proxy_async_global}; {store_release_system} ready 1
            g1.b0.f1: {load_acquire_system} ready 1; {sync_warp} a
            g1.b0.f0: {sync_warp} a; {fence_proxy_async_global}; {mbarrier_arrive_expect} %full;
            g1.b0.f0: {bulk_load} %tile x %full
            g1.b0.s0: {mbarrier_test} %full 2; {sync_warp} b; {sync_warp} c
            g1.b0.s0: {store_release_system} done 1
            g1.b0.s1: {sync_warp} b; {bulk_store} y %tile; {bulk_wait} 0;
            g1.b0.s1: {fence_proxy_async_global}; {sync_warp} c
            g2.b0.t0: {load_acquire_system} done 1; r = ld y""",
        never=("r=0",),
        weak=(*FLAGS, ONLY_READ, NO_GLOBAL_FENCE, TEST_RELAXED, NO_WARP_BARRIER),
        calls={
            f"{MOVER} fetch": "fence_proxy_async_global mbarrier_arrive_expect bulk_load",
            "cuda/device/warp.cuh is_complete": "broadcast mbarrier_test",
        },
    ),
    # The owner has read its slot in earlier work; another lane than the storing one saw it open.
    "open, then stored to": Order(
        program="""
            g0.b9.t0: st y 1; end before
            g1.b0.t0: r = ld x; end earlier
            g1.b1.t0: start earlier; {fence_release_system}; {store_relaxed_system} call 1;
            g1.b1.t0: {store_relaxed_system} open 1
            g0.b0.f1: {load_acquire_system} open 1; {sync_warp} a
            g0.b0.f0: start before; {sync_warp} a; {mbarrier_arrive_expect} %full;
            g0.b0.f0: {bulk_load} %tile y %full
            g0.b0.s0: {mbarrier_test} %full 2; {sync_warp} b
            g0.b0.s1: {sync_warp} b; {fence_proxy_async_global}; {bulk_store} x %tile""",
        never=("r=1",),
        weak=(
            *BATCH,
            *ACQUIRE_SYSTEM,
            EXPECT_RELAXED,
            TEST_RELAXED,
            NO_GLOBAL_FENCE,
            NO_WARP_BARRIER,
        ),
        calls={
            f"{MEMORY} wait_delivered": "sync_warp fence_release_system then released",
            "cuda/device/call.cuh announce": "check_peers announce_call_and_open",
            "core/transfer/announce.hpp announce_call_and_open": "publish_record publish_open",
            "core/transfer/stripe.hpp poll": "poll_openings sync poll_group",
            f"{MOVER} loaded": "is_complete fence_proxy_async_global",
        },
    ),
    # A slot and a flag of call 1 serve again in call 2; the owner reads what call 2 has stored.
    "reused in the next call": Order(
        program="""
            g0.b0.s0: {bulk_store} x %a; {bulk_wait} 0;
            g0.b0.s0: {fence_proxy_async_global}; {store_release_system} done 1
            g1.b0.t0: {load_acquire_system} done 1; end call
            g1.b1.t0: start call; {fence_release_system}; {store_relaxed_system} open 2
            g0.b1.s0: {load_acquire_system} open 2; st %b 2; {fence_proxy_async_shared};
            g0.b1.s0: {fence_proxy_async_global}; {bulk_store} x %b; {bulk_wait} 0;
            g0.b1.s0: {fence_proxy_async_global}; {store_release_system} done 2
            g1.b2.t0: {load_acquire_system} done 2; r = ld x""",
        never=("r!=2", "done=1"),
        weak=(*FLAGS, *BATCH, ONLY_READ, NO_GLOBAL_FENCE),
    ),
    # A peer that has announced call 2 has set its flags of call 1; else check_flag() blames it.
    "flags before the next record": Order(
        program="""
            g0.b0.s0: {store_release_system} done 1; end call
            g0.b1.t0: start call; {fence_release_system}; {store_relaxed_system} record 2
            g1.b0.t0: {load_acquire_system} record 2; r = {load_acquire_system} done""",
        never=("r=0",),
        weak=(*BATCH, *ACQUIRE_SYSTEM),
        calls={"core/transfer/protocol.hpp check_flag": "observe observe peer_gone observe"},
    ),
    # Blocks of a rank: the last to arrive vouches for the stores of all, here for those of two.
    "arrived, then published by the last": Order(
        program="""
            g0.b0.s0: st x 1; {fetch_add_acq_rel} left 1
            g0.b1.s0: {fetch_add_acq_rel} left 1
            g0.b2.s0: q = {fetch_add_acq_rel} left 1; {sync_warp} a
            g0.b2.s1: {sync_warp} a; {store_release_system} done 1
            g1.b0.t0: {load_acquire_system} done 1; r = ld x""",
        never=("q=2 r=0",),
        weak=(*FLAGS, *ARRIVAL, NO_WARP_BARRIER),
        calls={
            f"{MEMORY} arrive": "fetch_add_acq_rel",
            "core/transfer/storer.hpp finish_share": "arrive broadcast finish_task",
        },
    ),
    # What the last block of a call changes has been read by all: the epoch, the counters.
    "left, then advanced by the last": Order(
        program="""
            g0.b0.t1: r = ld epoch; {sync_block} a
            g0.b0.t0: {sync_block} a; {fetch_add_acq_rel} left 1
            g0.b1.t0: q = {fetch_add_acq_rel} left 1; st epoch 1""",
        never=("q=1 r=1",),
        weak=(*ARRIVAL, NO_BLOCK_BARRIER),
        calls={"cuda/device/call.cuh run_call": "sync_block fetch_add_acq_rel finish leave"},
    ),
    "counted, then summed by the last": Order(
        program="""
            g0.b0.t1: {add_relaxed} counts 1; {sync_block} a
            g0.b0.t0: {sync_block} a; {fetch_add_acq_rel} left 1
            g0.b1.t0: q = {fetch_add_acq_rel} left 1; {sync_block} b
            g0.b1.t1: {sync_block} b; r = {load_global} counts""",
        never=("q=1 r=0",),
        weak=(*ARRIVAL, NO_BLOCK_BARRIER),
        calls={
            "cuda/device/load.cuh load": "count_ids sync_block fetch_add_acq_rel take_row",
            "cuda/device/load.cuh take_row": "load_global",
        },
    ),
    # Of blocks that fail together one keeps its report.
    "failed first by one": Order(
        program="""
            g0.b0.f0: {compare_swap_relaxed} failed 0 1
            g0.b1.f0: {compare_swap_relaxed} failed 0 1""",
        never=("",),
        weak=(("compare_swap_relaxed", ".gpu", ".cta"),),
        calls={"cuda/device/wait.cuh fail": "compare_swap_relaxed store_shared_relaxed"},
    ),
    "a run for each block": Order(
        program="""
            g0.b0.t0: q = {fetch_add_relaxed} entered 1
            g0.b1.t0: r = {fetch_add_relaxed} entered 1""",
        never=("q=0 r=0",),
        weak=(("fetch_add_relaxed", ".gpu", ".cta"),),
        calls={"cuda/device/reroute_runs.cuh enter": "fetch_add_relaxed"},
    ),
    # A tile, or its end, that came by ordinary stores.
    "written, then stored from": Order(
        program="""
            g0.b0.f1: st %tile 1; {fence_proxy_async_shared}; {sync_warp} a
            g0.b0.f0: {sync_warp} a; {mbarrier_arrive} %full
            g0.b0.s0: {mbarrier_test} %full 1; {sync_warp} b
            g0.b0.s1: {sync_warp} b; {bulk_store} x %tile; {bulk_wait} 0;
            g0.b0.s1: {fence_proxy_async_global}; r = ld x""",
        never=("r=0",),
        weak=(NO_SHARED_FENCE, ARRIVE_RELAXED, TEST_RELAXED, ONLY_READ, NO_WARP_BARRIER),
        calls={
            f"{MOVER} fetch": "copy_from_global fence_proxy_async_shared sync_warp mbarrier_arrive"
        },
    ),
    # What came by a bulk load goes by ordinary stores.
    "loaded, then read": Order(
        program="""
            g0.b9.t0: st y 1; end before
            g0.b0.f0: start before; {mbarrier_arrive_expect} %full; {bulk_load} %tile y %full
            g0.b0.s0: {mbarrier_test} %full 2; {sync_warp} a
            g0.b0.s1: {sync_warp} a; r = ld %tile""",
        never=("r=0",),
        weak=(TEST_RELAXED, NO_WARP_BARRIER),
        calls={f"{MOVER} store": "bulk_store copy_from_shared"},
        implicit_fence=True,
    ),
    # A stage is loaded into again once it has been read, ordinarily and by bulk stores.
    "read, then loaded again": Order(
        program="""
            g0.b9.t0: st y 1; end before
            g0.b0.s1: q = ld %tile; {bulk_store} x %tile; {bulk_commit}; {bulk_wait_read} 0
            g0.b0.s1: {fence_proxy_async_shared}; {sync_warp} a; r = ld x
            g0.b0.s0: {sync_warp} a; {mbarrier_arrive} %empty
            g0.b0.f0: start before; {mbarrier_test} %empty 1
            g0.b0.f0: {mbarrier_arrive_expect} %full; {bulk_load} %tile y %full""",
        never=("q=1", "r=1"),
        weak=(
            NO_SHARED_FENCE,
            ("bulk_wait_read", "cp.async.bulk.wait_group.read %0;", ""),
            ARRIVE_RELAXED,
            TEST_RELAXED,
            NO_WARP_BARRIER,
        ),
        calls={
            f"{MOVER} commit_and_wait_source": "bulk_commit bulk_wait_read sync_warp",
            f"{MOVER} release": "fence_proxy_async_shared sync_warp mbarrier_arrive",
            f"{MOVER} vacant": "is_complete",
        },
    ),
    # A row of loads has been stored to all ranks when the planner writes to its place.
    "sent, then overwritten": Order(
        program="""
            g0.b0.s1: {bulk_store} x %row; {bulk_wait} 0; {sync_block} a; r = ld x
            g0.b0.t0: {sync_block} a; st %row 9""",
        never=("r=9",),
        weak=(("bulk_wait", "cp.async.bulk.wait_group %0;", ""), NO_BLOCK_BARRIER),
        calls={"cuda/device/load.cuh load": "exchange_rows sync_block copy_table"},
        implicit_fence=True,
    ),
    # The home's caller changes its weights once the hub has read them.
    "pulled, then changed": Order(
        program="""
            g1.b0.f0: {mbarrier_arrive_expect} %full; {bulk_load} %tile x %full
            g1.b0.s0: {mbarrier_test} %full 2; {sync_warp} a; r = ld %tile; {sync_warp} b
            g1.b0.s0: {store_release_system} pulled 1
            g1.b0.s1: {sync_warp} a; {fence_proxy_async_global}; {sync_warp} b
            g0.b0.t0: {load_acquire_system} pulled 1; end call
            g0.b1.t0: start call; st x 9""",
        never=("r=9",),
        weak=(*FLAGS, TEST_RELAXED, NO_GLOBAL_FENCE, NO_WARP_BARRIER),
        calls={"core/transfer/storer.hpp finish_task": "loads_complete find_abort publish publish"},
    ),
    # A home that fails changes its weights once its abort is delivered. A hub that has loaded new
    # ones sees the abort: they are no flags, so that an acquire would not do.
    "aborted, then changed": Order(
        program="""
            g0.b0.t0: {store_relaxed_system} abort 1; {fence_system}; end call
            g0.b1.t0: start call; st x 9
            g1.b0.f0: {mbarrier_arrive_expect} %full; {bulk_load} %tile x %full
            g1.b0.s0: {mbarrier_test} %full 2; r = ld %tile; {fence_proxy_async_global};
            g1.b0.s0: {fetch_add_acq_rel} left 1
            g1.b1.s0: p = {fetch_add_acq_rel} left 1; {sync_warp} a
            g1.b1.s1: {sync_warp} a; {fence_system}; q = {load_acquire_system} abort""",
        never=("p=1 r=9 q=0",),
        weak=(
            ("fence_system", "fence.sc", "fence.acq_rel"),
            ("fence_system", ".sys", ".gpu"),
        ),
        calls={
            f"{MOVER} loads_complete": "sync_warp fence_system",
            f"{MEMORY} flags_delivered": "fence_system",
            "cuda/device/wait.cuh fail": "announce_abort flags_delivered",
        },
    ),
    # The same in a reduction: the home looks for all the hubs.
    "aborted, then cleared": Order(
        program="""
            g2.b0.t0: {store_relaxed_system} abort 1; {fence_system}; end call
            g2.b1.t0: start call; st x 9
            g1.b0.t0: p = {load_global} x; st sum p; {store_release_system} summed 1
            g0.b0.t0: {load_acquire_system} summed 1; r = {load_global} sum; {fence_system}
            g0.b0.t0: q = {load_acquire_system} abort""",
        never=("r=9 q=0",),
        weak=(("fence_system", "fence.sc", "fence.acq_rel"), *RELEASE_SYSTEM),
        calls={
            f"{ADDER} loads_complete": "sync_warp fence_system",
            "core/transfer/reducer.hpp finish_piece": "loads_complete find_abort publish",
        },
    ),
    # A block's first warp hands an addition to the others, and publishes what they have stored.
    "handed on to be added, and back": Order(
        program="""
            g0.b0.s1: st x 1; {sync_warp} a
            g0.b0.s0: {sync_warp} a; {mbarrier_arrive} %empty
            g0.b0.t0: {mbarrier_test} %empty 1; {store_release_system} summed 1
            g1.b0.t0: {load_acquire_system} summed 1; {mbarrier_arrive} %full
            g1.b0.s0: {mbarrier_test} %full 1; {sync_warp} b
            g1.b0.s1: {sync_warp} b; r = {load_global} x""",
        never=("r=0",),
        weak=(*FLAGS, NO_WARP_BARRIER, ARRIVE_RELAXED, TEST_RELAXED),
        calls={
            f"{ADDER} add_all": "is_complete sync_warp mbarrier_arrive",
            f"{ADDER} take": "sync_warp mbarrier_arrive",
            f"{ADDER} try_delivered": "is_complete sync_warp then",
        },
    ),
    # Two hops: a hub's slot is cleared by another of its workers, once the home has its sum.
    "summed, consumed, then cleared": Order(
        program="""
            g0.b0.t1: r = {load_global} x; {sync_warp} a
            g0.b0.t0: {sync_warp} a; {store_release_system} summed 1
            g1.b0.t0: {load_acquire_system} summed 1; {store_release_system} consumed 1
            g0.b1.t0: {load_acquire_system} consumed 1; {sync_warp} b
            g0.b1.t1: {sync_warp} b; st x 9""",
        never=("r=9",),
        weak=(*FLAGS, NO_WARP_BARRIER),
        calls={"core/transfer/reducer.hpp ready": "summed consumed"},
    ),
    # The next backward pass adds to a cleared slot, which the next reduction reads.
    "cleared, then added to": Order(
        program="""
            g0.b0.t0: st x 9; end call
            g0.b1.t0: start call; red.add.relaxed.gpu x 1; end backward
            g0.b2.t0: start backward; {fence_release_system}; {store_relaxed_system} open 2
            g1.b0.t0: {load_acquire_system} open 2; {sync_warp} a
            g1.b0.t1: {sync_warp} a; r = {load_global} x""",
        never=("r!=10",),
        weak=(*BATCH, *ACQUIRE_SYSTEM, NO_WARP_BARRIER),
    ),
    # A call's block, made by all threads of the first block, read by all of another.
    "prepared, then read": Order(
        program="""
            g0.b0.t1: st x 1; {sync_block} a
            g0.b0.t0: {sync_block} a; {store_release_device} prepared 1
            g0.b1.t0: {load_acquire_device} prepared 1; {sync_block} b
            g0.b1.t1: {sync_block} b; r = ld x""",
        never=("r=0",),
        weak=(
            ("store_release_device", "st.release", "st.relaxed"),
            ("store_release_device", ".gpu", ".cta"),
            ("load_acquire_device", "ld.acquire", "ld.relaxed"),
            ("load_acquire_device", ".gpu", ".cta"),
            NO_BLOCK_BARRIER,
        ),
        calls={
            "cuda/device/prepare.cuh make_block": "sync_block store_release_device",
            "cuda/device/prepare.cuh await_block": "load_acquire_device",
        },
    ),
    "reported to the host": Order(
        program="""
            g0.b0.t0: st report 1; {store_release_system} failed 1
            host.h.t0: ld.acquire.sys failed 1; r = ld report""",
        never=("r=0",),
        weak=RELEASE_SYSTEM,
        calls={"cuda/device/wait.cuh publish_failure": "release_slots store_release_system"},
    ),
}
# Instructions without an order of their own: counts that are read after an arrival, bytes that only
# one block touches, barriers before their first use, and a mark that is all it says.
UNORDERED = {
    "add_shared_relaxed", "fence_mbarrier_init", "fetch_add_in_block", "fetch_max_relaxed",
    "load_relaxed", "lower_in_block", "max_relaxed", "mbarrier_init", "set_in_block",
}  # fmt: skip
FENCE_OR_BARRIER = re.compile(r"{(fence\w+|sync_\w+|bulk_wait\w*)}[^;\n]*")


def find_failure(order: Order, ptx: str) -> str | None:
    """Return an execution in which the order fails; None: there is none."""
    program = fill_in(order.program, instructions(ptx))
    found = (find_execution(program, o, implicit_fence=order.implicit_fence) for o in order.never)
    return next(filter(None, found), None)


@pytest.mark.parametrize("name", ORDERS)
def test_order_holds(name: str) -> None:
    order = ORDERS[name]
    failure = find_failure(order, PTX)
    assert failure is None, f"possible:\n{failure}"
    if any(order.never):  # and all waits can end
        assert find_execution(fill_in(order.program, instructions(PTX)), "") is not None


@pytest.mark.parametrize("name", ORDERS)
def test_kernels_have_the_order(name: str) -> None:
    for where, calls in ORDERS[name].calls.items():
        pattern = r".*?".join(rf"\b{call}\w*" for call in calls.split())
        assert re.search(pattern, body(where), re.DOTALL), f"{where}: not in order: {calls}"


@pytest.mark.parametrize("name", ORDERS)
def test_weaker_instructions_fail(name: str) -> None:
    """Each change of ptx.cuh makes the outcome possible; ``pytest -s`` shows how."""
    order = ORDERS[name]
    for weakening in order.weak:
        witness = find_failure(order, weakened(PTX, weakening))
        assert witness is not None, f"{name} holds even with {weakening}"
        print(f"{name}, {weakening}:\n{witness}\n")


def test_orders_have_all_instructions() -> None:
    used = set(re.findall(r"{(\w+)}", "".join(order.program for order in ORDERS.values())))
    known = instructions(PTX)
    assert {name for name, says in known.items() if says} == used | UNORDERED
    assert {w[0] for order in ORDERS.values() for w in order.weak} >= used - {
        "load_global", "add_relaxed", "bulk_load", "bulk_store", "bulk_commit",
    }  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_each_fence_and_barrier_counts(name: str) -> None:
    """Where a program has several, leaving out any one of them makes the outcome possible."""
    order = ORDERS[name]
    for found in FENCE_OR_BARRIER.finditer(order.program):
        without = order.program[: found.start()] + order.program[found.end() :]
        assert find_failure(replace(order, program=without), PTX) is not None, found
    if order.implicit_fence:
        assert find_failure(replace(order, implicit_fence=False), PTX) is not None
