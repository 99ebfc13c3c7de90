"""What users, files and devices see does not change by accident: `frozen.json` has all of it.

`python tests/python/project/test_frozen.py --update` writes the file anew, for a change on purpose.
Names here are public ones; nothing depends on the file that a definition lies in.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import hashlib
import importlib
import inspect
import io
import json
import random
import re
import runpy
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import ultraep_comm as uec
from ultraep_comm import _core, errors, interop, model, nn
from ultraep_comm.bench.commands.links.run import describe_matrix
from ultraep_comm.doctor import facts
from ultraep_comm.doctor.diagnose import Finding
from ultraep_comm.plan.topology import Topology
from ultraep_comm.recording import Known

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "ultraep_comm"
FROZEN = Path(__file__).with_name("frozen.json")
Section = dict[str, str]

# ---- Python -------------------------------------------------------------------------------------

# What pages name of other modules.
READERS = {
    "ultraep_comm.recording": ["Recording", "load_recording", "load_recordings"],
    "ultraep_comm.calibration": ["read_calibration"],
    "ultraep_comm.group.bank": ["Bank"],
    "ultraep_comm.group.layers": ["LayerGroup", "group_for"],
    "ultraep_comm.group.memory": ["GroupMemory"],
    "ultraep_comm.nn.replication": ["LayerPass"],
    "ultraep_comm.plan.topology": ["Topology"],
    "ultraep_comm.testing": ["new_loopback_groups"],
}
# Made by users; what others are made of is nobody's business.
CONSTRUCTED = {"Machine", "Plan", "PlanCost", "ReplicatedExperts", "Segment"}
# For other modules, and in no page of the documentation.
INTERNAL = {
    "Binding.addresses",
    "Binding.owner",
    "Binding.region",
    "Binding.types",
    "Bank.filled_by",
    "Bank.holder",
    "PlanHandle.end",
    "PlanHandle.entry",
    "PlanHandle.mark",
    "PlanHandle.store",
    "PlanHandle.stored",
    "PlanHandle.tag",
    "Recorder.add",
    "Recorder.enter",
    "Work.epoch",
}


class _Bare(str):
    """An annotation without quotes, and without the module that a name comes from."""

    __slots__ = ()

    def __repr__(self) -> str:
        return re.sub(r"\b([a-z_]\w*\.)+(?=[A-Z])", "", self)


def signature(function: Callable[..., Any]) -> str:
    found = inspect.signature(function)
    plain = [p.replace(annotation=_bare(p.annotation)) for p in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=_bare(found.return_annotation)))


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def is_ours(owner: type) -> bool:
    return owner.__module__.split(".")[0] == "ultraep_comm"


def members(cls: type, instance: object) -> Iterator[str]:
    """Yield methods with signatures, and attributes with types as far as they are stated."""
    types = (
        {f.name: f.type for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    )
    special = {"__enter__", "__exit__", "__len__", "__iter__", "__call__"}
    for name in sorted({*dir(cls), *dir(instance)}):
        owner = next((c for c in cls.__mro__ if name in vars(c)), None)
        hidden = name.startswith("_") and name not in special
        if hidden or f"{cls.__name__}.{name}" in INTERNAL or not is_ours(owner or cls):
            continue
        found = inspect.getattr_static(cls, name, None)
        if isinstance(found, (classmethod, staticmethod)):
            yield f"{name} {type(found).__name__}{signature(found.__func__)}"
        elif inspect.isfunction(found):
            yield name + signature(found)
        else:
            getter = getattr(found, "fget", None) or getattr(found, "func", None)
            kind = types.get(name) or getattr(getter, "__annotations__", {}).get("return", "")
            yield f"{name}: {_bare(kind)!r}" if kind else name


@contextlib.contextmanager
def small_groups() -> Iterator[list[uec.Group]]:
    groups = uec.testing.new_loopback_groups(
        2, num_experts=4, slots_per_rank=1, expert={"w": ((4,), torch.float32)}, grads=torch.float32
    )
    try:
        yield groups
    finally:
        for group in groups:
            group.abort()
            group.close()


def small_run(groups: list[uec.Group], folder: Path) -> tuple[list[object], Path]:
    """Make every call once, recorded; return an object of each class, and the recording."""
    ids = torch.tensor([[0], [0], [0], [1], [2], [3]])
    recorders = [group.start_recording(8) for group in groups]

    def on_both(call: Callable[[uec.Group], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(call, groups))

    on_both(lambda group: uec.gather_load(ids, group=group))
    plan = on_both(lambda group: uec.gather_and_plan(ids, group=group))[0]
    handles = [group.save(plan, layer=3, microbatch=5) for group in groups]
    weights = {"w": torch.zeros(2, 4)}
    bound = [group.bind(weights) for group in groups]

    def call(group: uec.Group) -> uec.Work:
        handle = handles[group.rank]
        uec.replicate_experts(bound[group.rank], handle, group=group, mode="push")
        work = uec.reduce_expert_grads(
            {"w": torch.zeros(2, 4)}, plan, group=group, mode="direct", async_op=True
        )
        assert work is not None
        work.wait()
        return work

    works = on_both(call)
    path = recorders[0].dump(folder / "r.npz")
    health = groups[0].health()
    assert health.peers is not None
    one_of_each = [groups[0], plan, handles[0], recorders[0], bound[0], works[0], health]
    one_of_each += [health.waits, health.peers[0], recorders[0].recording()]
    one_of_each += [model.predict(plan, 1 << 20), model.find_machine("nvl72")]
    one_of_each += [uec.PlanCost(token=1, expert_byte=1), uec.Segment((4,), torch.float32)]
    one_of_each += [uec.verify_plan(plan, [6, 2, 2, 2])]
    return one_of_each, path


def python_names() -> Section:
    found: Section = {}
    with tempfile.TemporaryDirectory() as folder, small_groups() as groups:
        instances = {type(x).__name__: x for x in small_run(groups, Path(folder))[0]}
        for name in ("home", "instances_per_rank"):  # what pages use of the topology
            assert hasattr(groups[0].topology, name)
    lists = {module.__name__: module.__all__ for module in (uec, nn, model, interop)}
    for module, names in {**lists, **READERS}.items():
        if module in lists:
            found[f"{module}.__all__"] = " ".join(sorted(names))
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if inspect.isfunction(value):
                found[f"{module}.{name}"] = signature(value)
            elif inspect.isclass(value):
                instances.setdefault(name, value)
    found["model.MACHINES"] = " ".join(sorted(model.MACHINES))
    for name, instance in sorted(instances.items()):
        cls = instance if isinstance(instance, type) else type(instance)
        made = [signature(cls).removesuffix(" -> None")] * (name in CONSTRUCTED)
        found[name] = "; ".join([*made, *members(cls, instance)])
    return found


def error_types() -> Section:
    """Bases of each error, and its own attributes with their types."""
    found = {}
    for name, cls in vars(errors).items():
        if not (inspect.isclass(cls) and issubclass(cls, errors.UltraEPError)):
            continue
        found[name] = f"{cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})"
        attributes = inspect.get_annotations(cls).items()
        found[name] += "".join(f"; {attribute}: {kind}" for attribute, kind in attributes)
    return found


def operators() -> Section:
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("ultraep_comm::")]
    return {s.name.split("::")[1]: str(s)[str(s).index("(") :] for s in sorted(schemas, key=str)}


def variables() -> Section:
    """Environment variables, and those of CMake."""

    def named(*paths: Path) -> set[str]:
        text = "".join(path.read_text() for path in paths)
        return set(re.findall(r"\bULTRAEP_[A-Z_]*[A-Z]\b", text))

    docs = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]
    named_in = {
        "package": named(*PACKAGE.rglob("*.py")),
        "docs": named(*docs),
        "build": named(ROOT / "CMakeLists.txt", *(ROOT / "cmake").glob("*.cmake")) & named(*docs),
    }
    return {where: " ".join(sorted(names)) for where, names in named_in.items()}


# ---- commands -----------------------------------------------------------------------------------


def run_command(program: str, *arguments: str) -> str:
    """Run a command in this process; return what it prints."""
    out = io.StringIO()
    with mock.patch.object(sys, "argv", [program, *arguments]), contextlib.redirect_stdout(out):
        status = 0
        try:
            runpy.run_module(f"ultraep_comm.{program}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
    assert not status, (program, arguments, out.getvalue())
    return out.getvalue()


def parser_of(program: str, *command: str) -> argparse.ArgumentParser:
    """Ask for help and catch the parser that is to give it, wherever it was made."""
    caught: list[argparse.ArgumentParser] = []

    def catch(parser: argparse.ArgumentParser, file: Any = None) -> None:
        caught.append(parser)

    with mock.patch.object(argparse.ArgumentParser, "print_help", catch):
        run_command(program, *command, "--help")
    return caught[0]


def options() -> Section:
    """The commands, and the options of each as they stand on command lines."""
    found: Section = {}
    for program in ("bench", "viz"):
        (action,) = (a for a in parser_of(program)._actions if a.choices)
        found[program] = " ".join(action.choices)
        for command in action.choices:
            actions = parser_of(program, command)._actions
            found[f"{program} {command}"] = "; ".join(map(describe, actions[1:]))  # not --help
    found["doctor"] = "; ".join(map(describe, parser_of("doctor")._actions[1:]))
    return found


def describe(option: argparse.Action) -> str:
    words = [*option.option_strings] or [option.dest]
    if option.nargs != 0:
        words.append(str(option.metavar or option.dest.upper()))
    if option.choices is not None:
        words.append("{" + ",".join(map(str, option.choices)) + "}")
    words += [f"nargs={option.nargs}"] if option.nargs is not None else []
    words += [f"const={option.const}"] if option.const is not None else []
    words += ["required"] if option.required else []
    if option.default is not None:
        words.append(f"default={option.default}")
    else:  # what the command fills in, of which the help has the numbers
        said = "".join(re.findall(r"\(default[^)]*\)", option.help or ""))
        numbers = re.findall(r"\b\d[\w./,%]*\b", said)
        words += [f"default~{','.join(numbers)}"] if numbers else []
    return " ".join(words)


# Where a limit can be given it is, so that its keys are there.
ALONE = {
    "plan": "--sizes 4/8/1 --workload zipf1.0 --seeds 1 --tokens 16 --topk 2 --max-over-bound 99",
}
FEW = "--ranks 2 -b 8K -n 1"
RANKS = {
    "replicate": f"{FEW} -w 0 --experts 4 -c --max-over-bound 1e9 --min-bandwidth 1e-9",
    "replicate --op reduce": f"{FEW} -w 0 --experts 4 -c --max-over-bound 1e9 --min-bandwidth 1e-9",
    "links": f"{FEW} -w 0 -c --min-bandwidth 1e-9",
    "accept": f"{FEW} --experts 4 --max-over-bound 1e9 --min-bandwidth 1e-9",
    "calibrate": "--ranks 3 -b 4M -n 5",
}
SPAWN = [sys.executable, "-m", "ultraep_comm.bench"]


def keys(*values: Any) -> str:
    """All keys of values that stand in one place, those of a list's items together."""
    items = [item for value in values if isinstance(value, list) for item in value]
    if items or any(isinstance(value, list) for value in values):
        return f"[{keys(*items)}]"
    below: dict[str, list[Any]] = defaultdict(list)
    for value in values:
        for name, inner in value.items() if isinstance(value, dict) else ():
            below[name].append(inner)
    inside = " ".join(f"{name}{keys(*inner)}" for name, inner in sorted(below.items()))
    return f"{{{inside}}}" if below else ""


