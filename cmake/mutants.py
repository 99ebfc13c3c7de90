"""Writes copies of sources that contain many mutants and choose one at run time.

    mutants.py <entries> <folder for the copies> <folder of sources>...

The entries are records of name, file, find and replace, as cmake/mutants.cmake writes them. The
smallest block that contains a mutant's change is written twice:

    {
      if (UEC_MUTANT(7)) { ...changed... } else { ...original... }
    }

A mutant's changes outside of functions (another member, a parameter with a default) apply to all
mutants: the test of the program without a mutant shows that they have no effect.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path

FIELD, RECORD = "\x1f", "\x1e"  # as in mutants.cmake
SKIPPED = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | ^[ \t]*\#(?:[^\n\\]|\\.)* | R"\((?:.*?)\)" |
        "(?:[^"\\\n]|\\.)*" | (?<!\w)'(?:[^'\\\n]|\\.)+' """,
    re.X | re.S | re.M,
)


@dataclass(frozen=True)
class Edit:
    """A mutant's replacement for text[begin:end]."""

    mutant: str
    begin: int
    end: int
    text: str


@dataclass
class Block:
    """A compound statement; begin and end are inside its braces."""

    begin: int
    end: int
    is_switch: bool
    inner: list[Block] = field(default_factory=list)
    edits: dict[str, list[Edit]] = field(default_factory=dict)  # by mutant


def blanked(text: str) -> str:
    """Return the text with comments, literals and directives blanked out."""
    return SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def matching(code: str, at: int) -> int:
    """Return the position of the bracket that code[at] closes."""
    depth = 0
    for i in range(at, -1, -1):
        depth += (code[i] in ")]}") - (code[i] in "([{")
        if depth == 0:
            return i
    raise ValueError("brackets do not match")


def header(code: str, at: int) -> str:
    """Return the part of the declaration or statement before code[at]."""
    depth, i = 0, at - 1
    while i >= 0:
        depth += (code[i] in ")]") - (code[i] in "([")
        if depth < 0 or (depth == 0 and code[i] in ";{}"):
            break
        i -= 1
    return code[i + 1 : at].strip()


def is_statement(code: str, at: int) -> bool:
    """Whether code[at] opens a compound statement, not a class, namespace or initializer list."""
    before = header(code, at)
    if re.search(r"\b(namespace|class|struct|union|enum)\b[^()]*$", before):
        return False
    if re.search(r"(\)|\)\s*(const|mutable|noexcept|override)|\b(else|do|try)|:)$", before):
        return True
    if before.endswith("]"):  # a lambda without parameters
        return not re.search(r"\w\s*$", code[: matching(code, code.rindex("]", 0, at))])
    if re.search(r"\)\s*(const\s*)?(noexcept\s*)?->[^()]*$", before):
        return True
    return not before and code[:at].rstrip()[-1] in ";{}"


def blocks_of(text: str) -> list[Block]:
    """Return the outermost blocks, with the others nested inside."""
    code = blanked(text)
    outer: list[Block] = []
    open_blocks: list[Block | None] = []
    for found in re.finditer("[{}]", code):
        at = found.start()
        if found[0] == "{":
            if is_statement(code, at):
                before = header(code, at)
                is_switch = re.match(r"(case .*:\s*)?switch\b", before) is not None
                open_blocks.append(Block(at + 1, at + 1, is_switch))
            else:
                open_blocks.append(None)
            continue
        block = open_blocks.pop()
        if block is not None:
            block.end = at
            parent = next((b for b in reversed(open_blocks) if b is not None), None)
            (parent.inner if parent else outer).append(block)
    if open_blocks:
        raise ValueError("braces do not match")
    return outer


def applied(text: str, edits: list[Edit], begin: int, end: int) -> str:
    """Return text[begin:end] with the edits applied."""
    parts = []
    for edit in sorted(edits, key=lambda edit: edit.begin):
        if edit.begin < begin:
            raise ValueError(f"{edit.mutant}: two changes overlap")
        parts += [text[begin : edit.begin], edit.text]
        begin = edit.end
    return "".join([*parts, text[begin:end]])


def enclosing(blocks: list[Block], edit: Edit, text: str) -> Block | None:
    """Return the smallest block whose braces still match after the edit."""
    for block in blocks:
        if not (block.begin <= edit.begin and edit.end <= block.end):
            continue
        smaller = enclosing(block.inner, edit, text)
        if smaller:
            return smaller
        code = blanked(applied(text, [edit], block.begin, block.end))
        depth = 0
        for brace in re.findall("[{}]", code):
            depth += 1 if brace == "{" else -1
            if depth < 0:
                break
        return block if depth == 0 and not block.is_switch else None
    return None


