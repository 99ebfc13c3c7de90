"""Generated blocks of documents: BLOCKS from a result file, DRAWINGS from the code."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from includes import BELOW

from ultraep_comm.bench.commands.plan import PlanSize
from ultraep_comm.bench.commands.show import print_document
from ultraep_comm.bench.table import Column, format_markdown
from ultraep_comm.model import MACHINES, Machine

ROOT = Path(__file__).resolve().parents[1]
Document = Mapping[str, Any]


def _fence(text: str) -> str:
    return f"```\n{text.rstrip()}\n```\n"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines).replace("| --- ", "|---")


def shown(document: Document) -> str:
    """The output of ``python -m ultraep_comm.bench show``."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_document(document)
    return _fence(printed.getvalue())


def table(document: Document) -> str:
    """The same with ``--markdown``: the records, with the columns of the file."""
    columns = [Column(*column) for column in document["columns"]]
    return f"{format_markdown(columns, document['records'])}\n"


def published(document: Document) -> str:
    """Published times of direct fan-out and relays, next to the model's."""
    header = ["imbalance", "replicas", "most of one"]
    header += ["direct, published", "model", "relay, published", "model"]
    rows = []
    for row in document["published"]:
        theirs, ours = row["published_us"], row["model_us"]
        rows.append(
            [
                *(f"{row['imbalance']:.2f}", str(row["replicas"]), str(row["max_replicas"])),
                *(f"{theirs['direct']:.0f} us", f"{ours['direct']:.1f}"),
                *(f"{theirs['relay']:.0f} us", f"{ours['relay']:.1f}"),
            ]
        )
    return markdown(header, rows)


def claims(document: Document) -> str:
    """Modelled time over its target, by size."""
    rows: dict[str, list[str]] = {}
    for claim in document["claims"]:
        over = claim["over_target"]
        rows.setdefault(claim["size"], []).extend(f"{over[k]:.3f}" for k in ("mean", "worst"))
    header = ["size", "push, mean", "worst", "pull, mean", "worst"]
    return markdown(header, [[size, *cells] for size, cells in rows.items()])


def over_bound(document: Document) -> str:
    """Modelled time over T*, by mode."""
    rows = []
    for mode in ("push", "pull", "direct", "relay"):
        found = [row["over_bound"][mode] for row in document["records"]]
        means = [row["mean"] for row in found]
        worst = max(row["worst"] for row in found)
        rows.append([mode, *(f"{x:.2f}" for x in (min(means), max(means), worst))])
    return markdown(["mode", "best kind of load", "worst kind, mean", "worst load"], rows)


def break_even(document: Document) -> str:
    """What banks and a prefetch move, by the memory that they take; see METRICS of ``steady``."""
    names = {"empty": "wiped", "residents": "a bank a layer", "prefetch": "one, prefetched"}
    rows, wiped = [], 0.0
    for row in document["records"]:
        bound = row["transfer_bound"]
        wiped = bound if row["way"] == "empty" else wiped
        rows.append(
            [
                *(str(row["slots"]), names[row["way"]], str(row["slots"] * row["banks"])),
                *(f"{row['moves']:.2f}", f"{row['prefetched']:.2f}", f"{bound:.2f}"),
                f"{1 - bound / wiped:.0%}",
                *(f"{row['nothing_moves']:.0%}", f"{row['imbalance']['worst']:.3f}"),
            ]
        )
    header = ["slots", "bank", "memory, experts", "moves", "fetched before", "T*, experts", "saved"]
    return markdown([*header, "nothing moves", "worst imbalance"], rows)


def planner(document: Document) -> str:
    """Plans of 64 ranks, 256 experts and 2 slots."""
    rows = [
        [
            row["family"],
            f"{row['imbalance_before']:.1f}",
            f"{row['imbalance']['worst']:.2f}",
            f"{row['replicas']:.0f}",
            f"{row['time_us']['p50']:.0f} us",
        ]
        for row in document["records"]
        if (row["ranks"], row["experts"], row["slots"]) == (64, 256, 2)
        and row["family"] in ("zipf0.6", "zipf1.0", "zipf1.4", "lognormal")
    ]
    header = ["load", "busiest rank over the mean", "with the plan", "replicas", "time to plan"]
    return markdown(header, rows)


_CHANGES = (  # shown in the document
    *("as described", "0 us a hop and a load", "4 us a hop and a load"),
    *(f"{sms} workers with {tiles} tiles each" for sms, tiles in ((32, 4), (32, 8), (128, 4))),
    *("tiles of 64 KiB", "remote loads at 80% of the rate", "loads first come, first served"),
    *("experts of 5 MB", "experts of 90 MB"),
)


