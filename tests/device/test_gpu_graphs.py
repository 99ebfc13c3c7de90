"""The critical path in CUDA graphs: replays with fresh ids and weights, every byte and integer.

Each test runs the kernels on the CPU too, with few replays: no GPU is needed to know that the test
itself is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import MAKERS, Graphs, on_each, on_forks
from loopback_ranks import Ranks, at_odd_offsets, critical_path, hold, put, put_plan
from ranks import raised, slot_memory, wrong_bytes

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.bench.payload import SENTINEL
from ultraep_comm.engines.cuda import device
from ultraep_comm.group.group import session_of

SEGMENTS = {"w13": 50_003, "w2": 16_384, "scale": 37, "bias": 1}
KINDS = [
    *(
        pytest.param("cuda", made, forks, marks=pytest.mark.gpu, id=f"cuda-{made}-{forks}")
        for made in ("torch", "core")
        for forks in ("forked", "one stream")
    ),
    *(
        pytest.param("emulated", "emulated", forks, id=f"emulated-{forks}")
        for forks in ("forked", "one stream")
    ),
]
Call = Callable[[int], Any]

every_kind = pytest.mark.parametrize(("streams", "made", "forks"), KINDS, indirect=["streams"])
any_kind = pytest.mark.parametrize(
    ("streams", "made", "forks"), [KINDS[0], KINDS[2], KINDS[4]], indirect=["streams"]
)


class Layer(Ranks):
    """Ranks with ids in fixed memory, and the calls of the critical path."""

    def __init__(
        self, engine: str, made: str, forks: str, num_ranks: int, num_experts: int, **options: Any
    ) -> None:
        super().__init__(engine, num_ranks, SEGMENTS, num_experts=num_experts, **options)
        self.num_ranks = num_ranks
        self.graphs: Graphs = MAKERS[made]()
        self._forks = (
            [self.graphs.new_stream()[0] for _ in self.groups] if forks == "forked" else None
        )
        tokens = (700, 4) if engine == "cuda" else (40, 2)
        self.ids = [self.put(torch.zeros(tokens, dtype=torch.int64)) for _ in self.groups]
        self.draw = torch.Generator().manual_seed(num_ranks)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return put(self.groups[0], tensor)

    def put_plan(self, plan: uec.Plan) -> uec.Plan:
        return put_plan(self.groups[0], plan)

    def bind(self, weights: list[Any]) -> list[Any]:
        pairs = zip(self.groups, weights, strict=True)
        return [group.bind(own) for group, own in pairs]

    def each(self, call: Call) -> list[Any]:
        """Call each rank in a thread, on the current stream."""
        return on_each(self.graphs, self.num_ranks, call)

    def capture(self, call: Call) -> tuple[list[Any], Callable[[], None]]:
        """Capture every rank's calls, each on its own stream or all on one."""
        if self._forks is None:
            return self.graphs.capture(lambda: self.each(call))
        forks = self._forks
        return self.graphs.capture(lambda: on_forks(self.graphs, forks, call))

    def route(self) -> None:
        """Draw new ids, mostly of a few hot experts; sometimes a rank has none."""
        self.synchronize()
        hot = torch.randint(self.num_experts, (3,), generator=self.draw)
        for ids in self.ids:
            drawn = torch.randint(-1, self.num_experts, ids.shape, generator=self.draw)
            chosen = torch.rand(ids.shape, generator=self.draw)
            drawn = torch.where(chosen < 0.6, hot[(chosen * 5).long() % 3], drawn)
            empty = torch.rand((), generator=self.draw) < 0.1
            ids.copy_(torch.full_like(drawn, -1) if empty else drawn)

    def path(self, weights: list[Any], **options: Any) -> Call:
        """Return the calls of the critical path on one rank."""
        return lambda r: critical_path(self.groups[r], self.ids[r], weights[r], **options)

    def check(self, found: list[Any]) -> int:
        """Compare every byte and integer with the host's; return the number of replicas."""
        self.finish()
        return self.check_path([own.cpu().clone() for own in self.ids], found)

    def run(self, weights: list[Any], path: Call) -> list[Any]:
        """Change ids and weights, make every rank's calls, and compare."""
        self.route()
        self.fill(weights)
        found = self.each(path)
        self.check(found)
        return found

    def replay(self, weights: list[Any], found: list[Any], replay: Callable[[], None]) -> int:
        """Change ids and weights, replay, and compare."""
        self.route()
        self.fill(weights)
        replay()
        return self.check(found)

    def eager_epochs(self) -> set[int]:
        return {group.health().epoch for group in self.groups}


