"""Steps of the c10d engine's ledgers, all ranks together, in any order that the rounds allow.

The order of execution here is written down from what `Step` promises; the engine's own is that of
`Movement`. What a step reads and writes is the engine's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference.reduce_oracle import reduced, same_bits
from tiers import cases

from ultraep_comm import _core
from ultraep_comm.engines.c10d.movement import (
    IN_FLIGHT,
    Movement,
    Reduction,
    Step,
    Transfer,
    read_steps,
)

Kind = _core.C10dStep
RECEIVING = (Kind.RECEIVE, Kind.ADD_GRAD, Kind.ADD_SUM)
TILES = st.sampled_from((16 << 10, 20 << 10, 32 << 10))  # bytes
LENGTHS = st.sampled_from((1, 3, 100, 4099, 40_000, (96 << 10) + 5, 300_001))
MODES = st.sampled_from((None, *_core.Mode))
# The least and the most that a message costs: chunks of any length.
COSTS = st.sampled_from(((700_000, 0, 1, 1, 100), (700_000, 0, 10**8, 1, 100)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A group and how it moves an expert."""

    num_ranks: int
    slots_per_rank: int
    home: list[int]
    segments: list[int]  # bytes
    tile_bytes: int
    cost: Sequence[int]
    domain: list[int]
    dtypes: list[torch.dtype] = field(default_factory=list)  # of slot gradients, by segment

    @property
    def num_experts(self) -> int:
        return len(self.home)

    def ledgers(self) -> list[_core.C10dLedger]:
        types = {torch.float32: _core.GradType.FLOAT32, torch.bfloat16: _core.GradType.BFLOAT16}
        return [
            _core.C10dLedger(
                _core.EngineConfig(
                    rank=rank,
                    num_experts=self.num_experts,
                    slots_per_rank=self.slots_per_rank,
                    home=self.home,
                    domain=self.domain,
                    allow_cross_domain=True,
                    segment_bytes=self.segments,
                    grad_bytes=self.segments[: len(self.dtypes)],
                    grad_type=[types[dtype] for dtype in self.dtypes],
                    tile_bytes=self.tile_bytes,
                    cost=self.cost,
                    call_timeout=0,
                    wait_timeout=0,
                    num_banks=2,
                )
            )
            for rank in range(self.num_ranks)
        ]

    def replicas(self, plan: NDArray[np.int32]) -> dict[int, list[tuple[int, int]]]:
        """(rank, slot) of each expert's replicas, by rank."""
        found: dict[int, list[tuple[int, int]]] = {}
        for rank, slot in zip(*np.nonzero(plan >= 0), strict=True):
            found.setdefault(int(plan[rank, slot]), []).append((int(rank), int(slot)))
        return found


@st.composite
def cases_of(draw: Callable[..., Any], *, gradients: bool = False) -> Case:
    num_ranks = draw(st.integers(1, 6))
    segments = draw(st.lists(LENGTHS, min_size=1, max_size=3))
    dtypes = []
    if gradients:
        choice = st.sampled_from((torch.float32, torch.bfloat16))
        dtypes = [draw(choice) for _ in segments]
        sizes = [dtype.itemsize for dtype in dtypes]
        segments = [-(-n // size) * size for n, size in zip(segments, sizes, strict=True)]
    return Case(
        num_ranks=num_ranks,
        slots_per_rank=draw(st.integers(1, 3)),
        home=draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=8)),
        segments=segments,
        tile_bytes=draw(TILES),
        cost=draw(COSTS),
        domain=draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks)),
        dtypes=dtypes,
    )


def place(case: Case, plan: NDArray[np.int32], expert: int, rank: int) -> None:
    """Put an expert into a rank's first free slot, where that is legal."""
    free = np.nonzero(plan[rank] < 0)[0]
    if len(free) and case.home[expert] != rank and expert not in plan[rank]:
        plan[rank, free[0]] = expert


def draw_plan(data: st.DataObject, case: Case, held: NDArray[np.int32]) -> NDArray[np.int32]:
    """A plan that takes over some of what slots hold."""
    plan = held.copy()
    kept = data.draw(st.lists(st.booleans(), min_size=plan.size, max_size=plan.size))
    plan[~np.array(kept, bool).reshape(plan.shape)] = -1
    experts, ranks = st.integers(0, case.num_experts - 1), st.integers(0, case.num_ranks - 1)
    if data.draw(st.booleans()):  # one expert on all ranks
        hot = data.draw(experts)
        for rank in range(case.num_ranks):
            place(case, plan, hot, rank)
    for expert, rank in data.draw(st.lists(st.tuples(experts, ranks), max_size=12)):
        place(case, plan, expert, rank)
    return plan