def sensitivity(document: Document) -> str:
    """Sensitivity of modelled times: microseconds beyond T* of three plans, push and pull."""
    records = {record["change"]: list(record["plans"].values()) for record in document["records"]}
    rows = []
    for change in _CHANGES:
        beyond = [f"{plan['beyond_us']:.1f}" for plan in records[change]]
        rows.append([change, *map(", ".join, zip(beyond[::2], beyond[1::2], strict=True))])
    bounds = [f"T* {plan['bound_us']:.0f} us" for plan in records["as described"][::2]]
    names = ("common", "two imports", "one expert")
    header = [f"{name}, {bound}" for name, bound in zip(names, bounds, strict=True)]
    return markdown(["change", *header], rows)


def charged(document: Document) -> str:
    """Modelled time over T* on links alone and with what workers spend, by size of expert."""
    records = document["records"]
    machines = list(dict.fromkeys(row["machine"] for row in records))
    rows = []
    for mb in dict.fromkeys(row["expert_mb"] for row in records):
        cells = []
        for mode in ("push", "pull", "direct"):
            for machine in machines:
                of = [r for r in records if (r["expert_mb"], r["machine"]) == (mb, machine)]
                cells.append(sum(r["over_bound"][mode]["mean"] for r in of) / len(of))
        rows.append([f"{mb} MB", *(f"{cell:.2f}" for cell in cells)])
    names = [f"{mode}, {m}" for mode in ("push", "pull", "direct") for m in machines]
    return markdown(["expert", *names], rows)


def _by_planner(records: Iterable[Document], load: Callable[[Document], str]) -> str:
    """Imbalance and modelled transfer of every planner; a row for each text of ``load``."""
    rows: dict[str, dict[str, str]] = {}
    for row in records:
        cell = f"{row['imbalance']['mean']:.3f}, {row['time_us']['mean']:.0f} us"
        rows.setdefault(load(row), {})[row["planner"]] = cell
    planners = list(dict.fromkeys(name for cells in rows.values() for name in cells))
    table = [[text, *(cells.get(name, "-") for name in planners)] for text, cells in rows.items()]
    return markdown(["load", *planners], table)


def against(document: Document) -> str:
    """Every planner for 64 ranks, by kind of load."""
    of_64 = (row for row in document["records"] if row["ranks"] == 64)
    return _by_planner(of_64, lambda row: row["family"])


def against_small(document: Document) -> str:
    """Every planner for fewer ranks, by size and kind of load."""
    others = (row for row in document["records"] if row["ranks"] != 64)

    def load(row: Document) -> str:
        size = PlanSize(
            num_ranks=row["ranks"],
            num_experts=row["experts"],
            slots_per_rank=row["slots"],
            domain_size=row["domain_size"],
        )
        return f"{size} {row['family']}"

    return _by_planner(others, load)


def against_slots(document: Document) -> str:
    """What the plans of every planner take for 64 ranks, and on how many loads they are exact."""
    records = [r for r in document["records"] if r["ranks"] == 64]
    cases = {row["planner"]: row for row in document["cases"]}
    rows = []
    for name in dict.fromkeys(row["planner"] for row in records):
        own = [row for row in records if row["planner"] == name]
        exact, loads = (sum(row[key] for row in own) for key in ("exact", "vectors"))
        keys = ("replicas", "max_exports", "max_imports", "max_copies", "transfer_bound")
        means = (f"{sum(row[key] for row in own) / len(own):.1f}" for key in keys)
        slots, case = max(row["slots_used"] for row in own), cases[name]
        of_cases = f"{case['exact']} of {case['cases']}"
        rows.append([name, f"{exact} of {loads}", str(slots), *means, of_cases])
    header = ["planner", "exact", "slots used", "replicas", "max exports", "max imports"]
    header += ["copies of one home", "T*", "MoonEP's cases exact"]
    return markdown(header, rows)


def charged_reductions(document: Document) -> str:
    """The same of reductions."""
    records = document["records"]
    machines = list(dict.fromkeys(row["machine"] for row in records))
    ways = [(mode, machine) for mode in ("pull", "direct") for machine in machines]
    rows = []
    for mb in dict.fromkeys(row["expert_mb"] for row in records):
        of = [row for row in records if row["expert_mb"] == mb]
        cells = []
        for mode, machine in ways:
            found = [r["reduction"][mode]["mean"] for r in of if r["machine"] == machine]
            cells.append(f"{sum(found) / len(found):.2f}")
        rows.append([f"{mb} MB", *cells])
    return markdown(["expert", *(f"{mode}, {machine}" for mode, machine in ways)], rows)


