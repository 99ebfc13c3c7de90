"""vLLM's EPLB moves experts by this library: ``ULTRAEP_VLLM=eplb``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import ultraep_comm as uec
from ultraep_comm.adapters import checks, rows
from ultraep_comm.adapters.vllm import EPLB, LOGGER, replace_factory
from ultraep_comm.errors import InvalidPlanError
from ultraep_comm.group.group import rejecting

_BASE = f"{EPLB}.eplb_communicator:EplbCommunicator"
_STREAM = f"{EPLB}.eplb_utils:device_stream"
# What is called or overridden, and the parameters that it was written for.
PATCH_POINTS = {
    _STREAM: "stream",
    f"{_BASE}.add_send": "self tensors dst_rank expert_id",
    f"{_BASE}.add_recv": "self tensors src_rank expert_id",
    f"{_BASE}.execute": "self",
    f"{_BASE}.set_transfer_context": "self old_indices layer_idx",
    f"{_BASE}.set_stream": "self stream",
}

_REMEDY = (
    "set ULTRAEP_VLLM=batch, for layers that differ: vLLM's own EPLB has one receive buffer for all"
)


def register() -> None:
    """Let vLLM make a :class:`Mover` where it would make a communicator."""
    replace_factory("eplb", PATCH_POINTS, _make_mover)


def _make_mover(*given: Any) -> Any:
    parts = {"on_stream": staticmethod(checks.find(_STREAM))}
    return type("UltraEPCommunicator", (Mover, checks.find(_BASE)), parts)(*given)


class Mover:
    """Moves a layer's experts, as an ``EplbCommunicator`` of vLLM.

    Physical rows are the group's experts: row ``i`` has its home on rank ``i // L``, and its L
    slots are vLLM's receive buffer. Every rank calls ``execute`` for every layer, from the main
    thread or EPLB's own.

    Attributes:
        group: shared by all models with experts of the same shapes.
        moved: experts that all ranks together have received.
    """

    needs_profile_buffer_reservation = False  # the slots are there
    on_stream: Any  # vLLM's context

    def __init__(
        self,
        coordinator: Any,
        expert_weights: Sequence[Sequence[torch.Tensor]],
        expert_buffer: list[torch.Tensor],
    ) -> None:
        """Create or join a group, and put its slots into ``expert_buffer``. Collective."""
        cpu_group = coordinator.cpu_group
        problem = _find_problem(expert_weights, expert_buffer)
        rows.raise_problems(checks.gather_json(cpu_group, problem), "ULTRAEP_VLLM", _REMEDY)
        first = expert_weights[0]
        on_cpu = first[0].device.type == "cpu"
        self._weights, self._buffer, self._rows = expert_weights, expert_buffer, len(first[0])
        self.group = rows.group_of_rows(cpu_group if on_cpu else coordinator.device_group, first)
        expert_buffer[:] = [self.group.slots[name] for name in rows.by_name(first)]
        self.moved, self._layer, self._stream = 0, -1, None
        self._old: list[list[int]] = []
        self._forget()
        LOGGER.info("vLLM's EPLB moves experts by ultraep_comm: %d rows a rank", self._rows)

    def set_stream(self, stream: Any) -> None:
        """Use a stream for what follows; None: the current one."""
        self._stream = stream

    def _forget(self) -> None:
        self._sources = [-1] * self._rows  # of this rank's slots: physical rows
        self._sends: set[tuple[int, int]] = set()  # own row, destination
        self._problem = ""

    def set_transfer_context(self, old_indices: Any, layer_idx: int) -> None:
        """Name the layer, and the experts in its physical rows: integers ``[G * L]``, -1: none."""
        shape = (self.group.num_ranks, self._rows)
        self._old = [list(map(int, row)) for row in old_indices.reshape(shape)]
        self._layer = layer_idx

    def add_send(self, tensors: list[torch.Tensor], dst_rank: int, expert_id: int) -> None:
        """Note that ``dst_rank`` needs a row of the layer's weights."""
        self._sends.add((self._find_row(self._weights[self._layer], tensors, expert_id), dst_rank))

    def add_recv(self, tensors: list[torch.Tensor], src_rank: int, expert_id: int) -> None:
        """Note that a slot is to have the expert that ``src_rank`` has."""
        slot = self._find_row(self._buffer, tensors, expert_id)
        if expert_id not in self._old[src_rank]:
            self._problem = f"expects expert {expert_id} of rank {src_rank}, which has none"
        elif slot >= 0:
            self._sources[slot] = src_rank * self._rows + self._old[src_rank].index(expert_id)

    def _find_row(
        self, whole: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], expert_id: int
    ) -> int:
        """Return which row of ``whole`` the tensors are; -1 with a problem: none."""
        step = whole[0].stride(0) * whole[0].element_size()
        row = (tensors[0].data_ptr() - whole[0].data_ptr()) // step
        places = [t.data_ptr() for t in tensors]
        if 0 <= row < self._rows and places == [t[row].data_ptr() for t in whole]:
            return row
        self._problem = f"has expert {expert_id} in memory that was not given at set-up"
        return -1

    def execute(self) -> None:
        """Move what was noted. Collective; later work of the stream has the weights.

        Raises:
            InvalidPlanError: this rank noted what does not match.
            TransferError: a rank did not join in time, ended, or rejected its input; or the
                transfer failed.
        """
        group, count, sends = self.group, self._rows, self._sends
        own, problem = self._sources, self._problem
        self._forget()
        # As a load: a call of the group, which is bounded and names an absent rank.
        noted = torch.zeros(group.num_ranks * count, dtype=torch.int32, device="cpu")
        noted[:count] = torch.tensor(own, dtype=torch.int32, device="cpu") + 1
        with rejecting(group):
            if problem:
                raise InvalidPlanError(f"EPLB of layer {self._layer}: rank {group.rank} {problem}")
            sources = uec.gather_load(counts=noted, group=group)[:, :count] - 1
            mine = (sources >= 0) & (sources // count == group.rank)
            needed = {(int(sources[r, s]) % count, r) for r, s in mine.nonzero().tolist()}
            if needed != sends:
                raise InvalidPlanError(
                    f"EPLB of layer {self._layer}: rank {group.rank} sends {sorted(sends)},"
                    f" (row, rank), and its peers need {sorted(needed)}; ranks have different maps"
                )
            plan = rows.plan_of(sources, group)
        if plan.num_replicas:
            weights = rows.by_name(self._weights[self._layer])
            with self.on_stream(self._stream):
                uec.replicate_experts(weights, plan, group=group)
            self.moved += plan.num_replicas


def _find_problem(weights: Sequence[Sequence[torch.Tensor]], buffer: Any) -> str:
    """Return what prevents slots in place of the receive buffer; nothing: an empty text."""
    if not isinstance(buffer, list) or len(buffer) != len(weights[0]):
        return f"has {type(buffer).__name__} as receive buffer, not a list of {len(weights[0])}"
    return rows.find_problem(weights)