class Given(NamedTuple):
    """A call and the arrays whose addresses it has."""

    call: _core.TransferCall
    keep: tuple[object, ...]


def make_call(
    case: Case,
    plan: NDArray[np.int32],
    *,
    quota: NDArray[np.int32] | None = None,
    segments: Sequence[int] | None = None,
    mode: _core.Mode | None = None,
    tag: int = 0,
    zero: bool = True,
    bank: int = -1,
    version: int = 0,
) -> Given:
    """A transfer of some segments or, where `segments` is None, a reduction."""
    home = np.array(case.home, np.int32)
    chosen = np.array(segments or (), np.int32)
    main_types = np.zeros(len(case.segments), np.int32)
    own = np.ascontiguousarray(plan, np.int32)
    view = _core.PlanView(
        own.ctypes.data,
        0 if quota is None else quota.ctypes.data,
        0,
        home.ctypes.data,
        case.num_ranks,
        case.slots_per_rank,
        case.num_experts,
        True,
    )
    reduces = segments is None
    call = _core.TransferCall(
        operation=_core.Operation.REDUCE if reduces else _core.Operation.REPLICATE,
        plan=view,
        main_ptrs=0,
        num_segments=len(case.dtypes) if reduces else len(chosen),
        mode=mode,
        background=True,
        tag=tag,
        segments=chosen.ctypes.data,
        main_types=main_types.ctypes.data,
        zero=zero,
        bank=bank,
        version=version,
    )
    return Given(call, (own, home, chosen, main_types, quota))


def submit(ledgers: Sequence[_core.C10dLedger], given_call: Given) -> list[list[Step]]:
    """All ranks make a call; returns the steps of each."""
    answers = [ledger.transfer(given_call.call) for ledger in ledgers]
    assert len({answer[:4] for answer in answers}) == 1
    return [read_steps(answer[4].tolist()) for answer in answers]


def check_ends(steps: Sequence[Sequence[Step]]) -> None:
    """Both ends list the same messages, in the same order: some backends look at no tag."""

    def ends(rank: int, *, receive: bool) -> Iterator[tuple[int, tuple[object, ...]]]:
        for s in steps[rank]:
            if s.kind is not Kind.KEEP_GRAD and (s.kind in RECEIVING) == receive:
                yield s.peer, (s.tag, s.round, s.segment, s.offset, s.bytes, s.expert, s.chunk)

    for rank, own in enumerate(steps):
        assert [s.round for s in own] == sorted(s.round for s in own)
        assert all(s.bytes > 0 and s.behind < s.round for s in own)
        for peer in range(len(steps)):
            sent = [what for to, what in ends(rank, receive=False) if to == peer]
            received = [what for source, what in ends(peer, receive=True) if source == rank]
            assert sent == received
            assert len({what[0] for what in sent}) == len(sent)
            assert rank != peer or not sent


@dataclass
class Message:
    """What a send has read, where its receive puts it, and whether that has happened."""

    payload: Any = None
    put: Callable[[Any], None] | None = None
    arrived: bool = False


class Rank:
    """A rank that issues its rounds in order, as src/c10d/rounds.hpp has it.

    Args:
        steps: its own.
        ahead: how many rounds' receives may be posted before the rank waits to issue them.
        find: returns the message of a step.
    """

    def __init__(self, steps: Sequence[Step], ahead: int, find: Callable[[Step], Message]) -> None:
        self._rounds = [(t, list(own)) for t, own in groupby(steps, lambda s: s.round)]
        self._ahead, self._find = ahead, find
        self._issued = self._posted = 0  # rounds, and rounds of which receives are posted
        self._open: list[tuple[Step, Message]] = []

    @property
    def is_done(self) -> bool:
        return self._issued == len(self._rounds)

    def may_issue(self) -> bool:
        self._open = [(step, message) for step, message in self._open if not message.arrived]
        if self.is_done:
            return False
        t, steps = self._rounds[self._issued]
        behind = max(s.behind for s in steps)
        return all(
            step.round > t - IN_FLIGHT and (step.kind not in RECEIVING or step.round > behind)
            for step, _ in self._open
        )

    def may_post(self) -> bool:
        return self._posted < min(self._issued + self._ahead, len(self._rounds))

    def post(self) -> list[tuple[Step, Message]]:
        """Post the receives of the next round."""
        self._posted += 1
        return self._note(self._posted - 1, receive=True)

    def issue(self) -> list[tuple[Step, Message]]:
        """Post what the next round sends, and what it receives unless that has been posted."""
        received = self.post() if self._posted == self._issued else []
        self._issued += 1
        return [*received, *self._note(self._issued - 1, receive=False)]

    def _note(self, index: int, *, receive: bool) -> list[tuple[Step, Message]]:
        steps = [s for s in self._rounds[index][1] if s.kind is not Kind.KEEP_GRAD]
        noted = [(s, self._find(s)) for s in steps if (s.kind in RECEIVING) == receive]
        self._open += noted
        return noted


