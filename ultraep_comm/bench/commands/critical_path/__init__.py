"""``critical-path``: options and settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import DEFAULT_EXPERTS, Settings
from ultraep_comm.bench.sizes import split_expert

if TYPE_CHECKING:
    from typing_extensions import Self

    from ultraep_comm.bench.traces import Trace


@dataclass(frozen=True, kw_only=True)
class PathSettings(Settings):
    """Checked options of ``critical-path``.

    Attributes:
        num_experts: E.
        segments: bytes of one expert, by segment.
        trace: recorded routing, or None.
    """

    num_ranks: int = options.RANKS(0)
    experts: int | None = options.EXPERTS(shown=f"{DEFAULT_EXPERTS}, or the trace's")
    slots: int = options.SLOTS(2)
    tokens: int = options.TOKENS(8192)
    topk: int = options.TOPK(8)
    expert_bytes: int = options.EXPERT_BYTES(16 << 20)
    imbalance: float | None = options.IMBALANCE_OF_LOAD(help="of the drawn ids")
    trace_file: Path | None = options.TRACE_FILE(
        help="draw ids from recorded routing; each iteration takes the next step"
    )
    layer: int = options.LAYER(0)
    engine: str = "cuda"
    fabric: str = options.FABRIC("auto", choices=("auto", "nvshmem", "torch", "loopback"))
    mode: str = options.MODE("auto")
    num_sms: int | None = options.NUM_WORKERS(help="blocks of a rank")
    tile_bytes: int | None = options.TILE_BYTES()
    iters: int = options.ITERS(20)
    warmup: int = options.WARMUP(3)
    check: bool = options.CHECK(False)
    seed: int = options.SEED(1)
    max_over_bound: float | None = options.MAX_OVER_BOUND(
        help="fail, with exit status 3, if a whole path takes more than X times the transfer's"
        " bound"
    )
    link_gbps: float | None = options.LINK_GBPS()
    json: Path | None = options.JSON()
    csv: Path | None = options.CSV()
    num_experts: int = 0
    segments: dict[str, int] = field(default_factory=dict)
    trace: Trace | None = None

    def checked(self) -> Self:
        """Return the settings with their experts and trace. See `Settings.checked`."""
        options.check_no_trace(self, "experts", "imbalance")
        made = options.resolve_ranks(super().checked())
        options.check_rate_known(made)
        options.check_assignments(made.num_ranks, made.tokens, made.topk)
        made = replace(made, segments=split_expert(self.expert_bytes, 2))
        if self.trace_file is not None:
            trace, _ = options.read_trace(
                self.trace_file, made.num_ranks, tokens=self.tokens, step=0, layer=self.layer
            )
            return replace(made, trace=trace, num_experts=trace.num_experts, imbalance=1.0)
        from ultraep_comm.bench.loads import generate_load

        shape = {"num_ranks": made.num_ranks, "seed": made.seed}
        experts = self.experts or max(DEFAULT_EXPERTS, made.num_ranks)
        imbalance = self.imbalance
        if imbalance is None:
            imbalance = options.default_imbalance(made.num_ranks)
        # Raises where there can be no such load.
        generate_load(**shape, num_experts=experts, imbalance=imbalance, num_tokens=1)
        return replace(made, num_experts=experts, imbalance=imbalance)

    @property
    def source(self) -> str:
        """Return the source of the ids, for header and JSON."""
        if self.trace_file is None:
            return f"drawn for an imbalance of {self.imbalance:g}, seed {self.seed}"
        return f"drawn from {self.trace_file.name}, layer {self.layer}"

    def describe(self) -> dict[str, Any]:
        """Return the options, and the source of the ids, for JSON."""
        return {**super().describe(), "ids": self.source}


COMMAND = Command(
    name="critical-path",
    help="time the path from topk_ids to filled slots, on GPUs",
    description="Time gather_load, plan_replicas, replicate_experts and reroute on the device:"
    " one by one, in sequence, as a CUDA graph, and with the plan on the host. Every"
    " iteration has fresh ids and bytes. The exit status is 1 if any plan, id or byte is wrong,"
    " 3 if a limit is not met, 2 after other errors.",
    settings=PathSettings,
    module="ultraep_comm.bench.commands.critical_path.run",
)