def by_blocks(document: Document) -> str:
    """Times and rates of the largest transfers of a GPU, by number of blocks."""
    rows: dict[str, list[str]] = {}
    blocks: list[str] = []
    for record in document["records"]:
        found = re.fullmatch(r"36864 KiB to (.*), (\d+) blocks", record["row"])
        if found is not None:
            cell = f"{record['us']['p50']:.1f} us, {record['gbps']:.0f} GB/s"
            rows.setdefault(found[1], []).append(cell)
            blocks.append(f"{found[2]} blocks")
    header = ["36 MiB to", *dict.fromkeys(blocks)]
    return markdown(header, [[name, *cells] for name, cells in rows.items()])


BLOCKS: dict[str, Callable[[Document], str]] = {
    block.__name__: block
    for block in (
        shown,
        table,
        break_even,
        published,
        claims,
        against,
        against_slots,
        against_small,
        over_bound,
        charged,
        charged_reductions,
        planner,
        sensitivity,
        by_blocks,
    )
}


def costs() -> str:
    """Draw what the machines of the model charge, in microseconds."""
    names = [f.name for f in fields(Machine) if f.name.endswith("_us")]
    machines = [MACHINES[name] for name in ("nvl72-links", "nvl72", "gb200")]
    rows = [[f"`{n}`", *(f"{getattr(m, n):g}" for m in machines)] for n in names]
    header = ["microseconds", *(f"`{machine.name}`" for machine in machines)]
    return markdown(header, [row for row in rows if set(row[1:]) != {"0"}])


def layers() -> list[list[str]]:
    """Return the layers of the package by import-linter's contract, top layer first."""
    text = (ROOT / "pyproject.toml").read_text()  # tomllib is not in Python 3.10
    found = re.search(r"^layers = (\[.*?^\])", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise LookupError("pyproject.toml has no layers")
    return [layer.split(" | ") for layer in ast.literal_eval(found[1])]


def _flowchart(arrows: Iterable[tuple[Sequence[str], Sequence[str]]]) -> str:
    lines = [f"  {' & '.join(above)} --> {' & '.join(below)}\n" for above, below in arrows]
    return "".join(["```mermaid\n", "flowchart TD\n", *lines, "```\n"])


def python_layers() -> str:
    """The layers of the Python package."""
    return _flowchart(pairwise(layers()))


def cpp_layers() -> str:
    """The folders of src/, each above those directly below it."""
    return _flowchart(([folder], below) for folder, below in reversed(BELOW.items()) if below)


@lru_cache
def walk() -> str:
    """A trace of the package's functions that one call of replicate_experts enters.

    Raises:
        ValueError: a function calls one in a layer above its own.
    """
    import torch

    import ultraep_comm as uec

    package = Path(uec.__file__).parent
    lines: list[str] = []
    under_way: list[str] = []
    layer_of = {name: at for at, layer in enumerate(layers()) for name in layer}

    def note(frame: FrameType, event: str, argument: object) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if package not in path.parents or name.startswith("<"):
            return
        if event == "return":
            under_way.pop()
        if event != "call":
            return
        file = path.relative_to(package).as_posix()
        caller = under_way[-1] if under_way else file
        under_way.append(file)
        if layer_of[file.split("/")[0]] < layer_of[caller.split("/")[0]]:
            raise ValueError(f"{caller} calls {name} of {file}, which is above it")
        if "self" in frame.f_code.co_varnames[:1]:
            kind = type(frame.f_locals["self"]).__name__
            name = kind if name == "__init__" else f"{kind}.{name}"
        lines.append(f"{'  ' * (len(under_way) - 1) + name:38}{file}\n")

    groups = uec.testing.new_loopback_groups(
        2, num_experts=2, slots_per_rank=1, expert={"w": ((8, 8), torch.float32)}, num_sms=1
    )
    weights = {"w": torch.ones(1, 8, 8)}
    plan = uec.Plan.from_slots(torch.tensor([[1], [-1]]), num_experts=2)

    def replicate(group: uec.Group) -> uec.Work:
        return uec.replicate_experts(weights, plan, group=group, async_op=True)

    def traced(function: Callable[..., Any], *arguments: Any) -> Any:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return function(*arguments)
        finally:
            sys.setprofile(before)

    for work in [replicate(group) for group in groups]:  # warm-up: imports and caches
        work.wait()
    work, peer = traced(replicate, groups[0]), replicate(groups[1])
    peer.wait()
    traced(work.wait)
    for group in groups:
        group.close()
    return _fence("".join(lines))


DRAWINGS: dict[str, Callable[[], str]] = {
    drawn.__name__: drawn for drawn in (python_layers, cpp_layers, walk, costs)
}
