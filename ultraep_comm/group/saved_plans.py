"""Saved plans: several microbatches in flight, each with the plan of its forward pass."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ultraep_comm.engines.base import Engine
from ultraep_comm.errors import (
    GroupBusyError,
    InvalidArgumentError,
    PlanHandleError,
    UnsupportedError,
)
from ultraep_comm.group.names import find_group
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import as_int

if TYPE_CHECKING:
    import ultraep_comm as uec


ALIGNMENT = 4  # in int32, of an entry's fields: the 16 bytes that compilers assume of tensors
Entry = Mapping[str, torch.Tensor]  # memory on the device for the fields of one plan
LAYERS, MICROBATCHES = 1 << 31, 1 << 32  # limits of the fields of a tag
MAX_NAMED = 4  # live handles that an error lists


# Why a handle has ended, and what to do instead.
_CONSUMED = (
    "was reduced already: backward twice on one handle",
    "save the plan once for each backward pass",
)
_RELEASED = "was released", "release a handle after its last use, or save the plan again"
_CLOSED = "belongs to a group that is closed", "create a new group, and save plans in that"


@dataclass(kw_only=True, eq=False, repr=False)
class PlanHandle:
    """A saved plan, for the calls of one layer and microbatch. Returned by ``group.save``.

    Pass it to those calls in place of the plan. ``reduce_expert_grads`` is its last use; without a
    reduction, end it with :meth:`release` or by leaving it as a context manager. Ranks have to use
    handles in the same order: calls with handles of different layers or microbatches do not match.

    A handle saved in a capture into a CUDA graph has the plan of the latest replay, until a replay
    of its reduction or release.

    Attributes:
        layer: as given to ``save``.
        microbatch: as given, or the number of plans of this layer that were saved before.
        generation: the number of this plan among all that the group has saved; unique.
        store: the group's.
        stored: the saved plan, also of a handle that has ended.
        entry: the store's memory that it is in; None: the plan owns its memory.
        mark: int64 ``[1]``, of a save that a CUDA graph makes in each replay: the generation, while
            the plan has not been reduced or released; 0: none. A lower generation is left from an
            earlier handle and is ignored. None: it was not captured.
        end: why it has ended; None: it is live.
    """

    layer: int
    microbatch: int
    generation: int
    store: PlanStore
    stored: Plan
    entry: Entry | None
    mark: torch.Tensor | None
    end: tuple[str, str] | None = None

    @property
    def group(self) -> uec.Group:
        """Return the group that saved the plan.

        Raises:
            GroupClosedError: the group has been garbage-collected.
        """
        return find_group(self.store.name)

    @property
    def plan(self) -> Plan:
        """Return the saved plan, in the store's memory: read-only, and valid while the handle is.

        Raises:
            PlanHandleError: the handle has ended, or its group is closed.
        """
        return self.store.plan_of(self, "PlanHandle.plan")

    @property
    def is_live(self) -> bool:
        """Return whether the handle can be used."""
        return self.end is None and not self.store.closed

    def release(self) -> None:
        """End the handle without a reduction. Does nothing if it has ended.

        A handle saved in a capture into a CUDA graph keeps its memory for the graph's replays. A
        release in a capture is part of the graph: each replay ends its use there. To free the
        memory, release the handle (again) outside of captures after the graph is destroyed.
        """
        self.store.release(self)

    @property
    def tag(self) -> int:
        """Return the tag that ranks compare; never 0, the tag of calls without a handle."""
        return _tag(self.layer, self.microbatch)

    def __enter__(self) -> PlanHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PlanHandle cannot be copied or pickled: its group counts its uses")

    def __repr__(self) -> str:
        state = "closed" if self.store.closed else "live"
        if self.end is not None:
            state = "reduced" if self.end is _CONSUMED else "released"
        return (
            f"PlanHandle(layer={self.layer}, microbatch={self.microbatch},"
            f" generation={self.generation}, group={self.store.name!r}, {state})"
        )


def _tag(layer: int, microbatch: int) -> int:
    return (layer + 1) << 32 | microbatch


class PlanStore:
    """The saved plans of a group.

    A plan on the CPU is cloned. A plan on the device is copied to device memory, in the current
    stream's order, so that a save can be captured. Outside of captures this memory is an entry of
    the store, reused when its handle has ended and all calls on the group up to then have finished.
    In a capture it comes from torch's pool of the graph, and the store keeps it until the handle is
    released outside of captures. The host does not see replays, so the device tracks them: the
    save's kernel sets a mark, and the reduction's kernel clears it after the rank's last read. A
    save that finds the mark set leaves the plan as it is and reports a fault. Marks are the
    group's memory, since a pool's may be written by other graphs between two replays.

    Args:
        name: the group's name.
        engine: copies plans, has the constant tensors that they share, and tells which calls have
            finished.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.closed = False
        self._rank = engine.rank  # for error texts
        self._engine = engine
        self._generation = 0
        self._saved: Counter[int] = Counter()  # number of plans by layer
        self._live: dict[int, tuple[int, int]] = {}  # layer and microbatch, by generation
        self._free: list[Entry] = []
        self._ended: deque[tuple[int, Entry]] = deque()  # free once the call has finished
        self._in_graphs: set[PlanHandle] = set()
        self._unused_marks = iter(range(len(engine.marks)))
        self._free_marks: list[torch.Tensor] = []

    # ---- saving ---------------------------------------------------------------------------

    def save(self, plan: Plan, layer: int, microbatch: int | None) -> PlanHandle:
        """Save a checked plan; see ``Group.save``."""
        layer = self._number(layer, "layer", LAYERS)
        if microbatch is None:
            microbatch = self._saved[layer]
        microbatch = self._number(microbatch, "microbatch", MICROBATCHES)
        shared = (self._engine.home, self._engine.domains)
        fields = {
            name: tensor
            for name, tensor in plan.tensors().items()
            if name != "slots_to_fill" and not any(tensor is constant for constant in shared)
        }
        entry = mark = None
        copies: dict[str, Any] = {}
        if not self._engine.is_on_device(plan):
            copies.update({name: tensor.clone() for name, tensor in fields.items()})
        else:
            if self._engine.is_capturing():
                memory, mark = self._make_entry(), self._take_mark()
            else:
                self._collect()
                memory = entry = self._free.pop() if self._free else self._make_entry()
            copies.update({name: memory[name] for name in fields})
        handle = PlanHandle(
            layer=layer,
            microbatch=microbatch,
            generation=self._generation + 1,
            store=self,
            stored=replace(plan, slots_to_fill=None, **copies),  # a later call may fill others
            entry=entry,
            mark=mark,
        )
        if entry is not None or mark is not None:
            try:
                self._engine.save(
                    [(copies[name], fields[name]) for name in fields],
                    mark,
                    0 if mark is None else handle.generation,
                    handle.tag,
                )
            except BaseException:
                if entry is not None:
                    self._free.append(entry)
                if mark is not None:
                    self._free_marks.append(mark)
                raise
        if mark is not None:
            self._in_graphs.add(handle)
        self._generation += 1
        self._saved[layer] += 1
        self._live[self._generation] = (layer, microbatch)
        return handle

    def tag(self, layer: int, operation: str) -> int:
        """Return the tag of a call of a layer without a handle."""
        return _tag(self._number(layer, "layer", LAYERS, operation), 0)

    def _number(self, value: int, name: str, limit: int, operation: str = "save") -> int:
        number = as_int(value, name)
        if not 0 <= number < limit:
            raise InvalidArgumentError(
                f"rank {self._rank}: {operation} was given {name}={number}; expected [0, {limit})"
            )
        return number

    def _take_mark(self) -> torch.Tensor:
        if self._free_marks:
            return self._free_marks.pop()
        i = next(self._unused_marks, None)
        if i is None:
            raise UnsupportedError(
                f"rank {self._rank}: CUDA graphs have saved {len(self._engine.marks)} plans of this"
                " group, as many as it can track; release the handles of graphs that are gone,"
                " outside of captures"
            )
        return self._engine.marks[i : i + 1]

    def _collect(self) -> None:
        """Free the entries whose calls have finished. Not in a capture, which forbids the query."""
        while self._ended and self._engine.is_completed(self._ended[0][0]):
            self._free.append(self._ended.popleft()[1])

    def _make_entry(self) -> Entry:
        t = self._engine.topology
        slots, experts = (t.num_ranks, t.slots_per_rank), (t.num_experts,)
        shapes = {
            "slot_expert": slots,
            "home": experts,
            "slot_quota": slots,
            "home_quota": experts,
            "load": (t.num_ranks, t.num_experts),
            "domains": (t.num_ranks,),
        }
        begins, total = {}, 0
        for name, shape in shapes.items():
            begins[name] = total
            total += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):  # autograd may save these tensors
            memory = self._engine.empty((total,), of_graph=True)
            return {
                name: memory[begins[name] :][: math.prod(shape)].view(shape)
                for name, shape in shapes.items()
            }

    # ---- using ----------------------------------------------------------------------------

    def plan_of(self, handle: PlanHandle, operation: str) -> Plan:
        """Return the plan of a handle.

        Raises:
            PlanHandleError: the handle has ended, or is another group's.
            UnsupportedError: the current stream is being captured, and the handle was saved outside
                of captures: replays would read the entry after it has been reused.
        """
        if handle.store is not self:
            other = f"belongs to group {handle.store.name!r}, not to group {self.name!r}"
            todo = "use a handle with the group that saved the plan"
            raise self._error(handle, operation, (other, todo))
        end = handle.end or (_CLOSED if self.closed else None)
        if end is not None:
            raise self._error(handle, operation, end)
        if handle.entry is not None and self._engine.is_capturing():
            raise UnsupportedError(
                f"rank {self._rank}: {operation} in a capture into a CUDA graph was given the"
                f" handle of layer {handle.layer}, microbatch {handle.microbatch}, which was saved"
                " outside of captures: replays would read whatever plan its memory holds then;"
                " save the plan in the capture, or pass the plan itself"
            )
        return handle.stored

    def _error(self, handle: PlanHandle, operation: str, end: tuple[str, str]) -> PlanHandleError:
        what, todo = end
        return PlanHandleError(
            f"rank {self._rank}: {operation} was given the handle of layer {handle.layer},"
            f" microbatch {handle.microbatch} (generation {handle.generation} of group"
            f" {handle.store.name!r}), which {what}; {todo}",
            rank=self._rank,
            layer=handle.layer,
            microbatch=handle.microbatch,
            generation=handle.generation,
        )

    # ---- ending ---------------------------------------------------------------------------

    def release(self, handle: PlanHandle) -> None:
        """End a plan without a reduction; see ``PlanHandle.release``."""
        self._end(handle, _RELEASED)

    def consume(self, handle: PlanHandle, *, on_device: bool) -> None:
        """End a plan whose reduction was submitted; on the device, that clears the mark."""
        self._end(handle, _CONSUMED)
        if not on_device:
            self._clear(handle)

    def _end(self, handle: PlanHandle, end: tuple[str, str]) -> None:
        """End a plan, unless it has ended, and free its memory if no graph uses it."""
        was_live = handle.end is None
        if was_live:
            handle.end = end
            self._live.pop(handle.generation, None)
        if self.closed:
            return
        if handle.entry is not None:
            # Waits for all calls so far, those of other handles included: simple, and late enough.
            self._ended.append((self._engine.epoch, handle.entry))
            handle.entry = None
        elif handle not in self._in_graphs:
            return
        elif end is _CONSUMED or self._engine.is_capturing():
            if was_live and end is _RELEASED:
                self._clear(handle)  # a reduction clears it by itself
        else:
            assert handle.mark is not None
            self._in_graphs.remove(handle)
            self._free_marks.append(handle.mark)

    def _clear(self, handle: PlanHandle) -> None:
        """Clear the mark of a captured save in the current stream's order."""
        if handle.mark is not None:
            self._engine.save([], handle.mark, 0, 0)

    def assert_idle(self) -> None:
        """Raise GroupBusyError if a handle is live or a call has not finished."""
        if error := self.busy_error("assert_idle"):
            raise error
        epoch = self._engine.epoch
        if not self._engine.is_completed(epoch):
            raise GroupBusyError(
                f"rank {self._rank}: assert_idle before call {epoch} on this group has finished;"
                " first synchronize() its Work, or the GPU that it runs on",
                rank=self._rank,
                live=[],
            )

    @property
    def num_live(self) -> int:
        """Return how many handles are live."""
        return len(self._live)

    def busy_error(self, operation: str) -> GroupBusyError | None:
        """Return the error for live handles; None: there are none."""
        live = list(self._live.values())  # in the order of saving
        if not live:
            return None
        named = "; ".join(f"layer {layer}, microbatch {mb}" for layer, mb in live[:MAX_NAMED])
        rest = f"; and {len(live) - MAX_NAMED} more" if len(live) > MAX_NAMED else ""
        return GroupBusyError(
            f"rank {self._rank}: {operation} with {len(live)} saved"
            f" {'plan' if len(live) == 1 else 'plans'} not reduced or released: {named}{rest}."
            " Call reduce_expert_grads with every handle, or handle.release()",
            rank=self._rank,
            live=live,
        )

    def close(self) -> None:
        """End all handles with their group. Plans still referenced keep their memory."""
        if self.closed:
            return
        self.closed = True
        del self._engine  # graphs that outlive the interpreter refer to handles
        self._live.clear()
        self._free.clear()
        self._in_graphs.clear()
        self._ended.clear()
