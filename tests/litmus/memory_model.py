"""The PTX memory consistency model as constraints on the executions of small programs, for z3.

The rules and their names are those of the chapter "Memory Consistency Model" of the PTX ISA and of
Lustig et al., "A Formal Analysis of the NVIDIA PTX Memory Consistency Model" (ASPLOS 2019); those
of proxies are of "Mixed-Proxy Extensions for the NVIDIA PTX Memory Consistency Model" (ISCA 2022).
Neither says what ``fence.proxy.async`` does: it is taken to be to the async proxy what the fences
of that paper are to theirs. Locations are words, so there is no partial overlap.

A program has a line for each thread, ``gpu[.cluster].block.thread: operation; operation; ...``; an
operation is an instruction of PTX, whose type does not matter, and its operands:

    r = ld.acquire.sys f      r is what the load returns
    ld.acquire.sys f 1        the wait that ends with 1
    st x 1, st x r            a store of r depends on the load of r
    r = atom.add.relaxed.gpu x 1, atom.cas.relaxed.gpu x 0 1, red.add.relaxed.gpu x 1
                              a compare-and-swap succeeds
    mbarrier.arrive m, mbarrier.test_wait m 2
                              counts arrivals; two of them complete the phase that is waited for
    bar.sync b                meets the block's other threads at b
    end k, start k            an end of a kernel, or what else a stream orders, and what follows it
    sust s 1, suld s, tex t   stores and loads of the surface and the texture proxy

The name of shared memory begins with %, and y@x is another virtual address of x.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import z3

SCOPES = ("cta", "cluster", "gpu", "sys")
PROXIES = {"sust": "surface", "suld": "surface", "tex": "texture"}
ALL_PROXIES = ("async", "surface", "texture", "constant")
# What an instruction means that does not say it: semantics and scope.
DEFAULTS = {
    "mbarrier.arrive": ("release", "cta"),
    "mbarrier.test_wait": ("acquire", "cta"),
    "atom": ("relaxed", "gpu"),
    "red": ("relaxed", "gpu"),
    "fence": ("acq_rel", "gpu"),
}


@dataclass(eq=False)
class Event:
    """One operation, or a part of an asynchronous one."""

    thread: str
    place: tuple[str, ...]  # gpu, cluster, block
    text: str
    index: int = -1
    address: str = ""
    reads: bool = False
    writes: bool = False
    semantics: str = "weak"
    scope: str = ""  # none: weak
    proxy: str = "generic"
    register: str = ""
    expected: int | None = None
    value: str = "0"  # written: a number or a register
    adds: bool = False  # to what it reads
    fence: bool = False
    flushes: tuple[str, ...] = ()  # proxies of a proxy fence
    space: str = ""  # and the memory that it is about; none: any
    meets: str = ""  # a barrier
    ends: str = ""  # a stream's order
    starts: str = ""
    issue: Event | None = None  # of an asynchronous operation
    source: Event | None = None  # the load that an asynchronous store depends on

    @property
    def location(self) -> str:
        return self.address.split("@")[-1]

    @property
    def strong(self) -> bool:
        return self.scope != ""

    @property
    def in_memory(self) -> bool:
        return self.reads or self.writes

    @property
    def releases(self) -> bool:
        return self.semantics in ("release", "acq_rel", "sc")

    @property
    def acquires(self) -> bool:
        return self.semantics in ("acquire", "acq_rel", "sc") and not self.text.startswith("red")

    def includes(self, other: Event) -> bool:
        """Whether the other's thread is in this operation's scope."""
        length = 3 - SCOPES.index(self.scope)
        return self.place[:length] == other.place[:length]

    def fences(self, other: Event) -> bool:
        """Whether it is a proxy fence that has an effect on the other.

        A fence has one on its block; a stream's order, on its device.
        """
        space = "shared" if other.address.startswith("%") else "global"
        length = 1 if self.ends or self.starts else 3
        return (
            other.proxy in self.flushes
            and self.space in ("", space)
            and self.place[:length] == other.place[:length]
        )


@dataclass
class Program:
    """Events, and the pairs that precede each other in every execution."""

    events: list[Event] = field(default_factory=list)
    edges: list[tuple[Event, Event]] = field(default_factory=list)

    def add(self, event: Event, after: Event | None) -> Event:
        event.index = len(self.events)
        self.events.append(event)
        if after is not None:
            self.edges.append((after, event))
        return event


def parse(text: str, *, implicit_fence: bool = True) -> Program:
    """Read a program.

    ``implicit_fence``: the end of a bulk copy is a proxy fence, as the ISA's section on the async
    proxy says.
    """
    program = Program()
    last: dict[str, Event] = {}
    stores: dict[str, list[tuple[Event, Event]]] = {}  # read and end of a thread's bulk stores
    for line in filter(None, map(str.strip, text.splitlines())):
        thread, operations = line.split(":", 1)
        *place, _ = thread.split(".")
        if len(place) == 2:
            place.insert(1, place[1])  # a block is a cluster
        for operation in filter(None, map(str.strip, operations.split(";"))):
            new = read_operation(thread, tuple(place), operation)
            words = operation.split()
            if new is None:  # orders nothing: bulk stores are waited for in one group
                continue
            last[thread] = program.add(new, last.get(thread))
            if words[0].startswith("cp.async.bulk.wait_group"):
                for read, end in stores.pop(thread, ()):
                    program.edges.append((read if "read" in words[0].split(".") else end, new))
            elif words[0].startswith("cp.async.bulk."):
                parts = add_bulk_copy(program, new, words, implicit_fence=implicit_fence)
                stores.setdefault(thread, []).append(parts)
    for a, b in itertools.permutations(program.events, 2):
        if a.meets and a.meets == b.meets and a.place == b.place:
            program.edges.append((a, b))
        if a.ends and a.ends == b.starts:
            program.edges.append((a, b))
    return program


def read_operation(thread: str, place: tuple[str, ...], text: str) -> Event | None:
    """Return the operation's event; of a bulk copy, its issue; None: it orders nothing."""
    register, _, rest = text.rpartition("= ")
    name, *operands = rest.split()
    words = name.split(".")
    kind = words[0]
    event = Event(thread, place, rest, register=register.strip())
    if name in ("end", "start"):
        setattr(event, name + "s", operands[0])
        event.flushes = ALL_PROXIES
        return event
    if kind == "bar":
        event.meets = operands[0]
        return event
    if kind == "cp":
        return None if "commit_group" in words else event
    if name.startswith("fence.mbarrier_init"):  # a block-wide barrier follows
        return None
    if name.startswith("fence.proxy"):
        event.flushes = (words[2],)
        event.space = words[3].split("::")[0] if len(words) > 3 else ""
        return event
    default = next((d for n, d in DEFAULTS.items() if name.startswith(n)), ("weak", ""))
    if "volatile" in words:
        default = ("relaxed", "sys")
    known = ("weak", "relaxed", "acquire", "release", "acq_rel", "sc")
    event.semantics = next((w for w in words if w in known), default[0])
    event.scope = next((w for w in words if w in SCOPES), default[1])
    if kind == "fence":
        event.fence = True
        return event
    event.address = operands[0]
    event.proxy = PROXIES.get(kind, "generic")
    if kind in ("ld", "suld", "tex") or "test_wait" in words:
        event.reads = True
        event.expected = int(operands[1]) if len(operands) > 1 else None
    elif kind in ("st", "sust"):
        event.writes = True
        event.value = operands[1]
    elif kind in ("atom", "red", "mbarrier"):
        event.reads = event.writes = True
        if "cas" in words:
            event.expected, event.value = int(operands[1]), operands[2]
        else:
            event.adds, event.value = True, operands[1] if kind != "mbarrier" else "1"
    else:
        raise ValueError(text)
    return event


