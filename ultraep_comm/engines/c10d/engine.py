"""The c10d engine of one rank.

One thread per group makes its calls, in their order, on channels of the group's own. On a device it
issues each call's operations before the caller continues, so that they keep their place among the
caller's own collectives, as NCCL requires.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from ultraep_comm import _core
from ultraep_comm.engines.base import Engine, Movable, Objective, Setup
from ultraep_comm.engines.c10d.agreement import Agreement
from ultraep_comm.engines.c10d.channel import BrokenChannelError, Channel
from ultraep_comm.engines.c10d.movement import Movement, Reduction, Rows, Transfer, read_steps
from ultraep_comm.engines.c10d.order import DeviceOrder
from ultraep_comm.engines.options import Options
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.fabrics import Place, SharedRegion
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import IntArray, Topology
from ultraep_comm.weights.binding import Binding
from ultraep_comm.weights.segments import Weights

Tensor = torch.Tensor
_Fault, _Kind = _core.Fault, _core.RecordKind
_KNOWN_ENDS = 8  # calls whose finish times are kept
_CLOSE_SECONDS = 2.0  # for a rejected call to reach its peers


@dataclass(kw_only=True)
class _Job:
    """A submitted call.

    Attributes:
        kind: of its record; None: no rank moves anything, and no peer is asked.
        epoch, digest, counts: in the record, see `Agreement.begin`.
        movement: its messages; None: there are none.
        table: of a gather, int32 ``[G, E]``.
        clear: slot gradients to clear behind it.
        events: on a device, those of `DeviceOrder.enter`.
        keep: memory that it uses.
    """

    kind: _core.RecordKind | None
    epoch: int
    digest: int = 0
    counts: IntArray | None = None
    movement: Movement | None = None
    table: Tensor | None = None
    clear: Sequence[Tensor] = ()
    events: tuple[Any, Any] | None = None
    keep: object = None


class C10dEngine(Engine):
    """One rank of the c10d engine.

    What is on a device is counted, planned and rerouted on the CPU. Plans stay there, where the
    engine reads them; other results go back. Each copy waits for the device.

    Args:
        topology, rank, setup: as in `Engine`.
        channels: for weights and gradients, for records and for failures; the first may be one.
        call_timeout: as for `Options.config`.
    """

    _native: _core.C10dLedger

    def __init__(
        self,
        topology: Topology,
        rank: int,
        setup: Setup,
        channels: Sequence[Channel],
        call_timeout: float,
    ) -> None:
        super().__init__(topology, rank, setup)
        self._device = device = self.memory[0].local.device
        self._native = ledger = _core.C10dLedger(self.config)
        self.version, self.slots_to_fill = ledger.version, ledger.slots_to_fill  # type: ignore[method-assign]
        self._slots, self._grads = _find_slots(setup[0], self.config, self.memory[0].local)
        self._channel, (calls, alarms) = channels[0], channels[-2:]
        num_ranks, num_experts = topology.num_ranks, topology.num_experts
        self._agreement = Agreement(calls, alarms, rank, num_ranks, num_experts)
        self._order = None if device.type == "cpu" else DeviceOrder(device)
        self._call_limit, self._wait_limit = setup[0].limits(call_timeout)
        self._changed = threading.Condition()
        # Under it:
        self._jobs: deque[_Job] = deque()
        self._running: _Job | None = None
        self._completed = self._failed = 0
        self._report = _core.Report(fault=_Fault.NONE, epoch=0)
        self._owed = 0  # the epoch of a call that this rank rejects, until its peers know
        self._cancelled = self._closed = self._ends_itself = False
        self._ends: dict[int, int] = {}
        self._end_events: deque[tuple[int, Any]] = deque(maxlen=_KNOWN_ENDS)
        self._bytes_sent = self._num_regions = 0
        self._counts = {"replicate": 0, "reduce": 0, "gather": 0, "rejected": 0}
        self._thread = threading.Thread(
            target=self._serve, name=f"ultraep-c10d-{rank}", daemon=True
        )
        self._thread.start()

    # ---- devices ----------------------------------------------------------------------------

    def is_on_device(self, value: object) -> bool:
        """Return whether a tensor, or a plan, is on the device."""
        tensor = value.slot_expert if isinstance(value, Plan) else value
        kind = self._device.type
        return isinstance(tensor, Tensor) and tensor.device.type == kind != "cpu"

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        runtime = torch.get_device_module(self._device)
        found = getattr(runtime, "is_current_stream_capturing", None)
        return found is not None and bool(found())

    def to_host(self, value: Movable, name: str) -> Movable:
        """Return a tensor or a plan on the CPU; waits for the device."""
        if not (isinstance(value, Tensor) or self.is_on_device(value)):
            return value
        if self.is_capturing():
            raise UnsupportedError(
                f"rank {self.rank}: {name} has to be copied to the CPU, which a capture cannot"
                " hold; the c10d engine cannot be captured"
            )
        return value.cpu()

    def plan_for_call(
        self, plan: Plan, operation: str, *, in_bank: bool = False
    ) -> tuple[Plan, bool]:
        """Return the plan on the CPU, and False."""
        if self.is_capturing():
            raise UnsupportedError(
                f"rank {self.rank}: {operation} while the current stream is being captured; the"
                " c10d engine cannot be captured"
            )
        return self.to_host(plan, "the plan"), False

    # ---- submitting -------------------------------------------------------------------------

    def add_region(self, bases: list[int], offset: list[int]) -> int:
        """Return an index; main weights in a region are sent as any others."""
        self._num_regions += 1
        return self._num_regions - 1

    def share_slots(
        self, allocate: Callable[[int], SharedRegion], num_bytes: int, places: Sequence[Place]
    ) -> SharedRegion:
        """Return new memory in which slots appear once more."""
        if self._order is not None:
            raise UnsupportedError(
                f"rank {self.rank}: the c10d engine maps slots on a device only once; create the"
                " group with a bank for each layer"
            )
        return super().share_slots(allocate, num_bytes, places)

    def transfer(self, call: _core.TransferCall, bound: Binding) -> tuple[int, _core.Mode | None]:
        """Submit a transfer or reduction of what ``bound`` refers to."""
        with self._changed:
            if self._refuses():
                return self._native.reject(), _core.Mode.DIRECT
            epoch, digest, mode, is_empty, rows = self._native.transfer(call)
            # Rule: an empty call asks nobody. Its digest is in that of the next call that does.
            kind = None if is_empty else _Kind.CALL
            job = _Job(kind=kind, epoch=epoch, digest=digest, keep=bound)
            steps = read_steps(rows.tolist())
            bank = max(call.bank, 0)  # the core's -1: bank 0 without reuse
            if bound.types:  # of gradients
                self._counts["reduce"] += 1
                grads = self._grads[bank % len(self._grads)]
                local = _find_rows(bound.tensors, list(grads), as_bytes=False)
                job.movement = Reduction(steps, self._channel, digest, [*grads.values()], local)
                if call.zero:
                    read = self._native.slots_to_fill()[self.rank].nonzero()[0].tolist()
                    job.clear = [segment[slot] for segment in grads.values() for slot in read]
            else:
                self._counts["replicate"] += 1
                slots = self._slots[bank]
                local = _find_rows(bound.tensors, list(slots), as_bytes=True)
                job.movement = Transfer(
                    steps, self._channel, digest, [*slots.values()], local, self._wake_waits
                )
            self._submit(job)
        if self._order is not None:
            # Rule: the call's operations are issued before the caller's next ones, on every rank.
            # Backends of devices may run two process groups one after another, and each rank in its
            # own order of issue: two orders would wait for each other.
            self._wait_for(lambda: self._is_over(epoch))
        return epoch, mode

    def gather(
        self, counted: Tensor, load: Tensor, objective: Objective | None = None
    ) -> tuple[int, None]:
        """Exchange counts ``[E]`` into ``load [G, E]``, both on the CPU; return the epoch."""
        with self._changed:
            if self._refuses():
                return self._native.reject(), None
            epoch, digest = self._native.gather()
            self._counts["gather"] += 1
            counts = counted.numpy()
            job = _Job(kind=_Kind.CALL, epoch=epoch, digest=digest, counts=counts, table=load)
            self._submit(job)
        return epoch, None

    def reject(self) -> None:
        """Take an epoch and tell the peers that this rank rejected its input."""
        with self._changed:
            if self._closed or self._failed:
                return
            epoch = self._native.reject()
            self._counts["rejected"] += 1
            self._submit(_Job(kind=_Kind.REJECTED, epoch=epoch))
            self._owed = epoch
            # Calls from here on are refused.
            rank = self.rank
            self._set_failed(_core.Report(fault=_Fault.REJECTED, epoch=epoch, peer=rank, root=rank))

    def _refuses(self) -> bool:
        """Return whether a call ends before it begins."""
        if self._closed and not self._failed:
            self._set_failed(_core.Report(fault=_Fault.CANCELLED, epoch=self._native.epoch + 1))
        return self._failed != 0

    def _submit(self, job: _Job) -> None:
        if self._order is not None:
            job.events = self._order.enter()
        self._jobs.append(job)
        self._changed.notify_all()

    def _wake_waits(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ---- the thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            # Tensors of either kind may be written to in it; nothing is recorded for autograd.
            with torch.inference_mode():
                while (job := self._next_job()) is not None:
                    self._run(job)
                    del job  # or its tensors live until the next one
        finally:
            with self._changed:
                self._running = None
                self._jobs.clear()
                if not self._closed:  # not meant to end, as when out of memory: nobody waits for it
                    self._cancelled = True
                    self._set_cancelled()
                    self._abort_channels()
                releases = self._ends_itself
            if releases:
                self._release()

    def _next_job(self) -> _Job | None:
        with self._changed:
            while True:
                self._set_cancelled()
                # What was submitted before a call that this rank rejects is still owed, and so is
                # the record of that.
                if self._jobs and (not self._failed or self._jobs[0].epoch <= self._owed):
                    self._running = self._jobs.popleft()
                    return self._running
                self._jobs.clear()
                if self._closed:
                    return None
                self._changed.wait()

    def _run(self, job: _Job) -> None:
        report = None
        try:
            order, events = self._order, job.events
            with nullcontext() if order is None or events is None else order.running(*events):
                report = self._execute(job)
            if report is not None:  # a peer that has yet to compare may find this rank gone
                self._agreement.broadcast(report.fault, report.peer, report.root)
                self._abort_channels()
        except Exception as error:
            report = self._explain(job, error)
        with self._changed:
            self._running = None
            if report is None:
                self._completed = job.epoch
                if job.events is None:  # else its operations have been issued, no more
                    self._ends[job.epoch] = time.monotonic_ns()
                    self._ends.pop(job.epoch - _KNOWN_ENDS, None)
                else:
                    self._end_events.append((job.epoch, job.events[1]))
            else:
                self._owed = 0
                if not self._has_failed(report.epoch):
                    self._set_failed(report)
            self._changed.notify_all()

    def _execute(self, job: _Job) -> _core.Report | None:
        """Run a call; return how it failed, or None."""
        movement = job.movement
        if job.kind is not None:
            self._agreement.begin(job.kind, job.epoch, job.digest, job.counts)
            # Rule: bytes may move before all ranks have agreed, as each rank receives only where
            # its own plan says; but no call ends well before they have.
            if movement is not None:
                movement.begin()
            self._agreement.finish(self._call_limit)
            if (found := self._agreement.compare()) is not None:
                fault, rank = found
                return _core.Report(fault=fault, epoch=job.epoch, peer=rank, root=rank)
            if job.table is not None:
                job.table.copy_(torch.from_numpy(self._agreement.counts()))
        if movement is not None:
            movement.finish(self._wait_limit)
            with self._changed:
                self._bytes_sent += movement.bytes_sent
        for gradient in job.clear:
            gradient.zero_()
        return None

    def _explain(self, job: _Job, error: Exception) -> _core.Report:
        """Return how a call failed, once all ranks have exchanged their failure reports."""
        with self._changed:
            cancelled = self._cancelled
        if cancelled:
            return _core.Report(fault=_Fault.CANCELLED, epoch=job.epoch)
        if isinstance(error, BrokenChannelError):
            broken = error
        else:  # ours, such as memory that was refused
            broken = BrokenChannelError(str(error) or type(error).__name__, -1, receives=True)
        peer, fault = broken.peer, _Fault.TIMEOUT if broken.timed_out else _Fault.GONE
        self._agreement.broadcast(fault, peer, peer)
        self._abort_channels()  # the peers stop waiting for this rank, and read its notice
        aborter, root = -1, peer
        asked = {self.rank}
        while root not in asked and (found := self._agreement.poll(root)) is not None:
            sender, told, about, first = found
            if aborter < 0 and told is _Fault.GONE and about == self.rank:
                break  # it saw this rank's abort, so this rank was first
            root = sender
            asked.add(root)
            if aborter < 0:
                aborter = root
            if told in (_Fault.REJECTED, _Fault.MISMATCH):
                other = root if first == self.rank else first
                return _core.Report(fault=told, epoch=job.epoch, peer=other, root=other)
            if told is _Fault.CANCELLED or about < 0:
                break
            root = about
        if aborter >= 0 and fault is _Fault.GONE:
            fault = _Fault.ABORTED
        expert, piece = broken.chunk or (-1, -1)
        return _core.Report(
            fault=fault,
            epoch=job.epoch,
            flag=_core.FlagKind.CALL if broken.chunk is None else _core.FlagKind.DONE,
            peer=peer,
            expert=expert,
            piece=piece,
            seen=self._completed,
            expected=job.epoch,
            aborter=aborter if fault is _Fault.ABORTED else -1,
            root=root,
            seconds=broken.seconds,
            all_called=broken.chunk is not None,
            detail=str(broken),
        )

    def _set_cancelled(self) -> None:
        if self._cancelled and not self._failed:
            self._set_failed(_core.Report(fault=_Fault.CANCELLED, epoch=self._completed + 1))

    def _set_failed(self, report: _core.Report) -> None:
        self._report, self._failed = report, report.epoch
        self._changed.notify_all()

    def _abort_channels(self) -> None:
        self._channel.abort()
        self._agreement.abort()

    # ---- waiting ----------------------------------------------------------------------------

    def _has_failed(self, epoch: int) -> bool:
        return 0 < self._failed <= epoch

    def _is_over(self, epoch: int) -> bool:
        return self._completed >= epoch or self._has_failed(epoch)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Block until a condition holds; Ctrl-C aborts the calls, since their memory is freed."""
        try:
            with self._changed:
                self._changed.wait_for(condition)
        except BaseException:
            self.abort()
            raise

    def wait(self, epoch: int, slots: list[int] | None = None) -> bool:
        """Block until a call has finished; with a device, the current stream waits for it.

        On the CPU, ``slots`` are waited for alone.
        """
        if slots is not None and self._order is None:
            return self._wait_slots(epoch, slots)
        self._wait_for(lambda: self._is_over(epoch))
        for event in self._end_of(epoch):
            event.wait()
        return not self._has_failed(epoch)

    def synchronize(self, epoch: int) -> bool:
        """Block until a call has finished, on a device too."""
        self._wait_for(lambda: self._is_over(epoch))
        for event in self._end_of(epoch):
            event.synchronize()
        return not self._has_failed(epoch)

    def _end_of(self, epoch: int) -> list[Any]:
        """Return, on a device, the event of a call's end, or of the first known one behind it."""
        with self._changed:
            return [event for known, event in self._end_events if known >= epoch][:1]

    def _wait_slots(self, epoch: int, slots: list[int]) -> bool:
        def are_ready() -> bool:
            return all(self._is_ready(epoch, slot) for slot in slots)

        self._wait_for(lambda: are_ready() or self._has_failed(epoch))
        with self._changed:
            return are_ready()

    def _is_ready(self, epoch: int, slot: int) -> bool:
        if self._has_failed(epoch) or self._order is not None:
            return self._completed >= epoch and not self._has_failed(epoch)
        if self._completed >= epoch:
            return True
        for job in (self._running, *self._jobs):
            if job is not None and job.epoch == epoch and isinstance(job.movement, Transfer):
                return slot not in job.movement.missing
        return False

    def is_completed(self, epoch: int, slot: int | None = None) -> bool:
        """Return whether a call has finished or failed, or has filled a slot."""
        with self._changed:
            if slot is not None:
                return self._is_ready(epoch, slot)
            over, failed = self._is_over(epoch), self._has_failed(epoch)
        return over and (failed or all(event.query() for event in self._end_of(epoch)))

    def finished_at(self, epoch: int) -> int:
        """Return when one of the last calls finished, in nanoseconds; 0: unknown."""
        return self._ends.get(epoch, 0)

    # ---- banks ------------------------------------------------------------------------------

    def residents(self, bank: int) -> IntArray:
        """Return int32 ``[G, S]``, what the slots of a bank hold after all submitted calls."""
        with self._changed:
            held = self._native.residents(bank)
            return np.full_like(held, -1) if self._failed else held

    def invalidate(self, bank: int) -> int:
        """Let a bank hold nothing, of the next version, unless a call fills it: return that."""
        with self._changed:
            last = self._native.last_call(bank)
            if not self._is_over(last):
                return last
            self._native.invalidate(bank)
            return 0

    # ---- failure and end --------------------------------------------------------------------

    def abort(self) -> None:
        """Fail the calls in progress, on this rank and its peers."""
        with self._changed:
            if self._closed or self._failed:
                return
            self._cancelled = True
            self._changed.notify_all()
        self._agreement.broadcast(_Fault.CANCELLED, -1, self.rank)
        self._abort_channels()
        if threading.current_thread() is not self._thread:
            with self._changed:  # the thread sees it at once, unless something holds it up
                self._changed.wait_for(lambda: self._failed != 0, _CLOSE_SECONDS)
                self._set_cancelled()

    def close(self) -> int:
        """End the thread and leave the process groups; return -1: every call has been compared."""
        with self._changed:
            if self._closed:
                return -1
            self._closed = True
            self._changed.notify_all()
            if threading.current_thread() is self._thread:  # a garbage collection happened in it
                self._ends_itself = True
                return -1
            # A rejected call may not have reached the peers yet.
            self._changed.wait_for(lambda: not (self._jobs or self._running), _CLOSE_SECONDS)
        self._thread.join(0.1)
        if self._thread.is_alive():
            self._abort_channels()
            self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():  # else a backend does not return, and uses them
            self._release()
        return -1

    def _release(self) -> None:
        self._channel.close()
        self._agreement.close()

    def failed_epoch(self) -> int:
        """Return the first call that is known to have failed; 0: none."""
        return self._failed

    def report(self) -> _core.Report:
        """Return the report of the first failed call."""
        return self._report

    def health(self, *, waits: bool) -> _core.EngineHealth:
        """Return what the engine has done so far; a backend does not say how long it waits."""
        return _core.EngineHealth(
            **self._counts, completed=self._completed, bytes_stored=self._bytes_sent
        )


