"""Pictures of transfers and loads.

load      tokens of every rank before and after replication (PNG, HTML page)
timeline  what every rank did when: recorded calls, or a predicted transfer; or the parts of
          critical paths (PNG, Perfetto JSON)

"COMMAND --help" has an example of each. PNG pictures need matplotlib:
pip install -c constraints.txt -e '.[viz]'.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.bench.command import parse_arguments
from ultraep_comm.bench.loads import generate_load
from ultraep_comm.bench.sizes import format_size, parse_count, parse_size
from ultraep_comm.bench.traces import open_trace
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.errors import InvalidArgumentError, UltraEPError
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import Topology
from ultraep_comm.recording.file import OPERATIONS, Known, Recording, load_recordings
from ultraep_comm.system import FAILED
from ultraep_comm.viz.charts import WIDTH, Chart, chart_calls, predict_charts
from ultraep_comm.viz.loads import LoadSeries, draw_load, make_page, plan_trace, series_of
from ultraep_comm.viz.style import save_png, save_text, short
from ultraep_comm.viz.timeline import draw_timeline, format_trace

MOST = 1 << 20  # limit of ranks, slots, tokens per rank, and layers
_TOKENS, _TOPK, _EXPERT_BYTES = 4096, 8, "36M"  # of a generated load, as in the benchmarks
Shown = TypeVar("Shown")
Writers = dict[str, Callable[[Shown, Path], None]]

LOAD_WRITERS: Writers[LoadSeries] = {
    ".png": lambda series, path: save_png(draw_load(series), path),
    ".html": lambda series, path: save_text(make_page(series), path),
}
# The chart for a picture, and the full one.
TIMELINE_WRITERS: Writers[tuple[Chart, Chart]] = {
    ".png": lambda charts, path: save_png(draw_timeline(charts[0]), path),
    ".json": lambda charts, path: save_text(format_trace(charts[1]), path),
}

LOAD_EXAMPLES = """examples:
  python -m ultraep_comm.viz load --trace counts.npz --ranks 8 --slots 1 --out load.html load.png
  ULTRAEP_RECORD=run torchrun ... train.py     # groups write run/*.npz when they are closed
  python -m ultraep_comm.viz load run --out load.html
"""
TIMELINE_EXAMPLES = """examples:
  python -m ultraep_comm.viz timeline run --calls 100:120 --out calls.png calls.json
  python -m ultraep_comm.viz timeline run --predict 17 --machine nvl72 --out transfer.png
  python -m ultraep_comm.viz timeline --imbalance 3 --mode push --width 8 --out transfer.png
A JSON file that it writes opens in https://ui.perfetto.dev or chrome://tracing.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 2 for input that cannot be drawn."""
    options = parse_arguments(_parser(), arguments)
    try:
        options.run(options)
    except UltraEPError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except MemoryError:
        print("error: there is not enough memory; choose fewer calls or steps", file=sys.stderr)
        return FAILED
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"error: {text}", file=sys.stderr)
        return FAILED
    return 0


# ---- commands -----------------------------------------------------------------------------------


def _load(options: argparse.Namespace) -> None:
    _check_outputs(options.out, LOAD_WRITERS)
    if (options.trace is None) == (not options.files):
        raise InvalidArgumentError("expected --trace FILE, or files of a recording: one of the two")
    series = _planned(options) if options.trace else _recorded_loads(options)
    _write(series, options.out, LOAD_WRITERS)


def _planned(options: argparse.Namespace) -> LoadSeries:
    if options.layers is not None:
        raise InvalidArgumentError("--layers is for recordings; a trace has its own layers")
    trace = open_trace(options.trace)
    ranks = options.ranks or (trace.array.shape[2] if trace.array.ndim == 4 else None)
    if ranks is None:
        raise InvalidArgumentError(f"{options.trace} has no number of ranks; pass --ranks")
    return plan_trace(
        trace,
        source=short(options.trace.name),
        num_ranks=ranks,
        slots_per_rank=options.slots,
        tokens_per_rank=options.tokens,
        target=options.target,
    )


def _recorded_loads(options: argparse.Namespace) -> LoadSeries:
    recordings = load_recordings(options.files, loads=False)
    return series_of(recordings, source=_name(options.files), num_layers=options.layers)