def add_bulk_copy(
    program: Program, issue: Event, words: Sequence[str], *, implicit_fence: bool
) -> tuple[Event, Event]:
    """Add what the copy does, in no thread's program order; return its read and its end."""
    to, source = words[1], words[2]

    def part(after: Event | None, **what: Any) -> Event:
        thread = f"{issue.thread}#{issue.index}"
        return program.add(Event(thread, issue.place, issue.text, issue=issue, **what), after)

    read = part(None, address=source, reads=True, proxy="async")
    end = part(read, address=to, writes=True, proxy="async", source=read)
    if implicit_fence:
        end = part(end, flushes=("async",))
    if len(words) > 3:
        arrival = {"semantics": "release", "scope": "cluster", "adds": True, "value": "1"}
        end = part(end, address=words[3], reads=True, writes=True, **arrival)
    return read, end


def any_of(terms: Iterable[Any]) -> Any:
    """Return z3's disjunction; constants are simplified, because there are many."""
    found = [t for t in terms if t is not False]
    return True if any(t is True for t in found) else z3.Or(found) if found else False


def all_of(*terms: Any) -> Any:
    found = [t for t in terms if t is not True]
    return False if any(t is False for t in found) else z3.And(found) if found else True


def morally_strong(a: Event, b: Event) -> bool:
    if a.proxy != b.proxy or (a.in_memory and b.in_memory and a.address != b.address):
        return False
    return a.thread == b.thread or (a.strong and b.strong and a.includes(b) and b.includes(a))


