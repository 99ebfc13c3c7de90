"""Options: a field of a command's settings is an option, stated once.

`option` makes such a field; from the fields come the parser, the checks and the settings in the
JSON document. The top-level imports load neither torch nor numpy, so that ``--help`` answers at
once.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ultraep_comm.bench.gate import Gate
from ultraep_comm.bench.launch import launched_ranks
from ultraep_comm.bench.sizes import format_size, parse_segments, parse_size
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ultraep_comm.bench.traces import Trace

DEFAULT_RANKS = 4
MAX_RANKS = 1024
DEFAULT_EXPERTS = 32
DEFAULT_IMBALANCE = 3.0
DEFAULT_TARGET = 1.01  # imbalance at which a planner may stop
ALL_MODES = ("push", "pull", "direct", "auto")
# Time columns: percentiles over iterations, and statistics of the ranks' mean times.
TIMES = ("p50", "p90", "p99", "max", "rank-min", "rank-avg", "rank-max")
# Families of generated loads; see `loads.make_loads`.
ZIPF = {f"zipf{s:.1f}": s for s in (0.6, 1.0, 1.4)}
PUBLISHED = {f"published{x:g}": x for x in (1.5, 2.0, 3.0, 4.0)}
IMBALANCE = "imbalance"  # prefix of further families, as in "imbalance2.5"
FAMILIES = (*ZIPF, "lognormal", *PUBLISHED, "adversarial")
_FACTOR = 2  # of a sweep
_METAVARS: dict[Any, str] = {int: "N", float: "X"}

# ---- fields that are options --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a field of settings says of its option.

    Attributes:
        flags: the first long one is its name in messages.
        help: without the default, which is added.
        parse: of the text: ``int``, ``float``, ``Path``, or a function of text and flag that raises
            InvalidArgumentError; None: text, or a switch if the default is a bool.
        choices: the possible texts.
        minimum: the smallest value.
        maximum: the largest value.
        positive: a finite number above 0.
        metavar: of the help.
        shown: the default in the help, if it is not the value's own text; "": none.
        required: there is no default.
        add: further arguments of `argparse.ArgumentParser.add_argument`.
    """

    flags: tuple[str, ...]
    help: str
    parse: Callable[..., Any] | None = None
    choices: Sequence[str] = ()
    minimum: float | None = None
    maximum: float | None = None
    positive: bool = False
    metavar: str | None = None
    shown: str | None = None
    required: bool = False
    add: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        """Return the name in messages: the first long one."""
        return next((f for f in self.flags if f.startswith("--")), self.flags[0])

    def __call__(self, default: Any = None, **changes: Any) -> Any:
        """Return a field with this option, some attributes changed, and a default."""
        return field(default=default, metadata={"option": replace(self, **changes)})


def option(*flags: str, help: str, default: Any = None, **attributes: Any) -> Any:  # noqa: A002
    """Return a field of settings that is an option, with attributes of `Option`."""
    return Option(flags=flags, help=help, **attributes)(default)


def options_of(settings: type[Settings] | Settings) -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields of settings that are options, as they are declared, a base class's first."""
    kind = settings if isinstance(settings, type) else type(settings)
    declared = [name for base in reversed(kind.__mro__[:-2]) for name in base.__annotations__]
    found = {one.name: one for one in fields(settings)}
    for name in dict.fromkeys(declared):
        if name in found and "option" in found[name].metadata:
            yield found[name], found[name].metadata["option"]


def add_options(parser: argparse.ArgumentParser, settings: type[Settings]) -> None:
    """Add the options of a settings class to a parser."""
    for one, stated in options_of(settings):
        more: dict[str, Any] = {**stated.add, "help": stated.help + _default_text(one, stated)}
        if stated.flags[0].startswith("-"):
            more |= {"dest": one.name, "default": None, "required": stated.required}
        if one.default is False and not stated.add:
            more["action"] = "store_true"
        else:
            more["metavar"] = stated.metavar or _METAVARS.get(stated.parse)
            more["choices"] = stated.choices or None
            more["type"] = stated.parse if stated.parse in (int, float, Path) else None
        more = {k: v for k, v in more.items() if v is not None or k == "default"}
        parser.add_argument(*stated.flags, **more)


