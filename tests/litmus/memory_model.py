"""The PTX memory consistency model: constraints on the executions of a program, for z3.

The rules and their names are those of the chapter "Memory Consistency Model" of the PTX ISA and of
Lustig et al., "A Formal Analysis of the NVIDIA PTX Memory Consistency Model" (ASPLOS 2019); those
of proxies are of "Mixed-Proxy Extensions for the NVIDIA PTX Memory Consistency Model" (ISCA 2022).
Neither says what ``fence.proxy.async`` does: it is taken to be to the async proxy what the fences
of that paper are to theirs. Locations are words, so there is no partial overlap. Barriers of a warp
order memory as those of a block do, and mbarriers as atomic operations do.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import z3
from programs import Event, Program, parse


def any_of(terms: Iterable[Any]) -> Any:
    """Return z3's disjunction; constants are simplified, because there are many."""
    found = [t for t in terms if t is not False]
    return True if any(t is True for t in found) else z3.Or(found) if found else False


def all_of(*terms: Any) -> Any:
    found = [t for t in terms if t is not True]
    return False if any(t is False for t in found) else z3.And(found) if found else True


def morally_strong(a: Event, b: Event) -> bool:
    if a.proxy != b.proxy or (a.address and b.address and a.address != b.address):
        return False
    strong = a.scope != "" and b.scope != ""
    return a.thread == b.thread or (strong and a.includes(b) and b.includes(a))


class Execution:
    """The constraints on one execution of a program.

    Derived relations are variables that contain what the rules demand, and may contain more: every
    axiom forbids something of them, so more of them never allows an outcome.
    """

    def __init__(self, program: Program) -> None:
        self.solver = z3.Solver()
        self.events = program.events
        self.memory = [e for e in self.events if e.address]
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
        """Require that all cases but the last imply the last."""
        *given, then = cases
        term = any_of([*(not c if isinstance(c, bool) else z3.Not(c) for c in given), then])
        if term is not True:
            self.solver.add(term)

    def forbid(self, *terms: Any) -> None:
        self.require(*terms, False)

    def order_statically(self, program: Program) -> None:
        """Base causality of every execution: program order, barriers, streams, bulk copies."""
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
        overwritten = (
            all_of(v, self.co[a, w]) for (a, to), v in self.rf.items() if to is r and a is not w
        )
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
                later = self.program_order(first, w) and w.scope
                if later and (not first.address or first.address == w.address):
                    yield first, w

    def acquire_patterns(self) -> Iterator[tuple[Event, Event]]:
        """Read and last operation."""
        for last in filter(lambda e: e.acquires, self.events):
            if last.reads:
                yield last, last
            for r in self.value_read:
                earlier = self.program_order(r, last) and r.scope and not r.text.startswith("red")
                if earlier and (not last.address or last.address == r.address):
                    yield r, last

    def synchronize(self) -> None:
        """Synchronizes-with, and ``paths`` of base causality from its first step to its last."""
        when: dict[tuple[Event, Event], list[Any]] = {}
        patterns = itertools.product(self.release_patterns(), self.acquire_patterns())
        for (first, w), (r, last) in patterns:
            met = first.thread != last.thread and (w, r) in self.observed
            if met and morally_strong(first, last):
                when.setdefault((first, last), []).append(self.observed[w, r])
        self.turn = {e: z3.Int(f"turn {e.index}") for e in self.events if e.semantics == "sc"}
        for a, b in itertools.permutations(self.turn, 2):
            if morally_strong(a, b):  # Fence-SC order
                self.solver.add(self.turn[a] != self.turn[b])
                when.setdefault((a, b), []).append(self.turn[a] < self.turn[b])
        self.steps = {step: any_of(terms) for step, terms in when.items()}
        pairs = itertools.product(self.steps, repeat=2)
        self.paths = {pair: z3.Bool(f"path {i}") for i, pair in enumerate(pairs)}
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
        through = {(a, b): [before] for (a, b), before in kept.items()}
        for (a, z), seen in self.observed.items():
            for b in self.memory:
                if (z, b) in kept and b is not a:
                    through[a, b].append(all_of(seen, kept[z, b]))
        return {pair: any_of(ways) for pair, ways in through.items()}

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
                newer = {w: [self.co[w, o] for o in writes if o is not w] for w in writes}
                holds = any_of(
                    all_of(self.value_written[w] == int(value), *map(z3.Not, newer[w]))
                    for w in writes
                )
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
                value = model.eval(self.value_read[e], model_completion=True)
                says += f" -> {value}, from {source}"
            lines.append(says)
        return "\n".join(lines)


def find_execution(text: str, outcome: str, *, implicit_fence: bool = True) -> str | None:
    """Return an execution of the program with this outcome, in words; None: it is forbidden."""
    execution = Execution(parse(text, implicit_fence=implicit_fence))
    execution.demand(outcome)
    return execution.witness()
