"""Coverage-guided fuzzing of the Python side, with atheris.

    python tests/fuzz/fuzz_python.py trace -max_total_time=60 found/trace tests/fuzz/corpus/trace

Behind the target's name come libFuzzer's options and folders. What fails is in ``crash-*``.
"""

from __future__ import annotations

import inspect
import resource
import sys
from pathlib import Path

import atheris

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fuzz.targets import TARGETS

_ROOM = 6 << 30  # bytes beyond what is in use at the start: more is a finding


def _instrument() -> None:
    """Have all functions of the package count for coverage.

    Not while they are imported: the hook for that does not see editable installs.
    """
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "ultraep_comm":
            continue
        for item in list(vars(module).values()):
            members = list(vars(item).values()) if inspect.isclass(item) else [item]
            for member in members:
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if inspect.isfunction(function) and function.__module__ == name:
                    atheris.instrument_func(function)


def main() -> None:
    """Fuzz the target that the first argument names."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"expected a target first: {', '.join(TARGETS)}")
    target = TARGETS[sys.argv.pop(1)]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, resource.RLIM_INFINITY))
    _instrument()
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
