"""Options that commands share: their arguments, checks and settings.

The top-level imports load neither torch nor numpy, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_comm.bench.gate import Gate
from ultraep_comm.bench.launch import launched_ranks
from ultraep_comm.bench.netlab import Lab
from ultraep_comm.bench.sizes import format_size, parse_segments, parse_size
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ultraep_comm.bench.traces import Trace

Add = Callable[..., argparse.Action]  # add_argument of a parser or of a group in it

DEFAULT_RANKS = 4
MAX_RANKS = 1024
DEFAULT_EXPERTS = 32
DEFAULT_EXPERT_BYTES = 16 << 20
DEFAULT_IMBALANCE = 3.0
DEFAULT_TARGET = 1.01  # imbalance at which a planner may stop
ALL_MODES = ("push", "pull", "direct", "auto")
# Time columns: percentiles over iterations, and statistics of the ranks' mean times.
TIMES = ("p50", "p90", "p99", "max", "rank-min", "rank-avg", "rank-max")
DEFAULT_TIMES = ("p50", "max")
# Families of generated loads; see `loads.make_loads`.
ZIPF = {f"zipf{s:.1f}": s for s in (0.6, 1.0, 1.4)}
PUBLISHED = {f"published{x:g}": x for x in (1.5, 2.0, 3.0, 4.0)}
IMBALANCE = "imbalance"  # prefix of further families, as in "imbalance2.5"
FAMILIES = (*ZIPF, "lognormal", *PUBLISHED, "adversarial")
_FACTOR, _MAX_SIZES = 2, 1000  # of a sweep
_SWITCH = ("gate", "iters", "warmup", "seed", "json", "csv", "link_gbps")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked arguments. Equal on every rank.

    Attributes:
        num_ranks: G.
        engine: "host", "cuda" or "c10d".
        fabric: "shm", "nvshmem", "torch" or "loopback"; "none" with the engine "c10d".
        lab: whose machines the ranks run on; None: on this one.
        tile_bytes: None: the engine's default.
        iters: measured iterations.
        warmup: iterations before the measured ones.
        check: verify every iteration instead of the last one.
        seed: of everything random.
        link_gbps: of a rank's link, one way, for bounds; None if unknown.
        link_source: where that is from; empty if unknown.
        gate: limits that records must meet.
        json: file to write records to, or None.
        csv: file to write flat records to, or None.
    """

    num_ranks: int = 1
    engine: str = "host"
    fabric: str = "shm"
    lab: Lab | None = None
    tile_bytes: int | None = None
    iters: int = 20
    warmup: int = 3
    check: bool = False
    seed: int = 1
    link_gbps: float | None = None
    link_source: str = ""
    gate: Gate = field(default_factory=Gate)
    json: Path | None = None
    csv: Path | None = None

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

    def describe(self, *names: str) -> dict[str, Any]:
        """Return the named settings for JSON."""
        return {name: getattr(self, name) for name in names}


def check_shared(options: argparse.Namespace, minima: Mapping[str, int]) -> dict[str, Any]:
    """Check those arguments of `add_rounds`, `add_outputs` and gates that the command has.

    Args:
        options: parsed command line.
        minima: smallest value of each option that has one.

    Returns:
        Fields of `Settings`.

    Raises:
        InvalidArgumentError: a value is out of range, or a file cannot be written.
    """
    check_minima(options, minima)
    _check_outputs(options)
    given = {**vars(options), "gate": make_gate(options)}
    found = {name: given[name] for name in _SWITCH if name in given}
    if found.get("link_gbps") is not None:
        found["link_source"] = "given, not measured here"
    if "check" in given:
        found["check"] = bool(given["check"])
    if given.get("tile_bytes") is not None:
        found["tile_bytes"] = parse_size(given["tile_bytes"], "--tile-bytes")
    return found


