"""vLLM: its expert parallelism load balancer (EPLB) moves weights by this library.

Installing the library declares :func:`register` as a general plugin of vLLM. It does nothing unless
the environment variable ULTRAEP_VLLM is set, so that this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ultraep_comm import env
from ultraep_comm.errors import InvalidPlanError, UltraEPError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from ultraep_comm.plan.plan import Plan

_EPLB = "vllm.distributed.eplb"
_BASE = f"{_EPLB}.eplb_communicator:EplbCommunicator"
_FACTORY = "create_eplb_communicator"
_ELASTIC = "vllm.distributed.stateless_coordinator"

# What is called or replaced, and the parameters it was written for.
SEAM: Mapping[str, str] = MappingProxyType(
    {
        f"{_EPLB}.eplb_communicator:{_FACTORY}": (
            "group_coordinator backend expert_weights expert_buffer"
        ),
        f"{_EPLB}.eplb_state:{_FACTORY}": "group_coordinator backend expert_weights expert_buffer",
        f"{_EPLB}.eplb_utils:device_stream": "stream",
        f"{_BASE}.add_send": "self tensors dst_rank expert_id",
        f"{_BASE}.add_recv": "self tensors src_rank expert_id",
        f"{_BASE}.execute": "self",
        f"{_BASE}.set_transfer_context": "self old_indices layer_idx",
        f"{_BASE}.set_stream": "self stream",
        f"{_BASE}._log_initialized": "self",
    }
)


def register() -> None:
    """Do what ULTRAEP_VLLM says, in a process of vLLM: nothing, or ``eplb``.

    Raises:
        InvalidArgumentError: the variable has another value.
        UnsupportedError: ``batch``, which is not there yet; or this release of vLLM has other
            signatures.
    """
    mode = env.vllm()
    if mode is None:
        return
    if mode == "batch":
        raise UnsupportedError(
            "ULTRAEP_VLLM=batch: there are no replicas for each batch in vLLM yet. Set"
            " ULTRAEP_VLLM=eplb, by which vLLM's own EPLB moves experts through this library"
        )
    from ultraep_comm.adapters import seams

    seams.check_version("vllm", "0.33", "0.33")
    communicators, state, utils, elastic = map(
        importlib.import_module,
        (f"{_EPLB}.eplb_communicator", f"{_EPLB}.eplb_state", f"{_EPLB}.eplb_utils", _ELASTIC),
    )
    original = getattr(communicators, _FACTORY)
    if isinstance(original, _Factory):  # plugins may be loaded more than once
        return
    for path, parameters in SEAM.items():
        module, _, names = path.partition(":")
        found = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        seams.check_signature(found, parameters.split())  # type: ignore[arg-type]
    kind = type("UltraEPCommunicator", (Mover, communicators.EplbCommunicator), {})
    factory = _Factory(original, kind, utils.device_stream, elastic.StatelessGroupCoordinator)
    for module in (communicators, state):
        setattr(module, _FACTORY, factory)


class _Factory:
    """Makes communicators, in place of vLLM's ``create_eplb_communicator``."""

    def __init__(
        self,
        original: Callable[..., Any],
        kind: type[Any],
        on_stream: Callable[[Any], Any],
        elastic: type[Any],
    ) -> None:
        self._original, self._kind, self._on_stream = original, kind, on_stream
        self._elastic = elastic

    def __call__(
        self,
        group_coordinator: Any,
        backend: str,
        expert_weights: Sequence[Sequence[torch.Tensor]],
        expert_buffer: list[torch.Tensor],
    ) -> Any:
        """Return a communicator; ``backend`` is used only where a rank is alone. Collective.

        Raises:
            UnsupportedError: elastic expert parallelism, or tensors without a row per expert.
            InvalidArgumentError: an expert's row is not dense.
            BootstrapError, OutOfSharedMemoryError: see ``new_group``.
        """
        from ultraep_comm.adapters import seams

        if isinstance(group_coordinator, self._elastic):
            raise UnsupportedError(
                "ULTRAEP_VLLM=eplb: elastic expert parallelism changes the ranks of a group;"
                " unset ULTRAEP_VLLM, or enable_elastic_ep"
            )
        if not expert_weights or seams.is_alone(group_coordinator.cpu_group, "vLLM's EPLB"):
            return self._original(group_coordinator, backend, expert_weights, expert_buffer)
        return self._kind(group_coordinator, expert_weights, expert_buffer, self._on_stream)


