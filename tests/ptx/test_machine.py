"""The PTX machine: what it lets pass, and what a device would only sometimes punish."""

from __future__ import annotations

from pathlib import Path

import pytest
from ptx_machine import RACE_FREE, TRAPPED, VIOLATED, PtxMachine
from small_kernels import Small, memory

pytestmark = pytest.mark.builds("cpu", "ptx", "ptx_kernels_90")


def message(store: str, load: str, **shape: int) -> Small:
    """Block or rank 0 stores a word and a flag; the other waits for the flag and reads the word."""
    writer = "%r3" if shape.get("ranks", 1) > 1 else "%r2"
    return Small(
        f"""
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra done;
  setp.ne.u32 %p2, {writer}, 0;
  @%p2 bra reader;
  mov.u32 %r4, 7;
  st.global.u32 [%rd1], %r4;
  {store} [%rd1+128], 1;
  bra done;
reader:
  {load} %r5, [%rd1+128];
  setp.eq.u32 %p3, %r5, 0;
  @%p3 bra reader;
  ld.global.u32 %r6, [%rd1];
  st.global.u32 [%rd1+256], %r6;
done:""",
        **shape,
    )


ACROSS_RANKS, ACROSS_BLOCKS = {"ranks": 2}, {"blocks": 2}


@pytest.mark.parametrize(
    "store,load,shape,racy",
    [
        ("st.release.sys.global.u32", "ld.acquire.sys.global.u32", ACROSS_RANKS, False),
        ("st.release.gpu.global.u32", "ld.acquire.gpu.global.u32", ACROSS_BLOCKS, False),
        ("st.release.sys.global.u32", "ld.relaxed.sys.global.u32", ACROSS_RANKS, True),
        ("st.relaxed.sys.global.u32", "ld.acquire.sys.global.u32", ACROSS_RANKS, True),
        ("st.release.gpu.global.u32", "ld.acquire.sys.global.u32", ACROSS_RANKS, True),
        ("st.release.sys.global.u32", "ld.acquire.gpu.global.u32", ACROSS_RANKS, True),
        ("st.release.cta.global.u32", "ld.acquire.gpu.global.u32", ACROSS_BLOCKS, True),
        ("st.global.u32", "ld.global.u32", ACROSS_BLOCKS, True),
        # By fences around relaxed accesses.
        (
            "fence.acq_rel.sys; st.relaxed.sys.global.u32",
            "ld.acquire.sys.global.u32",
            ACROSS_RANKS,
            False,
        ),
        (
            "fence.acq_rel.gpu; st.relaxed.sys.global.u32",
            "ld.acquire.sys.global.u32",
            ACROSS_RANKS,
            True,
        ),
    ],
)
def test_a_message_is_a_race_unless_it_is_released_and_acquired(
    machine: PtxMachine, tmp_path: Path, store: str, load: str, shape: dict[str, int], racy: bool
) -> None:
    outcome = message(store, load, **shape).run(machine, tmp_path)
    assert outcome.status == (VIOLATED if racy else RACE_FREE), outcome.text
    assert ("VIOLATION: " in outcome.text) == racy
    if not racy:
        assert memory(outcome)[0][64] == 7


# One lane loads 64 bytes into shared memory by a bulk copy; all read them when the phase ends.
BULK_LOAD = """
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra wait;
  mbarrier.init.shared::cta.b64 [%r15], 1;
  {init_fence}
  st.global.u32 [%rd1], 5;
  {fence}
  mbarrier.arrive.expect_tx.shared::cta.b64 %rd9, [%r15], {expected};
  add.u32 %r4, %r15, {offset};
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1], 64, [%r15];
wait:
  {barrier}
again:
  mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r15], 0;
  @!%p2 bra again;
  ld.shared.u32 %r5, [%r15+128];
  @%p1 bra done;
  st.global.u32 [%rd1+256], %r5;
done:"""
BULK_LOAD_RULES = {
    "init_fence": "fence.mbarrier_init.release.cluster;",
    "fence": "fence.proxy.async.global;",
    "expected": "64",
    "offset": "128",
    "barrier": "bar.warp.sync -1;",
}


