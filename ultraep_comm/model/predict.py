"""Predictions: the core's own workers execute a plan's real schedule on a modelled machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ultraep_comm import _core
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError
from ultraep_comm.model.bound import transfer_bound_us
from ultraep_comm.model.machine import Machine, find_machine
from ultraep_comm.model.timeline import SPAN
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.schedule import MODES
from ultraep_comm.plan.topology import as_int

ExpertBytes = int | Sequence[int] | Mapping[str, int]
_MAX_SEGMENT = 1 << 36
_MAX_TILES = 1 << 22
_MAX_RANKS = 1024
_MAX_SEGMENTS = 1024
_MAX_COST = 5e13  # picoseconds of all stores in sequence that the cost model can add up
_LOAD_PER_KIB = 310.0  # picoseconds, of mode="auto": as for groups on GPUs
_GRAD_TYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """A modelled transfer. All ranks enter the call at time 0.

    Attributes:
        time_us: when the last rank leaves.
        bound_us: T*, the lower bound for any schedule of the plan.
        mode: "push", "pull" or "direct": the requested mode, or the one that "auto" chose.
        finish_us: float64 ``[G]``, when each rank leaves.
        egress_us: float64 ``[G]``, how long each rank's egress was busy.
        ingress_us: float64 ``[G]``, how long each rank's ingress was busy.
        sent_bytes: int64 ``[G]`` over links, loads by other ranks included.
        received_bytes: int64 ``[G, S]``, for each slot.
        timeline: what every rank did when: ``[N]`` of ``model.timeline.SPAN``, by rank and begin;
            None unless requested.
    """

    time_us: float
    bound_us: float
    mode: str
    finish_us: NDArray[np.float64]
    egress_us: NDArray[np.float64]
    ingress_us: NDArray[np.float64]
    sent_bytes: NDArray[np.int64]
    received_bytes: NDArray[np.int64]
    timeline: NDArray[np.void] | None = None

    @property
    def over_bound(self) -> float:
        """Return the time over the bound; 1 if nothing is transferred."""
        return self.time_us / self.bound_us if self.bound_us else 1.0


def predict(
    plan: Plan,
    expert_bytes: ExpertBytes,
    machine: str | Machine = "nvl72",
    mode: str = "auto",
    *,
    residents: ArrayLike | None = None,
    may_pull: bool = False,
    device_plan: bool = False,
    timeline: bool = False,
) -> Prediction:
    """Predict the time of :func:`ultraep_comm.replicate_experts` on a machine.

    Args:
        plan: any legal plan; on a device it is copied to the CPU.
        expert_bytes: bytes of one expert; or of each segment, in a sequence or by name.
        machine: a name in ``MACHINES``, or a Machine.
        mode: "push", "pull", "direct", or "auto": by the cost model, with the machine's constants.
        residents: ``[G, S]`` integers, the expert that each slot holds since earlier calls; -1:
            none. Slots that hold what the plan has there are not filled, and can send it. None: all
            slots are empty.
        may_pull: "auto" considers pull, that is, peers can read the main weights.
        device_plan: the plan is in device memory: a kernel makes the schedule.
        timeline: keep a timeline.

    Raises:
        InvalidArgumentError: an argument is none of these, or the transfer takes too much time or
            memory to model.
        InvalidPlanError: the plan is not legal.
        UnsupportedError: the plan crosses domains and the machine has no links between them, or the
            mode is "pull", which needs load/store access.
    """
    if mode != "auto" and mode not in MODES:
        raise InvalidArgumentError(f"mode is {mode!r}; expected one of auto, {', '.join(MODES)}")
    return run_transfer(
        plan,
        expert_bytes,
        machine,
        mode=MODES.get(mode),
        residents=residents,
        may_pull=may_pull,
        device_plan=device_plan,
        timeline=timeline,
    )


def predict_reduction(
    plan: Plan,
    grad_bytes: ExpertBytes,
    machine: str | Machine = "nvl72",
    mode: str = "auto",
    *,
    grads: torch.dtype = torch.float32,
    zero: bool = True,
    device_plan: bool = False,
) -> Prediction:
    """Predict the time of :func:`ultraep_comm.reduce_expert_grads` on a machine.

    T* is that of a transfer of the same bytes, with directions reversed. Adding is charged to who
    adds; main gradients and slots to be cleared are in its own memory. ``received_bytes`` is 0.

    Args:
        plan, machine, device_plan: as in :func:`predict`; within a domain, on ranks with links.
            Slots without quota have no gradient; a plan without quotas has one in each slot.
        grad_bytes: bytes of one expert's gradients in a slot; or of each segment.
        mode: "pull", "direct", or "auto".
        grads: their dtype, float32 or bfloat16.
        zero: slots are cleared.

    Raises:
        InvalidArgumentError, InvalidPlanError, UnsupportedError: as :func:`predict`; the dtype is
            none of these, or the machine's ranks copy with their cores.
    """
    if mode not in ("auto", "pull", "direct"):
        raise InvalidArgumentError(f"mode is {mode!r}; expected one of auto, pull, direct")
    if grads not in _GRAD_TYPES:
        raise InvalidArgumentError(f"grads is {grads!r}; expected float32 or bfloat16")
    on = find_machine(machine)
    if on.parallel is not None:
        raise UnsupportedError(f"machine {on.name!r} copies with cores; reductions need links")
    return run_transfer(
        plan,
        grad_bytes,
        on,
        mode=MODES.get(mode),
        device_plan=device_plan,
        grads=grads,
        zero=zero,
    )


def run_transfer(
    plan: Plan,
    expert_bytes: ExpertBytes,
    machine: str | Machine,
    *,
    mode: _core.Mode | None,
    residents: ArrayLike | None = None,
    may_pull: bool = False,
    device_plan: bool = False,
    timeline: bool = False,
    parent: Sequence[int] = (),
    chunk_tiles: int = 1,
    grads: torch.dtype | None = None,
    zero: bool = True,
) -> Prediction:
    """Model a transfer as :func:`predict` does, or along trees of relays.

    Args:
        plan, expert_bytes, machine, residents, may_pull, device_plan, timeline: as in
            :func:`predict`; residents only of a transfer by the library's schedule.
        mode: None: chosen by the cost model.
        parent: ``[R]``, the rank that sends to each replica, by ascending expert and then rank;
            empty: the library's schedule.
        chunk_tiles: tiles that a relay passes on together.
        grads, zero: of a reduction, as in :func:`predict_reduction`; None: a transfer.
    """
    if not isinstance(plan, Plan):
        raise InvalidArgumentError(f"plan is {plan!r}; expected a Plan")
    on = find_machine(machine)
    segments = _segment_bytes(expert_bytes, on.tile_bytes)
    host = plan.cpu()
    slots = host.slot_expert.numpy().astype(np.int64)
    home = host.home.numpy().astype(np.int64)
    if len(slots) > _MAX_RANKS:
        raise InvalidArgumentError(
            f"the plan has {len(slots)} ranks; expected at most {_MAX_RANKS}"
        )
    host.validate(allow_cross_domain=True)
    if grads is not None and host.slot_quota is not None:
        slots = np.where(host.slot_quota.numpy() != 0, slots, -1)  # the others have no gradient
    held = _kept(residents, slots)
    num_moves = int((slots != held).sum())
    crosses = _check_links(slots, home, on, mode)
    cross = on.cross_gbps or on.egress_gbps  # not used without such a link
    before = on.launch_us + on.call_us
    if device_plan:
        before += on.schedule_us + on.schedule_replica_us * num_moves
    try:
        found = _core.model_transfer(
            slot_expert=slots.ravel().tolist(),
            home=home.tolist(),
            num_ranks=len(slots),
            segment_bytes=segments,
            tile_bytes=on.tile_bytes,
            mode=mode,
            may_pull=may_pull and not crosses,
            cost=_cost(on, len(slots), sum(segments) * num_moves),
            rates=[
                1e3 / (gbps * efficiency)  # picoseconds per byte
                for links in ((on.egress_gbps, on.ingress_gbps), (cross, cross))
                for efficiency in (on.write_efficiency, on.read_efficiency)
                for gbps in links
            ]
            + [on.egress_gbps / (on.unloaded_gbps or on.egress_gbps)],
            times=[
                round(us * 1e6)
                for us in (
                    *(on.deliver_us, on.flag_us, on.load_us, on.cross_us),
                    *(on.group_us, before, on.leave_us, on.poll_us),
                    *(on.fetch_us, on.store_us, on.publish_us),
                    *(on.gather_us, on.add_us, on.clear_us),
                )
            ],
            counts=[
                on.domain_size or 0,
                *(on.num_sms, on.stages),
                int(on.fair_loads),
            ],
            cores=[
                0.0 if on.parallel is None else 1 / on.parallel,
                0.0 if on.read_gbps is None else 1e3 / on.read_gbps,
            ],
            timeline=timeline,
            parent=list(parent),
            chunk_tiles=chunk_tiles,
            grad_types=[] if grads is None else [_GRAD_TYPES[grads]] * len(segments),
            zero=zero,
            resident=None if residents is None else held.ravel().tolist(),
        )
    except OverflowError as error:
        raise InvalidArgumentError(
            f"a transfer of {sum(segments)} bytes for each of {num_moves} replicas cannot"
            f" be modelled on machine {on.name!r}: {error}"
        ) from None
    return Prediction(
        time_us=float(found["finish_ps"].max()) / 1e6,
        bound_us=transfer_bound_us(slots, home, sum(segments), on, residents=held),
        mode=found["mode"].name.lower(),
        finish_us=found["finish_ps"] / 1e6,
        egress_us=found["egress_ps"] / 1e6,
        ingress_us=found["ingress_ps"] / 1e6,
        sent_bytes=found["sent"],
        received_bytes=found["received"],
        timeline=_timeline(found) if timeline else None,
    )


def _segment_bytes(expert_bytes: ExpertBytes, tile_bytes: int) -> list[int]:
    if isinstance(expert_bytes, Mapping):
        expert_bytes = list(expert_bytes.values())
    sizes = expert_bytes if isinstance(expert_bytes, Sequence) else [expert_bytes]
    if len(sizes) > _MAX_SEGMENTS:
        raise InvalidArgumentError(
            f"expert_bytes has {len(sizes)} segments; expected at most {_MAX_SEGMENTS}"
        )
    segments = [as_int(size, "expert_bytes") for size in sizes]
    if not segments or not all(0 < size <= _MAX_SEGMENT for size in segments):
        raise InvalidArgumentError(
            f"expert_bytes is {expert_bytes!r}; expected 1 to {_MAX_SEGMENT} bytes for each segment"
        )
    if sum(-(-size // tile_bytes) for size in segments) > _MAX_TILES:
        raise InvalidArgumentError(
            f"expert_bytes is {expert_bytes!r}; expected at most {_MAX_TILES} tiles of {tile_bytes}"
            " bytes; use larger tiles"
        )
    return segments


def _kept(residents: ArrayLike | None, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the residents that the plan has in the same slots; -1 elsewhere."""
    held = np.full_like(slots, -1) if residents is None else np.asarray(residents)
    if held.shape != slots.shape or (held.size and not np.issubdtype(held.dtype, np.integer)):
        raise InvalidArgumentError(
            f"residents is an array of {held.dtype} of shape {held.shape}; expected integers of"
            f" shape {slots.shape}"
        )
    return np.where(held == slots, slots, -1)