# ---- replays -------------------------------------------------------------------------------------


@every_kind
@pytest.mark.timeout(900)
def test_a_thousand_replays(streams: str, made: str, forks: str) -> None:
    num_ranks, num_experts, replays = (4, 16, 1000) if streams == "cuda" else (3, 7, 4)
    with Layer(streams, made, forks, num_ranks, num_experts) as layer:
        weights = layer.stacked()
        bound = layer.bind(weights)
        layer.run(weights, layer.path(bound))  # load lazily loaded kernels before the capture
        found, replay = layer.capture(layer.path(bound))
        assert layer.eager_epochs() == {2}  # gather_load and replicate_experts
        replicas = sum(layer.replay(weights, found, replay) for _ in range(replays))
        assert replicas > replays  # plans that do something
        assert layer.eager_epochs() == {2}
        # Replays are counted on the device: an eager call may follow them.
        layer.run(weights, layer.path(weights))
        assert layer.eager_epochs() == {4}
        del replay


@every_kind
def test_a_rank_alone(streams: str, made: str, forks: str) -> None:
    """Its calls are on the caller's stream itself, but for those in the background."""
    replays = 50 if streams == "cuda" else 3
    with Layer(streams, made, forks, 1, 5) as layer:
        weights = layer.stacked()
        bound = layer.bind(weights)

        def in_place(rank: int) -> tuple[torch.Tensor, uec.Plan, torch.Tensor]:
            group, ids = layer.groups[rank], layer.ids[rank]
            plan = uec.gather_and_plan(ids, group=group)
            uec.replicate_experts(bound[rank], plan, group=group)
            assert plan.load is not None
            return plan.load, plan, uec.reroute(ids, plan, group=group)

        for path in (in_place, layer.path(bound)):
            layer.run(weights, path)
            found, replay = layer.capture(path)
            for _ in range(replays):
                layer.replay(weights, found, replay)
            layer.check(layer.each(path))
            del replay


