"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import torch

import ultraep_comm
from ultraep_comm.calibration import cpu_name


def describe_machine() -> dict[str, str | int]:
    """Return the machine and the software that decide a figure."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "ultraep_comm": ultraep_comm.__version__,
    }


def find_commit() -> str:
    """Return the commit of this checkout, with ``-dirty`` after changes; else the version."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        # An installed copy may lie inside somebody else's repository.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return f"v{ultraep_comm.__version__}"