def _check_links(
    slots: NDArray[np.int64], home: NDArray[np.int64], machine: Machine, mode: _core.Mode | None
) -> bool:
    """Return whether the plan crosses domains; raise UnsupportedError if it cannot."""
    size = machine.domain_size
    if size is None:
        return False
    rank, slot = np.nonzero(slots >= 0)
    expert = slots[rank, slot]
    far = np.flatnonzero(rank // size != home[expert] // size)
    if not len(far):
        return False
    i = far[0]
    crossing = (
        f"rank {rank[i]} has a replica of expert {expert[i]} from rank {home[expert[i]]}, in"
        f" another domain of {size} ranks"
    )
    if machine.cross_gbps is None:
        raise UnsupportedError(
            f"{crossing}, and machine {machine.name!r} has no links between domains; set its"
            " cross_gbps, or plan with domains"
        )
    if mode is _core.Mode.PULL:
        raise UnsupportedError(
            f"{crossing}, whose memory it cannot load from; expected a plan within domains, or"
            " mode 'push' or 'direct'"
        )
    return True


def _cost(machine: Machine, num_ranks: int, total_bytes: int) -> list[int]:
    """Return the constants of `CostModel` in src/core/schedule/cost.hpp.

    They are scaled down by one factor if the transfer would overflow the cost model: only their
    ratios matter.
    """
    store = 1024e3 / (machine.egress_gbps * machine.write_efficiency)
    load, percent = _LOAD_PER_KIB, 100 * num_ranks
    flag = machine.poll_us + machine.publish_us  # by each worker, for groups of its own
    group = 1e6 * flag / machine.num_sms
    hop = 1e6 * (machine.hop_us + flag + machine.fetch_us + machine.store_us)
    if machine.parallel is not None:  # cores: the calibrated constants, as for groups on the host
        load = 1024e3 / machine.read_gbps if machine.read_gbps else 0.0
        group, percent = 1e6 * machine.group_us, max(100, round(100 * machine.parallel))
    scale = max(1.0, max(store, load) * total_bytes / 1024 / _MAX_COST)
    times = (store, load, group, hop)
    return [*(round(time / scale) for time in times), percent]


def _timeline(found: dict[str, Any]) -> NDArray[np.void]:
    columns, times = found["spans"], found["span_ps"] / 1e6
    spans = np.empty(len(columns), SPAN)
    for i, name in enumerate(("rank", "kind", "peer", "expert", "piece", "bytes")):
        spans[name] = columns[:, i]
    spans["begin_us"], spans["end_us"] = times[:, 0], times[:, 1]
    order = np.lexsort((spans["kind"], spans["begin_us"], spans["rank"]))
    return spans[order]