def written(command: str, arguments: str, run: Callable[..., object]) -> Section:
    """Keys of the JSON, and columns of the CSV file, that a command writes."""
    with tempfile.TemporaryDirectory() as folder:
        path, table = Path(folder, "o.json"), Path(folder, "o.csv")
        files = (
            ["-o", str(path)] if command == "calibrate" else ["-J", str(path), "--csv", str(table)]
        )
        run(*command.split(), *arguments.split(), *files)
        document = json.loads(path.read_text())
        for stage in document.get("stages", ()):
            stage["document"] = None  # a command's own
        if command == "links":  # with a slow rank, which a run may find or not
            document |= describe_matrix(np.array([[np.nan, 8.0], [1.0, np.nan]]), 5)
        found = {f"{command}: {k}": keys(v) for k, v in document.items()}
        found[f"{command}: format"] += str(document.get("format"))
        if table.exists():
            found[f"{command}: csv"] = " ".join(next(csv.reader(table.open())))
    return found


def keys_alone() -> Section:
    found: Section = {}
    for command, arguments in ALONE.items():
        found |= written(command, arguments, lambda *given: run_command("bench", *given))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "o.json")
        sizes = "--imbalance 2 --ranks 4 --experts 8 --expert-bytes 64K"
        run_command("viz", "timeline", *sizes.split(), "--out", str(path))
        found |= {f"timeline: {k}": keys(v) for k, v in json.loads(path.read_text()).items()}
    return found