def _default_text(one: Field[Any], stated: Option) -> str:
    """Return what the help says of a default: as it would be typed."""
    shown = stated.shown
    value: Any = one.default
    if shown is None and not any(value is nothing for nothing in (None, False, MISSING)):
        if stated.parse is parse_size:
            shown = format_size(value).replace(" ", "").removesuffix("iB")
        elif isinstance(value, tuple):
            shown = ",".join(map(str, value))
        else:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f" (default: {shown})" if shown else ""


def make_settings(settings: type[Chosen], given: argparse.Namespace) -> Chosen:
    """Return checked settings from parsed arguments.

    Raises:
        InvalidArgumentError: an argument is invalid, or contradicts another.
        OSError: a file cannot be read.
    """
    values = {}
    for one, stated in options_of(settings):
        value = getattr(given, one.name)
        if value is None:
            continue
        if stated.parse not in (None, int, float, Path):
            value = stated.parse(value, stated.flag)
        if stated.positive and not (math.isfinite(value) and value > 0):
            raise InvalidArgumentError(
                f"{stated.flag} is {value}; expected a finite number above 0"
            )
        if stated.minimum is not None and not value >= stated.minimum:
            raise InvalidArgumentError(
                f"{stated.flag} is {value}; expected at least {stated.minimum:g}"
            )
        if stated.maximum is not None and value > stated.maximum:
            raise InvalidArgumentError(
                f"{stated.flag} is {value}; expected at most {stated.maximum:g}"
            )
        values[one.name] = value
    return settings(**values).checked()


# ---- settings -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked options of a command. Equal on every rank.

    A command's own class declares its options, and overrides these fields by options where the
    command has them.

    Attributes:
        num_ranks: G; 0: not resolved yet.
        engine: "host", "cuda" or "c10d".
        fabric: "shm", "nvshmem", "torch" or "loopback"; "none" with the engine "c10d".
        tile_bytes: None: the engine's default.
        iters: measured iterations.
        warmup: iterations before the measured ones.
        check: verify every iteration instead of the last one.
        seed: of everything random.
        link_gbps: of a rank's link, one way, for bounds; None if unknown.
        link_source: where that is from; empty if unknown.
        min_bandwidth: limit that records must meet, in GB/s.
        max_over_bound: limit that records must meet.
        json: file to write records to, or None.
        csv: file to write flat records to, or None.
    """

    num_ranks: int = 0
    engine: str = "host"
    fabric: str = "shm"
    tile_bytes: int | None = None
    iters: int = 20
    warmup: int = 3
    check: bool = False
    seed: int = 1
    link_gbps: float | None = None
    link_source: str = ""
    min_bandwidth: float | None = None
    max_over_bound: float | None = None
    json: Path | None = None
    csv: Path | None = None

    def checked(self) -> Self:
        """Return the settings with what follows from the options.

        Raises:
            InvalidArgumentError: an option is invalid, or contradicts another.
            OSError: a file cannot be read.
        """
        for name in ("json", "csv"):
            if (path := getattr(self, name)) is not None:
                check_writable(path, f"--{name}")
        if self.json is not None and self.csv is not None:
            one, other = self.json.resolve(), self.csv.resolve()
            if one == other and not is_stream(self.json):
                raise InvalidArgumentError(f"--json and --csv are both {one}; expected two files")
        if self.link_gbps is not None:
            return replace(self, link_source="given, not measured here")
        return self

    @property
    def gate(self) -> Gate:
        """Return the limits."""
        return Gate(min_gbps=self.min_bandwidth, max_over_bound=self.max_over_bound)

    @property
    def loopback(self) -> bool:
        """Return whether all ranks run in this process, on one GPU."""
        return self.fabric == "loopback"

    @property
    def ranks_here(self) -> int:
        """Return the number of ranks in each process."""
        return self.num_ranks if self.loopback else 1

    @property
    def alone(self) -> bool:
        """Return whether the command needs no rank processes."""
        return self.loopback

    def describe(self) -> dict[str, Any]:
        """Return the options for JSON, but for the files that are written."""
        return {
            one.name: _plain(getattr(self, one.name))
            for one, stated in options_of(self)
            if stated not in _FILES
        }


Chosen = TypeVar("Chosen", bound=Settings)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | dict | None) else str(value)


# ---- options that commands share ----------------------------------------------------------------


def parse_names(text: str, flag: str, possible: Sequence[str]) -> tuple[str, ...]:
    """Return the names in ``"zipf1.0,lognormal"``, each once.

    Raises:
        InvalidArgumentError: one is not in ``possible``.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in possible:
            raise InvalidArgumentError(
                f"{flag} has {name!r}; expected any of {', '.join(possible)}"
            )
    return names


