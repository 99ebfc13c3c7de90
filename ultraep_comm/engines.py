"""What a group needs from an engine. The host engine has it in C++, the CUDA engine in Python."""

from __future__ import annotations

from typing import Protocol

import torch

from ultraep_comm import _core
from ultraep_comm.gradients import BoundGrads
from ultraep_comm.plan import Plan
from ultraep_comm.planner import Costs
from ultraep_comm.segments import BoundWeights


class Engine(Protocol):
    """One rank of one group. Addresses are integers; calls are numbered by epochs from 1."""

    def add_region(self, bases: list[int]) -> int:
        """Remember main weights that peers can address; return their number."""

    def check(self, slot_expert: int) -> tuple[int, int, int, int]:
        """Check a plan; see `check_plan` in src/core/validate.hpp."""

    def accepts(self, slot_expert: int, home: int) -> bool:
        """Return whether a plan is legal and has the group's home map: both, in one question."""

    def has_home(self, home: int) -> bool:
        """Return whether a home map ``[E]`` is the group's."""

    def replicate(
        self,
        slot_expert: int,
        slot_quota: int,
        home_quota: int,
        mains: int,
        segments: int,
        num_segments: int,
        mode: int,
        region: int,
        background: bool,
        tag: int,
    ) -> tuple[int, int]:
        """Submit a call; return its epoch and its mode. Ranks must agree on ``tag``, 64 bits."""

    def reduce(
        self,
        slot_expert: int,
        slot_quota: int,
        home_quota: int,
        mains: int,
        main_types: int,
        mode: int,
        zero: bool,
        background: bool,
        tag: int,
    ) -> tuple[int, int]:
        """Submit a reduction of gradients; return its epoch and its mode."""

    def wait(self, epoch: int) -> bool:
        """Order what the caller does next behind a call; False: it has failed.

        The host engine blocks; the CUDA engine orders the current stream.
        """

    def synchronize(self, epoch: int) -> bool:
        """Block until a call has finished; False: it has failed."""

    def is_completed(self, epoch: int) -> bool:
        """Return whether a call has finished or failed."""

    def finished_at(self, epoch: int) -> int:
        """Return when a call finished, in nanoseconds of the monotonic clock; 0: not known.

        The host engine knows it of its last eight calls; the CUDA engine of none.
        """

    def failed_epoch(self) -> int:
        """Return the first call that failed; 0: none is known."""

    def report(self) -> _core.Report:
        """Return how it failed."""

    def reject(self) -> None:
        """Tell the peers that this rank's input was bad."""

    def abort(self) -> None:
        """Fail what is under way, here and at the peers."""

    def close(self) -> int:
        """Say goodbye; return a rank that is seen to have made another last call, else -1."""

    @property
    def epoch(self) -> int:
        """Return the number of submitted calls."""

    @property
    def bytes_stored(self) -> int:
        """Return the bytes stored so far."""

    @property
    def calls(self) -> tuple[int, int, int, int]:
        """Return how many calls took an epoch: transfers, reductions, gathers, rejected ones."""


class DeviceEngine(Engine, Protocol):
    """One that takes ids and plans in its device's memory too."""

    def gather(self, ids: torch.Tensor, load: torch.Tensor) -> int:
        """Count ids, and exchange the counts into ``load`` ``[G, E]``; return the epoch."""

    @property
    def plans_at_once(self) -> bool:
        """Return whether :meth:`gather_and_plan` can be used."""

    def gather_and_plan(
        self,
        ids: torch.Tensor,
        load: torch.Tensor,
        plan: torch.Tensor,
        stages: _core.CudaStages,
        target_ppm: int,
        costs: Costs | None,
    ) -> int:
        """Do the same and plan the load, in one launch; return the epoch."""

    @property
    def launch_counts(self) -> tuple[int, int]:
        """Return how many kernels calls have launched so far, and copies enqueued to the device."""

    def bad_id(self) -> tuple[int, int]:
        """Return where the first id was that this rank's device rejected, and the id; -1: none."""

    def replicate_on_device(
        self,
        plan: Plan,
        home: int,
        bound: BoundWeights,
        segments: int,
        mode: int,
        background: bool,
        tag: int,
    ) -> int:
        """Submit a call; return its epoch.

        ``home`` is compared with the group's, unless it is 0; ``segments`` has a bit for each.
        """

    def reduce_on_device(
        self,
        plan: Plan,
        home: int,
        bound: BoundGrads,
        mode: int,
        zero: bool,
        in_use: int,
        background: bool,
        tag: int,
    ) -> int:
        """Submit a reduction; return its epoch. ``home`` as above.

        ``in_use`` is the address of its saved plan's mark, which it clears, or 0.
        """