def keys_of_doctor() -> Section:
    """Keys of the document, and of its areas, of which a machine fills only some."""
    kinds = {name: cls for name, cls in vars(facts).items() if dataclasses.is_dataclass(cls)}
    found = {
        name: "; ".join(f"{field.name}: {field.type}" for field in dataclasses.fields(cls))
        for name, cls in {**kinds, "Finding": Finding}.items()
    }
    found |= {name: " ".join(fields) for name, fields in facts.AREAS.items()}
    document = json.loads(run_command("doctor", "--json"))
    return {"": " ".join([*document, f"format={document['format']}"]), **found}


def spawn(*arguments: str) -> None:
    for _ in range(3):
        done = subprocess.run([*SPAWN, *arguments], capture_output=True, text=True, check=False)
        if "too busy" not in done.stderr:  # a calibration that makes no sense is an error
            assert done.returncode == 0, done.stdout + done.stderr
            return
    pytest.skip(done.stderr)


# ---- integers -----------------------------------------------------------------------------------

SHAPES = [
    (2, 4, 1),
    (4, 8, 1),
    (3, 10, 2),
    (5, 7, 3),
    (8, 32, 1),
    (8, 32, 2),
    (16, 48, 2),
    (24, 64, 2),
]
NUM_CASES = 24
SEGMENTS, TILE = [7 * 32768 + 100, 4096], 32768
COST = [50_000, 60_000, 700_000, 1_300_000, 400]


