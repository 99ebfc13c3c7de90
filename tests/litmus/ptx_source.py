"""The instructions of ptx.cuh, as the file has them or weaker, and what the kernels call."""

from __future__ import annotations

import re
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
PTX = (SRC / "cuda/device/ptx.cuh").read_text()
INSTRUCTION = re.compile(r"(?<![\w.])(?:ld|st|atom|red|fence|mbarrier|cp)\.[\w.:]+")
INTRINSICS = {"__syncwarp()": "bar.warp.sync", "__syncthreads()": "bar.sync"}

Weakening = tuple[str, str, str]  # a function, what is in it, and what is instead


def functions(text: str) -> list[tuple[str, int, int]]:
    """Return name, begin and end of each function of ptx.cuh."""
    starts = [(m[1], m.start()) for m in re.finditer(r"^UEC_DEVICE [\w ]+?(\w+)\(", text, re.M)]
    ends = [begin for _, begin in starts[1:]] + [len(text)]
    return [(name, begin, end) for (name, begin), end in zip(starts, ends, strict=True)]


def instructions(text: str) -> dict[str, str]:
    """Return each function's instruction without its type; empty: it has lost it."""
    found: dict[str, str] = {}
    for name, begin, end in functions(text):
        code = re.sub(r"//.*", "", text[begin:end])
        says = [intrinsic for call, intrinsic in INTRINSICS.items() if call in code]
        says += [re.sub(r"\.(v\d|[usb]\d+)\b", "", i) for i in INSTRUCTION.findall(code)]
        says = sorted(set(says)) or [""]
        assert found.setdefault(name, says[0]) == says[-1], name  # overloads too
    return found


def weakened(text: str, weakening: Weakening) -> str:
    name, old, new = weakening
    spans = [(begin, end) for n, begin, end in functions(text) if n == name]
    assert spans, name
    for begin, end in reversed(spans):
        assert old in text[begin:end], weakening
        text = text[:begin] + text[begin:end].replace(old, new) + text[end:]
    return text


def fill_in(program: str, known: dict[str, str]) -> str:
    """Put instructions in the place of ``{name}``; an operation without one is left out."""
    lines = []
    for line in program.strip().splitlines():
        thread, operations = line.split(":", 1)
        kept = [
            o for o in operations.split(";") if all(known[n] for n in re.findall(r"{(\w+)}", o))
        ]
        lines.append(f"{thread}:{';'.join(kept).format_map(known)}")
    return "\n".join(lines)


def body(where: str) -> str:
    """Return the body of ``file function``."""
    file, function = where.split()
    text = re.sub(r"//.*", "", (SRC / file).read_text())
    start = re.search(rf"UEC_\w+ [^;{{}}()]*\b{function}\([^;{{}}]*{{", text)
    assert start is not None, where
    depth, at = 1, start.end()
    while depth > 0:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return text[start.end() : at]
