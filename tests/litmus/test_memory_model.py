"""The memory model gives the published verdicts.

PTX: examples of the ISA's chapter. ISCA: of "Mixed-Proxy Extensions", and of the tests that
NVlabs/mixedproxy has for it. The others are the usual ones, by their usual names.
"""

from __future__ import annotations

import pytest

pytest.importorskip("z3", reason="no z3-solver: pip install '.[test]'")
from memory_model import find_execution

# In blocks of a GPU, unless a place says otherwise.
A, B, C, D = (f"g0.b{i}.t0" for i in range(4))
SAME_BLOCK = "g0.b0.t1"
OTHER_GPU = "g1.b0.t0"


def threads(*operations: str, at: tuple[str, ...] = (A, B, C, D)) -> str:
    return "\n".join(f"{place}: {done}" for place, done in zip(at, operations, strict=False))


def message(release: str, acquire: str, *, at: tuple[str, ...] = (A, B)) -> str:
    return threads(f"st x 1; {release}", f"{acquire}; r = ld x", at=at)


RELEASE, ACQUIRE = "st.release.{} f 1", "ld.acquire.{} f 1"
FENCED = "fence.acq_rel.sys; st.relaxed.sys f 1", "ld.relaxed.sys f 1; fence.acq_rel.sys"


def sent(scope: str, *at: str) -> str:
    return message(RELEASE.format(scope), ACQUIRE.format(scope), at=at)


def buffered(fence: str, other: str = "", to: str = B) -> str:
    return threads(f"st x 1; {fence}; r = ld y", f"st y 1; {other or fence}; s = ld x", at=(A, to))


def independent(fence: str) -> str:
    return threads(
        "st.relaxed.gpu x 1",
        "st.relaxed.gpu y 1",
        f"ld.relaxed.gpu x 1; {fence}; r = ld.relaxed.gpu y",
        f"ld.relaxed.gpu y 1; {fence}; s = ld.relaxed.gpu x",
    )


def chain(first: str, second: str) -> str:
    """ISA2: three threads, two hops; the first within a block."""
    return threads(
        f"st x 1; st.release.{first} f 1",
        f"ld.acquire.{first} f 1; st.release.{second} g 1",
        f"ld.acquire.{second} g 1; r = ld x",
        at=(A, SAME_BLOCK, B),
    )


def buffering(first: str, second: str, load: str = "ld.relaxed.gpu") -> str:
    return threads(f"r = {load} x; {first}", f"s = {load} y; {second}")


def two_writes(fence: str) -> str:
    store = "st.relaxed.gpu"
    return threads(f"{store} x 1; {fence}; {store} y 2", f"{store} y 1; {fence}; {store} x 2")


def both(operation: str) -> str:
    return threads(operation, operation)