@pytest.mark.parametrize(
    "change,complaint",
    [
        ({}, ""),
        ({"fence": ""}, "VIOLATION"),
        ({"fence": "fence.proxy.async.shared::cta;"}, "VIOLATION"),
        ({"init_fence": ""}, "VIOLATION"),
        ({"barrier": ""}, "VIOLATION|TRAP"),
        ({"expected": "32"}, "VIOLATION|TRAP"),
        ({"expected": "96"}, "TRAP: stuck"),
        ({"offset": "120"}, "TRAP"),
        ({"offset": "4096"}, "TRAP"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bulk_load_needs_its_fences_and_its_bytes(
    machine: PtxMachine, tmp_path: Path, change: dict[str, str], complaint: str
) -> None:
    outcome = Small(BULK_LOAD.format(**BULK_LOAD_RULES | change)).run(machine, tmp_path)
    if not complaint:
        assert outcome.status == RACE_FREE, outcome.text
        assert memory(outcome)[0][64] == 5
    else:
        assert outcome.status in (VIOLATED, TRAPPED), outcome.text
        assert any(word in outcome.text for word in complaint.split("|"))


# Rank 0 stores 64 bytes to rank 1 by a bulk copy, and says so; rank 1 reads them.
BULK_STORE = """
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra done;
  setp.ne.u32 %p2, %r3, 0;
  @%p2 bra reader;
  mov.u32 %r4, 9;
  st.shared.v4.u32 [%r15], {{%r4, %r4, %r4, %r4}};
  st.shared.v4.u32 [%r15+16], {{%r4, %r4, %r4, %r4}};
  st.shared.v4.u32 [%r15+32], {{%r4, %r4, %r4, %r4}};
  st.shared.v4.u32 [%r15+48], {{%r4, %r4, %r4, %r4}};
  {before}
  cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r15], 64;
  {commit}
  {wait}
  {reuse}
  st.release.sys.global.u32 [%rd2+128], 1;
  bra done;
reader:
  ld.acquire.sys.global.u32 %r5, [%rd2+128];
  setp.eq.u32 %p3, %r5, 0;
  @%p3 bra reader;
  ld.global.u32 %r6, [%rd2];
  st.global.u32 [%rd2+256], %r6;
done:"""
BULK_STORE_RULES = {
    "before": "fence.proxy.async.shared::cta;",
    "commit": "cp.async.bulk.commit_group;",
    "wait": "cp.async.bulk.wait_group 0;",
    "reuse": "st.shared.u32 [%r15], %r3;",
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"before": ""},
        {"commit": ""},
        {"wait": ""},
        {"wait": "cp.async.bulk.wait_group.read 0;"},
        {"wait": "cp.async.bulk.wait_group 1;"},
    ],
    ids=lambda change: "-".join(f"{key}={value}" for key, value in change.items()),
)
def test_a_bulk_store_has_arrived_when_it_was_waited_for(
    machine: PtxMachine, tmp_path: Path, change: dict[str, str]
) -> None:
    small = Small(BULK_STORE.format(**BULK_STORE_RULES | change), ranks=2)
    outcome = small.run(machine, tmp_path)
    assert outcome.status == (VIOLATED if change else RACE_FREE), outcome.text
    if not change:
        assert memory(outcome)[1][64] == 9


# Each block of a cluster writes a word into the next one's shared memory, and reads its own.
CLUSTER = """
  setp.ne.u32 %p1, %r1, 0;
  mov.u32 %r4, %cluster_ctarank;
  xor.b32 %r5, %r4, 1;
  {begin}
  mapa.shared::cluster.u32 %r6, %r15, %r5;
  add.u32 %r7, %r4, 40;
  @!%p1 st.shared::cluster.u32 [%r6], %r7;
  {end}
  @%p1 bra done;
  ld.shared.u32 %r8, [%r15];
  mul.wide.u32 %rd3, %r4, 4;
  add.u64 %rd4, %rd1, %rd3;
  st.global.u32 [%rd4], %r8;
done:"""
MEET = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"


@pytest.mark.parametrize(
    "begin,end,fine",
    [
        (MEET, MEET, True),
        (MEET, "barrier.cluster.arrive.relaxed; barrier.cluster.wait;", False),
        (MEET, "bar.sync 0;", False),
    ],
)
def test_blocks_of_a_cluster_share_memory_behind_its_barrier(
    machine: PtxMachine, tmp_path: Path, begin: str, end: str, fine: bool
) -> None:
    small = Small(CLUSTER.format(begin=begin, end=end), blocks=2, cluster=2)
    outcome = small.run(machine, tmp_path)
    assert outcome.status == (RACE_FREE if fine else VIOLATED), outcome.text
    if fine:
        assert memory(outcome)[0] == {0: 41, 1: 40}


# The cluster's first block loads 64 bytes into both blocks' shared memory.
MULTICAST = """
  setp.ne.u32 %p1, %r1, 0;
  mov.u32 %r4, %cluster_ctarank;
  .reg .b16 %rs<4>;
  add.u32 %r9, %r4, %r1;
  setp.ne.u32 %p3, %r9, 0;
  @!%p1 mbarrier.init.shared::cta.b64 [%r15], 1;
  @!%p1 fence.mbarrier_init.release.cluster;
  @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 %rd9, [%r15], 64;
  barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
  add.u32 %r5, %r15, 128;
  mov.u16 %rs1, 3;
  @!%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%r5], [%rd1], 64, [%r15], %rs1;
again:
  mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r15], 0;
  @!%p2 bra again;
  ld.shared.u32 %r8, [%r15+128];
  mul.wide.u32 %rd3, %r4, 4;
  add.u64 %rd4, %rd1, %rd3;
  @!%p1 st.global.u32 [%rd4+256], %r8;
  barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"""


def test_a_multicast_load_reaches_each_block(machine: PtxMachine, tmp_path: Path) -> None:
    outcome = Small(MULTICAST, blocks=2, cluster=2).run(machine, tmp_path)
    assert outcome.status == RACE_FREE, outcome.text


@pytest.mark.parametrize(
    "body,complaint",
    [
        # Lanes of a warp, and of different warps.
        (
            "shl.b32 %r4, %r1, 2; add.u32 %r5, %r15, %r4; st.shared.u32 [%r5], %r1;"
            "xor.b32 %r6, %r5, 4; ld.shared.u32 %r7, [%r6];",
            "VIOLATION",
        ),
        ("ld.shared.u32 %r4, [%r15+64];", "uninitialised"),
        ("st.global.u32 [%rd1], %r1;", "VIOLATION"),
        ("st.global.u32 [%rd1+2], %r1;", "TRAP"),
        ("add.u32 %r4, %r15, 65536; st.shared.u32 [%r4], %r1;", "TRAP"),
        ("mov.u64 %rd3, 16; ld.global.u32 %r4, [%rd3];", "TRAP"),
        (
            "setp.eq.u32 %p1, %r1, 3; @%p1 bra other; shfl.sync.idx.b32 %r4, %r1, 0, 31, -1;"
            "bra out; other: bar.warp.sync -1; out:",
            "TRAP",
        ),
        ("setp.eq.u32 %p1, %r1, 3; @%p1 bra out; bar.warp.sync 7; out:", "TRAP"),
        ("trap;", "TRAP"),
    ],
    ids=[
        "lanes",
        "uninitialised",
        "same-word",
        "misaligned",
        "beyond-shared",
        "null",
        "shuffle-and-barrier",
        "barrier-of-others",
        "trap",
    ],
)
def test_what_a_device_would_only_sometimes_punish_is_said(
    machine: PtxMachine, tmp_path: Path, body: str, complaint: str
) -> None:
    outcome = Small(body).run(machine, tmp_path)
    assert outcome.status in (VIOLATED, TRAPPED), outcome.text
    assert complaint in outcome.text


def test_a_put_that_nobody_waited_for_is_said(machine: PtxMachine, tmp_path: Path) -> None:
    put = """
  {
  .param .b64 a; .param .b64 b; .param .b64 c; .param .b32 d;
  st.param.b64 [a], %rd1; st.param.b64 [b], %rd1; st.param.b64 [c], 64; st.param.b32 [d], 1;
  call.uni nvshmemx_putmem_nbi_warp, (a, b, c, d);
  }"""
    outcome = Small(put).run(machine, tmp_path)
    assert outcome.status == VIOLATED, outcome.text
    outcome = Small(put + "\n  call.uni nvshmem_quiet, ();").run(machine, tmp_path)
    assert outcome.status == RACE_FREE, outcome.text


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body,said",
    [
        ("tcgen05.alloc.b32 %r4;", "small.ptx:{line}: not modelled: tcgen05.alloc.b32 %r4"),
        ("add.u32 %r4, %r99, 1;", "unknown name %r99"),
        ("bra nowhere;", "no label nowhere"),
    ],
)
def test_what_the_machine_does_not_know_is_named(
    machine: PtxMachine, tmp_path: Path, body: str, said: str
) -> None:
    small = Small(body)
    outcome = small.run(machine, tmp_path)
    assert outcome.status == 2, outcome.text
    assert said.format(line=small.text.splitlines().index(body) + 1) in outcome.text