def run(
    steps: Sequence[Sequence[Step]],
    seed: int,
    read: Callable[[int, Step], Any],
    put: Callable[[int, Step, Any], None],
) -> None:
    """Let all ranks execute their steps, in one of the orders that are possible.

    Args:
        steps: of each rank.
        seed: of the order.
        read: returns a copy of what a rank's step sends.
        put: takes what a rank's step has received.
    """
    chance = random.Random(seed)
    ahead = chance.choice((0, IN_FLIGHT))
    messages: dict[tuple[int, int, int], Message] = {}

    def find(index: int, step: Step) -> Message:
        pair = (step.peer, index) if step.kind in RECEIVING else (index, step.peer)
        return messages.setdefault((*pair, step.tag), Message())

    def start(index: int, act: Callable[[], list[tuple[Step, Message]]]) -> None:
        for step, message in act():
            if step.kind in RECEIVING:
                message.put = partial(put, index, step)
            else:
                message.payload = read(index, step)

    def arrive(message: Message) -> None:
        message.arrived = True
        assert message.put
        message.put(message.payload)

    ranks = [Rank(own, ahead, partial(find, index)) for index, own in enumerate(steps)]
    while True:
        moves: list[Callable[[], None]] = []
        for index, rank in enumerate(ranks):
            if rank.may_issue():
                moves.append(partial(start, index, rank.issue))
            if rank.may_post():
                moves.append(partial(start, index, rank.post))
        moves += [
            partial(arrive, m)
            for m in messages.values()
            if m.put and m.payload is not None and not m.arrived
        ]
        if not moves:
            break
        chance.choice(moves)()
    assert all(rank.is_done for rank in ranks), "ranks wait for each other"
    assert all(message.arrived for message in messages.values())


# ---- transfers -----------------------------------------------------------------------------------


def execute(
    case: Case, steps: Sequence[Sequence[Step]], seed: int, ranks: Sequence[Movement]
) -> Counter[tuple[int, int, int]]:
    """Let all ranks execute a call; return how many bytes came by rank, place and segment."""
    came: Counter[tuple[int, int, int]] = Counter()

    def read(rank: int, step: Step) -> torch.Tensor:
        if step.kind is Kind.SEND_MAIN:
            check_main(case, rank, step)
        return ranks[rank].prepare(step).clone()

    def put(rank: int, step: Step, payload: torch.Tensor) -> None:
        if step.kind is not Kind.RECEIVE and step.place >= 0:  # this rank is the home
            check_main(case, rank, step)
        memory = ranks[rank].prepare(step)
        assert len(memory) == len(payload)
        ranks[rank].arrived(step, memory.copy_(payload))
        came[rank, step.place, step.segment] += step.bytes

    run(steps, seed, read, put)
    return came


def local_row(case: Case, rank: int, rows: Sequence[Any], segment: int, index: int) -> Any:
    """Return a local expert's tensor, given its index on the rank."""
    return rows[segment][[e for e, home in enumerate(case.home) if home == rank][index]]


def check_main(case: Case, rank: int, step: Step) -> None:
    """The step's place is where the rank has its main of the expert."""
    assert case.home[step.expert] == rank
    assert case.home[: step.expert].count(rank) == step.place