RANKS = Option(flags=("--ranks",), parse=int, minimum=1, help="ranks", shown="4, or the launcher's")
EXPERTS = Option(flags=("--experts",), parse=int, minimum=1, help="experts")
SLOTS = Option(flags=("--slots",), parse=int, minimum=1, help="slots of a rank")
TOKENS = Option(flags=("--tokens",), parse=int, minimum=1, help="tokens of each rank")
TOPK = Option(flags=("--topk",), parse=int, minimum=1, help="experts of a token")
EXPERT_BYTES = Option(
    flags=("-b", "--expert-bytes"),
    parse=parse_size,
    metavar="SIZE",
    help="bytes of one expert, such as 64K",
)
MAX_BYTES = Option(
    flags=("-e", "--maxbytes"),
    parse=parse_size,
    metavar="SIZE",
    help="the last of several sizes, from that of -b on, one row for each",
)
STEP_FACTOR = Option(
    flags=("-f", "--stepfactor"),
    parse=int,
    minimum=2,
    help=f"with -e, from each size to the next (default: {_FACTOR})",
)
SEGMENTS = Option(
    flags=("--segments",),
    metavar="N|NAME=SIZE,...",
    help="tensors of an expert: a number (2: w13 with two thirds, and w2; more: also scales of a"
    " 64th each), or names and sizes",
)
IMBALANCE_OF_LOAD = Option(
    flags=("--imbalance",),
    parse=float,
    help="of the generated load",
    shown=f"{DEFAULT_IMBALANCE:g}, or less for few ranks",
)
TRACE_FILE = Option(
    flags=("--trace",), parse=Path, metavar="FILE.npz", help="recorded routing instead"
)
STEP = Option(flags=("--step",), parse=int, minimum=0, help="step of the trace")
LAYER = Option(flags=("--layer",), parse=int, minimum=0, help="layer of the trace")
WORKLOAD = Option(flags=("--workload",), metavar="NAME,...", help="kinds of load")
TARGET = Option(
    flags=("--target",), parse=float, minimum=1, help="imbalance at which a planner stops"
)
ENGINE = Option(
    flags=("--engine",),
    choices=("auto", "host", "cuda"),
    help="host: threads and shared memory; cuda: kernels; auto: cuda if there is a GPU and a kernel"
    " for it, else host",
)
ANY_ENGINE = replace(
    ENGINE,
    choices=(*ENGINE.choices, "c10d"),
    help=f"{ENGINE.help}; c10d: the ranks' process group, on the CPU",
)
FABRIC = Option(
    flags=("--fabric",),
    choices=("auto", "shm", "nvshmem", "torch", "loopback"),
    help="of the CUDA engine: loopback, all ranks on one GPU in this process; nvshmem or torch"
    " (symmetric memory), one process and GPU per rank",
    shown="nvshmem under torchrun or srun, else loopback",
)
NUM_WORKERS = Option(
    flags=("--num-workers", "--sms"),
    parse=int,
    minimum=1,
    metavar="N",
    help="workers of a rank: threads, or blocks on the GPU",
    shown="the engine's",
)
MODE = Option(flags=("--mode",), choices=ALL_MODES, help="mode of the transfer")
TILE_BYTES = Option(
    flags=("--tile-bytes",),
    parse=parse_size,
    metavar="SIZE",
    help="unit of the transfer",
    shown="the engine's",
)
ITERS = Option(flags=("-n", "--iters"), parse=int, minimum=1, help="measured iterations")
WARMUP = Option(flags=("-w", "--warmup"), parse=int, minimum=0, help="unmeasured iterations first")
CHECK = Option(
    flags=("-c", "--check"),
    parse=lambda text, _: text == "1",
    choices=("0", "1"),
    add={"nargs": "?", "const": "1"},
    help="1 or no value: check every iteration; 0, the default: only the last one",
)
SEED = Option(flags=("--seed",), parse=int, minimum=0, help="seed of everything random")
LINK_GBPS = Option(
    flags=("--link-gbps",),
    parse=float,
    positive=True,
    metavar="GBPS",
    help="rate of a rank's link, one way, for bounds (default: on several GPUs what the calibration"
    " or else the driver says; the measured copy rate, if all ranks share one memory)",
)
MIN_BANDWIDTH = Option(
    flags=("--min-bandwidth",),
    parse=float,
    positive=True,
    metavar="GBPS",
    help="fail, with exit status 3, if a bandwidth (critbw, or a link's) is lower",
)
MAX_OVER_BOUND = Option(
    flags=("--max-over-bound",),
    parse=float,
    positive=True,
    metavar="X",
    help="fail, with exit status 3, if a figure is more than X times its bound",
)
JSON = Option(
    flags=("-J", "--json"), parse=Path, metavar="FILE", help="write records and settings to FILE"
)
CSV = Option(flags=("--csv",), parse=Path, metavar="FILE", help="write flat records to FILE")
OUTPUT = Option(
    flags=("-o", "--output"), parse=Path, metavar="FILE", help="write or extend this file"
)
_FILES = (JSON, CSV, OUTPUT)

