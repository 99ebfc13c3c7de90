"""Small programs of a few threads, and what of their order no execution can change.

A program has lines ``gpu[.cluster].block.thread: operation; operation; ...``. An operation is an
instruction of PTX, whose type does not matter, and its operands:

    r = ld.acquire.sys f      r is what the load returns
    ld.acquire.sys f 1        the wait that ends with 1
    st x 1, st x r            a store of r depends on the load of r
    r = atom.add.relaxed.gpu x 1, atom.cas.relaxed.gpu x 0 1, red.add.relaxed.gpu x 1
                              a compare-and-swap succeeds
    mbarrier.arrive m, mbarrier.test_wait m 2
                              counts arrivals; two of them complete the phase that is waited for
    bar.sync b                meets the block's other threads at b
    end k, start k            the end of a kernel, and the start of one that the stream has after it
    sust s 1, suld s, tex t   stores and loads of the surface and the texture proxy

The name of shared memory begins with %, and y@x is another virtual address of x.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LOADS, STORES, ATOMICS = ("ld", "suld", "tex"), ("st", "sust"), ("atom", "red", "mbarrier")
SCOPES = ("cta", "cluster", "gpu", "sys")
SEMANTICS = ("weak", "relaxed", "acquire", "release", "acq_rel", "sc")
# Of instructions that do not say them.
DEFAULTS = {
    "mbarrier.arrive": ("release", "cta"),
    "mbarrier.test_wait": ("acquire", "cta"),
    "atom": ("relaxed", "gpu"),
    "red": ("relaxed", "gpu"),
    "fence": ("acq_rel", "gpu"),
}
PROXIES = {"sust": "surface", "suld": "surface", "tex": "texture"}
ALL_PROXIES = ("async", "surface", "texture", "constant")


@dataclass(eq=False)
class Event:
    """An operation, or a part of an asynchronous one."""

    thread: str
    place: tuple[str, ...]  # gpu, cluster, block
    text: str
    index: int = -1
    address: str = ""  # none: a fence, a barrier, ...
    reads: bool = False
    writes: bool = False
    semantics: str = "weak"
    scope: str = ""  # none: weak
    proxy: str = "generic"
    register: str = ""
    expected: int | None = None
    value: str = "0"  # written: a number or a register
    adds: bool = False  # to what it reads
    flushes: tuple[str, ...] = ()  # proxies, of a proxy fence
    space: str = ""  # and the memory that it is about; none: any
    issue: Event | None = None  # of what is asynchronous
    source: Event | None = None  # what an asynchronous write has read

    @property
    def location(self) -> str:
        return self.address.split("@")[-1]

    @property
    def releases(self) -> bool:
        return self.semantics in ("release", "acq_rel", "sc")

    @property
    def acquires(self) -> bool:  # a reduction's read is not part of an acquire pattern
        return self.semantics in ("acquire", "acq_rel", "sc") and not self.text.startswith("red")

    def includes(self, other: Event) -> bool:
        """Whether the other's thread is in this operation's scope."""
        length = 3 - SCOPES.index(self.scope)
        return self.place[:length] == other.place[:length]

    def fences(self, other: Event) -> bool:
        """Whether it is a proxy fence with an effect on the other.

        A fence has one on its block; the start or end of a kernel, on its device.
        """
        space = "shared" if other.address.startswith("%") else "global"
        length = 1 if self.text.startswith(("end ", "start ")) else 3
        near = self.place[:length] == other.place[:length]
        return other.proxy in self.flushes and self.space in ("", space) and near


@dataclass
class Program:
    """Events, and pairs of them that precede each other in every execution."""

    events: list[Event] = field(default_factory=list)
    edges: list[tuple[Event, Event]] = field(default_factory=list)

    def add(self, event: Event, after: Event | None) -> Event:
        event.index = len(self.events)
        self.events.append(event)
        if after is not None:
            self.edges.append((after, event))
        return event


def parse(text: str, *, implicit_fence: bool = True) -> Program:
    """Read a program. ``implicit_fence``: a bulk copy ends with a proxy fence, as in the ISA."""
    program = Program()
    last: dict[str, Event] = {}
    stores: dict[str, list[tuple[Event, Event]]] = {}  # read and end of a thread's bulk stores
    for line in filter(None, map(str.strip, text.splitlines())):
        thread, operations = line.split(":", 1)
        *place, _ = thread.split(".")
        if len(place) == 2:
            place.insert(1, place[1])  # a block is a cluster
        for operation in filter(None, map(str.strip, operations.split(";"))):
            words = operation.split()
            if words[0].endswith(("commit_group", "mbarrier_init.release.cluster")):
                continue  # all bulk stores are one group; a barrier follows the other
            new = program.add(read_operation(thread, tuple(place), operation), last.get(thread))
            last[thread] = new
            if words[0].startswith("cp.async.bulk.wait_group"):
                only_read = "read" in words[0].split(".")
                for read, end in stores.get(thread, ()):
                    program.edges.append((read if only_read else end, new))
            elif words[0].startswith("cp."):
                parts = add_bulk_copy(program, new, words, implicit_fence=implicit_fence)
                stores.setdefault(thread, []).append(parts)
    for a, b in itertools.permutations(program.events, 2):
        met = a.text == b.text and a.text.startswith("bar.") and a.place == b.place
        if met or (a.text.startswith("end ") and b.text == a.text.replace("end", "start")):
            program.edges.append((a, b))
    return program


def read_operation(thread: str, place: tuple[str, ...], text: str) -> Event:
    """Return the operation's event; of a bulk copy, its issue."""
    register, _, rest = text.rpartition("= ")
    name, *operands = rest.split()
    words = name.split(".")
    kind = words[0]
    event = Event(thread, place, rest, register=register.strip())
    if kind in ("end", "start"):
        event.flushes = ALL_PROXIES
    elif name.startswith("fence.proxy"):
        event.flushes = (words[2],)
        event.space = words[3].split("::")[0] if len(words) > 3 else ""
    if kind in ("end", "start", "bar", "cp") or event.flushes:
        return event
    default = next((d for n, d in DEFAULTS.items() if name.startswith(n)), ("weak", ""))
    if "volatile" in words:
        default = ("relaxed", "sys")
    event.semantics = next((w for w in words if w in SEMANTICS), default[0])
    event.scope = next((w for w in words if w in SCOPES), default[1])
    if kind == "fence":
        return event
    if kind not in (*LOADS, *STORES, *ATOMICS):
        raise ValueError(text)
    event.address = operands[0]
    event.proxy = PROXIES.get(kind, "generic")
    event.reads = kind not in STORES
    event.writes = kind not in LOADS and "test_wait" not in words
    event.adds = event.reads and event.writes and "cas" not in words
    if event.reads and not event.adds and len(operands) > 1:
        event.expected = int(operands[1])
    if event.writes:
        event.value = "1" if kind == "mbarrier" else operands[-1]
    return event


def add_bulk_copy(
    program: Program, issue: Event, words: Sequence[str], *, implicit_fence: bool
) -> tuple[Event, Event]:
    """Add what the copy does, in no thread's program order; return its read and its end."""

    def part(after: Event | None, **what: Any) -> Event:
        thread = f"{issue.thread}#{issue.index}"
        return program.add(Event(thread, issue.place, issue.text, issue=issue, **what), after)

    to, source, *barrier = words[1:]
    read = part(None, address=source, reads=True, proxy="async")
    end = part(read, address=to, writes=True, proxy="async", source=read)
    if implicit_fence:
        end = part(end, flushes=("async",))
    if barrier:
        arrival = {"semantics": "release", "scope": "cluster", "adds": True, "value": "1"}
        end = part(end, address=barrier[0], reads=True, writes=True, **arrival)
    return read, end