ATOMIC = "atom.add.acq_rel.gpu"
FORBIDDEN = {
    "PTX MP": (message("fence.sys; st.relaxed.sys f 1", "ld.relaxed.sys f 1; fence.sys"), "r=0"),
    "MP+fence.acq_rel": (message(*FENCED), "r=0"),
    "MP.cta": (sent("cta", A, SAME_BLOCK), "r=0"),
    "MP.cluster": (sent("cluster", "g0.c0.b0.t0", "g0.c0.b1.t0"), "r=0"),
    "MP.gpu": (sent("gpu", A, B), "r=0"),
    "MP.sys": (sent("sys", A, OTHER_GPU), "r=0"),
    "MP, scopes wider than needed": (message("st.release.gpu f 1", "ld.acquire.sys f 1"), "r=0"),
    "MP by way of an atomic operation": (
        threads(
            "st x 1; red.add.release.gpu f 1",
            "atom.add.relaxed.gpu f 1",
            "ld.acquire.gpu f 2; r = ld x",
        ),
        "r=0",
    ),
    "MP+fence.sc, weak flag": (message("fence.sc.sys; st f 1", "ld f 1; fence.sc.sys"), "r=0"),
    "PTX release pattern": (
        message("st.release.sys f 1; st.relaxed.sys f 2", "ld.relaxed.sys f 2; fence.acq_rel.sys"),
        "r=0",
    ),
    "bar.sync": (message("bar.sync k", "bar.sync k", at=(A, SAME_BLOCK)), "r=0"),
    "a stream": (message("end k", "start k", at=(A, OTHER_GPU)), "r=0"),
    "PTX SB": (buffered("fence.sc.sys"), "r=0 s=0"),
    "ISCA SB_cta": (buffered("fence.sc.cta", to=SAME_BLOCK), "r=0 s=0"),
    "ISCA SB_rmw": (
        threads(f"{ATOMIC} x 1; r = {ATOMIC} y 1", f"{ATOMIC} y 1; s = {ATOMIC} x 1"),
        "r=0 s=0",
    ),
    "IRIW+fence.sc": (independent("fence.sc.gpu"), "r=0 s=0"),
    "ISCA ISA2": (chain("cta", "gpu"), "r=0"),
    "WRC": (
        threads(
            "st.relaxed.gpu x 1",
            "ld.relaxed.gpu x 1; st.release.gpu f 1",
            "ld.acquire.gpu f 1; r = ld.relaxed.gpu x",
        ),
        "r=0",
    ),
    "PTX CoRR": (threads("st.relaxed.sys x 1", "ld.relaxed.sys x 1; r = ld.relaxed.sys x"), "r=0"),
    "CoWW": (threads("st x 1; st x 2"), "x=1"),
    "CoRW": (threads("r = ld x; st x 1"), "r=1"),
    "CoWR": (threads("st x 1; r = ld x"), "r=0"),
    "PTX atomicity": (both("atom.add.sys x 1"), "x=1"),
    "compare-and-swap": (both("atom.cas.relaxed.gpu x 0 1"), ""),
    "PTX no thin air": (buffering("st.relaxed.gpu y r", "st.relaxed.gpu x s"), "r=1"),
    "LB+release+acquire": (
        buffering("st.release.gpu y 1", "st.release.gpu x 1", "ld.acquire.gpu"),
        "r=1 s=1",
    ),
    "2+2W+fence.sc": (two_writes("fence.sc.gpu"), "x=1 y=1"),
    "ISCA SC_per_location": (
        threads(
            "st.release.sys x 1; st.release.sys f 1",
            "st.release.gpu x 2; ld.acquire.sys x 1; st.release.sys g 1",
            "ld.acquire.sys g 1; r = ld.acquire.sys x",
        ),
        "r=2",
    ),
}
ALLOWED = {
    "MP, relaxed": (message("st.relaxed.gpu f 1", "ld.relaxed.gpu f 1"), "r=0"),
    "MP, released only": (message("st.release.gpu f 1", "ld.relaxed.gpu f 1"), "r=0"),
    "MP, acquired only": (message("st.relaxed.gpu f 1", "ld.acquire.gpu f 1"), "r=0"),
    "MP+fence.acq_rel, weak flag": (
        message("fence.acq_rel.sys; st f 1", "ld f 1; fence.acq_rel.sys"),
        "r=0",
    ),
    "MP+fence.sc+fence.acq_rel, weak flag": (
        message("fence.sc.sys; st f 1", "ld f 1; fence.acq_rel.sys"),
        "r=0",
    ),
    "MP.cta, other block": (sent("cta", A, B), "r=0"),
    "MP.cluster, other cluster": (sent("cluster", A, B), "r=0"),
    "MP.gpu, other GPU": (sent("gpu", A, OTHER_GPU), "r=0"),
    "MP, one scope too small": (message("st.release.cta f 1", "ld.acquire.sys f 1"), "r=0"),
    "MP by red and a fence": (
        message(
            "fence.acq_rel.gpu; st.relaxed.gpu f 1",
            "red.add.relaxed.gpu f 1; fence.acq_rel.gpu",
        ),
        "f=2 r=0",
    ),
    "PTX release pattern, weak write": (
        message("st.release.sys f 1; st f 2", "ld.relaxed.sys f 2; fence.acq_rel.sys"),
        "r=0",
    ),
    "bar.sync, other block": (message("bar.sync k", "bar.sync k"), "r=0"),
    "SB": (buffered("fence.acq_rel.sys"), "r=0 s=0"),
    "SB, one fence.sc": (buffered("fence.sc.sys", "fence.acq_rel.sys"), "r=0 s=0"),
    "SB, fences of too small a scope": (buffered("fence.sc.cta"), "r=0 s=0"),
    "ISCA SB_rmw_2": (
        threads(f"{ATOMIC} x 1; r = {ATOMIC} y 1", "st.relaxed.gpu y 1; s = ld.relaxed.gpu x"),
        "r=0 s=0",
    ),
    "IRIW": (independent("fence.acq_rel.gpu"), "r=0 s=0"),
    "ISA2, a scope too small": (chain("cta", "cta"), "r=0"),
    "ISCA CoMP_volatile": (threads("st x 1; st.volatile x 2", "ld x 2; r = ld.volatile x"), "r!=2"),
    "CoRR, weak": (threads("st x 1", "ld x 1; r = ld x"), "r=0"),
    "PTX atomicity, scopes": (threads("atom.add.cta x 1", "atom.add.gpu x 1"), "x=1"),
    "compare-and-swap of a block": (both("atom.cas.relaxed.cta x 0 1"), ""),
    "LB": (buffering("st.relaxed.gpu y 1", "st.relaxed.gpu x 1"), "r=1 s=1"),
    "2+2W": (two_writes("fence.acq_rel.gpu"), "x=1 y=1"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden(name: str) -> None:
    assert find_execution(*FORBIDDEN[name]) is None


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str) -> None:
    assert find_execution(*ALLOWED[name]) is not None


S, T, L = "fence.proxy.surface", "fence.proxy.texture", "fence.proxy.alias"
# ISCA MP: the store, fences before the release, fences behind the acquire, the load; whether it is
# ordered within a block, and between blocks. Where y is another address of x.
PROXIES = [
    ("st x", "", "", "ld x", True, True),
    ("st x", "", "", "suld x", False, False),
    ("sust x", "", "", "ld x", False, False),
    ("sust x", "", "", "suld x", True, False),
    ("st x", S, "", "suld x", True, False),
    ("st x", "", S, "suld x", True, True),
    ("sust x", S, "", "ld x", True, True),
    ("sust x", "", S, "ld x", True, False),
    ("sust x", S, S, "suld x", True, True),
    ("sust x", S, "", "tex x", False, False),
    ("sust x", T, "", "tex x", False, False),
    ("sust x", f"{T}; {S}", "", "tex x", False, False),
    ("sust x", f"{S}; {T}", "", "tex x", True, False),
    ("sust x", T, S, "tex x", False, False),
    ("sust x", S, T, "tex x", True, True),
    ("sust x", "", f"{T}; {S}", "tex x", False, False),
    ("sust x", "", f"{S}; {T}", "tex x", True, False),
    ("st x", "", "", "ld y@x", False, False),
    ("st x", L, "", "ld y@x", True, True),
    ("st x", "", L, "ld y@x", True, True),
    ("st x", S, L, "suld y@x", False, False),
    ("st x", L, S, "suld y@x", True, True),
    ("sust x", f"{L}; {S}", "", "ld y@x", False, False),
    ("sust x", S, L, "ld y@x", True, True),
    ("sust x", f"{S}; {L}", T, "tex y@x", True, True),
    ("sust x", S, f"{T}; {L}", "tex y@x", False, False),
]  # fmt: skip


@pytest.mark.parametrize("scope", ["cta", "gpu"])
def test_proxies(scope: str) -> None:
    """ISCA's MP_cta, MP_gpu, and the same with synonyms."""
    for store, before, behind, load, in_block, between in PROXIES:
        found = find_execution(
            f"{A}: {store} 1; {before}; st.release.{scope} f 1\n"
            f"{SAME_BLOCK if scope == 'cta' else B}: ld.acquire.{scope} f 1; {behind}; r = {load}",
            "r=0",
        )
        ordered = in_block if scope == "cta" else between
        assert (found is None) == ordered, (store, before, behind, load)


def test_proxies_in_a_thread() -> None:
    """ISCA's CoWR, and PTX's."""
    for store, fences, load, ordered in (
        *((s, f, d, b) for s, f, behind, d, b, _ in PROXIES if not behind),
        *((s, f, d, b) for s, before, f, d, b, _ in PROXIES if not before),
    ):
        found = find_execution(f"{A}: {store} 1; {fences}; r = {load}", "r=0")
        assert (found is None) == ordered, (store, fences, load)


COPY_IN = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes %s x %m"
COPY_OUT = "cp.async.bulk.global.shared::cta.bulk_group x %s"
ARRIVE, TEST = "mbarrier.arrive.expect_tx %m", "mbarrier.test_wait.parity %m 2"


def test_bulk_copies() -> None:
    """The ISA's sections on the async proxy, on completion, and on asynchronous operations."""
    stored = f"{A}: st %s 1; {{}}; {COPY_OUT}; {{}}; r = ld x"
    fence, wait = "fence.proxy.async.shared::cta", "cp.async.bulk.wait_group 0"
    for fences, waits, outcome, ordered in (
        (fence, wait, "r=0", True),
        ("", wait, "r=0", False),
        ("fence.proxy.async.global", wait, "r=0", False),  # of other memory
        (fence, "", "r=0", False),
        (fence, "cp.async.bulk.wait_group.read 0", "r=0", False),
    ):
        assert (find_execution(stored.format(fences, waits), outcome) is None) == ordered
    # A copy comes after what its issuer did before it; an arrival orders that, its end does not.
    loaded = (
        f"{A}: st x 1; fence.proxy.async.global; st y 1; {{}}; {COPY_IN}\n"
        f"{SAME_BLOCK}: {{}}; r = ld %s; s = ld y"
    )
    for arrive, test, outcome, ordered in (
        (ARRIVE, TEST, "r=0", True),
        (ARRIVE, TEST, "s=0", True),
        (ARRIVE.replace("tx", "tx.relaxed.cta"), TEST, "s=0", False),
        (ARRIVE, TEST.replace("wait", "wait.relaxed.cta"), "r=0", False),
    ):
        found = find_execution(loaded.format(arrive, test), outcome)
        assert (found is None) == ordered, (arrive, test, outcome)


def test_witness() -> None:
    said = find_execution(*ALLOWED["MP, relaxed"])
    assert said is not None
    assert said.splitlines()[-1] == "g0.b1.t0: ld x -> 0, from the start"