def digest(*arrays: Any) -> str:
    text = "".join(f"{np.asarray(a).shape}{np.asarray(a).tolist()}" for a in arrays)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    load: torch.Tensor  # [G, E]
    slots: int
    home: list[int] | None
    domains: list[int]
    target: float
    cost: uec.PlanCost | None

    @classmethod
    def make(cls, index: int) -> Case:
        draw = random.Random(
            index
        ).random  # the same in all versions of Python, as integers are not
        ranks, experts, slots = SHAPES[index % len(SHAPES)]
        steep = (1.0, 3.0, 8.0)[index // 8]
        heights = [40 * draw() ** steep + (60 if draw() < 0.05 else 0) for _ in range(experts)]
        load = [[int(height * draw()) for height in heights] for _ in range(ranks)]
        free = index % 3 == 0
        target = (1.01, 1.0, 1.2)[index % 5 % 3]
        by_cost = index % 4 == 3
        return cls(
            name=f"{index:02} {ranks}/{experts}/{slots} steep {steep:g}"
            + (" any home" if free else "")
            + (" two domains" if index % 7 == 2 else "")
            + (" by cost" if by_cost else f" to {target}"),
            load=torch.tensor(load, dtype=torch.int32),
            slots=slots,
            home=[int(ranks * draw()) for _ in range(experts)] if free else None,
            domains=[2 * r // ranks if index % 7 == 2 else 0 for r in range(ranks)],
            target=target,
            cost=uec.PlanCost(token=1e-6, expert_byte=1e-12, replica=1e-6, expert_bytes=1 << 22)
            if by_cost
            else None,
        )


def integers() -> Section:
    return {
        case.name: results(case, index)
        for index, case in enumerate(map(Case.make, range(NUM_CASES)))
    }


def results(case: Case, index: int) -> str:
    shape: dict[str, Any] = {"slots_per_rank": case.slots, "num_ranks": len(case.load)}
    topology = Topology.make(
        **shape, num_experts=case.load.shape[1], home=case.home, domains=case.domains
    )
    plan = uec.plan_replicas(case.load, topology=topology, target=case.target, cost=case.cost)
    words = [f"{plan.num_replicas} replicas"]
    words += ["plan " + digest(plan.slot_expert, plan.slot_quota, plan.home_quota)]
    words += ["ids " + rerouted(case, plan, random.Random(index))]
    words += scheduled(case, plan.home.tolist(), index)
    return " ".join(words)


def rerouted(case: Case, plan: uec.Plan, rng: random.Random) -> str:
    num_ranks, num_experts = case.load.shape
    groups = uec.testing.new_loopback_groups(
        num_ranks,
        num_experts=num_experts,
        slots_per_rank=case.slots,
        home=case.home,
        domains=case.domains,
        expert={"w": ((1,), torch.uint8)},
    )
    ids_there, maps = [], []
    for group in [groups[rank] for rank in sorted({0, num_ranks // 2, num_ranks - 1})]:
        row = case.load[group.rank].tolist()
        ids = [-1, *(expert for expert, count in enumerate(row) for _ in range(count))]
        ids.sort(key=lambda _: rng.random())
        ids_there.append(uec.reroute(torch.tensor(ids)[:, None], plan, group=group))
        one_hot = torch.nn.functional.one_hot(torch.tensor(ids) + 1, num_experts + 1)[:, 1:]
        maps.append(uec.reroute_map(one_hot.bool(), None, plan, group=group)[0].nonzero())
    for group in groups:
        group.close()
    return f"{digest(*ids_there)} map {digest(*maps)}"


def placement(home: list[int], num_ranks: int, slots: int, rng: random.Random) -> list[list[int]]:
    """Any legal placement, of which few experts have most: ranks both export and import."""
    by_heat = sorted(range(len(home)), key=lambda _: rng.random())
    rows = []
    for rank in range(num_ranks):
        away = [expert for expert in by_heat if home[expert] != rank]
        row: list[int] = []
        for _ in range(slots):
            row.append(
                away.pop(int(len(away) * rng.random() ** 6)) if away and rng.random() < 0.9 else -1
            )
        rows.append(row)
    return rows


def scheduled(case: Case, home: list[int], index: int) -> Iterator[str]:
    """Hubs by mode, the mode that a cost model chooses, and what a machine would take."""
    fields = ("expert", "first", "replica_rank", "replica_slot", "boundary", "egress")
    modes = ("push", "pull", "direct")
    rows = placement(home, len(case.load), case.slots, random.Random(index))

    def in_core(mode: _core.Mode | None, may_pull: bool = False) -> dict[str, Any]:
        shape = (
            [x for row in rows for x in row],
            home,
            [0] * len(rows),
            case.slots,
            False,
            SEGMENTS,
            TILE,
        )
        return _core.make_schedule(*shape, mode, may_pull, COST)

    for number, mode in zip(_core.Mode, modes, strict=True):
        found = in_core(number)
        yield f"{mode} {digest(*(np.array(found[f]) for f in fields))}"
    yield "auto " + " or ".join(
        modes[in_core(None, may_pull)["mode"]] for may_pull in (False, True)
    )
    if index % 3 == 1:
        plan = uec.Plan.from_slots(rows, num_experts=len(home), home=home)
        times = [model.predict(plan, 1 << 20, "nvl72-links", mode).time_us for mode in modes]
        yield "us " + " ".join(f"{time:.2f}" for time in times)


# ---- files and devices --------------------------------------------------------------------------


def recording() -> Section:
    with tempfile.TemporaryDirectory() as folder, small_groups() as groups:
        path = small_run(groups, Path(folder))[1]
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    found = {"magic": str(arrays["magic"]), "version": str(arrays["version"])}
    found["arrays"] = "; ".join(map(described, arrays, arrays.values()))
    for name in ("operation", "mode", "epoch", "layer", "microbatch", "expert_bytes", "known"):
        found[name] = str(arrays["calls"][name].tolist())
    found["Known"] = " ".join(f"{known.name}={known.value}" for known in Known)
    return found


def described(name: str, array: np.ndarray[Any, Any]) -> str:
    if array.dtype.names:
        kind = ", ".join(f"{field} {dtype}" for field, dtype in array.dtype.descr)
    else:
        kind = "text" if array.dtype.kind == "U" else array.dtype.str
    return f"{name} {list(array.shape)} of {kind}"


def kernels() -> Section:
    """Names, arguments and budget of what a cubin has, and the layout of the arguments."""
    text = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.cu")))
    (budget,) = (ROOT / "tests").rglob("budget.json")
    allowed = json.loads(budget.read_text())
    pattern = r"UEC_KERNEL\((\w+)\)\s*void (ultraep_\w+)\((.*?)\) *\{"
    found = {}
    for registers, name, arguments in re.findall(pattern, text, re.DOTALL):
        types = re.sub(r"UEC_ARGS\((\w+)\)|const|__grid_constant__|uec::cuda::", r"\1", arguments)
        limits = " ".join(f"{k}={v}" for k, v in allowed.pop(name, {}).items())
        found[name] = f"({' '.join(types.split())}) compiled for {registers}; {limits}"
    assert not allowed, f"{budget} has {list(allowed)}, of which there is no kernel"
    found["tile sizes"] = " ".join(map(str, _core.cuda_tile_sizes()))
    found["limits"] = " ".join(f"{n}={getattr(_core, n)}" for n in dir(_core) if n.isupper())
    return found


# ---- the comparison -----------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[], Section]] = {
    "python": python_names,
    "errors": error_types,
    "operators": operators,
    "variables": variables,
    "options": options,
    "keys": keys_alone,
    "keys of doctor": keys_of_doctor,
    **{f"keys of {name}": partial(written, name, given, spawn) for name, given in RANKS.items()},
    "integers": integers,
    "recording": recording,
    "kernels": kernels,
}
SLOW = {f"keys of {command}" for command in RANKS}  # they start processes


def changes(before: Section, after: Section) -> list[str]:
    found = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if "[]" in (old, new) and all(text and text.startswith("[") for text in (old, new)):
            continue  # of a list without items, such as slow ranks, there is nothing to see
        if old is None or new is None:
            found.append(f"{name!r} is {'new' if old is None else 'gone'}: {old or new}")
            continue
        by = "; " if "; " in old + new else " "
        lost = [part for part in old.split(by) if part not in new.split(by)]
        more = [part for part in new.split(by) if part not in old.split(by)]
        found.append(f"{name!r} was\n    {old}\n  and is\n    {new}\n  lost {lost}, new {more}")
    return found


@pytest.mark.parametrize(
    "section",
    [pytest.param(s, marks=[pytest.mark.exhaustive] * (s in SLOW)) for s in SECTIONS],
)
def test_nothing_that_users_see_has_changed(section: str) -> None:
    frozen = json.loads(FROZEN.read_text())
    found = changes(frozen[section], SECTIONS[section]())
    if found:
        hint = "python tests/python/project/test_frozen.py --update, if that was meant to be"
        pytest.fail("\n".join([f"{section}:", *found, hint]), pytrace=False)


def test_a_change_is_named() -> None:
    before = {"f": "(a: int)", "g": "x y", "h": "", "l": "[{a b}]"}
    assert changes(before, dict(before)) == []
    assert changes(before, before | {"l": "[]"}) == changes(before | {"l": "[]"}, before) == []
    assert len(changes(before, before | {"l": "[{a}]"})) == 1
    gone, changed, new = changes(before, {"g": "x z", "h": "", "i": "1", "l": "[]"})
    assert gone == "'f' is gone: (a: int)"
    assert "'g' was" in changed
    assert "lost ['y'], new ['z']" in changed
    assert new == "'i' is new: 1"


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("usage: python tests/python/project/test_frozen.py --update")
    text = json.dumps({s: make() for s, make in SECTIONS.items()}, indent=0, ensure_ascii=False)
    FROZEN.write_text(text + "\n")