def _timeline(options: argparse.Namespace) -> None:
    _check_outputs(options.out, TIMELINE_WRITERS)
    if (options.imbalance is None) == (not options.files):
        raise InvalidArgumentError(
            "expected files of a recording, or --imbalance X for a generated load: one of the two"
        )
    ways = ("calls", "predict", "imbalance")
    given = [f"--{name}" for name in ways if getattr(options, name) is not None]
    if len(given) > 1:
        raise InvalidArgumentError(f"{' and '.join(given)} are given; expected at most one of them")
    if options.imbalance is not None:
        _write(_generated(options), options.out, TIMELINE_WRITERS)
        return
    recordings = load_recordings(options.files, loads=False)
    source = _name(options.files)
    if options.predict is None:
        chart = chart_calls(recordings, source=source, epochs=_epochs(options.calls))
        chart = replace(chart, width=options.width)
        if not chart.bars:
            raise InvalidArgumentError(f"{source} has none of these calls; {_range(recordings)}")
        charts = chart, chart
    else:
        plan, residents, expert_bytes = _find_plan(recordings, options.predict, source)
        size = expert_bytes if options.expert_bytes is None else parse_size(options.expert_bytes)
        charts = predict_charts(
            plan,
            size,
            machine=options.machine,
            mode=options.mode,
            residents=residents,
            source=f"call {options.predict} of {source}",
            width=options.width,
        )
    _write(charts, options.out, TIMELINE_WRITERS)


def _generated(options: argparse.Namespace) -> tuple[Chart, Chart]:
    """Return the charts of the predicted transfer for a generated load."""
    ranks, experts = options.ranks, options.experts
    load = generate_load(
        num_ranks=ranks,
        num_experts=experts,
        imbalance=options.imbalance,
        num_tokens=ranks * _TOKENS * _TOPK,
        seed=options.seed,
    )
    topology = Topology.make(num_ranks=ranks, num_experts=experts, slots_per_rank=options.slots)
    plan = plan_replicas(torch.from_numpy(load), topology=topology)
    if not plan.num_replicas:
        raise InvalidArgumentError(
            f"a load with --imbalance {options.imbalance:g} and --slots {options.slots} gets no"
            " replicas; increase one of them"
        )
    size = parse_size(options.expert_bytes or _EXPERT_BYTES)
    source = f"{ranks} ranks, {experts} experts of {format_size(size)}, imbalance"
    return predict_charts(
        plan,
        size,
        machine=options.machine,
        mode=options.mode,
        source=f"{source} {options.imbalance:g}",
        width=options.width,
    )


def _find_plan(
    recordings: Sequence[Recording], epoch: int, source: str
) -> tuple[Plan, NDArray[np.int32], int]:
    """Return the plan of a recorded transfer, what it left in place, and the bytes of experts."""
    for recording in recordings:
        calls = recording.calls
        for i in (calls["epoch"] == epoch).nonzero()[0]:
            if calls["known"][i] & Known.PLACEMENT:
                slots, moves = recording.slot_expert[i], recording.moves[i]
                if OPERATIONS[calls["operation"][i]] == "reduce_expert_grads":
                    slots = np.where(moves, slots, -1)  # the others have no gradient
                plan = Plan.from_slots(
                    slots,
                    num_experts=recording.num_experts,
                    home=recording.home,
                    domains=recording.domain,
                    allow_cross_domain=True,
                )
                return plan, np.where(moves, -1, slots), int(calls["expert_bytes"][i])
    raise InvalidArgumentError(
        f"{source} has no plan of a call {epoch}: there is no such call, or its plan was on a"
        f" device; {_range(recordings)}"
    )


def _range(recordings: Sequence[Recording]) -> str:
    epochs = [int(e) for r in recordings for e in r.calls["epoch"]]
    return f"it has calls {min(epochs)} to {max(epochs)}" if epochs else "it has no calls"


