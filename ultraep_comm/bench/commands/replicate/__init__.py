"""``replicate``: options and settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings, option, parse_names
from ultraep_comm.bench.sizes import parse_counts
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

OPS = ("replicate", "reduce")
REDUCE_MODES = ("pull", "direct", "auto")
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
GENERATED_TOPK = 8
_DEFAULT_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class ReplicateSettings(Settings):
    """Checked options of ``replicate``.

    Attributes:
        load: int32 ``[G, E]``.
        load_source: description of the load, for the header.
        sizes: segments of one expert, ``{name: bytes}``, for each size, ascending.
        modes: to measure.
    """

    op: str = option(
        "--op",
        choices=OPS,
        default=OPS[0],
        help="replicate: copy weights into slots; reduce: add the slots' gradients to those of the"
        " experts at home",
    )
    num_ranks: int = options.RANKS(0)
    experts: int | None = options.EXPERTS(shown=f"{options.DEFAULT_EXPERTS}, or the trace's")
    slots: int = options.SLOTS(2)
    first_bytes: int | None = options.EXPERT_BYTES(
        help="bytes of one expert (reduce: of its gradients in a slot), such as 64K", shown="16M"
    )
    max_bytes: int | None = options.MAX_BYTES()
    step_factor: int | None = options.STEP_FACTOR()
    split: str = options.SEGMENTS("2")
    imbalance: float | None = options.IMBALANCE_OF_LOAD()
    trace_file: Path | None = options.TRACE_FILE()
    step: int = options.STEP(0)
    layer: int = options.LAYER(0)
    tokens: int = options.TOKENS(4096)
    grad_dtype: str = option(
        "--grad-dtype",
        choices=tuple(ITEM_BYTES),
        default="float32",
        help="reduce: of the gradients in slots",
    )
    main_dtype: str = option(
        "--main-dtype",
        choices=tuple(ITEM_BYTES),
        default="float32",
        help="reduce: of the gradients at home",
    )
    engine: str = options.ANY_ENGINE("host")
    fabric: str = options.FABRIC("auto")
    num_sms: tuple[int, ...] = options.NUM_WORKERS(
        (),
        parse=parse_counts,
        minimum=None,
        metavar="N,...",
        help="workers of a rank: threads, or blocks on the GPU; of a list, such as 4,8,16, one"
        " after another",
    )
    mode: str = options.MODE("all", choices=(*options.ALL_MODES, "all"))
    tile_bytes: int | None = options.TILE_BYTES()
    iters: int = options.ITERS(20)
    warmup: int = options.WARMUP(3)
    check: bool = options.CHECK(False)
    seed: int = options.SEED(1)
    min_bandwidth: float | None = options.MIN_BANDWIDTH()
    max_over_bound: float | None = options.MAX_OVER_BOUND()
    link_gbps: float | None = options.LINK_GBPS()
    json: Path | None = options.JSON()
    csv: Path | None = options.CSV()
    times: tuple[str, ...] = option(
        "--times",
        parse=partial(parse_names, possible=options.TIMES),
        default=("p50", "max"),
        metavar="NAME,...",
        help=f"time columns of the table, of {', '.join(options.TIMES)}; rank-...: statistics of"
        " the ranks' mean times",
    )
    load: NDArray[np.int32] = field(default=None)  # type: ignore[arg-type]
    load_source: str = ""
    sizes: tuple[dict[str, int], ...] = ()
    modes: tuple[str, ...] = ()

    def checked(self) -> Self:
        """Return the settings with their load, sizes and modes. See `Settings.checked`."""
        sizes = options.sweep_segments(
            self.split,
            self.first_bytes,
            self.max_bytes,
            self.step_factor,
            _DEFAULT_BYTES,
        )
        options.check_no_trace(self, "experts", "imbalance")
        made = options.resolve_ranks(super().checked())
        options.check_rate_known(made)
        load, source = _make_load(made)
        modes = _find_modes(made.op, made.engine, made.mode)
        made = replace(made, load=load, load_source=source, sizes=sizes, modes=modes)
        for name, size in (pair for segments in sizes for pair in segments.items()):
            if self.op == "reduce" and size % made.grad_bytes:
                raise InvalidArgumentError(
                    f"segment {name!r} has {size} bytes; expected a multiple of {made.grad_bytes},"
                    f" the size of {self.grad_dtype}"
                )
        options.check_memory(made.needed_bytes, made.engine)
        return made

    @property
    def num_experts(self) -> int:
        """Return E."""
        return int(self.load.shape[1])

    @property
    def segments(self) -> dict[str, int]:
        """Return the segments of the first size."""
        return self.sizes[0]

    @property
    def expert_bytes(self) -> int:
        """Return W."""
        return sum(self.segments.values())

    @property
    def grad_bytes(self) -> int:
        """Return the bytes of an element of slot gradients."""
        return ITEM_BYTES[self.grad_dtype]

    @property
    def main_bytes(self) -> int:
        """Return the bytes of an element of gradients at home."""
        return ITEM_BYTES[self.main_dtype]

    @property
    def elements(self) -> dict[str, int]:
        """Return the gradients of one expert, by segment."""
        return {name: size // self.grad_bytes for name, size in self.segments.items()}

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of experts and slots on all ranks, at the largest size."""
        slots, largest = self.num_ranks * self.slots, sum(self.sizes[-1].values())
        if self.op == "replicate":
            return (self.num_experts + slots) * largest
        at_home = self.num_experts * self.main_bytes
        return (at_home + slots * self.grad_bytes) * (largest // self.grad_bytes)

    def describe(self) -> dict[str, Any]:
        """Return the options and what follows from them, for options.JSON."""
        return {
            **super().describe(),
            "load": self.load_source,
            "segments": self.segments,
            "sizes": [sum(segments.values()) for segments in self.sizes],
            "link_source": self.link_source,
        }


def _find_modes(op: str, engine: str, mode: str) -> tuple[str, ...]:
    """Return the modes to measure.

    Raises:
        InvalidArgumentError: the operation does not have the mode.
    """
    possible: tuple[str, ...] = REDUCE_MODES
    if op == "replicate":  # over a process group nobody reads a peer's memory: there, pull is push
        possible = tuple(m for m in options.ALL_MODES if m != "pull" or engine != "c10d")
    if mode == "all":
        return possible
    if op == "reduce" and mode not in possible:
        raise InvalidArgumentError(
            f"--op reduce has no --mode {mode}; expected one of {', '.join(possible)}"
        )
    return (mode,)


def _make_load(settings: ReplicateSettings) -> tuple[NDArray[np.int32], str]:
    """Return the load of the settings, and a description."""
    from ultraep_comm.bench.loads import generate_load

    ranks, experts, imbalance = settings.num_ranks, settings.experts, settings.imbalance
    if (path := settings.trace_file) is not None:
        at = {"step": settings.step, "layer": settings.layer}
        _, load = options.read_trace(path, ranks, tokens=settings.tokens, **at)
        return load, f"{path.name}, step {settings.step}, layer {settings.layer}"
    load = generate_load(
        num_ranks=ranks,
        num_experts=max(options.DEFAULT_EXPERTS, ranks) if experts is None else experts,
        imbalance=options.default_imbalance(ranks) if imbalance is None else imbalance,
        num_tokens=ranks * settings.tokens * GENERATED_TOPK,
        seed=settings.seed,
    )
    return load, f"generated, seed {settings.seed}"


def each_size(settings: ReplicateSettings) -> Iterator[ReplicateSettings]:
    """Yield settings for each size of a sweep alone."""
    for segments in settings.sizes:
        yield replace(settings, sizes=(segments,))


COMMAND = Command(
    name="replicate",
    help="copy the experts of a plan into slots, or add up their gradients",
    description="Time replicate_experts against batch_isend_irecv and memcpy (the engine c10d:"
    " batch_isend_irecv and broadcast), or reduce_expert_grads against isend/irecv and adding, and"
    " plain adding from shared memory (c10d: torch.distributed.reduce), on one plan, with"
    " interleaved iterations. Sizes take the suffixes K, M and G. The exit status is 1 if any byte"
    " is wrong, 3 if a limit is not met, 2 after other errors.",
    settings=ReplicateSettings,
    module="ultraep_comm.bench.commands.replicate.run",
)
