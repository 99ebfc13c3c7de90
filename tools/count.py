#!/usr/bin/env python3
"""Count what there is to read and to learn in a commit: lines, classes, names and members.

python tools/count.py [commit]           # default: HEAD
python tools/count.py [commit] --time    # and the processor seconds of the README's second command
"""

from __future__ import annotations

import argparse
import ast
import re
import resource
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def count_members(module: Path, name: str) -> int:
    """Count what a class has for users: methods, annotations, and what its methods set."""
    body = ast.parse(module.read_text()).body
    kind = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    names = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
    names |= {ast.unparse(node.target) for node in kind.body if isinstance(node, ast.AnnAssign)}
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return sum(not name.startswith("_") for name in names)


def count(root: Path) -> dict[str, int]:
    """Return the counts of a checkout, with what they are of."""
    package = root / "ultraep_comm"
    apart = (package / "bench", package / "viz")
    files = [f for f in package.rglob("*.py*") if not any(f.is_relative_to(a) for a in apart)]
    nodes = [n for f in files if f.suffix == ".py" for n in ast.walk(ast.parse(f.read_text()))]
    tests = [f for part in ("python", "device") for f in (root / "tests" / part).rglob("*.py")]
    exported = re.findall(r'^    "\w+",$', (package / "__init__.pyi").read_text(), re.M)
    return {
        "lines of ultraep_comm with stubs, without bench and viz": count_lines(files),
        "classes there": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "names at the top": len(exported),
        "members of Group": count_members(package / "group/group.py", "Group"),
        "members of Engine": count_members(package / "engines/base.py", "Engine"),
        "lines of Python in tests/python and tests/device": count_lines(tests),
    }


def count_lines(files: list[Path]) -> int:
    """Return the lines of all files."""
    return sum(len(file.read_text().splitlines()) for file in files)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--time", action="store_true", help="measure the README's second command")
    options = parser.parse_args()
    git = ("git", "-c", "safe.directory=*", "-C", ROOT)
    found = subprocess.run([*git, "rev-parse", options.commit], check=True, stdout=subprocess.PIPE)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*git, "clone", "--quiet", ROOT, folder], check=True)
        checkout = ["git", "-C", folder, "checkout", "--quiet", found.stdout.decode().strip()]
        subprocess.run(checkout, check=True)
        for what, number in count(Path(folder)).items():
            print(f"{number:6d} {what}")
        if options.time:
            readme = (Path(folder) / "README.md").read_text()
            (command,) = re.findall(r"^python3 -m venv .* -m pytest$", readme, re.M)
            subprocess.run(["bash", "-c", command], check=True, cwd=folder)
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            print(f"{used.ru_utime + used.ru_stime:6.0f} processor seconds of: {command}")


if __name__ == "__main__":
    main()
