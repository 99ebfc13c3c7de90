"""The machine: its GPUs, what is tested, the packages that it lacks, and one that lacks more."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hour.stages import PROBES, PYTHON, ROOT

PACKAGES = Path(__file__).with_name("machine.txt")
BARE = Path(__file__).with_name("bare")  # has the sitecustomize.py that hides others


def find_device() -> dict[str, Any] | str:
    """Return the GPU, or why there is none; asked in a process, which a broken driver may hang."""
    words = [*PYTHON, PROBES, "none", "device"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "the driver does not answer"
    with contextlib.suppress(ValueError):
        found = json.loads(done.stdout)
        if isinstance(found, dict):
            return found
    return (done.stderr.strip().splitlines() or ["no GPU"])[-1]


def commit() -> str:
    """Return what is tested: the commit, with + if files have changed since."""

    def git(*words: str) -> str:
        command = ["git", "-c", "safe.directory=*", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    with contextlib.suppress(OSError):
        if head := git("rev-parse", "HEAD"):
            changed = git("status", "--porcelain", "--untracked-files=no")
            return head + ("+" if changed else "")
    return "unknown"


# ---- packages -----------------------------------------------------------------------------------


def plain(name: str) -> str:
    """Return a package's name in the form in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_installed(name: str) -> bool:
    """Return whether this Python has a package."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def unpack(carried: Path, place: Path, has: Callable[[str], bool] = is_installed) -> list[str]:
    """Unpack the wheels of packages that the machine does not have; return what to say of it.

    Modules that are compiled cannot be imported out of a wheel.
    """
    said = []
    for wheel in sorted(carried.glob("*.whl")):
        name = wheel.name.partition("-")[0]
        if has(name):
            continue
        words = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        words += ["--upgrade", "--target", str(place), str(wheel)]
        done = subprocess.run([*PYTHON, *words], capture_output=True, text=True, check=False)
        last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        said.append(f"{wheel.name}: {'unpacked' if done.returncode == 0 else last}")
    return said


def listed() -> set[str]:
    """Return the names of the packages of the machine."""
    lines = (line for line in PACKAGES.read_text().splitlines() if not line.startswith("#"))
    return {plain(name) for line in lines for name in line.split()}


def bare_env(carried: Path) -> dict[str, str]:
    """Return the environment of a process that has only the machine's packages, and carried ones.

    PYTHONPATH there begins with what hides the others; what it had besides comes after that.
    """
    there = listed()
    there.add("ultraep-comm")  # of which the stages build their own
    hidden = sorted(
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if not any(plain(package) in there for package in packages)
    )
    names = sorted(
        {plain(found.metadata["Name"]) for found in importlib.metadata.distributions()} - there
    )
    return {
        "UEC_HIDDEN_MODULES": " ".join(hidden),
        "UEC_HIDDEN_PACKAGES": " ".join(names),
        "UEC_CARRIED": str(carried),
        "PYTHONPATH": os.pathsep.join([str(BARE), os.environ.get("PYTHONPATH", "")]),
        "PYTHONNOUSERSITE": "1",
    }
