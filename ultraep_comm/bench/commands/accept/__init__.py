"""``accept``: options and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.commands import links, replicate
from ultraep_comm.bench.options import Settings

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Stage:
    """A measurement of the acceptance test.

    Attributes:
        name: in the table and the document.
        settings: checked ones, of the measurement's command.
        module: of that command.
    """

    name: str
    settings: Settings
    module: str


@dataclass(frozen=True, kw_only=True)
class AcceptSettings(Settings):
    """Checked options of ``accept``.

    Attributes:
        stages: what is measured, one after the other.
    """

    num_ranks: int = options.RANKS(0, minimum=2)
    experts: int | None = options.EXPERTS(shown=str(options.DEFAULT_EXPERTS))
    slots: int = options.SLOTS(2)
    expert_bytes: int = options.EXPERT_BYTES(
        36 << 20, help="bytes of one expert, and over each link, such as 36M"
    )
    imbalance: float | None = options.IMBALANCE_OF_LOAD()
    engine: str = options.ENGINE("auto")
    fabric: str = options.FABRIC("auto")
    num_sms: int | None = options.NUM_WORKERS()
    iters: int = options.ITERS(20)
    min_bandwidth: float | None = options.MIN_BANDWIDTH()
    max_over_bound: float | None = options.MAX_OVER_BOUND(
        help="fail, with exit status 3, if a transfer takes more than X times its bound"
    )
    link_gbps: float | None = options.LINK_GBPS()
    json: Path | None = options.JSON()
    csv: Path | None = options.CSV()
    stages: tuple[Stage, ...] = ()

    def checked(self) -> Self:
        """Return the settings with their stages, each checked. See `Settings.checked`."""
        made = options.resolve_ranks(super().checked(), minimum=2)
        names = ("num_ranks", "engine", "fabric", "iters", "min_bandwidth")
        same: dict[str, Any] = {name: getattr(made, name) for name in names} | {"check": True}
        of_transfers = {name: getattr(made, name) for name in ("experts", "slots", "imbalance")}
        of_transfers |= {"max_over_bound": made.max_over_bound, "link_gbps": made.link_gbps}
        of_links = links.LinksSettings(
            **same, link_bytes=made.expert_bytes, num_sms=made.num_sms
        ).checked()
        stages = [Stage("links", of_links, links.COMMAND.module)]
        for op in replicate.OPS:
            settings = replicate.ReplicateSettings(
                **same,
                **of_transfers,
                op=op,
                first_bytes=made.expert_bytes,
                num_sms=() if made.num_sms is None else (made.num_sms,),
                mode="auto",
            ).checked()
            stages.append(Stage(op, settings, replicate.COMMAND.module))
        return replace(made, stages=tuple(stages))


COMMAND = Command(
    name="accept",
    help="accept a machine or a rack: PASS or FAIL, and what is slow",
    description="Run the doctor on every machine, then measure all links, a transfer and a"
    " reduction, every byte checked, each beside its limit. What fails keeps nothing else from"
    " running. The page at the end begins with PASS or FAIL and names bad links and ranks. The exit"
    " status is 0 for PASS; else 1 if any byte is wrong, 3 if a limit is not met, 2 after other"
    " errors.",
    settings=AcceptSettings,
    module="ultraep_comm.bench.commands.accept.run",
)