@settings(max_examples=cases(40, 400))
@given(cases_of(), st.data(), st.integers(0, 2**32 - 1))
def test_slots_become_what_the_local_experts_are(
    case: Case, data: st.DataObject, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    ledgers = case.ledgers()
    shape = case.num_ranks, case.slots_per_rank
    every = set(range(len(case.segments)))
    held = np.full(shape, -1, np.int32)

    def random_bytes(*first: int) -> list[torch.Tensor]:
        sizes = [(*first, n) for n in case.segments]
        return [torch.from_numpy(generator.integers(0, 256, size, np.uint8)) for size in sizes]

    slots, weights = random_bytes(*shape), random_bytes(case.num_experts)
    nothing: Any = None
    for _ in range(data.draw(st.integers(1, 3))):
        plan = draw_plan(data, case, held)
        segments = sorted(data.draw(st.one_of(st.just(every), st.sets(st.sampled_from([*every])))))
        bank = data.draw(st.sampled_from((-1, 0, 0)))
        if bank < 0 or data.draw(st.integers(0, 3)) == 0:  # other weights
            weights = random_bytes(case.num_experts)
            for ledger in ledgers:
                ledger.invalidate(0)
        options = {"bank": bank, "version": ledgers[0].version(0), "mode": data.draw(MODES)}
        steps = submit(ledgers, make_call(case, plan, segments=segments, **options))
        check_ends(steps)
        expected = [slot.clone() for slot in slots]
        for segment in segments:
            expected[segment][plan >= 0] = weights[segment][plan[plan >= 0]]
        ready: list[int] = []
        ranks = [
            Transfer(
                own,
                nothing,
                0,
                [slot[rank] for slot in slots],
                partial(local_row, case, rank, weights),
                partial(ready.append, rank),
            )
            for rank, own in enumerate(steps)
        ]
        came = execute(case, steps, seed, ranks)
        assert all(
            torch.equal(found, wanted) for found, wanted in zip(slots, expected, strict=True)
        )
        assert not any(rank.missing for rank in ranks)
        assert len(ready) == len({(rank, slot) for rank, slot, _ in came})
        assert came == {
            (rank, slot, segment): case.segments[segment]
            for rank, slot in np.argwhere(ledgers[0].slots_to_fill()).tolist()
            for segment in segments
        }
        held = np.where(plan >= 0, plan, held).astype(np.int32)
        for rank, row in enumerate(held):  # an expert may not be twice on a rank
            held[rank, (plan[rank] < 0) & np.isin(row, plan[rank])] = -1
        if bank == 0:
            np.testing.assert_array_equal(ledgers[-1].residents(0)[plan >= 0], plan[plan >= 0])


# ---- reductions ----------------------------------------------------------------------------------


def random_grads(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-12, 12, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator), scale).to(dtype)


