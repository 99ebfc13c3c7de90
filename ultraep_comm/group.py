"""Groups: ranks that replicate experts among each other, their slots, and their life."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, cast

import torch

from ultraep_comm import _core
from ultraep_comm.cuda.device import Device
from ultraep_comm.cuda.weights import WeightTables
from ultraep_comm.engines import DeviceEngine, Engine
from ultraep_comm.errors import (
    GroupClosedError,
    PlanMismatchError,
    UltraEPError,
    UnsupportedError,
)
from ultraep_comm.fabrics import Fabric, SharedRegion
from ultraep_comm.failures import failure_of
from ultraep_comm.forks import watch_forks
from ultraep_comm.gradients import BoundGrads, RankGrads
from ultraep_comm.health import GroupHealth, health_of
from ultraep_comm.loads import LoadExchange
from ultraep_comm.plan import Plan
from ultraep_comm.plan_store import PlanHandle, PlanStore
from ultraep_comm.planning import check_device_plan, check_plan_fits
from ultraep_comm.rank_weights import RankWeights
from ultraep_comm.recorder import CAPACITY, Recorder, record_group
from ultraep_comm.registry import register_group
from ultraep_comm.segments import BoundWeights, Segment, Weights, with_own_storage
from ultraep_comm.selections import Selections
from ultraep_comm.topology import Topology
from ultraep_comm.work import Work

if TYPE_CHECKING:
    from ultraep_comm.cuda.stages import CudaStages


Held = deque[tuple[int, tuple[object, ...]]]


def _dispose(engine: Engine, fabric: Fabric, memory: list[SharedRegion], held: Held) -> None:
    """End a group that nobody closed. ``memory`` outlives the engine, which still writes to it."""
    if not engine.is_completed(engine.epoch):
        engine.abort()  # nobody is left to wait for the call
    engine.close()
    fabric.close()
    held.clear()
    memory.clear()


class Group:
    """One rank's part of a group. Made by :func:`new_group` or :func:`new_loopback_groups`.

    Attributes:
        rank: this rank in the group.
        topology: the group's constants.
        device: where weights and slots are.
        segments: the tensors of an expert, by name.
        slots: ``{name: [S, *shape]}``, views of this rank's slots, stable for the group's life.
        slot_grads: the same for their gradients, zero at first; of the segments that have any.
        name: what operators find the group by, in this process.
    """

    def __init__(
        self,
        *,
        rank: int,
        topology: Topology,
        segments: Mapping[str, Segment],
        grads: Mapping[str, Segment],
        config: _core.EngineConfig,
        fabric: Fabric,
        make_engine: Callable[[_core.EngineConfig], Engine] = _core.Engine,
        loads: LoadExchange | None = None,
        device: Device | None = None,
        make_stages: Callable[[], CudaStages] | None = None,
        check: bool = False,
    ) -> None:
        self.rank = rank
        self.topology = topology
        self.segments = dict(segments)
        self._names = tuple(self.segments)
        self._fabric = fabric
        self._loads = loads  # None: the engine exchanges them
        self._layout = _core.EngineLayout(config)
        self._region = fabric.allocate(self._layout.total_bytes)
        config.set_bases(self._region.bases)
        checked = [fabric.allocate(self._layout.check_bytes)] if check else []
        for region in checked:
            config.set_check_bases(region.bases)
        config.peer_sockets = fabric.peer_sockets
        config.peer_processes = fabric.peer_processes
        self.device = self._region.local.device
        # None: there is no device to plan and to reroute on.
        self._stages = None if make_stages is None else make_stages()
        self._engine = make_engine(config)
        self._device = device  # None: the host; else the engine is a DeviceEngine
        self._memory = [self._region, *checked]
        self._selections = Selections(rank, self.segments)
        self._in_flight: Held = deque()
        self._filled_by: Plan | PlanHandle | None = None  # of the last transfer
        self._captured: list[tuple[object, ...]] = []
        self._recorder: Recorder | None = None
        self._run = ""  # names this group in its recordings; the same on all ranks
        self._on_close: Callable[[], object] | None = None
        self._state = "open"
        self._aborted = False
        self._first_error: Exception | None = None  # the one that this rank raised first
        self._finalizer = weakref.finalize(
            self, _dispose, self._engine, fabric, self._memory, self._in_flight
        )
        self.num_mains = self._layout.num_mains[rank]
        self._weights = RankWeights(
            rank=rank,
            segments=self.segments,
            num_mains=self.num_mains,
            region_offset=self._layout.region_offset,
            owner=self._region,
            device=self.device,
            tables=WeightTables(device, len(self.segments), self.num_mains) if device else None,
        )
        slots = self._views(self._region.local, self._layout.slot_offset, topology.slots_per_rank)
        self.slots = {name: with_own_storage(view) for name, view in slots.items()}
        offsets, count = self._layout.grad_offset, topology.slots_per_rank
        slot_grads = self._views(self._region.local, offsets, count, grads)
        self.slot_grads = {name: with_own_storage(view) for name, view in slot_grads.items()}
        self._grads = RankGrads(
            rank=rank,
            segments=dict(grads),
            num_mains=self.num_mains,
            device=self.device,
            tables=WeightTables(device, len(grads), self.num_mains) if device else None,
        )
        self.name = register_group(self)
        self._process = os.getpid()
        watch_forks(self)
        self._plans = PlanStore(
            rank=rank,
            name=self.name,
            topology=topology,
            device=device,
            stages=self._stages,
            constants=(self._stages.home, self._stages.domains) if self._stages else (),
            engine=self._engine,
        )
        _ = topology.instances_per_rank  # kept there: torch.compile cannot trace how it is found

    def _views(
        self,
        storage: torch.Tensor,
        offsets: list[int],
        count: int,
        segments: Mapping[str, Segment] | None = None,
    ) -> dict[str, torch.Tensor]:
        views = {}
        segments = self.segments if segments is None else segments
        for (name, segment), offset in zip(segments.items(), offsets, strict=True):
            views[name] = segment.view(storage.narrow(0, offset, count * segment.nbytes), count)
        return views

    @property
    def num_ranks(self) -> int:
        """Return G."""
        return self.topology.num_ranks

    @property
    def bytes_stored(self) -> int:
        """Return the bytes that this rank's engine has stored into slots since the group exists.

        Raises:
            UnsupportedError: the current stream is being captured.
        """
        self._refuse_capture("bytes_stored")
        return self._engine.bytes_stored

    # ---- weights --------------------------------------------------------------------------

    def bind(self, weights: Weights | BoundWeights) -> BoundWeights:
        """Check main weights and take their addresses, once for repeated calls.

        On a CUDA group the addresses go to the device too, and the host waits for that; what was
        bound before a capture into a CUDA graph can be used in it.

        Args:
            weights: ``{name: tensor [M, *shape] or sequence of M tensors}``; may leave segments
                out that later calls do not transfer.

        Raises:
            InvalidWeightsError: as the text says.
        """
        return self._weights.bind_for_good(weights)

    def bind_grads(self, grads: Weights | BoundGrads) -> BoundGrads:
        """Check main gradients and take their addresses, once for repeated reductions.

        On a CUDA group the addresses go to the device too, and the host waits for that; what was
        bound before a capture into a CUDA graph can be used in it.

        Args:
            grads: as for :func:`reduce_expert_grads`.

        Raises:
            InvalidGradientsError: as the text says.
        """
        return self._grads.bind_for_good(grads)

    @property
    def weight_table(self) -> torch.Tensor:
        """Return this rank's table of addresses, to pass in place of weights that move.

        int64 ``[num_segments, M]`` on the device of a CUDA group, zero at first and stable for the
        group's life. A call with it and a plan on the device reads it when its kernel runs, so that
        replays of a graph follow :meth:`update_weight_table`.

        Raises:
            UnsupportedError: a group of the host engine; or the first use is during a capture.
        """
        return self._weights.table

    def update_weight_table(self, weights: Weights | BoundWeights) -> None:
        """Write the addresses of weights to :attr:`weight_table`, in the current stream's order.

        Args:
            weights: as for :meth:`bind`. They have to stay where they are until the calls that use
                them have finished. Addresses of segments that are left out become 0.

        Raises:
            InvalidWeightsError: as :meth:`bind`.
            UnsupportedError: as :attr:`weight_table`, and during a capture.
        """
        self._weights.update_table(weights)

    def empty_weights(self) -> dict[str, torch.Tensor]:
        """Allocate main weights that peers can address, as ``pull`` needs. Collective.

        Returns:
            ``{name: tensor [M, *shape]}``, zeroed.

        Raises:
            OutOfSharedMemoryError: there is not enough memory on some rank.
            UnsupportedError: some ranks have no load/store access to each other, so none can pull;
                or the current stream is being captured.
        """
        self._refuse_capture("empty_weights()")
        self._check_open("empty_weights")
        if not self._fabric.can_pull:
            raise UnsupportedError(
                f"rank {self.rank}: empty_weights() is for mode='pull', and some ranks of this"
                " group reach each other by puts only; use ordinary tensors and mode='push'"
            )
        try:
            with torch.inference_mode(False):
                region = self._fabric.allocate(self._layout.region_bytes)
        except BaseException as error:  # Ctrl-C too
            if isinstance(error, Exception):
                self._first_error = error
            self.abort()  # ranks may no longer agree on their regions
            raise
        index = self._engine.add_region(region.bases)
        self._memory.append(region)
        self._weights.add_region(region.bases[self.rank], index)
        with torch.inference_mode(False):  # as in new_group
            return self._views(region.local, self._layout.region_offset, self.num_mains)

    def expert_pointers(self, weights: Weights | BoundWeights) -> dict[str, torch.Tensor]:
        """Return addresses for grouped GEMMs: ``{name: int64 [M + S]}``, mains first, then slots.

        Raises:
            InvalidWeightsError: as :meth:`bind`.
            UnsupportedError: the current stream is being captured.
        """
        self._refuse_capture("expert_pointers()")
        bound, mains = self._weights.addresses_of(weights), self.num_mains
        result = {}
        for i, (name, segment) in enumerate(self.segments.items()):
            if name not in bound.names:
                continue
            base = self._region.bases[self.rank] + self._layout.slot_offset[i]
            slots = [base + s * segment.nbytes for s in range(self.topology.slots_per_rank)]
            own = bound.addresses[i * mains : (i + 1) * mains]
            result[name] = torch.tensor([*own, *slots], dtype=torch.int64, device=self.device)
        return result

    @property
    def _device_engine(self) -> DeviceEngine:
        assert self._device is not None
        return cast(DeviceEngine, self._engine)

    # ---- saved plans ----------------------------------------------------------------------

    def save(self, plan: Plan, *, layer: int = 0, microbatch: int | None = None) -> PlanHandle:
        """Keep a plan for the calls of a layer and microbatch that are still to come. Local.

        The group copies it, in the current stream's order: whoever made the plan may write to its
        memory. On the device of a CUDA group a save can be captured into a CUDA graph; its memory
        belongs to the graph, and every replay saves the plan that is there by then, unless the one
        of the replay before is still in use, because its reduction, or a captured release, has not
        run: that one stays, and the next call on the group raises PlanHandleError.

        Args:
            plan: of this group's shape, on the CPU or on the device of a CUDA group.
            layer: a number from 0 up.
            microbatch: likewise; None: how many plans of the layer this group has saved before.

        Raises:
            InvalidPlanError: the plan is for another group.
            InvalidArgumentError: ``layer`` or ``microbatch`` is out of range.
            GroupClosedError: the group is closed or failed earlier.
            PlanHandleError, InvalidLoadError: what an earlier launch on the device has found wrong.
            UnsupportedError: the current stream is being captured, and no entry is free:
                :meth:`reserve_plans`.
            DeviceError: the CUDA driver refused the launch.
        """
        self._check_running("save")
        if self._stages is not None:
            self._stages.raise_fault()
        device = self._device
        if device is not None and isinstance(plan, Plan) and device.holds(plan.slot_expert):
            check_device_plan(plan, self)
        else:
            check_plan_fits(plan, self)
        return self._plans.save(plan, layer, microbatch)

    def reserve_plans(self, count: int) -> None:
        """Have memory for so many more saved plans: for a capture, all that it saves. Local.

        Outside of captures :meth:`save` does so by itself, and takes none of these. The host engine
        needs none.

        Raises:
            UnsupportedError: the current stream is being captured.
            OutOfSharedMemoryError: there is not enough memory on the device.
        """
        self._check_running("reserve_plans")
        self._plans.reserve(count)

    def _plan_of(self, given: Plan | PlanHandle, operation: str) -> tuple[Plan, int, str]:
        """Return the plan, what ranks compare besides it, and the operation's name for errors.

        Raises:
            PlanHandleError: a handle that cannot be used.
            UnsupportedError: a handle of outside in a capture, or any in a compiled function.
        """
        if not isinstance(given, PlanHandle):
            return given, 0, operation
        if torch.compiler.is_dynamo_compiling():
            raise UnsupportedError(
                f"{operation} was given a PlanHandle in a compiled function, which cannot see"
                " whether it has ended; give the plan, whose tensors autograd saves"
            )
        plan = self._plans.plan_of(given, operation)
        return (
            plan,
            given._tag,
            f"{operation} of layer {given.layer}, microbatch {given.microbatch}",
        )

    def assert_idle(self) -> None:
        """Raise unless every saved plan was reduced or released, and every call has finished.

        For the end of a training step. It waits for nothing: on a CUDA group, synchronize the
        device before.

        Raises:
            GroupBusyError: as the text says.
            GroupClosedError: the group is closed or failed earlier.
            PlanHandleError, InvalidLoadError, InvalidPlanError: what an earlier launch on the
                device, also of a replay, has found wrong.
        """
        self._check_running("assert_idle")
        if self._stages is not None:
            self._stages.raise_fault()
        self._plans.assert_idle()

    # ---- recording ------------------------------------------------------------------------

    def start_recording(self, capacity: int = CAPACITY, *, loads: bool = True) -> Recorder:
        """Keep the times and plans of this rank's calls from now on. Local.

        Args:
            capacity: of so many calls; later ones take the place of the first.
            loads: keep the load ``[G, E]`` of plans too, which is most of the memory.

        Returns:
            The recorder; ``with group.start_recording() as recorder:`` stops it at the end.

        Raises:
            InvalidArgumentError: the capacity is out of range, or the group is being recorded.
            GroupClosedError: the group is closed or failed earlier.
        """
        self._check_running("start_recording")
        return record_group(self, capacity, loads)

    # ---- health ---------------------------------------------------------------------------

    def health(self) -> GroupHealth:
        """Return what this rank has done and waited for, and what it knows of its peers. Local.

        From any thread and at any time, also while a call is under way, after a failure and after
        a close; it waits for no call, and changes nothing.
        """
        return health_of(self)

    # ---- life -----------------------------------------------------------------------------

    def _check_open(self, operation: str) -> None:
        if self._recorder is not None:
            self._recorder.enter()
        self._check_running(operation)
        self._raise_stage_fault()

    def _refuse_capture(self, operation: str) -> None:
        """Raise UnsupportedError for what no graph can hold, and nobody can do beside one."""
        if self._device is not None and self._device.is_capturing():
            raise UnsupportedError(
                f"rank {self.rank}: {operation} while the current stream is being captured into a"
                " CUDA graph; call it before or after the capture"
            )

    def leave_to_parent(self) -> None:
        """Put the group out of use in a process that was forked from its own. Called there."""
        if self._state == "open":
            self._state = "inherited"
        self._finalizer.detach()

    def _check_process(self, operation: str) -> None:
        if self._state == "inherited":
            raise GroupClosedError(
                f"rank {self.rank}: {operation} in process {os.getpid()}, on a group of process"
                f" {self._process}, which this one was forked from; make a new group here"
            )

    def _check_running(self, operation: str) -> None:
        self._check_process(operation)
        failed = self._engine.failed_epoch()
        if self._state == "open" and failed == 0:
            return
        reason = "is closed" if self._state == "closed" else f"failed in call {failed}"
        error = GroupClosedError(
            f"rank {self.rank}: {operation} on a group that {reason}; make a new group"
        )
        raise error from (self._first_error or self._failure(failed, "a call") if failed else None)

    def _raise_stage_fault(self) -> None:
        """Raise what plans and reroutes on the device found wrong, and tell the peers.

        A call of all ranks is due that this one will not make.
        """
        if self._stages is None:
            return
        try:
            self._stages.raise_fault()
        except UltraEPError as error:
            self._reject(error)
            raise

    def _submitted(
        self,
        epoch: int,
        keep: tuple[object, ...],
        operation: str,
        mode: str,
        plan: Plan | None = None,
        tag: int = 0,
        expert_bytes: int = 0,
    ) -> Work:
        """Return the handle of a call; ``keep`` lives until it has finished, waited for or not.

        The last three are for the recorder: :meth:`Recorder.add` describes them.
        """
        if epoch & _core.CUDA_CAPTURED:
            self._captured.append(keep)  # replays may come at any time
            return Work(self, epoch, operation, mode)
        if self._recorder is not None:
            self._recorder.add(epoch, operation, mode, plan, tag, expert_bytes)
        self._in_flight.append((epoch, keep))  # before anything that may be refused
        while (
            self._in_flight
            and self._engine.failed_epoch() == 0
            and self._engine.is_completed(self._in_flight[0][0])
        ):
            self._in_flight.popleft()
        return Work(self, epoch, operation, mode)

    def _failure(self, epoch: int, operation: str) -> UltraEPError:
        error = failure_of(self, epoch, operation)
        if not isinstance(error, GroupClosedError):
            self._first_error = self._first_error or error
        return error

    def _broke_off(self, error: BaseException) -> None:
        """Remember why a call was not taken, or failed; after Ctrl-C, end it whoever has it.

        The engine may have taken the call when the signal came, and nobody else know of it: what it
        reads would be freed, and the peers would wait. Not during a capture, in which nothing runs.
        """
        if isinstance(error, Exception):
            if self._engine.failed_epoch() != 0:
                self._first_error = self._first_error or error
        elif self._device is None or not self._device.is_capturing():
            self.abort()

    def _fail(self, error: Exception) -> None:
        """End a group whose ranks may no longer be at the same call."""
        self._first_error = self._first_error or error
        self._engine.abort()
        if self._loads is not None:
            self._loads.leave()

    def _reject(self, error: Exception) -> None:
        """Tell the peers that this rank's own input is bad, so that none waits for it.

        Not during a capture, in which nothing runs.
        """
        if self._state != "open" or (self._device is not None and self._device.is_capturing()):
            return
        self._first_error = self._first_error or error
        self._engine.reject()

    def abort(self) -> None:
        """Fail the calls that are under way, here and, through the peers' waits, everywhere.

        The group takes no more calls; close it.
        """
        if self._state == "open":
            self._aborted = True
            self._engine.abort()
            if self._loads is not None:
                self._loads.leave()

    def _leave(self) -> None:
        self._fabric.close()
        if self._loads is not None:
            self._loads.leave()

    def close(self) -> None:
        """Finish submitted calls, say goodbye to the peers, and free threads and connections.

        Slot tensors stay valid as long as they are referenced. Closing twice is harmless, and so is
        closing in a process that was forked from the group's: there it frees nothing but memory.

        Raises:
            TransferError: a submitted call failed, and nobody has waited for it.
            PlanMismatchError: a peer is seen to have made another last call than this rank.
            InvalidLoadError, InvalidPlanError: an earlier plan or reroute on the device was given
                bad values, and no call since then has said so.
            PlanHandleError: likewise, a replay saved a plan before the one there was reduced.
            GroupBusyError: plans were saved that nobody has reduced or released. The group is
                closed all the same.
            UnsupportedError: the current stream is being captured; the group stays open.
        """
        if self._state != "open":
            self._state = "closed"
            return
        self._refuse_capture("close()")
        self._state = "closed"
        engine = self._engine
        busy = self._plans.busy_error("the group was closed")
        try:
            engine.synchronize(engine.epoch)
        except BaseException:  # Ctrl-C while a peer keeps us waiting
            engine.abort()
            raise
        finally:
            if self._recorder is not None:
                self._recorder.stop()
            peer = engine.close()
            self._leave()
            self._plans.close()
            self._in_flight.clear()
            self._captured.clear()
            self._finalizer.detach()
            if self._on_close is not None:
                self._on_close()  # writes a file, for which no peer has to wait
        failed = engine.failed_epoch()
        if failed != 0 and self._first_error is None and not self._aborted:
            raise self._failure(failed, "a call that nobody waited for")
        if peer >= 0:
            raise PlanMismatchError(
                f"rank {self.rank}: rank {peer} made another call than this rank's last one, whose"
                " plan gave this rank nothing to wait for. Make the same calls on every rank",
                rank=self.rank,
                peer=peer,
                epoch=self._engine.epoch,
            )
        if self._stages is not None and not self._aborted:
            self._stages.finish_replays()
            self._stages.raise_fault()
        if busy is not None and failed == 0 and not self._aborted:
            raise busy

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Group cannot be copied or pickled: it owns memory and threads of a rank")

    def __repr__(self) -> str:
        t = self.topology
        return (
            f"Group(rank={self.rank}, num_ranks={t.num_ranks}, num_experts={t.num_experts},"
            f" slots_per_rank={t.slots_per_rank}, {self._state})"
        )