# ---- checks that commands share -----------------------------------------------------------------


def resolve_ranks(settings: Chosen, default: int = DEFAULT_RANKS, minimum: int = 1) -> Chosen:
    """Return settings with engine, fabric and number of ranks resolved.

    Raises:
        InvalidArgumentError: engine, fabric, ranks and launcher do not match.
    """
    launched = launched_ranks()
    engine, fabric = choose_engine(settings.engine, settings.fabric, launched)
    num_ranks = _count_ranks(settings.num_ranks, launched, default)
    if num_ranks < minimum:
        raise InvalidArgumentError(f"--ranks is {num_ranks}; expected at least {minimum}")
    return replace(settings, engine=engine, fabric=fabric, num_ranks=num_ranks)


def choose_engine(engine: str, fabric: str, launched: int | None) -> tuple[str, str]:
    """Return engine and fabric of a run, with "auto" resolved.

    Raises:
        InvalidArgumentError: the engine cannot use the fabric, or loopback runs under a launcher.
    """
    if engine == "auto":
        if fabric == "auto":
            from ultraep_comm.bench.clock import gpu_is_usable

            engine = "cuda" if gpu_is_usable() else "host"
        else:
            engine = "host" if fabric == "shm" else "cuda"
    of_engine = {"host": ("shm",), "c10d": ("none",)}
    fabrics = of_engine.get(engine, ("loopback", "torch", "nvshmem"))
    if fabric == "auto":
        fabric = fabrics[0] if launched is None else fabrics[-1]
    if fabric not in fabrics:
        raise InvalidArgumentError(
            f"--engine {engine} does not run over --fabric {fabric}; expected {', '.join(fabrics)}"
        )
    if fabric == "loopback" and launched is not None:
        raise InvalidArgumentError(
            f"--fabric loopback runs in one process, but {launched} ranks were launched; start it"
            " without the launcher, or use --fabric nvshmem or torch"
        )
    return engine, fabric


def _count_ranks(given: int, launched: int | None, default: int) -> int:
    if given > MAX_RANKS:
        raise InvalidArgumentError(f"--ranks is {given}; expected at most {MAX_RANKS}")
    if launched is None:
        return given or default
    if given not in (0, launched):
        raise InvalidArgumentError(
            f"--ranks is {given}, but {launched} ranks were launched; omit --ranks"
        )
    return launched


def default_imbalance(num_ranks: int) -> float:
    """Return the default imbalance of a generated load: 3, or 0.75 G for small G."""
    return max(1.0, min(DEFAULT_IMBALANCE, 0.75 * num_ranks))


