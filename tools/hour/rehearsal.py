"""The stages without a GPU, where only the packages of a bare GPU machine can be imported."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hour.call import Results, run_stages
from hour.machine import bare_env, is_installed, listed, plain, unpack
from hour.running import Budget
from hour.stages import Plan

MOST = 100.0  # times its seconds on a GPU is what a command may take on a CPU
CARRIED = "nvshmem4py_cu13-0.4.1-py3-none-any.whl"  # a stand-in, of any platform


def rehearse(
    names: Sequence[str], build: Path, out: Path, header: dict[str, Any], limit: float
) -> list[dict[str, Any]]:
    """Run stages with nothing carried, then with wheels, then resumed; return all records."""
    for left in ("python", "wheels", "carried", "results"):  # a machine that has nothing
        shutil.rmtree(build / left, ignore_errors=True)
    results = Results(out, build / "results", header)

    def run(chosen: Sequence[str], *, resume: bool = False) -> list[dict[str, Any]]:
        plan = Plan(results.files, build, rehearsal=True)
        env = plan.env() | bare_env(plan.wheels)
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], plan.env()["PYTHONPATH"]])
        chosen = results.to_run(plan.stages(), chosen, resume=resume)
        stages = plan.stages()
        budget = Budget(limit, [stages[name] for name in chosen], MOST)
        return run_stages(plan, chosen, results, budget, env)

    records = run(names)
    if "nvshmem" in names:
        make_wheel(build / "carried")
        there = listed()
        said = unpack(
            build / "carried",
            build / "wheels",
            lambda name: plain(name) in there and is_installed(name),
        )
        (carried,) = run(["nvshmem"])
        if carried["status"] == "skipped":  # the wheel is there
            carried = failed(f"{CARRIED} is in .whl/, but not used: {said or 'not unpacked'}")
        records.append({**carried, "stage": "carried"})
    if "build" in names:
        for left in ("python", "wheels"):
            shutil.rmtree(build / left, ignore_errors=True)
        again = run([name for name in names if name in ("build", "doctor")], resume=True)
        if all(record["stage"] != "build" for record in again):
            again = [failed("--resume left out the build, on a machine where nothing is built")]
        records += [{**record, "stage": f"{record['stage']} 2"} for record in again]
    return records


def failed(why: str) -> dict[str, Any]:
    """Return the record of what is wrong in no command."""
    command = {"name": "the rehearsal", "command": "", "status": "failed", "last": why}
    return {"stage": "rehearsal", "status": "failed", "seconds": 0.0, "commands": [command]}


def make_wheel(folder: Path) -> None:
    """Make a wheel that has a module of the name of NVSHMEM's, and nothing in it."""
    folder.mkdir(parents=True)
    name, version = CARRIED.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    files = {
        "nvshmem/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / CARRIED, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