def _epochs(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    begin, end = parse_count(first), parse_count(last)
    if not 0 <= begin <= end:
        raise InvalidArgumentError(
            f"--calls is {text!r}; expected FIRST:LAST, for instance 100:120"
        )
    return range(begin, end + 1)


# ---- shared by the commands ---------------------------------------------------------------------


def _name(files: Sequence[Path]) -> str:
    """Return a name for the files, for a subtitle."""
    first = files[0].resolve()
    if len(files) == 1:
        return short(first.name)
    return f"{short(first.parent.name)} ({len(files)} files)"


def _check_outputs(paths: Sequence[Path], writers: Writers[Shown]) -> None:
    """Raise InvalidArgumentError for bad outputs, before anything is computed."""
    for path in paths:
        if path.suffix.lower() not in writers:
            raise InvalidArgumentError(
                f"--out {path} has an unknown kind; expected a name that ends in"
                f" {' or '.join(writers)}"
            )
        if not path.parent.is_dir():
            raise InvalidArgumentError(f"--out {path}: there is no folder {path.parent}; create it")


def _write(shown: Shown, paths: Sequence[Path], writers: Writers[Shown]) -> None:
    for path in paths:
        writers[path.suffix.lower()](shown, path)
        print(str(path).encode(errors="backslashreplace").decode())


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m ultraep_comm.viz", description=__doc__, formatter_class=plain
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    load = commands.add_parser(
        "load",
        help="tokens of every rank before and after replication",
        description="Draw the tokens of every rank, before and after replication, for every step"
        " and layer of recorded routing (which is planned here) or of a recorded run.",
        epilog=LOAD_EXAMPLES,
        formatter_class=plain,
    )
    _add_files(load)
    load.add_argument("--trace", type=Path, metavar="FILE.npz", help="recorded routing instead")
    load.add_argument("--ranks", type=_positive, help="with --trace; default: the file's")
    load.add_argument("--slots", type=_not_negative, default=2, help="with --trace: per rank (2)")
    load.add_argument(
        "--tokens",
        type=_positive,
        default=4096,
        help="with a trace of tokens: tokens per rank and step (4096)",
    )
    load.add_argument("--target", type=float, default=1.01, help="with --trace: imbalance (1.01)")
    load.add_argument(
        "--layers",
        type=_positive,
        help="of a recording without saved plans: transfers per step (1)",
    )
    _add_out(load, LOAD_WRITERS)
    load.set_defaults(run=_load)

    timeline = commands.add_parser(
        "timeline",
        help="what every rank did when",
        description="Draw the recorded calls of all ranks, or one predicted transfer, piece by"
        " piece.",
        epilog=TIMELINE_EXAMPLES,
        formatter_class=plain,
    )
    _add_files(timeline)
    timeline.add_argument("--calls", metavar="FIRST:LAST", help="epochs of the calls to draw (all)")
    timeline.add_argument("--predict", type=int, metavar="EPOCH", help="draw this transfer instead")
    timeline.add_argument("--machine", default="nvl72", help="of the prediction (nvl72)")
    timeline.add_argument("--mode", default="auto", help="of the prediction (auto)")
    timeline.add_argument(
        "--expert-bytes", help="of the prediction, such as 36M (as recorded; generated: 36M)"
    )
    timeline.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        help="draw the transfer for a generated load instead, as in the benchmarks",
    )
    timeline.add_argument("--ranks", type=_positive, default=8, help="of a generated load (8)")
    timeline.add_argument("--experts", type=_positive, default=32, help="of a generated load (32)")
    timeline.add_argument(
        "--slots", type=_not_negative, default=2, help="of a generated load, per rank (2)"
    )
    timeline.add_argument("--seed", type=int, default=1, help="of a generated load (1)")
    timeline.add_argument(
        "--width", type=_inches, default=WIDTH, help=f"of the picture in inches ({WIDTH:g})"
    )
    _add_out(timeline, TIMELINE_WRITERS)
    timeline.set_defaults(run=_timeline)
    for own in commands.choices.values():
        own.set_defaults(parser=own)
    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="RECORDING",
        help="one run's files, written by recorder.dump(), or their folder",
    )


def _add_out(parser: argparse.ArgumentParser, writers: Writers[Shown]) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help=f"files to write; the kind follows the name: {', '.join(writers)}",
    )


def _inches(text: str) -> float:
    try:
        width = float(text)
    except ValueError:
        width = 0.0
    if not 4 <= width <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a width from 4 to 100 inches")
    return width


def _positive(text: str) -> int:
    return _number(text, 1)


def _not_negative(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal() and least <= int(text[:11]) <= MOST):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {MOST}")
    return int(text)