def _find_slots(
    options: Options, config: _core.EngineConfig, memory: Tensor
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return views of a rank's slots and their gradients in its memory.

    The slots by bank and segment, uint8 ``[S, bytes]``; the gradients by set and segment,
    ``[S, elements]``.
    """
    layout, per_bank = _core.EngineLayout(config), config.slots_per_rank
    offset, grad_offset = iter(layout.slot_offset), iter(layout.grad_offset)

    def rows(offset: int, nbytes: int) -> Tensor:
        return memory.narrow(0, offset, per_bank * nbytes).view(per_bank, nbytes)

    slots = [
        {name: rows(next(offset), s.nbytes) for name, s in options.segments.items()}
        for _ in range(options.banks)
    ]
    grads = [
        {name: rows(next(grad_offset), s.nbytes).view(s.dtype) for name, s in options.grads.items()}
        for _ in range(options.grad_banks)
    ]
    return slots, grads


def _find_rows(weights: Weights, names: Sequence[str], *, as_bytes: bool) -> Rows:
    """Return a function from a segment's and a local expert's index to its tensor, as one row."""

    @cache
    def find(segment: int, index: int) -> Tensor:
        tensor = weights[names[segment]][index].detach()
        row = tensor.as_strided((tensor.numel(),), (1,))  # any strides that are dense
        return row.view(torch.uint8) if as_bytes else row

    return find