@pytest.mark.parametrize("streams", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_updates_of_bound_weights_do_not_wait(streams: str) -> None:
    with Layer(streams, "torch", "one stream", 2, 5) as layer:
        homes = [layer.stacked(), layer.stacked()]
        bound, seen = layer.groups[0].bind(homes[0][0]), []
        assert bound.table is not None
        layer.finish()
        busy = torch.cuda.Event()
        torch.cuda._sleep(1 << 31)  # about a second
        busy.record()
        for turn in range(8):
            bound.update(homes[turn % 2][0])
            seen.append(bound.table.clone())
        assert not busy.query()
        layer.finish()
        assert not torch.equal(seen[0], seen[1])
        for turn, table in enumerate(seen):
            assert torch.equal(table, seen[turn % 2])


@any_kind
@pytest.mark.parametrize("mode", ["push", "pull", "direct", "auto"])
def test_every_mode(streams: str, made: str, forks: str, mode: str) -> None:
    num_ranks, replays = (8, 50) if streams == "cuda" else (4, 2)
    with Layer(streams, made, forks, num_ranks, 2 * num_ranks + 1) as layer:
        weights = layer.shared()
        bound = layer.bind(weights)
        path = layer.path(bound, mode=mode, at_once=mode in ("push", "auto"))
        layer.run(weights, path)
        found, replay = layer.capture(path)
        assert sum(layer.replay(weights, found, replay) for _ in range(replays)) > 0
        del replay


@every_kind
def test_weights_that_move(streams: str, made: str, forks: str) -> None:
    replays = 60 if streams == "cuda" else 4
    with Layer(streams, made, forks, 4, 9) as layer:
        homes = [layer.stacked(), layer.shared(), [at_odd_offsets(g, 3, 5) for g in layer.groups]]

        def move(turn: int) -> Any:
            weights = homes[turn % len(homes)]
            layer.synchronize()
            for own, moved in zip(bound, weights, strict=True):
                own.update(moved)
            return weights

        bound = layer.bind(homes[0])
        tables = [own.table for own in bound]
        weights: Any = move(0)
        layer.run(weights, layer.path(bound))
        found, replay = layer.capture(layer.path(bound))
        for turn in range(replays):
            layer.replay(move(turn), found, replay)
        plan = layer.plans(range(1))[-1]
        layer.fill(move(1))
        layer.call(bound, plan)  # which takes the new addresses from the CPU
        layer.finish()
        assert layer.wrong(plan) == [0] * 4
        assert all(own.table is table for own, table in zip(bound, tables, strict=True))
        del replay


@every_kind
def test_graphs_and_eager_calls_take_turns(streams: str, made: str, forks: str) -> None:
    """Two graphs, calls with plans on the device and on the host, in any order."""
    rounds = 100 if streams == "cuda" else 6
    with Layer(streams, made, forks, 4, 11) as layer:
        weights = layer.stacked()
        bound = layer.bind(weights)
        held = layer.put_plan(layer.plan([[-1, -1]] * 4))

        def transfer(rank: int) -> None:
            uec.replicate_experts(bound[rank], held, group=layer.groups[rank], mode="push")

        layer.run(weights, layer.path(bound))
        layer.each(transfer)
        layer.finish()
        found, replay = layer.capture(layer.path(bound))
        _, replay_transfer = layer.capture(transfer)
        plans = layer.plans(range(4))
        eager, order = 3, [0, 1, 2, 1, 3, 0, 0, 3, 1, 2, 2]
        for turn in range(rounds):
            what, plan = order[turn % len(order)], plans[turn % len(plans)]
            if what == 0:
                layer.replay(weights, found, replay)
                continue
            if what == 3:
                layer.run(weights, layer.path(weights))
                eager += 2
                continue
            layer.route()
            layer.fill(weights)
            if what == 1:
                layer.synchronize()
                held.slot_expert.copy_(plan.slot_expert)
                replay_transfer()
            else:
                layer.call(weights, plan, blocking=turn % 2 == 0)
                eager += 1
            layer.finish()
            assert layer.wrong(plan) == [0] * 4
        assert layer.eager_epochs() == {eager}
        del replay, replay_transfer


@any_kind
def test_replays_submitted_ahead(streams: str, made: str, forks: str) -> None:
    """The host is far ahead of the stream: what replays read changes in the stream's order."""
    with Layer(streams, made, forks, 4, 9) as layer:
        weights = layer.stacked()
        bound = layer.bind(weights)
        plans = layer.plans(range(5))
        rows = [layer.put(plan.slot_expert) for plan in plans]
        held = layer.put_plan(plans[0])

        def transfer(rank: int) -> None:
            uec.replicate_experts(bound[rank], held, group=layer.groups[rank])

        layer.fill(weights)
        layer.each(transfer)
        layer.finish()
        _, replay = layer.capture(transfer)
        layer.fill(weights)
        layer.finish()
        seen: list[list[torch.Tensor]] = []
        held_slots = [slot_memory(group) for group in layer.groups]
        empty = [torch.full_like(slots, SENTINEL) for slots in held_slots]
        results = [[torch.empty_like(slots) for slots in held_slots] for _ in plans]
        hold(streams)
        for row, result in zip(rows, results, strict=True):
            for slots, blank in zip(held_slots, empty, strict=True):
                copy(streams, slots, blank)
            copy(streams, held.slot_expert, row)
            replay()
            for slots, own in zip(held_slots, result, strict=True):
                copy(streams, own, slots)
            seen.append(result)
        layer.finish()
        for plan, result in zip(plans, seen, strict=True):
            for group, slots in zip(layer.groups, result, strict=True):
                assert not wrong_bytes(group, plan, layer.epoch, found=slots)
        del replay


def copy(streams: str, to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in the order of the current stream."""
    if streams == "cuda":
        to.copy_(source)
    else:
        found: Any = device.find_device()
        found.copy(to, source)


# ---- what cannot be captured ---------------------------------------------------------------------


@every_kind
def test_errors_in_a_capture_are_typed_and_leave_the_group_usable(
    streams: str, made: str, forks: str
) -> None:
    with Layer(streams, made, forks, 2, 5, slots=1) as layer:
        weights = layer.stacked()
        bound = layer.bind(weights)
        found = layer.run(weights, layer.path(bound))
        on_host = uec.plan_replicas(found[0][0].cpu().clone(), group=layer.groups[0])
        # More ids than the working memory holds, and not those of the load.
        many = [layer.put(torch.zeros(70_000, 1, dtype=torch.int64)) for _ in layer.groups]
        rows = layer.put(torch.ones(70_000, 5, dtype=torch.bool))

        def replicate(own: list[Any], plan: uec.Plan, **options: Any) -> Call:
            return lambda r: uec.replicate_experts(
                own[r], plan, group=layer.groups[r], async_op=True, **options
            )

        def reroute(ids: list[torch.Tensor], plan: uec.Plan) -> Call:
            return lambda r: uec.reroute(ids[r], plan, group=layer.groups[r])

        plan = found[0][1]
        cpu_ids = [torch.zeros(3, 2, dtype=torch.int64) for _ in layer.groups]
        cases: list[tuple[Call, type[errors.UltraEPError], str]] = [
            (
                lambda r: uec.gather_load(cpu_ids[r], group=layer.groups[r]),
                errors.UnsupportedError,
                "topk_ids is on the CPU",
            ),
            (replicate(bound, on_host), errors.UnsupportedError, "plan is on the CPU"),
            (replicate(weights, plan), errors.UnsupportedError, "addresses of the weights"),
            (replicate(layer.bind(weights), plan, mode="x"), errors.InvalidArgumentError, "'x'"),
            (reroute(layer.ids, on_host), errors.UnsupportedError, "topk_ids has to be copied"),
            (reroute(cpu_ids, plan), errors.UnsupportedError, "the plan has to be copied"),
            (
                reroute(many, plan),
                errors.UnsupportedError,
                "call reroute(topk_ids, plan, group=group) with 70000 ids once before",
            ),
            (
                lambda r: uec.reroute_map(rows, None, plan, group=layer.groups[r]),
                errors.UnsupportedError,
                "call reroute_map(routing_map, probs, plan, group=group) with 70000 tokens once",
            ),
            (lambda r: bound[r].update(weights[r]), errors.UnsupportedError, "before the replay"),
        ]
        for call, kind, text in cases:
            outcomes, _ = layer.capture(lambda r, call=call: raised(lambda: call(r)))
            for error in outcomes:
                assert isinstance(error, kind), (text, error)
                assert text in str(error)
        layer.finish()
        found, replay = layer.capture(layer.path(bound))
        for _ in range(3):
            layer.replay(weights, found, replay)
        if streams == "cuda":  # the emulation has no room for so many threads
            # Once such a call was made outside, the capture has the memory for it.
            layer.each(reroute(many, plan))
            layer.finish()
            for group in layer.groups:
                assert session_of(group).engine is not None
                assert isinstance(
                    raised(session_of(group).engine.raise_fault), errors.InvalidLoadError
                )
            layer.capture(reroute(many, plan))
            layer.replay(weights, found, replay)  # with the memory that it was captured with
        del replay


# ---- replays that fail ---------------------------------------------------------------------------


@every_kind
def test_a_plan_that_is_spoiled_ends_the_group(streams: str, made: str, forks: str) -> None:
    layer = Layer(streams, made, forks, 3, 6)
    weights = layer.stacked()
    bound = layer.bind(weights)
    plan = layer.plan([[2, -1], [4, -1], [0, -1]])
    held = layer.put_plan(plan)

    def transfer(rank: int) -> None:
        uec.replicate_experts(bound[rank], held, group=layer.groups[rank])

    layer.fill(weights)
    done = layer.call(weights, plan)
    layer.finish()
    assert layer.wrong(plan) == [0] * 3
    layer.each(transfer)
    _, replay = layer.capture(transfer)
    layer.fill(weights)
    replay()
    layer.finish()
    assert layer.wrong(plan) == [0] * 3
    held.slot_expert[1, 0] = 3  # at home there
    replay()
    layer.finish()  # every rank sees the fault itself, and fails
    layer.fill(weights)
    replay()
    layer.finish()
    assert layer.wrong(layer.plan([[-1, -1]] * 3)) == [0] * 3  # replays move nothing any more
    for rank, group in enumerate(layer.groups):
        with pytest.raises(errors.GroupClosedError, match="failed in call 3") as closed:
            transfer(rank)
        assert isinstance(
            closed.value.__cause__,
            errors.InvalidPlanError | errors.PeerRejectedError | errors.TransferAbortedError,
        )
        assert raised(group.close) is None  # it was raised before
    for work in done:
        work.synchronize()  # what was finished before stays finished
    assert isinstance(session_of(layer.groups[0]).first_error, errors.InvalidPlanError)
    assert "rank 1 holds expert 3" in str(session_of(layer.groups[0]).first_error)
    del replay
    with Ranks(streams, 3, SEGMENTS, num_experts=6) as fresh:  # the device still works
        fresh.replicate(fresh.stacked(), plan)


@every_kind
def test_replays_behind_a_close_move_nothing(streams: str, made: str, forks: str) -> None:
    layer = Layer(streams, made, forks, 2, 5)
    weights = layer.stacked()
    bound = layer.bind(weights)
    layer.run(weights, layer.path(bound))
    found, replay = layer.capture(layer.path(bound))
    assert layer.replay(weights, found, replay) > 0
    for group in layer.groups:
        group.close()
    layer.fill(weights)
    replay()
    layer.finish()
    assert layer.wrong(layer.plan([[-1, -1]] * 2)) == [0] * 2
    assert not any(load.any() for load, *_ in found)
    del replay


@every_kind
def test_bad_ids_end_the_group(streams: str, made: str, forks: str) -> None:
    layer = Layer(streams, made, forks, 2, 4)
    weights = layer.stacked()
    path = layer.path(layer.bind(weights), at_once=forks == "forked")
    layer.run(weights, path)
    found, replay = layer.capture(path)
    layer.replay(weights, found, replay)
    layer.route()
    layer.fill(weights)
    layer.ids[1][2, 1] = 4
    replay()
    layer.finish()
    assert layer.wrong(layer.plan([[-1, -1]] * 2)) == [0] * 2
    for load, plan, _ in found:
        assert not load.any()
        assert plan.num_replicas == 0
        assert not plan.home_quota.any()
    causes = []
    for rank in range(2):
        with pytest.raises(errors.GroupClosedError) as closed:
            uec.gather_load(layer.ids[rank], group=layer.groups[rank])
        causes.append(closed.value.__cause__)
    assert isinstance(causes[1], errors.InvalidLoadError)
    assert "id 4 at position" in str(causes[1])
    assert isinstance(causes[0], errors.PeerRejectedError | errors.TransferAbortedError)
    for group in layer.groups:
        raised(group.close)
    del replay
