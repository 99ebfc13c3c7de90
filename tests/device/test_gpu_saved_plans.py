"""Saved plans in CUDA graphs: replays that save, reduce and release, and those in a wrong order.

Each test runs the kernels on the CPU too: no GPU is needed to know that the test itself is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from graphs import MAKERS, on_each
from loopback_ranks import put_plan
from rank_grads import RankGrads
from ranks import raised, random_plan

import ultraep_comm as uec
from ultraep_comm import Segment, errors
from ultraep_comm.engines.cuda import device
from ultraep_comm.group.group import session_of

EXPERT = {"w": Segment((33, 47), torch.float32), "b": Segment((3,), torch.float32)}
LAYER, MICROBATCH = 3, 7
Replay = Callable[[], None]
NewGroups = Callable[..., list[uec.Group]]


class Passes:
    """Ranks with a plan in fixed memory, and graphs of their forward and backward passes."""

    def __init__(self, streams: str, new_groups: NewGroups, expert: Any = EXPERT) -> None:
        self._device = device.find_device()
        options = {"grads": torch.float32, "engine": "cuda", "num_sms": 2, "timeout": 30.0}
        self.groups = new_groups(3, num_experts=5, slots_per_rank=2, expert=expert, **options)
        self.graphs = MAKERS["torch" if streams == "cuda" else "emulated"]()
        self.grads = RankGrads(self.groups, dict.fromkeys(expert, torch.float32))
        pairs = zip(self.groups, self.grads.main_grads, strict=True)
        self.bound = [group.bind_grads(own) for group, own in pairs]
        self.given = put_plan(self.groups[0], self.plan(0))
        # Load lazily loaded kernels before captures.
        self.each(lambda rank: self.groups[rank].save(self.given).release())
        self.each(lambda rank: self.reduce(rank, self.given))
        self._device.synchronize()

    def plan(self, seed: int) -> uec.Plan:
        home = self.groups[0].topology.home.tolist()
        return random_plan(seed, len(self.groups), 5, 2, home)

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        return on_each(self.graphs, len(self.groups), call)

    def capture(self, call: Callable[[int], Any]) -> tuple[list[Any], Replay]:
        return self.graphs.capture(lambda: self.each(call))

    def reduce(self, rank: int, plan: uec.Plan | uec.PlanHandle) -> None:
        uec.reduce_expert_grads(self.bound[rank], plan, group=self.groups[rank])

    def save(self, rank: int) -> uec.PlanHandle:
        return self.groups[rank].save(self.given, layer=LAYER, microbatch=MICROBATCH)

    def capture_save(self) -> tuple[list[uec.PlanHandle], Replay]:
        return self.capture(self.save)

    def capture_passes(self) -> tuple[list[uec.PlanHandle], Replay, Replay]:
        """Return handles, and how to replay the forward and the backward pass."""
        handles, forward = self.capture_save()
        _, backward = self.capture(lambda rank: self.reduce(rank, handles[rank]))
        return handles, forward, backward

    def run(self, replay: Replay, seed: int | None = None) -> None:
        """Replay, with the plan of ``seed`` if given, and overwrite the plan afterwards."""
        if seed is not None:
            self.given.slot_expert.copy_(self.plan(seed).slot_expert)
        replay()
        self._device.synchronize()
        self.given.slot_expert.fill_(-1)

    def take_turns(self, forward: Replay, backward: Replay, seeds: Iterable[int]) -> None:
        """Replay both passes for each seed, and check every sum."""
        for seed in seeds:
            self.grads.fill(seed)
            self.run(forward, seed)
            self.run(backward)
            self.grads.check(self.plan(seed))
        self.assert_no_fault()

    def assert_no_fault(self) -> None:
        for group in self.groups:
            group.assert_idle()

    def assert_refused(self, handles: list[uec.PlanHandle]) -> None:
        """The next call on each rank names the refused save, once."""
        for group, handle in zip(self.groups, handles, strict=True):
            self.is_named(raised(group.assert_idle), group.rank, handle)
        self.assert_no_fault()

    @staticmethod
    def is_named(error: Exception, rank: int, handle: uec.PlanHandle) -> None:
        assert isinstance(error, errors.PlanHandleError), error
        assert (error.rank, error.layer, error.microbatch) == (rank, LAYER, MICROBATCH)
        assert error.generation == handle.generation
        text = f"rank {rank}: .* of layer 3, microbatch 7 .generation {handle.generation}."
        assert re.match(text, str(error)), error
        assert "Replay the graph that reduces before this one" in str(error)


@pytest.fixture
def passes(streams: str, new_groups: NewGroups) -> Passes:
    return Passes(streams, new_groups)


def test_passes_take_turns(streams: str, passes: Passes) -> None:
    _, forward, backward = passes.capture_passes()
    passes.take_turns(forward, backward, range(50 if streams == "cuda" else 4))


def test_a_plan_in_use_is_kept(passes: Passes) -> None:
    handles, forward, backward = passes.capture_passes()
    for seed in (1, 4):  # the fault is raised, and the group goes on
        passes.grads.fill(seed)
        passes.run(forward, seed)
        passes.assert_no_fault()
        passes.run(forward, seed + 1)
        passes.run(forward, seed + 2)
        passes.run(backward)
        passes.grads.check(passes.plan(seed))
        passes.assert_refused(handles)


def test_one_graph_for_each_microbatch_in_flight(passes: Passes) -> None:
    both = [passes.capture_passes()[1:] for _ in range(2)]
    for turn in range(3):
        for i, (forward, _) in enumerate(both):
            passes.run(forward, 10 * turn + i)
        for i, (_, backward) in enumerate(both):
            passes.grads.fill(turn)
            passes.run(backward)
            passes.grads.check(passes.plan(10 * turn + i))
    passes.assert_no_fault()


def test_the_next_collective_call_ends_the_group(passes: Passes) -> None:
    handles, forward, _ = passes.capture_passes()
    passes.run(forward, 1)
    passes.run(forward, 2)
    for rank, handle in enumerate(handles):  # each rank has refused its own save
        passes.is_named(raised(lambda r=rank: passes.reduce(r, passes.plan(3))), rank, handle)
    for rank in range(len(handles)):
        with pytest.raises(errors.GroupClosedError) as caught:
            passes.reduce(rank, passes.plan(3))
        assert isinstance(caught.value.__cause__, errors.PlanHandleError)


def test_a_captured_release_ends_the_use_of_each_replay(streams: str, passes: Passes) -> None:
    def evaluate(rank: int) -> uec.PlanHandle:
        with passes.save(rank) as handle:
            return handle

    handles, replay = passes.capture(evaluate)
    for seed in range(4):
        passes.run(replay, seed)
        for handle in handles:
            assert torch.equal(handle.stored.slot_expert.cpu(), passes.plan(seed).slot_expert)
    passes.assert_no_fault()


def test_a_release_in_a_capture_of_its_own(passes: Passes) -> None:
    handles, forward = passes.capture_save()
    _, drop = passes.capture(lambda rank: handles[rank].release())
    passes.run(forward, 1)
    passes.run(drop)
    passes.run(forward, 2)
    passes.assert_no_fault()
    passes.run(forward, 3)
    passes.assert_refused(handles)


def test_a_release_behind_a_reduction_does_not_go_first(passes: Passes) -> None:
    """The reduction clears the mark itself; a captured release would clear it too early."""
    handles, forward = passes.capture_save()

    def reduce(rank: int) -> uec.Work:
        own, group = passes.bound[rank], passes.groups[rank]
        work = uec.reduce_expert_grads(own, handles[rank], group=group, async_op=True)
        assert work is not None
        stages: Any = session_of(group).engine
        launched = stages._stages.counts
        handles[rank].release()
        assert stages._stages.counts == launched
        work.wait()
        return work

    _, backward = passes.capture(reduce)
    passes.take_turns(forward, backward, range(2))


def test_a_mark_that_is_given_up_is_free_for_another_graph(passes: Passes) -> None:
    handles, forward = passes.capture_save()
    passes.run(forward, 1)
    marks = [handle.mark.data_ptr() for handle in handles]
    for handle in handles:  # the graph is gone, its last plan was never reduced
        handle.release()
    passes.each(lambda rank: passes.reduce(rank, passes.plan(0)))
    passes._device.synchronize()
    again, forward, backward = passes.capture_passes()
    assert [handle.mark.data_ptr() for handle in again] == marks
    passes.take_turns(forward, backward, (2, 3))
    passes.run(forward, 4)
    passes.run(forward, 5)
    passes.assert_refused(again)


@pytest.mark.parametrize("num_segments", [2, 33])  # 33: the plan goes by way of the host
def test_an_eager_reduction_ends_the_use(
    streams: str, new_groups: NewGroups, num_segments: int
) -> None:
    expert = {f"s{i}": Segment((5,), torch.float32) for i in range(num_segments)}
    passes = Passes(streams, new_groups, expert)
    handles, forward = passes.capture_save()
    passes.run(forward, 1)
    passes.grads.fill(1)
    passes.each(lambda rank: passes.reduce(rank, handles[rank]))
    passes._device.synchronize()
    passes.grads.check(passes.plan(1))
    passes.run(forward, 2)
    passes.assert_no_fault()
    passes.run(forward, 3)
    passes.assert_refused(handles)