class Execution:
    """The constraints on one execution of a program.

    Derived relations are variables that contain what the rules demand, and may contain more: every
    axiom forbids something of them, so more of them never allows an outcome.
    """

    def __init__(self, program: Program) -> None:
        self.solver = z3.Solver()
        self.events = program.events
        self.memory = [e for e in self.events if e.in_memory]
        self.writes = [e for e in self.events if e.writes]
        self.order_statically(program)
        self.read_values()
        self.order_writes()
        self.observe()
        self.synchronize()
        self.add_axioms()

    # ---- relations

    def variable(self, name: str, a: Event, b: Event) -> Any:
        return z3.Bool(f"{name} {a.index} {b.index}")

    def require(self, *cases: Any) -> None:
        """All cases but the last imply the last."""
        term = any_of([z3.Not(c) if not isinstance(c, bool) else not c for c in cases[:-1]] + [cases[-1]])
        if term is not True:
            self.solver.add(term)

    def forbid(self, *terms: Any) -> None:
        self.require(*terms, False)

    def order_statically(self, program: Program) -> None:
        """Base causality that every execution has: program order, barriers, streams, bulk copies."""
        reach = [0] * len(self.events)
        for a, b in program.edges:
            reach[a.index] |= 1 << b.index
        for via, row in itertools.product(range(len(reach)), repeat=2):
            if reach[row] >> via & 1:
                reach[row] |= reach[via]
        self.static = reach

    def precedes(self, a: Event, b: Event) -> bool:
        return bool(self.static[a.index] >> b.index & 1)

    def program_order(self, a: Event, b: Event) -> bool:
        return a.thread == b.thread and a.index < b.index

    def overlapping(self, events: Iterable[Event]) -> Iterator[tuple[Event, Event]]:
        for a, b in itertools.permutations(events, 2):
            if a.location == b.location:
                yield a, b

    def read_values(self) -> None:
        """Reads-from, ``rf``: a write for each read, or the initial value, which is 0."""
        self.value_read = {e: z3.Int(f"read {e.index}") for e in self.events if e.reads}
        self.by_register = {e.register: e for e in self.events if e.register}
        self.value_written = {e: self.written(e) for e in self.writes}
        self.rf: dict[tuple[Event, Event], Any] = {}
        for r in self.value_read:
            sources = [w for w in self.writes if w is not r and w.location == r.location]
            for w in sources:
                self.rf[w, r] = self.variable("rf", w, r)
                self.require(self.rf[w, r], self.value_read[r] == self.value_written[w])
            initial = self.from_start(r)
            self.require(initial, self.value_read[r] == 0)
            self.solver.add(z3.PbLe([(self.rf[w, r], 1) for w in sources], 1) if sources else True)
            if r.expected is not None:
                self.solver.add(self.value_read[r] == r.expected)

    def written(self, e: Event) -> Any:
        if e.source is not None:
            return self.value_read[e.source]
        known = e.value.lstrip("-").isdigit()
        value = int(e.value) if known else self.value_read[self.by_register[e.value]]
        return self.value_read[e] + value if e.adds else z3.IntVal(value) if known else value

    def from_start(self, r: Event) -> Any:
        return all_of(*(z3.Not(v) for (_, to), v in self.rf.items() if to is r))

    def order_writes(self) -> None:
        """Coherence order, ``co``: transitive, partial where writes race; morally strong: total."""
        self.co = {(a, b): self.variable("co", a, b) for a, b in self.overlapping(self.writes)}
        for (a, b), before in self.co.items():
            self.forbid(before, self.co[b, a])
            if morally_strong(a, b):
                self.solver.add(z3.Or(before, self.co[b, a]))
            for c in self.writes:
                if c not in (a, b) and c.location == a.location:
                    self.require(before, self.co[b, c], self.co[a, c])

    def from_read(self, r: Event, w: Event) -> Any:
        """``fr``: what r has read is older than w."""
        overwritten = (all_of(v, self.co[a, w]) for (a, to), v in self.rf.items() if to is r and a is not w)
        return any_of([self.from_start(r), *overwritten])

    def observe(self) -> None:
        """Observation order: morally strong reads-from, also by way of atomic operations."""
        self.observed: dict[tuple[Event, Event], Any] = {}
        for w, r in self.overlapping(self.memory):
            if w.writes and r.reads:
                self.observed[w, r] = self.variable("observed", w, r)
                if morally_strong(w, r):
                    self.require(self.rf[w, r], self.observed[w, r])
        for (w, z), (z2, r) in itertools.product(self.observed, repeat=2):
            if z is z2 and w is not r:
                self.require(self.observed[w, z], self.observed[z, r], self.observed[w, r])

    def release_patterns(self) -> Iterator[tuple[Event, Event]]:
        """First operation and write."""
        for first in filter(lambda e: e.releases, self.events):
            if first.writes:
                yield first, first
            for w in self.writes:
                later = self.program_order(first, w) and w.strong
                if later and (first.fence or first.address == w.address):
                    yield first, w

    def acquire_patterns(self) -> Iterator[tuple[Event, Event]]:
        """Read and last operation."""
        for last in filter(lambda e: e.acquires, self.events):
            if last.reads:
                yield last, last
            for r in self.value_read:
                earlier = self.program_order(r, last) and r.strong and not r.text.startswith("red")
                if earlier and (last.fence or last.address == r.address):
                    yield r, last

    def synchronize(self) -> None:
        """Synchronizes-with, and ``paths`` of base causality from its first step to its last."""
        when: dict[tuple[Event, Event], list[Any]] = {}
        for (first, w), (r, last) in itertools.product(self.release_patterns(), self.acquire_patterns()):
            if first.thread != last.thread and (w, r) in self.observed and morally_strong(first, last):
                when.setdefault((first, last), []).append(self.observed[w, r])
        self.turn = {e: z3.Int(f"turn {e.index}") for e in self.events if e.semantics == "sc"}
        for a, b in itertools.permutations(self.turn, 2):
            if morally_strong(a, b):  # Fence-SC order
                self.solver.add(self.turn[a] != self.turn[b])
                when.setdefault((a, b), []).append(self.turn[a] < self.turn[b])
        self.steps = {step: any_of(terms) for step, terms in when.items()}
        self.paths = {(d, e): z3.Bool(f"path {i}") for i, (d, e) in enumerate(itertools.product(self.steps, repeat=2))}
        for d, happens in self.steps.items():
            self.require(happens, self.paths[d, d])
            for e, f in itertools.product(self.steps, repeat=2):
                if e[1] is f[0] or self.precedes(e[1], f[0]):
                    self.require(self.paths[d, e], self.steps[f], self.paths[d, f])

    def base_causality(self, a: Event, b: Event) -> Any:
        """Base causality order.

        A bulk copy comes after what its issuer did before it, but orders only itself: a step
        through its start does not lead through its end.
        """
        if b.issue is not None and b.issue is not a.issue:
            return a is b.issue or self.base_causality(a, b.issue)
        if self.precedes(a, b):
            return True
        out = [s for s in self.steps if s[0] is a or self.precedes(a, s[0])]
        into = [s for s in self.steps if s[1] is b or self.precedes(s[1], b)]
        return any_of(self.paths[d, e] for d, e in itertools.product(out, into))

    def in_proxy(self, a: Event, b: Event) -> Any:
        """Proxy-preserved base causality order, of operations on one location."""
        same_address = a.address == b.address
        if same_address and a.proxy == b.proxy and (a.proxy == "generic" or a.place == b.place):
            return self.base_causality(a, b)
        needed: list[Callable[[Event], bool]] = []  # fences on the way, in this order
        if a.proxy != "generic":
            needed.append(lambda f: f.fences(a))
        if not same_address:
            needed.append(lambda f: "alias" in f.flushes)
        if b.proxy != "generic":
            needed.append(lambda f: f.fences(b))

        def onward(at: Event, left: Sequence[Callable[[Event], bool]]) -> Any:
            if not left:
                return self.base_causality(at, b)
            return any_of(
                all_of(at is f or self.base_causality(at, f), onward(f, left[1:]))
                for f in self.events
                if left[0](f) and f.issue in (None, at.issue)
            )

        return onward(a, needed)

    def causality(self) -> dict[tuple[Event, Event], Any]:
        kept = {(a, b): self.in_proxy(a, b) for a, b in self.overlapping(self.memory)}
        return {
            (a, b): any_of([kept[a, b]] + [all_of(v, kept[z, b]) for (w, z), v in self.observed.items() if w is a and z is not b])
            for a, b in kept
        }

    # ---- axioms

    def add_axioms(self) -> None:
        cause = self.causality()
        place = {e: z3.Int(f"place {e.index}") for e in self.memory}  # among those that overlap
        time = {e: z3.Int(f"time {e.index}") for e in self.memory}
        for (a, b), before in cause.items():
            strong = morally_strong(a, b)
            if a.writes and b.writes:
                self.require(before, self.co[a, b])  # Coherence
            for happens in self.communication(a, b):
                self.forbid(happens, cause[b, a])  # Causality
                if strong:
                    self.require(happens, place[a] < place[b])  # SC-per-Location
            if strong and self.program_order(a, b):
                self.solver.add(place[a] < place[b])
        for (w, r), v in self.rf.items():
            self.require(v, time[w] < time[r])  # No-Thin-Air
            if r.writes:
                for other in self.writes:
                    if (other, r) in self.co and other is not w and morally_strong(other, r):
                        self.forbid(v, self.co[w, other], self.co[other, r])  # Atomicity
        for w in self.writes:
            needs = w.source or (self.by_register.get(w.value) if not w.adds else None)
            if needs is not None:
                self.solver.add(time[needs] < time[w])
            for other in self.writes:
                if w.reads and (other, w) in self.co and morally_strong(other, w):
                    self.forbid(self.from_start(w), self.co[other, w])  # Atomicity, of the first
        for a, b in itertools.permutations(self.turn, 2):
            if morally_strong(a, b):
                self.require(self.base_causality(a, b), self.turn[a] < self.turn[b])  # Fence-SC

    def communication(self, a: Event, b: Event) -> Iterator[Any]:
        if (a, b) in self.rf:
            yield self.rf[a, b]
        if (a, b) in self.co:
            yield self.co[a, b]
        if a.reads and b.writes:
            yield self.from_read(a, b)

    # ---- outcomes

    def demand(self, outcome: str) -> None:
        """Demand, for example, ``r=1 s!=2 x=0``: registers, and what remains in memory."""
        for name, differs, value in re.findall(r"([\w%]+)(!?)=(-?\d+)", outcome):
            if name in self.by_register:
                holds = self.value_read[self.by_register[name]] == int(value)
            else:
                writes = [w for w in self.writes if w.location == name]
                last = {w: all_of(*(z3.Not(self.co[w, o]) for o in writes if o is not w)) for w in writes}
                holds = any_of(all_of(v, self.value_written[w] == int(value)) for w, v in last.items())
            self.solver.add(z3.Not(holds) if differs else holds)

    def witness(self) -> str | None:
        """Return an execution in words; None: there is none."""
        if self.solver.check() != z3.sat:
            return None
        model = self.solver.model()
        lines = []
        for e in self.memory:
            says = f"{e.thread}: {e.text}"
            if e.reads:
                found = [w for (w, r), v in self.rf.items() if r is e and z3.is_true(model.eval(v))]
                source = f"{found[0].thread}: {found[0].text}" if found else "the start"
                says += f" -> {model.eval(self.value_read[e], model_completion=True)}, from {source}"
            lines.append(says)
        return "\n".join(lines)


def find_execution(text: str, outcome: str, *, implicit_fence: bool = True) -> str | None:
    """Return an execution of the program with this outcome, in words; None: it is forbidden."""
    execution = Execution(parse(text, implicit_fence=implicit_fence))
    execution.demand(outcome)
    return execution.witness()