class Mover:
    """Moves a layer's experts, as an ``EplbCommunicator`` of vLLM.

    Physical rows are the group's experts: row ``i`` has its home on rank ``i // L``, and its L
    slots are vLLM's receive buffer. Every rank calls ``execute`` for every layer, from the main
    thread or EPLB's own.

    Attributes:
        group: shared by all models with experts of the same shapes.
        plan: of the last transfer; None: there was none.
        moved: experts that all ranks together have received.
    """

    needs_profile_buffer_reservation = False  # the slots are there

    def __init__(
        self,
        coordinator: Any,
        expert_weights: Sequence[Sequence[torch.Tensor]],
        expert_buffer: list[torch.Tensor],
        on_stream: Callable[[Any], Any],
    ) -> None:
        """Create or join a group, and put its slots into ``expert_buffer``. Collective."""
        import torch.distributed as dist

        import ultraep_comm as uec

        self._cpu_group = cpu_group = coordinator.cpu_group
        problems = [""] * cpu_group.size()
        dist.all_gather_object(problems, _find_problem(expert_weights, expert_buffer), cpu_group)
        for rank, problem in enumerate(problems):
            if problem:
                raise UnsupportedError(
                    f"ULTRAEP_VLLM=eplb: expert-parallel rank {rank} {problem}; unset ULTRAEP_VLLM,"
                    " and vLLM moves them itself"
                )
        first = expert_weights[0]
        self._names = [f"tensor {i}" for i in range(len(first))]
        self._weights, self._buffer, self._on_stream = expert_weights, expert_buffer, on_stream
        self._rows = rows = first[0].shape[0]
        on_cpu = first[0].device.type == "cpu"
        self.group = uec.group_for(
            cpu_group if on_cpu else coordinator.device_group,
            like=dict(zip(self._names, first, strict=True)),
            slots_per_rank=rows,
            num_experts=cpu_group.size() * rows,
            allow_cross_domain=True,
            device="cpu" if on_cpu else first[0].device,
        ).group
        expert_buffer[:] = [self.group.slots[name] for name in self._names]
        self.plan: Plan | None = None
        self.moved = 0
        self.set_stream(None)
        self._forget()
        self._log_initialized()

    if TYPE_CHECKING:  # of vLLM's class

        def set_stream(self, stream: Any) -> None: ...
        def _log_initialized(self) -> None: ...

        _stream: Any

    def _forget(self) -> None:
        self._old: Any = None
        self._layer = -1
        self._sources = [-1] * self._rows  # of this rank's slots: physical rows
        self._sends: set[tuple[int, int]] = set()  # own row, destination
        self._problem = ""

    def set_transfer_context(self, old_indices: Any, layer_idx: int) -> None:
        """Name the layer, and the experts in its physical rows: integers ``[G * L]``, -1: none."""
        count = self._cpu_group.size()
        self._old = [list(map(int, row)) for row in old_indices.reshape(count, self._rows)]
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
        first = whole[0]
        step = first.stride(0) * first.element_size()
        row = (tensors[0].data_ptr() - first.data_ptr()) // step
        places = [t.data_ptr() for t in tensors]
        if 0 <= row < self._rows and places == [t[row].data_ptr() for t in whole]:
            return row
        self._problem = f"has expert {expert_id} in memory that was not given at set-up"
        return -1

    def execute(self) -> None:
        """Move what was noted. Collective; later work of the stream has the weights.

        Raises:
            InvalidPlanError: ranks noted what does not match.
            TransferError: the transfer failed.
        """
        try:
            self._execute()
        finally:
            self._forget()

    def _execute(self) -> None:
        import torch
        import torch.distributed as dist

        import ultraep_comm as uec

        group, rows = self.group, self._rows
        every: list[Any] = [None] * group.num_ranks
        dist.all_gather_object(every, (self._sources, self._problem), self._cpu_group)
        try:
            for rank, (_, problem) in enumerate(every):
                if problem:
                    raise InvalidPlanError(f"EPLB of layer {self._layer}: rank {rank} {problem}")
            sources = torch.tensor([own for own, _ in every], dtype=torch.int32)
            mine = (sources >= 0) & (sources // rows == group.rank)
            needed = {(int(sources[r, s]) % rows, r) for r, s in mine.nonzero().tolist()}
            if needed != self._sends:
                raise InvalidPlanError(
                    f"EPLB of layer {self._layer}: rank {group.rank} sends {sorted(self._sends)},"
                    f" (row, rank), and its peers need {sorted(needed)}; ranks have different maps"
                )
            plan = uec.Plan.from_slots(
                sources,
                num_experts=group.num_ranks * rows,
                domains=group.topology.domain,
                allow_cross_domain=True,
            )
        except UltraEPError as error:
            group.session.reject(error)
            raise
        if not plan.num_replicas:
            return
        weights = dict(zip(self._names, self._weights[self._layer], strict=True))
        with self._on_stream(self._stream):
            uec.replicate_experts(weights, plan, group=group)
        self.plan = plan
        self.moved += plan.num_replicas


def _find_problem(weights: Sequence[Sequence[torch.Tensor]], buffer: Any) -> str:
    """Return what prevents slots in place of the receive buffer; nothing: an empty text."""
    if not isinstance(buffer, list) or len(buffer) != len(weights[0]):
        return f"has {type(buffer).__name__} as receive buffer, not a list of {len(weights[0])}"
    for number, layer in enumerate(weights):
        for i, tensor in enumerate(layer):
            what = f"has a tensor {i} of layer {number} with shape {tuple(tensor.shape)}"
            if tensor.dim() == 0 or tensor.shape[0] != weights[0][0].shape[0]:
                return f"{what}, without one row for each expert"
            if tensor.shape[0] > 1 and tensor.stride(0) < tensor[0].numel():
                return f"{what}, whose rows share memory"
        kinds = [[(t.shape, t.stride(), t.dtype, t.device) for t in w] for w in (layer, weights[0])]
        if kinds[0] != kinds[1]:
            return f"has layer {number} with tensors {kinds[0]}, and layer 0 with {kinds[1]}"
    return ""