def take(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return some of the options, as fields of settings of the same names."""
    return {name: getattr(options, name) for name in names}


def check_ranks(
    options: argparse.Namespace, *, engine: str | None = None, default: int = DEFAULT_RANKS
) -> dict[str, Any]:
    """Check engine, fabric and number of ranks; return them as fields of `Settings`.

    Args:
        options: parsed command line.
        engine: of a command that has only one; None: use ``--engine``.
        default: number of ranks without ``--ranks`` and without a launcher.

    Raises:
        InvalidArgumentError: engine, fabric, ranks and launcher do not match.
    """
    fabric = getattr(options, "fabric", "auto")
    engine, fabric = choose_engine(engine or options.engine, fabric, launched_ranks())
    return {"engine": engine, "fabric": fabric, "num_ranks": count_ranks(options, default)}


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


def count_ranks(options: argparse.Namespace, default: int = DEFAULT_RANKS) -> int:
    """Return G, from the launcher or else from ``--ranks``.

    Raises:
        InvalidArgumentError: the two differ, or ``--ranks`` is above MAX_RANKS.
    """
    launched = launched_ranks()
    if options.ranks is not None and options.ranks > MAX_RANKS:
        raise InvalidArgumentError(f"--ranks is {options.ranks}; expected at most {MAX_RANKS}")
    if launched is None:
        return default if options.ranks is None else int(options.ranks)
    if options.ranks not in (None, launched):
        raise InvalidArgumentError(
            f"--ranks is {options.ranks}, but {launched} ranks were launched; omit --ranks"
        )
    return launched


def check_minima(options: argparse.Namespace, minima: Mapping[str, int]) -> None:
    """Raise InvalidArgumentError if an option is below its smallest value."""
    for name, least in minima.items():
        value = getattr(options, name)
        if value is not None and value < least:
            flag = name.replace("_", "-")
            raise InvalidArgumentError(f"--{flag} is {value}; expected at least {least}")


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


# ---- engine and trace --------------------------------------------------------------------------


def add_engine(add: Add, *more: str) -> None:
    """Add ``--engine``, with ``more`` engines, and ``--fabric``."""
    c10d = "; c10d: the ranks' process group, on the CPU" if "c10d" in more else ""
    add(
        "--engine",
        choices=["auto", "host", "cuda", *more],
        default="host",
        help=f'auto: cuda if there is a GPU and a kernel for it, else host (default "host"){c10d}',
    )
    add(
        "--fabric",
        choices=["auto", "shm", "nvshmem", "torch", "loopback"],
        default="auto",
        help="of the CUDA engine: loopback, all ranks on one GPU in this process; nvshmem or torch"
        " (symmetric memory), one process and GPU per rank (default: nvshmem under torchrun or"
        " srun, else loopback)",
    )


def add_lab(add: Add) -> None:
    """Add ``--lab-gbit`` and ``--lab-machines``."""
    add(
        "--lab-gbit",
        type=float,
        metavar="RATE",
        help="run the ranks on machines that are network namespaces, each with a link of RATE"
        " Gbit/s, one way, to a switch; needs root or user namespaces",
    )
    add(
        "--lab-machines",
        type=int,
        metavar="N",
        help="machines of the lab, each with a run of consecutive ranks; 1 with the host engine"
        " (default: one for each rank)",
    )


def check_lab(options: argparse.Namespace, found: Mapping[str, Any]) -> dict[str, Any]:
    """Check the arguments of `add_lab`; return fields of `Settings`.

    Args:
        options: parsed command line.
        found: engine and number of ranks, and what `check_shared` returns.

    Raises:
        InvalidArgumentError: a value is out of range, or there cannot be a lab with the others.
    """
    gbit, machines, ranks = options.lab_gbit, options.lab_machines, found["num_ranks"]
    if gbit is None:
        if machines is not None:
            raise InvalidArgumentError(f"--lab-machines is {machines}, but there is no --lab-gbit")
        return {}
    engine, launched = found["engine"], launched_ranks()
    if launched is not None:
        raise InvalidArgumentError(
            f"--lab-gbit is for ranks that the benchmark starts, but {launched} were launched;"
            " start it without the launcher"
        )
    if engine == "cuda":
        raise InvalidArgumentError("--lab-gbit is for ranks on the CPU; use --engine c10d")
    machines = ranks if machines is None else machines
    if not 1 <= machines <= ranks:
        raise InvalidArgumentError(
            f"--lab-machines is {machines}; expected 1 to {ranks}, the ranks"
        )
    if engine == "host" and machines > 1:
        raise InvalidArgumentError(
            f"--engine host needs all ranks on one machine, and the lab has {machines}; use"
            " --engine c10d, or --lab-machines 1"
        )
    try:
        lab = Lab(machines=machines, gbit=gbit)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--lab-{error}") from None
    has_links = found["link_gbps"] is None and machines == ranks
    link = {"link_gbps": gbit / 8, "link_source": "of the lab"} if has_links else {}
    return {"lab": lab, **link}


def add_trace(add: Add, use: str) -> None:
    """Add ``--trace``, ``--step`` and ``--layer``."""
    add("--trace", type=Path, metavar="FILE.npz", help=use)
    add("--step", type=int, default=0, help="step of the trace (default 0)")
    add("--layer", type=int, default=0, help="layer of the trace (default 0)")


def read_trace(options: argparse.Namespace, num_ranks: int) -> tuple[Trace, NDArray[np.int32]]:
    """Return the trace and the load ``[G, E]`` of ``--step`` and ``--layer``.

    Raises:
        InvalidArgumentError: ``--imbalance`` or ``--experts`` contradict the trace.
        TraceError: the file is no trace, or has no such step or layer.
        OSError: the file cannot be read.
    """
    from ultraep_comm.bench.traces import open_trace

    if options.imbalance is not None:
        raise InvalidArgumentError("--imbalance is for generated load; the trace has its own")
    trace = open_trace(options.trace)
    if options.experts not in (None, trace.num_experts):
        raise InvalidArgumentError(
            f"--experts is {options.experts}, but {options.trace} has {trace.num_experts}; omit"
            " --experts"
        )
    load = trace.load(
        num_ranks=num_ranks,
        tokens_per_rank=options.tokens,
        **take(options, "step", "layer"),
    )
    return trace, load


# ---- iterations ---------------------------------------------------------------------------------


def add_rounds(add: Add, seed_of: str) -> None:
    """Add the numbers of iterations, ``--check`` and ``--seed``, spelled as in nccl-tests."""
    add("-n", "--iters", type=int, default=20, help="measured iterations (default 20)")
    add("-w", "--warmup", type=int, default=3, help="unmeasured iterations first (default 3)")
    add(
        *("-c", "--check"),
        type=int,
        choices=[0, 1],
        nargs="?",
        const=1,
        default=0,
        help="1 or no value: check every iteration; 0, the default: only the last one",
    )
    add("--seed", type=int, default=1, help=f"seed of {seed_of} (default 1)")


def parse_times(text: str) -> tuple[str, ...]:
    """Return the names in ``"p50,max"``.

    Raises:
        InvalidArgumentError: a name is unknown or repeated.
    """
    names = tuple(part.strip() for part in text.split(","))
    if not set(names) <= set(TIMES) or len(set(names)) < len(names):
        raise InvalidArgumentError(
            f"--times is {text!r}; expected any of {', '.join(TIMES)}, each once"
        )
    return names


def parse_families(
    text: str, possible: tuple[str, ...], flag: str = "--families"
) -> tuple[str, ...]:
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


# ---- sizes --------------------------------------------------------------------------------------


def parse_expert_bytes(options: argparse.Namespace) -> int | None:
    """Return the bytes of ``--expert-bytes``, or None if it was not given."""
    given = options.expert_bytes
    return None if given is None else parse_size(given, "--expert-bytes")


def add_sweep(add: Add, *, expert_bytes: str, default: str) -> None:
    """Add ``-b``, ``-e``, ``-f`` and ``-i``, as in nccl-tests."""
    add(
        *("-b", "--expert-bytes", "--minbytes"),
        dest="expert_bytes",
        metavar="SIZE",
        help=f"{expert_bytes}, e.g. 64K; with -e the first of several (default {default})",
    )
    add(
        *("-e", "--maxbytes"),
        dest="max_bytes",
        metavar="SIZE",
        help="the last of several sizes, one row for each (default: only that of -b)",
    )
    add(
        *("-f", "--stepfactor"),
        dest="step_factor",
        type=int,
        metavar="N",
        help=f"factor from each size to the next, with -e (default {_FACTOR})",
    )
    add(
        *("-i", "--stepbytes"),
        dest="step_bytes",
        metavar="SIZE",
        help="increment from each size to the next, with -e, instead of -f",
    )


def parse_sweep(options: argparse.Namespace, default_bytes: int) -> tuple[int, ...] | None:
    """Return the ascending sizes of ``-b``, ``-e``, ``-f`` and ``-i``; None without ``-e``.

    Raises:
        InvalidArgumentError: the options contradict each other, or give too many sizes.
    """
    factor, step = options.step_factor, options.step_bytes
    if options.max_bytes is None:
        for flag, value in (("--stepfactor", factor), ("--stepbytes", step)):
            if value is not None:
                raise InvalidArgumentError(f"{flag} is {value}, but there is no --maxbytes")
        return None
    first = parse_expert_bytes(options) or default_bytes
    last = parse_size(options.max_bytes, "--maxbytes")
    if last < first:
        raise InvalidArgumentError(
            f"--maxbytes is {last}, below the first size, {first}; use a smaller --minbytes"
        )
    if factor is not None and step is not None:
        raise InvalidArgumentError(
            f"--stepfactor is {factor} and --stepbytes is {step}; expected one of them"
        )
    if factor is not None and factor < 2:
        raise InvalidArgumentError(f"--stepfactor is {factor}; expected at least 2")
    added = 0 if step is None else parse_size(step, "--stepbytes")
    sizes = [first]
    while True:
        size = sizes[-1] + added if added else sizes[-1] * (factor or _FACTOR)
        if size > last:
            return tuple(sizes)
        if len(sizes) == _MAX_SIZES:
            raise InvalidArgumentError(
                f"from {first} to {last} there are more than {_MAX_SIZES} sizes; use larger steps"
            )
        sizes.append(size)


def sweep_segments(options: argparse.Namespace, default_bytes: int) -> tuple[dict[str, int], ...]:
    """Return the segments of an expert for each size, at least one.

    Raises:
        InvalidArgumentError: sizes or segments are invalid, or a sweep has named segments.
    """
    sizes = parse_sweep(options, default_bytes)
    if sizes is None:
        given = parse_expert_bytes(options)
        return (parse_segments(options.segments, given, default_bytes),)
    if not options.segments.isdecimal():
        raise InvalidArgumentError(
            f"--segments {options.segments!r} fixes the size, but --maxbytes asks for several;"
            " expected a number of segments"
        )
    return tuple(parse_segments(options.segments, size, default_bytes) for size in sizes)


# ---- limits -------------------------------------------------------------------------------------


def add_bandwidth_limit(add: Add, of: str) -> None:
    """Add ``--min-bandwidth``."""
    add(
        "--min-bandwidth",
        type=float,
        metavar="GBPS",
        help=f"fail, with exit status 3, if {of} is lower",
    )


def add_bound_limit(add: Add, missed: str) -> None:
    """Add ``--max-over-bound``; ``missed`` is the condition on which it fails."""
    add("--max-over-bound", type=float, metavar="X", help=f"fail, with exit status 3, if {missed}")


def make_gate(options: argparse.Namespace) -> Gate:
    """Return the gate, after a check of its limits.

    Raises:
        InvalidArgumentError: a limit is not a positive number.
    """
    for name in ("min_bandwidth", "max_over_bound", "link_gbps"):
        value = getattr(options, name, None)
        if value is not None and not (math.isfinite(value) and value > 0):
            flag = name.replace("_", "-")
            raise InvalidArgumentError(f"--{flag} is {value}; expected a finite number above 0")
    return Gate(
        min_gbps=getattr(options, "min_bandwidth", None),
        max_over_bound=getattr(options, "max_over_bound", None),
    )


def check_rate_known(gate: Gate, fabric: str, link_gbps: float | None) -> None:
    """Raise InvalidArgumentError if the gate needs a bound, but the link rate is unknown."""
    if gate.max_over_bound is not None and link_gbps is None and fabric not in ("shm", "loopback"):
        raise InvalidArgumentError(
            f"--max-over-bound is {gate.max_over_bound:g}, but the rate of a rank's link is not"
            " known; give --link-gbps"
        )


# ---- results ------------------------------------------------------------------------------------


def add_outputs(add: Add) -> None:
    """Add ``--json`` and ``--csv``."""
    add("-J", "--json", type=Path, metavar="FILE", help="write records and settings to FILE")
    add("--csv", type=Path, metavar="FILE", help="write flat records to FILE")


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise InvalidArgumentError if an output file cannot be written, before anything runs."""
    given = {name: getattr(options, name, None) for name in ("json", "csv")}
    for name, path in given.items():
        if path is not None:
            check_writable(path, f"--{name}")
    if given["json"] is not None and given["csv"] is not None:
        one, other = (path.resolve() for path in given.values() if path is not None)
        if one == other and not is_stream(given["json"]):
            raise InvalidArgumentError(f"--json and --csv are both {one}; expected two files")


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
    if not target.parent.is_dir():
        raise InvalidArgumentError(f"{name} {path}: there is no such folder")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise InvalidArgumentError(
            f"{name} {path}: the folder cannot be written to ({error.strerror}); choose another"
        ) from None


def is_stream(path: Path) -> bool:
    """Return whether a path is to be written into, as a pipe is, rather than replaced.

    Standard output counts as a stream even if it goes to a file.
    """
    streams = str(path) in ("/dev/stdout", "/dev/stderr") or path.is_relative_to("/dev/fd")
    return streams or (path.exists() and not path.is_file())
