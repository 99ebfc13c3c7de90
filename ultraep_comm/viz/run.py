"""What the commands draw: recordings, traces and generated loads as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.bench.loads import generate_load
from ultraep_comm.bench.report import Report
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.traces import open_trace
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.errors import InvalidArgumentError, UltraEPError
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import Topology
from ultraep_comm.recording.file import OPERATIONS, Known, Recording, load_recordings
from ultraep_comm.viz.charts import chart_calls, predict_charts
from ultraep_comm.viz.cli import LoadSettings, TimelineSettings
from ultraep_comm.viz.loads import draw_load, make_page, plan_trace, series_of
from ultraep_comm.viz.style import save, short
from ultraep_comm.viz.timeline import draw_timeline, format_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TOKENS, _TOPK, _EXPERT_BYTES = 4096, 8, 36 << 20  # of a generated load, as in the benchmarks
Drawings = Mapping[str, Callable[[], "Figure | str"]]  # by the file's kind


def run(settings: LoadSettings | TimelineSettings, report: Report) -> int:
    """Write the files; return the exit status.

    Raises:
        UltraEPError: the input cannot be drawn, or a file not written.
    """
    draw = _load if isinstance(settings, LoadSettings) else _timeline
    try:
        _write(draw(settings), settings.out, report)  # type: ignore[arg-type]
    except OSError as error:
        raise UltraEPError(f"{error.filename}: {error.strerror}") from None
    except MemoryError:
        raise UltraEPError("there is not enough memory; choose fewer calls or steps") from None
    return 0


def _write(drawings: Drawings, paths: Sequence[Path], report: Report) -> None:
    for path in paths:
        save(drawings[path.suffix.lower()](), path)
        report.show(str(path).encode(errors="backslashreplace").decode())


def _load(settings: LoadSettings) -> Drawings:
    if settings.trace_file is None:
        recordings = load_recordings(settings.files, loads=False)
        source = _name(settings.files)
        series = series_of(recordings, source=source, num_layers=settings.layers or 1)
    else:
        trace = open_trace(settings.trace_file)
        ranks = settings.num_ranks or (trace.array.shape[2] if trace.array.ndim == 4 else 0)
        if not ranks:
            raise InvalidArgumentError(f"{trace.place} has no number of ranks; pass --ranks")
        series = plan_trace(
            trace,
            source=short(settings.trace_file.name),
            num_ranks=ranks,
            slots_per_rank=settings.slots,
            tokens_per_rank=settings.tokens,
            target=settings.target,
        )
    return {".png": lambda: draw_load(series), ".html": lambda: make_page(series)}


def _timeline(settings: TimelineSettings) -> Drawings:
    if settings.imbalance is None and settings.predict is None:
        recordings, source = load_recordings(settings.files, loads=False), _name(settings.files)
        drawn = full = chart_calls(recordings, source=source, epochs=settings.calls)
        if not full.bars:
            raise InvalidArgumentError(f"{source} has none of these calls; {_range(recordings)}")
    else:
        found = _recorded_plan if settings.imbalance is None else _generated_plan
        plan, residents, size, source = found(settings)
        drawn, full = predict_charts(
            plan,
            size,
            machine=settings.machine,
            mode=settings.mode,
            residents=residents,
            source=source,
        )
    return {
        ".png": lambda: draw_timeline(drawn, width=settings.width),
        ".json": lambda: format_trace(full),
    }


# A plan, the experts that slots hold already (-1: none), the bytes of an expert, and the source.
Planned = tuple[Plan, NDArray[np.int32] | None, int, str]


def _generated_plan(settings: TimelineSettings) -> Planned:
    assert settings.imbalance is not None
    ranks, experts, imbalance = settings.num_ranks, settings.experts, settings.imbalance
    load = generate_load(
        num_ranks=ranks,
        num_experts=experts,
        imbalance=imbalance,
        num_tokens=ranks * _TOKENS * _TOPK,
        seed=settings.seed,
    )
    topology = Topology.make(num_ranks=ranks, num_experts=experts, slots_per_rank=settings.slots)
    plan = plan_replicas(torch.from_numpy(load), topology=topology)
    if not plan.num_replicas:
        raise InvalidArgumentError(
            f"a load with --imbalance {imbalance:g} and --slots {settings.slots} gets no replicas;"
            " increase one of them"
        )
    size = settings.expert_bytes or _EXPERT_BYTES
    what = f"{ranks} ranks, {experts} experts of {format_size(size)}, imbalance {imbalance:g}"
    return plan, None, size, what


def _recorded_plan(settings: TimelineSettings) -> Planned:
    recordings, source = load_recordings(settings.files, loads=False), _name(settings.files)
    for recording in recordings:
        calls = recording.calls
        for i in (calls["epoch"] == settings.predict).nonzero()[0]:
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
                size = settings.expert_bytes or int(calls["expert_bytes"][i])
                return (
                    plan,
                    np.where(moves, -1, slots),
                    size,
                    f"call {settings.predict} of {source}",
                )
    raise InvalidArgumentError(
        f"{source} has no plan of a call {settings.predict}: there is no such call, or its plan was"
        f" on a device; {_range(recordings)}"
    )


def _range(recordings: Sequence[Recording]) -> str:
    epochs = [int(e) for r in recordings for e in r.calls["epoch"]]
    return f"it has calls {min(epochs)} to {max(epochs)}" if epochs else "it has no calls"


def _name(files: Sequence[Path]) -> str:
    """Return a name for the files, for a subtitle."""
    first = files[0].resolve()
    if len(files) == 1:
        return short(first.name)
    return f"{short(first.parent.name)} ({len(files)} files)"