def edit_of(mutant: str, where: str, text: str, find: str, new: str) -> Edit:
    """Return the change, without the common prefix and suffix of find and new."""
    if text.count(find) != 1:
        raise ValueError(f"{where}: found {text.count(find)} times, not once:\n{find}")
    if find == new:
        raise ValueError(f"{where}: FIND and REPLACE are the same")
    shortest = min(len(find), len(new))
    head = next((i for i in range(shortest) if find[i] != new[i]), shortest)
    rest = shortest - head
    tail = next((i for i in range(rest) if find[-1 - i] != new[-1 - i]), rest)
    at = text.index(find)
    return Edit(mutant, at + head, at + len(find) - tail, new[head : len(new) - tail])


class Source:
    """A source file with its mutants' changes."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        self.edits: dict[str, list[Edit]] = {}

    def change_for_all(self) -> None:
        """Apply the changes outside of functions, and shift the positions of the others."""
        blocks = blocks_of(self.text)
        every = [edit for edits in self.edits.values() for edit in edits]
        inside = {edit for edit in every if enclosing(blocks, edit, self.text)}
        outside = sorted(set(every) - inside, key=lambda edit: edit.begin)

        def moved(edit: Edit) -> Edit:
            before = [other for other in outside if other.begin < edit.end]
            if any(other.end > edit.begin for other in before):
                raise ValueError(f"{edit.mutant}: another mutant changes this for all")
            by = sum(len(other.text) - (other.end - other.begin) for other in before)
            return replace(edit, begin=edit.begin + by, end=edit.end + by)

        kept = {n: [moved(e) for e in edits if e in inside] for n, edits in self.edits.items()}
        self.edits = {name: edits for name, edits in kept.items() if edits}
        self.text = applied(self.text, outside, 0, len(self.text))

    def with_choices(self, numbers: dict[str, int]) -> str:
        """Return the text with the run-time choices between its mutants."""
        blocks = blocks_of(self.text)
        for edits in self.edits.values():
            for edit in edits:
                block = enclosing(blocks, edit, self.text)
                assert block
                block.edits.setdefault(edit.mutant, []).append(edit)
        starts = [0, *(found.end() for found in re.finditer("\n", self.text))]

        def line(at: int) -> str:
            return f"\n#line {bisect_right(starts, at)}\n"

        def chosen(begin: int, end: int, inner: list[Block], done: frozenset[str]) -> str:
            parts = []
            for block in inner:
                parts.append(self.text[begin : block.begin])
                mine = [mutant for mutant in block.edits if mutant not in done]
                for mutant in mine:
                    edits = [
                        edit
                        for edit in self.edits[mutant]
                        if block.begin <= edit.begin and edit.end <= block.end
                    ]
                    changed = applied(self.text, edits, block.begin, block.end)
                    parts.append(f" if (UEC_MUTANT({numbers[mutant]})) {{{line(block.begin)}")
                    parts.append(f"{changed}\n}} else ")
                rest = chosen(block.begin, block.end, block.inner, done | set(mine))
                if mine:
                    rest = f"{{{line(block.begin)}{rest}\n}}{line(block.end)}"
                parts.append(rest)
                begin = block.end
            return "".join([*parts, self.text[begin:end]])

        return '#include "mutant.hpp"\n#line 1\n' + chosen(0, len(self.text), blocks, frozenset())


def write(path: Path, text: str) -> None:
    """Write the file if its contents change, so that it is not rebuilt otherwise."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main(entries: Path, folder: Path, roots: list[Path]) -> None:
    """Write the copies of all entries' files."""
    sources: dict[str, Source] = {}
    mutants: dict[str, None] = {}
    for record in entries.read_text().split(RECORD)[:-1]:
        name, file, find, new = record.split(FIELD)
        mutants[name] = None
        if file not in sources:
            path = next((root / file for root in roots if (root / file).exists()), None)
            if path is None:
                raise ValueError(f"mutant {name}: no file {file} below {roots}")
            sources[file] = Source(path)
        source = sources[file]
        edit = edit_of(name, f"mutant {name}, {file}", source.text, find, new)
        source.edits.setdefault(name, []).append(edit)

    numbers = {name: number for number, name in enumerate(mutants, start=1)}
    written = {folder / "mutant_names.inc"}
    write(folder / "mutant_names.inc", "".join(f'"{name}",\n' for name in mutants))
    for file, source in sources.items():
        source.change_for_all()
        write(folder / file, source.with_choices(numbers))
        written.add(folder / file)
    for path in folder.rglob("*"):  # stale copies would still precede the originals
        if path.is_file() and path not in written:
            path.unlink()
    inside = {name for source in sources.values() for name in source.edits}
    if len(inside) < len(mutants):
        raise ValueError(f"no function is changed by {mutants.keys() - inside}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(root) for root in sys.argv[3:]])
    except ValueError as error:
        sys.exit(f"mutants.py: {error}")