def check_memory(num_bytes: int, engine: str) -> None:
    """Raise InvalidArgumentError if the largest size of a run on the CPU does not fit in memory.

    Otherwise the system would kill a rank, perhaps hours into a sweep, and lose its records.
    """
    from ultraep_comm.fabrics.memory import available_memory

    available = available_memory()
    here = engine == "host" or (engine == "c10d" and launched_ranks() is None)
    if here and num_bytes > available.bytes:
        raise InvalidArgumentError(
            f"experts and slots of all ranks take {format_size(num_bytes)}, but this machine has"
            f" {format_size(available.bytes)} of memory available ({available.limit}); use smaller"
            " sizes, or fewer experts, slots or ranks"
        )


def check_assignments(num_ranks: int, tokens: int, topk: int, what: str = "") -> None:
    """Raise InvalidArgumentError if all tokens might be too many for an expert's int32 count."""
    total = num_ranks * tokens * topk
    if total >= 2**31:
        raise InvalidArgumentError(
            f"{what}{num_ranks} ranks with --tokens {tokens} to --topk {topk} experts make a load"
            f" of {total}; expected less than 2**31"
        )


def check_rate_known(settings: Settings) -> None:
    """Raise InvalidArgumentError if a limit needs a bound, but the link rate is unknown."""
    limit, fabric = settings.max_over_bound, settings.fabric
    if limit is not None and settings.link_gbps is None and fabric not in ("shm", "loopback"):
        raise InvalidArgumentError(
            f"--max-over-bound is {limit:g}, but the rate of a rank's link is not known; give"
            " --link-gbps"
        )


def read_trace(
    path: Path, num_ranks: int, *, tokens: int, step: int, layer: int
) -> tuple[Trace, NDArray[np.int32]]:
    """Return a trace and the load ``[G, E]`` of one step and layer.

    Raises:
        TraceError: the file is no trace, or has no such step or layer.
        OSError: the file cannot be read.
    """
    from ultraep_comm.bench.traces import open_trace

    trace = open_trace(path)
    return trace, trace.load(num_ranks=num_ranks, tokens_per_rank=tokens, step=step, layer=layer)


def check_no_trace(settings: Any, *names: str) -> None:
    """Raise InvalidArgumentError for an option that generated loads have and traces do not."""
    for name in names:
        if settings.trace_file is not None and getattr(settings, name) is not None:
            raise InvalidArgumentError(
                f"--{name} is for generated load; {settings.trace_file} has its own"
            )


def sweep_segments(
    segments: str, expert_bytes: int | None, max_bytes: int | None, factor: int | None, default: int
) -> tuple[dict[str, int], ...]:
    """Return the segments of an expert for each size of a sweep, ascending; at least one size.

    Raises:
        InvalidArgumentError: the options contradict each other, or give too many sizes.
    """
    if max_bytes is None:
        if factor is not None:
            raise InvalidArgumentError(f"--stepfactor is {factor}, but there is no --maxbytes")
        return (parse_segments(segments, expert_bytes, default),)
    sizes = [expert_bytes or default]
    if max_bytes < sizes[0]:
        raise InvalidArgumentError(
            f"--maxbytes is {max_bytes}, below the first size, {sizes[0]}; use a smaller"
            " --expert-bytes"
        )
    while (size := sizes[-1] * (factor or _FACTOR)) <= max_bytes:
        sizes.append(size)
    if not segments.isdecimal():
        raise InvalidArgumentError(
            f"--segments {segments!r} fixes the size, but --maxbytes asks for several; expected a"
            " number of segments"
        )
    return tuple(parse_segments(segments, size, default) for size in sizes)


def check_writable(path: Path, name: str) -> None:
    """Raise InvalidArgumentError if ``path`` cannot be written. Leaves no file behind."""
    if path.is_dir():
        raise InvalidArgumentError(f"{name} {path} is a folder; expected a file")
    if is_stream(path):
        return
    try:
        target = path.resolve()
    except RuntimeError:  # before Python 3.13
        raise InvalidArgumentError(f"{name} {path} is a symbolic link to itself") from None
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise InvalidArgumentError(
            f"{name} {path} cannot be written to: {error.strerror}; choose another folder"
        ) from None


def is_stream(path: Path) -> bool:
    """Return whether a path is to be written into, as a pipe is, rather than replaced.

    Standard output counts as a stream even if it goes to a file.
    """
    streams = str(path) in ("/dev/stdout", "/dev/stderr") or path.is_relative_to("/dev/fd")
    return streams or (path.exists() and not path.is_file())
