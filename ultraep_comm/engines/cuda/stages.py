"""The local stages of one rank on its device, without host synchronisation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from ultraep_comm import _core
from ultraep_comm.engines.base import (
    Engine,
    Form,
    Movable,
    Setup,
    count_in_torch,
    find_ends,
    too_many_rows,
)
from ultraep_comm.engines.cuda.device import Device, Kernels
from ultraep_comm.engines.cuda.kernels import PLAN_WARPS, choose_plan_warps, stage_shape
from ultraep_comm.engines.reports import raise_fault
from ultraep_comm.errors import DeviceError, InvalidLoadError, PlanHandleError, UnsupportedError
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.planner import MAX_LOAD, MAX_TOTAL_LOAD, Costs
from ultraep_comm.plan.topology import Topology
from ultraep_comm.weights.binding import Addresses

MAX_CAPTURED_SAVES = 4096  # of a group at a time
MIN_RUNS = 64  # reserved at the start: enough for 65536 ids, or 4096 tokens of a map
ALIGNMENT = 16  # bytes; what torch.compile assumes of a tensor's address
CORE_ERRORS = (_core.DriverError, _core.CaptureError)
Tensor = torch.Tensor
P = ParamSpec("P")
R = TypeVar("R")


class CudaStages(Engine):
    """Launches the stages in order on the current stream; see src/cuda/stages.hpp.

    Tensors on the CPU are planned and rerouted there, as by the host engine. A launch that the
    driver rejects raises DeviceError, or UnsupportedError during a capture.

    Attributes:
        plan_warps: warps of the plan kernel: as many as asked for, or as fit; 0: none fits.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        topology: Topology,
        rank: int,
        setup: Setup | None = None,
        *,
        plan_warps: int | None = None,
    ) -> None:
        super().__init__(topology, rank, setup)
        self._device = device
        self._num_segments = 1 if setup is None else len(setup[0].segments)
        self._shape = shape = stage_shape(topology, rank, device)

        def handle(name: str, shared_bytes: int) -> int:
            fits = shared_bytes <= device.max_shared_bytes
            return kernels.handle(f"ultraep_{name}", shared_bytes) if fits else 0

        self.plan_warps = choose_plan_warps(
            shape.plan_shared_bytes, device, plan_warps or PLAN_WARPS
        )
        self._bank_plan_warps = choose_plan_warps(
            shape.bank_plan_shared_bytes, device, _core.CUDA_MAX_BANK_PLAN_WARPS
        )
        runs_bytes = shape.reroute_shared_bytes
        self._can_reroute = max(runs_bytes, shape.shares_shared_bytes) <= device.max_shared_bytes
        constants = device.allocate(shape.constants_bytes)
        faults = device.pinned(_core.cuda_stage_faults_bytes())
        self._memory = [constants, faults]  # and all states, since graphs may still use old ones
        self._stages = translated(
            _core.CudaStages,
            driver=device.driver,
            context=device.context,
            shape=shape,
            plan=handle("plan", shape.plan_shared_bytes(max(self.plan_warps, 1))),
            plan_in_bank=handle(
                "plan_in_bank", shape.bank_plan_shared_bytes(max(self._bank_plan_warps, 1))
            ),
            shares=handle("reroute_shares", shape.shares_shared_bytes),
            reroute_int32=handle("reroute_int32", runs_bytes),
            reroute_int64=handle("reroute_int64", runs_bytes),
            reroute_map=handle("reroute_map", runs_bytes),
            save_plan=handle("save_plan", 0),
            plan_warps=self.plan_warps,
            bank_plan_warps=self._bank_plan_warps,
            constants=constants.data_ptr(),
            faults=faults.data_ptr(),
            keep=(device, self._memory),
        )
        maps, end = constants.view(torch.int32), topology.num_experts + topology.num_ranks
        self.home, self.domains = maps[: topology.num_experts], maps[topology.num_experts : end]
        before = end + topology.num_ranks + 1 + int((topology.home < rank).sum())
        self._local_experts = maps[before : before + len(topology.local_experts(rank))]
        self.marks = device.allocate(8 * MAX_CAPTURED_SAVES).view(torch.int64)
        # Plans so far that exceeded `pad_to`, times 2**40, plus the tokens of the last: counted on
        # the device, and copied to where the host looks.
        self._overruns = device.allocate(8).view(torch.int64)
        self._overruns_copy = device.pinned(8).view(torch.int64)
        self._overruns_seen, self._overruns_raised = self._overruns_copy.numpy(), 0
        self._counts_overruns = False
        self._reserve(MIN_RUNS, "")

    # ---- devices --------------------------------------------------------------------------

    def is_on_device(self, value: object) -> bool:
        """Return whether a tensor, or a plan, is on the device."""
        tensor = value.slot_expert if isinstance(value, Plan) else value
        return isinstance(tensor, Tensor) and self._device.is_on_device(tensor)

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured."""
        with self._launching():
            return self._stages.is_capturing(self._device.current_stream())

    def _prepare_copy(self, what: str) -> None:
        """Wait for the launches so far, before the host reads their results."""
        if self.is_capturing():
            raise UnsupportedError(
                f"rank {self.rank}: {what} has to be copied between the CPU and the device, which"
                " cannot be captured into a CUDA graph; pass all tensors of the call on the device"
            )
        self.finish()

    def to_host(self, value: Movable, name: str) -> Movable:
        """Return a tensor or a plan on the CPU; waits for the launches so far."""
        if self.is_on_device(value):
            self._prepare_copy(name)
        elif not isinstance(value, Tensor | Plan):  # which checks reject
            return value
        return value.cpu()

    def plan_for_call(
        self, plan: Plan, operation: str, *, in_bank: bool = False
    ) -> tuple[Plan, bool]:
        """Return a plan where the engine reads it, and whether that is on the device."""
        if in_bank:  # always there, as the table of what slots hold
            return self._plan_for_bank(plan)
        if not self.is_on_device(plan):
            return self.to_host(plan, "the plan"), False
        most = _core.CUDA_MAX_DEVICE_SEGMENTS
        if self.topology.slots_per_rank == 0:  # an empty tensor has no address
            why = "has no slots: there is nothing to capture, leave the call out"
        elif self._num_segments > most:
            why = (
                f"has {self._num_segments} segments, and at most {most} can be captured: create it"
                " with fewer, larger ones"
            )
        else:
            return plan, True
        if self._device.is_capturing():
            raise UnsupportedError(
                f"rank {self.rank}: {operation} in a capture into a CUDA graph, on a group that"
                f" {why}"
            )
        return self.to_host(plan, "the plan"), False

    def _plan_for_bank(self, plan: Plan) -> tuple[Plan, bool]:
        on_device = self.is_on_device(plan)
        if on_device or self.topology.slots_per_rank == 0:  # no slots: nothing is moved
            return plan, on_device
        if self._num_segments > _core.CUDA_MAX_DEVICE_SEGMENTS:
            raise UnsupportedError(
                f"rank {self.rank}: a plan of bank {plan.bank} on a group with"
                f" {self._num_segments} segments; the CUDA engine has banks for at most"
                f" {_core.CUDA_MAX_DEVICE_SEGMENTS}: create it with fewer, larger ones, or use"
                " bank 0 without reuse=True"
            )
        if self.is_capturing():
            raise UnsupportedError(
                f"rank {self.rank}: a plan of bank {plan.bank} is on the CPU, and the current"
                " stream is being captured into a CUDA graph; pass a plan on the device"
            )
        read = ("slot_expert", "slot_quota", "home_quota")
        put: dict[str, Any] = {
            name: self.to_device(tensor) for name, tensor in plan.tensors().items() if name in read
        }
        put |= {"home": self.home, "domains": self.domains}
        return replace(plan, load=None, slots_to_fill=None, **put), True

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor on the device, in stream order, without waiting.

        From host memory that is not page-locked the driver copies only once the stream is idle.
        """
        copy = self._device.empty(tensor.shape, tensor.dtype)
        if self.is_on_device(tensor):
            return copy.copy_(tensor)
        self._device.upload(copy, tensor.contiguous())
        return copy

    def put_addresses(
        self, addresses: Addresses, shape: tuple[int, int], table: Tensor | None
    ) -> Tensor | None:
        """Write addresses to a table, int64 ``[num_segments, M]``, in the current stream's order.

        Without a ``table``, to a new one, ready for every stream.

        Returns:
            The table; None if it would be a new one, and the current stream is being captured.

        Raises:
            UnsupportedError: there is a table, and the current stream is being captured.
        """
        is_new = table is None
        if self._device.is_capturing():
            if is_new:
                return None
            raise UnsupportedError(
                "the current stream is being captured into a CUDA graph: a replay would write the"
                " addresses of the capture again; call bound.update() before the replay"
            )
        if table is None:
            with torch.inference_mode(False):  # it is also written to outside inference mode
                table = self._device.allocate(8 * len(addresses)).view(torch.int64).view(shape)
        if addresses:  # uint64 bits in int64, since torch has few operations for uint64
            self._device.upload(table, torch.frombuffer(addresses, dtype=torch.int64).view(shape))
        if is_new:
            self._device.synchronize_stream()
        return table

    # ---- stages ---------------------------------------------------------------------------

    def count(self, routing: Tensor, form: Form, *, for_gather: bool = False) -> Tensor:
        """Return int32 ``[E]``; ``for_gather``, on the device, or ids for the kernel to count."""
        on_device = self.is_on_device(routing)
        if for_gather and not on_device and self._device.is_capturing():
            raise UnsupportedError(
                f"rank {self.rank}: {form} is on the CPU, and the current stream is being"
                " captured into a CUDA graph; pass a tensor on the device"
            )
        if for_gather and form == "topk_ids":
            found = routing.contiguous()
        elif not on_device:
            found = super().count(routing, form)
        elif form == "counts":
            found = self._as_counts(routing)
        else:
            found = count_in_torch(routing, self.topology.num_experts)
        return self.to_device(found) if for_gather and not self.is_on_device(found) else found

    def plan(
        self,
        load: Tensor,
        target_ppm: int,
        costs: Costs | None,
        *,
        apart: bool = False,
        bank: int | None = None,
    ) -> Plan:
        """Launch the plan of a load of valid shape and dtype; see `plan_replicas`.

        The plan's tensors share one allocation, and constants are shared by all plans. With
        ``apart`` each tensor has its own memory, and ``load`` is the given tensor.
        """
        if not self.is_on_device(load):
            return super().plan(load, target_ppm, costs, apart=apart, bank=bank)
        self._check_can_plan(in_bank=bank is not None)
        table = 0 if bank is None else self.bank_table(bank)
        t = self.topology
        given = self._as_counts(load)
        slots = (t.num_ranks, t.slots_per_rank)
        shapes: list[tuple[int, ...]] = [slots, slots, (t.num_experts,)]
        if given is load and load.dim() == 2 and not apart:  # the caller may write to its load
            shapes.append((t.num_ranks, t.num_experts))
        slot_expert, slot_quota, home_quota, *kept = (
            [self._device.empty(shape, torch.int32) for shape in shapes]
            if apart
            else self._tensors(shapes)
        )
        moves = None if bank is None else self._device.empty(slots, torch.bool)
        with self._launching():
            self._stages.plan(
                given.data_ptr(),
                kept[0].data_ptr() if kept else 0,
                slot_expert.data_ptr(),
                slot_quota.data_ptr(),
                home_quota.data_ptr(),
                t.num_ranks if load.dim() == 2 else 1,
                target_ppm,
                costs,
                table,
                0 if moves is None else moves.data_ptr(),
                self._device.current_stream(),
            )
        self._device.keep([given])
        return Plan(
            slot_expert=slot_expert,
            home=self.to_device(self.home) if apart else self.home,
            slot_quota=slot_quota,
            home_quota=home_quota,
            load=None if load.dim() == 1 else kept[0] if kept else given,
            domains=self.to_device(self.domains) if apart else self.domains,
            slots_to_fill=moves,
        )

    def bank_table(self, bank: int) -> int:
        """Return the address of what a bank holds from here on in the current stream."""
        raise NotImplementedError

    def _check_can_plan(self, *, in_bank: bool) -> None:
        if (self._bank_plan_warps if in_bank else self.plan_warps) > 0:
            return
        shape = self._shape
        needed = shape.bank_plan_shared_bytes(1) if in_bank else shape.plan_shared_bytes(1)
        options = ", bank=bank, reuse=True" if in_bank else ""
        raise UnsupportedError(
            f"rank {self.rank}: a plan for {self.topology.num_experts} experts and"
            f" {self.topology.num_ranks} ranks needs {needed} bytes of shared memory, but this"
            f" device has {self._device.max_shared_bytes}; plan on the CPU:"
            f" plan_replicas(load.cpu(), group=group{options})"
        )

    def plan_memory(self, load: Tensor) -> tuple[Tensor, Plan]:
        """Return memory for a plan that another kernel writes, and the plan with ``load`` in it."""
        t = self.topology
        *starts, num_bytes = _core.cuda_plan_offsets(t.num_ranks, t.slots_per_rank, t.num_experts)
        memory = self._device.empty((num_bytes // 4,), torch.int32)
        slots = (t.num_ranks, t.slots_per_rank)
        slot_expert, slot_quota, home_quota = (
            memory[at // 4 : at // 4 + math.prod(shape)].view(shape)
            for at, shape in zip(starts, (slots, slots, (t.num_experts,)), strict=True)
        )
        plan = Plan(
            slot_expert=slot_expert,
            home=self.home,
            slot_quota=slot_quota,
            home_quota=home_quota,
            load=load,
            domains=self.domains,
        )
        return memory, plan

    def reroute(self, topk_ids: Tensor, plan: Plan, source: int | None = None) -> Tensor:
        """Launch the reroute of ids; see `uec.reroute`. The plan must have load and quotas.

        Raises:
            UnsupportedError: more working memory is needed during a capture, or the group is too
                large for the kernel.
        """
        if not (self.is_on_device(topk_ids) and self.is_on_device(plan)):
            found = super().reroute(topk_ids, plan, source)
            return self.to_device(found) if self.is_on_device(topk_ids) else found
        ids = self._dense(topk_ids)
        self._reserve(
            self._shape.runs_of_ids(ids.numel()),
            f"reroute(topk_ids, plan, group=group) with {ids.numel()} ids",
        )
        out = self._device.empty(ids.shape, ids.dtype)
        with self._launching():
            self._stages.reroute(
                *self._addresses(plan),
                self.rank if source is None else source,
                ids.data_ptr(),
                out.data_ptr(),
                ids.numel(),
                ids.element_size(),
                self._device.current_stream(),
            )
        self._device.keep([ids, *self._read_of(plan)])
        return out

    def reroute_map(
        self, routing_map: Tensor, probs: Tensor | None, plan: Plan, source: int
    ) -> tuple[Tensor, Tensor | None]:
        """Launch the reroute of a map; see `uec.reroute_map`. The plan must have load and quotas.

        Raises:
            UnsupportedError: as :meth:`reroute`.
        """
        if not (self.is_on_device(routing_map) and self.is_on_device(plan)):
            return super().reroute_map(routing_map, probs, plan, source)
        differentiable = probs is not None and probs.requires_grad and probs.element_size() > 1
        if differentiable and torch.is_grad_enabled():
            physical_map, physical = _MoveProbs.apply(probs, routing_map, plan, source, self)  # type: ignore[no-untyped-call]
            return physical_map, physical
        physical_map, physical, _ = self.move(
            routing_map, probs, plan, source, with_instances=False
        )
        return physical_map, physical

    def move(
        self,
        routing_map: Tensor,
        probs: Tensor | None,
        plan: Plan,
        source: int,
        *,
        with_instances: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Launch the reroute of a map without autograd.

        Returns:
            The map and probabilities ``[T, G * P]``; with ``with_instances`` also int32 ``[T, E]``,
            the column that each routed entry moved to, -1 where nothing is routed.
        """
        given, t = self._dense(routing_map), self.topology
        num_tokens = given.shape[0]
        self._reserve(
            self._shape.runs_of_map(num_tokens),
            f"reroute_map(routing_map, probs, plan, group=group) with {num_tokens} tokens",
        )
        shape = (num_tokens, t.num_ranks * t.instances_per_rank)
        physical_map = self._device.empty(shape, torch.bool)
        moved = physical = instances = None
        if probs is not None:
            moved = self._dense(probs.detach())
            physical = self._device.empty(shape, probs.dtype)
        if with_instances:
            instances = self._device.empty(given.shape, torch.int32)
        with self._launching():
            self._stages.reroute_map(
                *self._addresses(plan),
                source,
                given.data_ptr(),
                physical_map.data_ptr(),
                num_tokens,
                0 if moved is None else moved.data_ptr(),
                0 if physical is None else physical.data_ptr(),
                1 if moved is None else moved.element_size(),
                0 if instances is None else instances.data_ptr(),
                self._device.current_stream(),
            )
        self._device.keep([given, *self._read_of(plan), *([] if moved is None else [moved])])
        return physical_map, physical, instances

    def reroute_gradient(
        self, grad: Tensor, routing_map: Tensor, plan: Plan, source: int
    ) -> Tensor:
        """Return the probabilities' gradient ``[T, E]`` from that of the rerouted ones."""
        if not (self.is_on_device(routing_map) and self.is_on_device(plan)):
            return super().reroute_gradient(grad, routing_map, plan, source)
        *_, instances = self.move(routing_map, None, plan, source, with_instances=True)
        assert instances is not None
        return gather_gradient(grad, instances)

    def instance_offsets(self, home_quota: Tensor, slot_quota: Tensor, pad_to: int) -> Tensor:
        """Return the ends of the rows of this rank's instances, on the device if the plan is."""
        if not self.is_on_device(slot_quota):
            return super().instance_offsets(home_quota, slot_quota, pad_to)
        self._device.keep([home_quota, slot_quota])
        ends = find_ends(home_quota, self._local_experts, slot_quota[self.rank])
        if not len(ends):
            return ends.int()
        self._counts_overruns = True
        counted = ((self._overruns >> 40) + 1 << 40) + ends[-1:]
        self._overruns.copy_(torch.where(ends[-1:] > pad_to, counted, self._overruns))
        self._overruns_copy.copy_(self._overruns, non_blocking=True)
        return ends.clamp(max=pad_to).int()

    # ---- saved plans ----------------------------------------------------------------------

    def save(
        self,
        fields: Iterable[tuple[Tensor, Tensor]],
        in_use: Tensor | None,
        mark: int,
        tag: int,
    ) -> None:
        """Launch the copy of a plan's tensors, given as pairs (destination, source), dense int32.

        ``in_use`` (int64, one word) is the mark of the captured save whose plan is in the entry.
        While it equals ``mark``, nothing is copied and a fault with ``tag`` is recorded. A ``mark``
        of 0 clears it.
        """
        fields = list(fields)
        with self._launching():
            self._stages.save_plan(
                [(to.data_ptr(), source.data_ptr(), to.numel()) for to, source in fields],
                0 if in_use is None else in_use.data_ptr(),
                mark,
                tag,
                self._device.current_stream(),
            )
        self._device.keep(itertools.chain.from_iterable(fields))

    def empty(self, shape: Sequence[int], *, of_graph: bool = False) -> Tensor:
        """Return an uninitialised int32 tensor on the device."""
        if of_graph and self.is_capturing() and not self._device.has_graph_pool():
            raise UnsupportedError(
                f"rank {self.rank}: save in a capture into a CUDA graph that is not one of torch:"
                " only with torch.cuda.graph does the memory of the plan belong to the graph. Save"
                " the plan before, or capture with torch.cuda.graph"
            )
        return self._device.empty(shape, torch.int32)

    # ---- faults ---------------------------------------------------------------------------

    def raise_fault(self, *, wait: bool = False) -> None:
        """Raise the error of a launch that has found its input invalid since the last call of this.

        ``wait``: first for the launches outside captures; if any were captured, or torch's launches
        count overruns, for the whole device.

        Raises:
            InvalidLoadError, InvalidPlanError, PlanHandleError: once per fault; of several faults,
                the one that may have caused the others.
        """
        if wait:
            self.finish()
            if self._stages.has_captured or self._counts_overruns:
                self._device.synchronize()
        found = self._stages.take_faults()
        if found is None:
            overruns = self._overruns_seen.item(0)
            if overruns != self._overruns_raised:
                self._overruns_raised = overruns
                limit = ", more than the pad_to of an earlier instance_offsets: its ends stop there"
                raise too_many_rows(self.rank, overruns & (1 << 40) - 1, limit)
            return
        kinds, expert = _core.LoadFault, found.expert
        texts = {
            kinds.NEGATIVE: f"an entry for expert {expert} outside 0 to {MAX_LOAD}",
            kinds.TOO_MANY: f"more than {MAX_LOAD} tokens for expert {expert}",
            kinds.TOO_MANY_IN_ALL: f"more than {MAX_TOTAL_LOAD} tokens in total",
        }
        if found.load is not kinds.NONE:
            raise InvalidLoadError(
                f"rank {self.rank}: an earlier plan_replicas on the device got a load with"
                f" {texts[found.load]}; its plan has no replicas and no tokens"
            )
        if found.saved_tag:
            layer, microbatch = (found.saved_tag >> 32) - 1, found.saved_tag & 0xFFFFFFFF
            generation = found.saved_generation
            raise PlanHandleError(
                f"rank {self.rank}: a CUDA graph was replayed while the plan saved by an earlier"
                f" replay, of layer {layer}, microbatch {microbatch} (generation {generation}), was"
                " still in use: it was neither reduced nor released. That plan was kept, so what"
                " this replay computed by its own plan is wrong. Replay the graph that reduces"
                " before this one, or capture one graph for each microbatch in flight",
                rank=self.rank,
                layer=layer,
                microbatch=microbatch,
                generation=generation,
            )
        routing = "routing_map" if found.of_map else "topk_ids"
        raise_fault(found.reroute, routing, self.rank, self.topology.num_experts)

    def finish(self) -> None:
        """Wait for the launches outside captures."""
        translated(self._stages.await_idle)

    @contextmanager
    def _launching(self) -> Iterator[None]:
        """Raise this library's errors. A failure in a capture leaves the group unchanged."""
        try:
            yield
        except _core.CaptureError as error:
            raise UnsupportedError(f"rank {self.rank}: {error}") from error
        except _core.DriverError as error:
            if self._device.is_capturing():
                raise UnsupportedError(
                    f"rank {self.rank}: the capture into a CUDA graph failed: {error}"
                ) from error
            raise_typed(error)

    # ---- memory ---------------------------------------------------------------------------

    def _reserve(self, num_runs: int, call: str) -> None:
        """Reserve working memory for ``num_runs`` blocks; old memory is kept for graphs."""
        if not self._can_reroute:
            if not call:
                return
            raise UnsupportedError(
                f"rank {self.rank}: rerouting {self.topology.num_experts} experts needs"
                f" {self._shape.reroute_shared_bytes} bytes of shared memory, but this device has"
                f" {self._device.max_shared_bytes}; reroute on the CPU: pass the ids or map on the"
                " CPU, and plan.cpu()"
            )
        if num_runs <= self._stages.max_runs:
            return
        if call and self.is_capturing():
            raise UnsupportedError(
                f"rank {self.rank}: {call} needs more working memory than this group has, which"
                f" cannot be allocated while a CUDA graph is being captured; call {call} once"
                " before the capture"
            )
        num_runs = 1 << (num_runs - 1).bit_length()
        state = self._device.allocate(self._shape.state_bytes(num_runs))
        self._memory.append(state)
        translated(self._stages.bind_state, state.data_ptr(), num_runs)

    def _tensors(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return int32 tensors in one allocation."""
        step = ALIGNMENT // 4
        sizes = [math.prod(shape) for shape in shapes]
        padded = [-(-size // step) * step for size in sizes]
        memory = self._device.empty((sum(padded),), torch.int32)
        starts = [0, *itertools.accumulate(padded)]
        return [
            memory[start : start + size].view(shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=False)
        ]

    def _as_counts(self, load: Tensor) -> Tensor:
        """Return a load as contiguous int32; values that do not fit become -1, which is invalid."""
        if load.dtype == torch.int32:
            return self._dense(load)
        narrow = load.to(torch.int32)
        out = self._device.empty(load.shape, torch.int32)
        return torch.where(narrow == load, narrow, narrow.new_full((), -1), out=out)

    def _read_of(self, plan: Plan) -> list[Tensor]:
        """Return the plan's tensors that a reroute reads; ``home`` only if not the group's."""
        tensors = (plan.load, plan.slot_expert, plan.slot_quota, plan.home_quota)
        read = [tensor for tensor in tensors if tensor is not None]
        return read if plan.home is self.home else [*read, plan.home]

    def _addresses(self, plan: Plan) -> tuple[int, int, int, int, int]:
        load, slot_expert, slot_quota, home_quota, *other = self._read_of(plan)
        return (
            load.data_ptr(),
            slot_expert.data_ptr(),
            slot_quota.data_ptr(),
            home_quota.data_ptr(),
            other[0].data_ptr() if other else 0,  # compared with the group's home
        )

    def _dense(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_contiguous() else self.to_device(tensor)


class _MoveProbs(torch.autograd.Function):
    """Moves probabilities to their instances, and gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        probs: Tensor,
        routing_map: Tensor,
        plan: Plan,
        source: int,
        stages: CudaStages,
    ) -> tuple[Tensor, Tensor | None]:
        physical_map, physical, instances = stages.move(
            routing_map, probs, plan, source, with_instances=True
        )
        ctx.save_for_backward(instances)
        ctx.mark_non_differentiable(physical_map)
        return physical_map, physical

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (instances,) = ctx.saved_tensors
        return gather_gradient(grads[1], instances), None, None, None, None


def gather_gradient(grad: Tensor, instances: Tensor) -> Tensor:
    """Return ``[T, E]``: ``grad [T, G * P]`` at each routed entry's column, 0 elsewhere."""
    columns = instances.clamp(min=0).long()
    return grad.gather(1, columns).masked_fill(instances < 0, 0)


def translated(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of the core; raise its errors as this library's."""
    try:
        return function(*args, **kwargs)
    except CORE_ERRORS as error:
        raise_typed(error)


def raise_typed(error: Exception) -> NoReturn:
    """Raise one of ``CORE_ERRORS`` as UnsupportedError or DeviceError."""
    if isinstance(error, _core.CaptureError):
        raise UnsupportedError(str(error)) from error
    raise DeviceError(
        f"{error}. The group cannot use the device any more; if other CUDA calls fail too, restart"
        " the process"
    ) from error