def test_without_kernels_there_is_a_line(machine: PtxMachine, tmp_path: Path) -> None:
    outcome = machine.run_program("save", tmp_path / "nothing.ptx")
    assert outcome.status == 2
    assert f"cannot read {tmp_path / 'nothing.ptx'}" in outcome.text


def test_without_a_machine_there_is_a_line(machine: PtxMachine, tmp_path: Path) -> None:
    outcome = machine.run(
        [machine.folder / "test_device_save"], UEC_PTX_MACHINE=str(tmp_path / "none.so")
    )
    assert outcome.status == 2
    assert "none.so" in outcome.text


@pytest.mark.parametrize("line", ["L2=fast", "L3=40", "L2=0"])
def test_a_clock_that_is_none_is_refused(machine: PtxMachine, tmp_path: Path, line: str) -> None:
    (tmp_path / "clock.env").write_text(f"MHZ=1755\n{line}\n")
    outcome = Small("").run(machine, tmp_path, UEC_PTX_COSTS=str(tmp_path / "clock.env"))
    assert outcome.status == 2
    assert f"clock.env: not NAME=CYCLES: {line}" in outcome.text


def test_who_waits_for_ever_is_named(machine: PtxMachine, tmp_path: Path) -> None:
    body = "setp.eq.u32 %p1, %r1, 40; @%p1 bra out; bar.sync 0; out: again: bra again;"
    outcome = Small(body, threads=64).run(machine, tmp_path)
    assert outcome.status == TRAPPED
    assert "stuck" in outcome.text
    assert "block (0, 0) warp" in outcome.text
