"""What one run of the replicate benchmark, or one like it, does. Equal on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.bench.figures import DEFAULT_TIMES
from ultraep_comm.bench.gate import Gate
from ultraep_comm.options import HOST_TILE_BYTES
from ultraep_comm.plan import Plan
from ultraep_comm.schedule import MODES, make_schedule

ALL_MODES = (*MODES, "auto")


@dataclass(frozen=True, kw_only=True)
class ReplicateSettings:
    """Checked arguments of ``replicate``.

    Attributes:
        load: int32 ``[G, E]``; its shape gives the numbers of ranks and experts.
        load_source: where it comes from, for the header.
        slots: replicas that a rank can hold.
        segments: bytes of one expert, by segment.
        sweep: the same of further sizes, ascending; empty: there is one size.
        modes: what is measured.
        tile_bytes: None: the engine's default.
        iters: measured iterations.
        warmup: iterations before them.
        check: verify every iteration instead of the last one.
        json: where records go; None: nowhere.
        csv: where they go flat; None: nowhere.
        gate: what they have to reach.
        link_gbps: of a rank's link, one way, for the bound; None: the measured copy rate.
        times: time columns of the table, names of `figures.TIMES`.
        seed: of load and payload.
        engine: "host" or "cuda".
        fabric: "shm", "nvshmem", "torch" or "loopback".
        num_sms: workers of a rank, one run of the modes for each; empty: the engine's default.
    """

    op: ClassVar[str] = "replicate"

    load: NDArray[np.int32]
    load_source: str
    slots: int
    segments: dict[str, int]
    sweep: tuple[dict[str, int], ...] = ()
    modes: tuple[str, ...] = ALL_MODES
    tile_bytes: int | None = None
    iters: int
    warmup: int
    check: bool
    json: Path | None = None
    csv: Path | None = None
    gate: Gate = field(default_factory=Gate)
    link_gbps: float | None = None
    times: tuple[str, ...] = DEFAULT_TIMES
    seed: int
    engine: str = "host"
    fabric: str = "shm"
    num_sms: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Return G."""
        return int(self.load.shape[0])

    @property
    def num_experts(self) -> int:
        """Return E."""
        return int(self.load.shape[1])

    @property
    def expert_bytes(self) -> int:
        """Return W."""
        return sum(self.segments.values())

    @property
    def expert(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return ``new_group``'s argument."""
        return {name: ((size,), torch.uint8) for name, size in self.segments.items()}

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """Return the segments of every size, ascending."""
        return (self.segments, *self.sweep)

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of all ranks' experts and slots at the largest size."""
        instances = self.num_experts + self.num_ranks * self.slots
        return instances * sum(self.sizes[-1].values())

    @property
    def more(self) -> dict[str, Any]:
        """Return what a header and JSON say of this command alone."""
        return {}

    def busiest_rank(self, plan: Plan, mode: str) -> float:
        """Return what the rank that moves most takes over its link in a mode, in experts."""
        schedule = make_schedule(
            plan.slot_expert,
            home=plan.home,
            segment_bytes=list(self.segments.values()),
            tile_bytes=self.tile_bytes or HOST_TILE_BYTES,
            mode=mode,
        )
        return schedule.max_egress


Sized = TypeVar("Sized", bound=ReplicateSettings)


def each_size(settings: Sized) -> Iterator[Sized]:
    """Yield the settings of every size of a sweep, each for a run of its own."""
    for segments in settings.sizes:
        yield replace(settings, segments=segments, sweep=())
