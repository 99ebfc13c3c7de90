"""``layer``: options and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from studies.options import (
    WORKLOAD_EXPERTS,
    WORKLOAD_TOKENS,
    WORKLOAD_TOPK,
    WORKLOADS,
    parse_workloads,
)
from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import DEFAULT_EXPERTS, Settings, default_imbalance, option
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

DEFAULT_RANKS = 2
_WORKLOAD_STEPS = 12  # whose mean is the workload's: a turn of W6 and of W7
_SHARES_TOKENS = 1 << 24  # of a generated load; enough for smooth shares


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where tokens go.

    Attributes:
        workload: of `options.WORKLOADS`, whose next step an iteration is; "": ids are drawn by
            shares, which else are those of the workload's first steps.
        shares: float64 ``[E]``, the probability of each expert.
        imbalance: of the ranks under these shares.
    """

    workload: str
    shares: NDArray[np.float64]
    imbalance: float


@dataclass(frozen=True, kw_only=True)
class LayerSettings(Settings):
    """Checked options of ``layer``.

    Attributes:
        routings: one after the other.
        hidden, inner: H and I.
    """

    num_ranks: int = options.RANKS(
        0, help="ranks, at most one per core", shown=f"{DEFAULT_RANKS}, or the launcher's"
    )
    experts: int = options.EXPERTS(DEFAULT_EXPERTS)
    slots: int = options.SLOTS(2, minimum=0)
    tokens: int = options.TOKENS(1024)
    topk: int = options.TOPK(4)
    hidden: int = option("--hidden", parse=int, minimum=1, default=256, help="width of a token")
    inner: int = option("--inner", parse=int, minimum=1, default=512, help="width inside an expert")
    imbalance: float | None = options.IMBALANCE_OF_LOAD(help="of the routing")
    workloads: tuple[str, ...] = options.WORKLOAD(
        (),
        parse=parse_workloads,
        help=f"routing of public workloads instead, of {', '.join(WORKLOADS)}; their published"
        f" shape is --experts {WORKLOAD_EXPERTS} --topk {WORKLOAD_TOPK} --tokens {WORKLOAD_TOKENS}"
        " --hidden 512 --inner 1024 -w 5",
    )
    iters: int = options.ITERS(20)
    warmup: int = options.WARMUP(3)
    check: bool = options.CHECK(False)
    seed: int = options.SEED(1)
    json: Path | None = options.JSON()
    csv: Path | None = options.CSV()
    max_over_bound: float | None = options.MAX_OVER_BOUND(
        help="fail, with exit status 3, if a step with replicas takes more than X times a balanced"
        " one"
    )
    routings: tuple[Routing, ...] = ()

    def checked(self) -> Self:
        """Return the settings with their routings. See `Settings.checked`."""
        made = options.resolve_ranks(super().checked(), default=DEFAULT_RANKS)
        if made.experts < made.num_ranks:
            raise InvalidArgumentError(
                f"--experts is {made.experts}; expected at least one for each of {made.num_ranks}"
                " ranks"
            )
        return replace(made, routings=_make_routings(made))

    @property
    def mean_imbalance(self) -> float:
        """Return the imbalance, mean over the routings."""
        return sum(routing.imbalance for routing in self.routings) / len(self.routings)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of one expert's tensors."""
        return {"w13": (self.hidden, 2 * self.inner), "w2": (self.inner, self.hidden)}


def _make_routings(settings: LayerSettings) -> tuple[Routing, ...]:
    """Return the routings.

    Raises:
        InvalidArgumentError: both ways to give one are used, or it is impossible.
    """
    import numpy as np

    from studies.loads import make_loads
    from studies.workloads import check_pools
    from ultraep_comm.bench.loads import generate_load, rank_imbalance

    num_ranks, workloads = settings.num_ranks, settings.workloads
    shape = {"num_ranks": num_ranks, "num_experts": settings.experts}
    if not workloads:
        given = settings.imbalance
        imbalance = default_imbalance(num_ranks) if given is None else given
        load = generate_load(
            **shape, imbalance=imbalance, num_tokens=_SHARES_TOKENS, seed=settings.seed
        ).sum(axis=0)
        return (Routing(workload="", shares=load / load.sum(), imbalance=imbalance),)
    if settings.imbalance is not None:
        raise InvalidArgumentError(
            f"--imbalance is {settings.imbalance:g}, but --workload {','.join(workloads)} has its"
            " own; give one of the two"
        )
    check_pools(workloads, settings.experts, settings.topk, f"--experts is {settings.experts}")
    routings = []
    for workload in workloads:
        loads = make_loads(
            workload,
            **shape,
            num_tokens=num_ranks * settings.tokens,
            topk=settings.topk,
            seeds=_WORKLOAD_STEPS,
        )
        mean = sum(rank_imbalance(load, num_ranks) for load in loads) / len(loads)
        total = np.sum(loads, axis=0)
        routings.append(Routing(workload=workload, shares=total / total.sum(), imbalance=mean))
    return tuple(routings)


COMMAND = Command(
    name="layer",
    help="time a whole MoE layer, forward and backward, with and without replicas",
    description="Time a MoE layer, forward and backward, on the CPU: with skewed routing, with"
    " skewed routing and replicas, and with balanced routing, interleaved. The exit status is 1"
    " if any value is wrong, 3 if a limit is not met, 2 after other errors.",
    settings=LayerSettings,
    module="studies.layer.run",
)
