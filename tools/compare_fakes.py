"""Compare the tests' fakes of frameworks with the releases that are installed.

    python tools/compare_fakes.py [FILE ...]

Each fake (``tests/python/fake_*.py`` with a function ``differences``) stands for what an adapter
calls or overrides. Prints what the installed release has otherwise; the exit status is 1 if
anything. Install the newest releases first to see what has moved.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "python"
MISSING = 3
# In a process of its own: frameworks change each other's modules, and some never end cleanly.
PROGRAM = f"""
import importlib, sys
fake = importlib.import_module(sys.argv[1])
try:
    found = fake.differences()
except ImportError as error:
    print(error)
    sys.exit({MISSING})
print(*found, sep="\\n")
sys.exit(bool(found))
"""


def compare(fake: Path) -> tuple[int, list[str]]:
    """Return 0, 1 if the release differs, MISSING if there is none, or another error; and lines."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            f"import sys; sys.path.insert(0, {str(fake.parent)!r})\n{PROGRAM}",
            fake.stem,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout if done.returncode in (0, 1, MISSING) and done.stdout else done.stderr
    return done.returncode, [line for line in text.splitlines() if line.strip()]


def main(arguments: list[str]) -> int:
    """Compare the named fakes, or all."""
    fakes = [Path(a).resolve() for a in arguments] or [
        path for path in sorted(FOLDER.glob("fake_*.py")) if "def differences" in path.read_text()
    ]
    status = 0
    for fake in fakes:
        code, lines = compare(fake)
        name = fake.stem.removeprefix("fake_")
        if code == MISSING:
            print(f"{name}: not installed ({lines[-1] if lines else ''})")
        elif code == 0:
            print(f"{name}: as the adapter expects it")
        else:
            print(f"{name}: differs", *lines[-20:], sep="\n  ")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