@settings(max_examples=cases(40, 400))
@given(cases_of(gradients=True), st.data(), st.integers(0, 2**32 - 1))
def test_main_grads_get_the_sum_in_the_order_of_ranks(
    case: Case, data: st.DataObject, seed: int
) -> None:
    shape = case.num_ranks, case.slots_per_rank
    plan = draw_plan(data, case, np.full(shape, -1, np.int32))
    quota = None
    if data.draw(st.booleans()):
        quota = np.random.default_rng(seed).integers(0, 3, shape).astype(np.int32)
    lengths = [n // d.itemsize for n, d in zip(case.segments, case.dtypes, strict=True)]
    slots = [
        random_grads((*shape, n), dtype, seed + i)
        for i, (n, dtype) in enumerate(zip(lengths, case.dtypes, strict=True))
    ]
    main_types = [data.draw(st.sampled_from((torch.float32, torch.bfloat16))) for _ in lengths]
    main_grads = [
        random_grads((case.num_experts, n), dtype, seed + 100 + i)
        for i, (n, dtype) in enumerate(zip(lengths, main_types, strict=True))
    ]
    with_tokens = plan if quota is None else np.where(quota > 0, plan, -1).astype(np.int32)
    expected = [main.clone() for main in main_grads]
    for expert, replicas in case.replicas(with_tokens).items():
        for i, main in enumerate(main_grads):
            expected[i][expert] = reduced(main[expert], [slots[i][at] for at in replicas])
    mode = data.draw(st.sampled_from((None, _core.Mode.PULL, _core.Mode.DIRECT)))
    ledgers = case.ledgers()
    steps = submit(ledgers, make_call(case, plan, quota=quota, mode=mode))
    check_ends(steps)
    np.testing.assert_array_equal(ledgers[0].slots_to_fill(), with_tokens >= 0)

    nothing: Any = None
    ranks = [
        Reduction(
            own,
            nothing,
            0,
            [slot[rank] for slot in slots],
            partial(local_row, case, rank, main_grads),
        )
        for rank, own in enumerate(steps)
    ]
    execute(case, steps, seed, ranks)
    assert not any(rank._parts for rank in ranks), "nothing is summed in vain"
    for found, wanted in zip(main_grads, expected, strict=True):
        assert same_bits(found, wanted)


# ---- digests -------------------------------------------------------------------------------------

GROUP = Case(
    num_ranks=4,
    slots_per_rank=2,
    home=[0, 0, 1, 1, 2, 2, 3, 3],
    segments=[200_000, 100],
    tile_bytes=32 << 10,
    cost=(700_000, 0, 1, 1, 100),
    domain=[0, 0, 0, 0],
    dtypes=[torch.float32],
)
SPREAD = np.array([[-1, -1], [0, -1], [0, -1], [0, -1]], np.int32)
LESS = np.array([[-1, -1], [0, -1], [0, -1], [-1, -1]], np.int32)


Wanted = Callable[[], Given] | str


def transfer(plan: NDArray[np.int32] = SPREAD, **options: Any) -> Callable[[], Given]:
    usual = {"segments": (0, 1), "mode": _core.Mode.PUSH, "bank": 0}
    return partial(make_call, GROUP, plan, **(usual | options))


def reduction(plan: NDArray[np.int32] = SPREAD, **options: Any) -> Callable[[], Given]:
    return partial(make_call, GROUP, plan, **({"mode": _core.Mode.PULL} | options))


def digests(calls: Sequence[Wanted]) -> tuple[list[int], list[int]]:
    """The epochs and digests of a rank's calls; "gather" and "invalidate" are calls too."""
    (ledger, *_) = GROUP.ledgers()
    epochs, found = [], []
    for call in calls:
        if call == "invalidate":
            ledger.invalidate(0)
            continue
        if isinstance(call, str):
            epoch, digest = ledger.gather()
        else:
            made = call()
            epoch, digest = ledger.transfer(made.call)[:2]
        epochs.append(epoch)
        found.append(digest)
    return epochs, found


USUAL = (transfer(), reduction(), "gather", transfer(LESS), "gather")
QUOTA = np.array([[0, 0], [3, 0], [4, 0], [5, 0]], np.int32)


@pytest.mark.parametrize(
    ("calls", "same"),
    [
        pytest.param((transfer(LESS), *USUAL[1:]), 0, id="plan"),
        pytest.param((transfer(quota=QUOTA), *USUAL[1:]), 0, id="quota"),
        pytest.param((transfer(mode=_core.Mode.DIRECT), *USUAL[1:]), 0, id="mode"),
        pytest.param((transfer(segments=(0,)), *USUAL[1:]), 0, id="segments"),
        pytest.param((transfer(tag=1), *USUAL[1:]), 0, id="tag"),
        pytest.param((transfer(bank=1), *USUAL[1:]), 0, id="bank"),
        pytest.param((transfer(version=1), *USUAL[1:]), 0, id="version"),
        pytest.param((USUAL[0], reduction(LESS), *USUAL[2:]), 1, id="sums of another plan"),
        pytest.param((USUAL[0], reduction(mode=_core.Mode.DIRECT), *USUAL[2:]), 1, id="sums' mode"),
        pytest.param((USUAL[0], reduction(tag=1), *USUAL[2:]), 1, id="sums' tag"),
        pytest.param((USUAL[0], reduction(zero=False), *USUAL[2:]), 1, id="zero"),
        pytest.param((USUAL[1], USUAL[0], *USUAL[2:]), 0, id="order"),
        pytest.param((*USUAL[:2], USUAL[3], *USUAL[2:4]), 2, id="later order"),
        pytest.param((*USUAL[:2], "invalidate", *USUAL[2:]), 3, id="residents"),
    ],
)
def test_calls_that_differ_once_differ_for_ever(calls: Sequence[Wanted], same: int) -> None:
    usual, other = digests(USUAL), digests(calls)
    assert usual[0] == other[0] == [1, 2, 3, 4, 5]
    assert usual[1][:same] == other[1][:same]
    assert not set(usual[1][same:]) & set(other[1][same:])


def test_equal_calls_have_equal_digests_on_all_ranks() -> None:
    ledgers = GROUP.ledgers()
    for call in (transfer(), reduction(), transfer(LESS, bank=-1), reduction(LESS)):
        submit(ledgers, call())
        assert len({ledger.gather() for ledger in ledgers}) == 1


def test_pulls_are_pushed() -> None:
    assert digests([transfer(mode=_core.Mode.PULL)]) == digests([transfer()])


def test_a_rejected_call_has_a_number_alone() -> None:
    usual, other, *_ = GROUP.ledgers()
    _, digest = usual.gather()
    assert other.reject() == 1
    assert other.gather() == (2, digest)
