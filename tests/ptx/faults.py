"""Faults planted into the compiled kernels: what orders something, with its order taken away."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

# What is inlined everywhere: a place is known by who calls these.
WRAPPERS = ("cuda/device/ptx.cuh", "cuda/device/warp.cuh", "cuda/device/memory.cuh", "include/")

# Kinds of faults: which instructions, and what becomes of them; "" leaves them out.
KINDS: dict[str, tuple[str, str]] = {
    "unordered": (r"(ld\.)acquire|(st\.)release|(atom\.)acq_rel", r"\1\2\3relaxed"),
    "scope too small": (r"((?:ld\.acquire|st\.release|fence\.acq_rel)\.)sys", r"\1gpu"),
    "scope of a block": (r"((?:ld\.acquire|st\.release|atom\.acq_rel)\.)gpu", r"\1cta"),
    "no fence": (r"fence\.(?:sc|acq_rel|proxy|mbarrier_init).*", ""),
    "no barrier": (r"bar(?:rier)?\.(?:warp\.)?sync.*", ""),
    "no wait": (r"cp\.async\.bulk\.wait_group.*", ""),
    "waits for too little": (r"(cp\.async\.bulk\.wait_group) ", r"\1.read "),
    "not committed": (r"cp\.async\.bulk\.commit_group.*", ""),
    "expects too little": (r"(mbarrier\.arrive\.expect_tx\S* \S+ \S+) \S+;", r"\1 16;"),
    "one arrival too many": (r"(mbarrier\.init\S* \S+) \S+;", r"\1 2;"),
    "always the first phase": (r"(mbarrier\.test_wait\S* \S+ \S+) \S+;", r"\1 0;"),
    "loads from elsewhere": (r"(cp\.async\.bulk\.shared\S* \S+ \[\S+)\]", r"\1+16]"),
    "stores to elsewhere": (r"(cp\.async\.bulk\.global\S* \[\S+)\]", r"\1+16]"),
    "reads a stale cache": (r"ld\.global\.v4\.u32", "ld.global.nc.v4.u32"),
}

# What a planted fault does not change, by its place, and why.
EXPLAINED = {
    r"layout\.abort\(|AbortWord|layout\.call\(call\.rank\), word\)|failure\.hpp: const CallRecord"
    r"|failure\.hpp: .*observe|publish_record\(token, call, memory, word\)": (
        "the word is all that is said: nothing is read behind it"
    ),
    r"failed_call|said\.(routing|tag)|status\.word\(\)|load_acquire_system\(word\)|cancelled": (
        "between a kernel and the host, which the machine does not have; tests/litmus has it"
    ),
    r"announce\.hpp: wait = |fetcher\.hpp: const uint64_t ready|gather\.hpp: memory_\.observe"
    r"|reducer\.hpp: const uint64_t seen|stripe\.hpp: const (CallRecord|uint64_t)": (
        "fills in what a failed wait reports"
    ),
    r"slot_words\.cuh: .*(kGroupFailed|words \+ s\) == number)": (
        "lets go of those who wait, for slots that are undefined then; or a lane's own word"
    ),
    r"unordered .*layout\.pulled": "behind loads_complete(), whose fence makes it a release",
    r"protocol\.hpp: const CallRecord record": "a record tells of another call, and is all it says",
    r"no fence .*fence\.sc\.sys": "how far stores are, which no load can tell; tests/litmus has it",
    r"reads a stale cache .*(adder|load_count|vector_copy)\.cuh": (
        "ids, main gradients and main weights, which nobody writes meanwhile; what peers write is "
        "copied in bulk"
    ),
    r"reads a stale cache .*call\.cuh": "what nobody writes before all blocks have left",
    r"no barrier .*(keeps a compiler from|before all loads are under way)": (
        "keeps loads together, and orders nothing"
    ),
    r"no barrier .*the next expert may have the same hubs": (
        "experts of many replicas, of which these programs have no two; tests/core has them"
    ),
    r"no barrier .*(reduce_worklist\.hpp|all boundaries are there|announce\.hpp: mover\.wait"
    r"|stripe\.hpp: team_\.sync\(\);$|schedule/schedule\.hpp: team\.sync\(\);$"
    r"|storer\.hpp: team_\.sync|call\.cuh: ptx::sync_warp"
    r"|load\.cuh: ptx::sync_warp|notice\.cuh|have read the stage|return team\.sync\(\))": (
        "a barrier that is there for its callers: on every path of today another one follows"
    ),
}

LOCATION = re.compile(r"\s*\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?")
Position = tuple[int, int, int]


@dataclass
class Fault:
    """One place of the sources, in every kernel that has it."""

    kind: str
    what: str  # the instruction
    place: str  # file: text of the line that asks for it
    lines: list[int] = field(default_factory=list)  # of the PTX
    kernels: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.kind} ({self.what}) at {self.place}"

    @property
    def explanation(self) -> str | None:
        return next((why for p, why in EXPLAINED.items() if re.search(p, self.name)), None)


class Kernels:
    """Compiled kernels as text."""

    def __init__(self, path: Path) -> None:
        self.lines = path.read_text().splitlines()
        self._files = {
            int(m[1]): Path(m[2])
            for line in self.lines
            if (m := re.match(r'\s*\.file\s+(\d+) "(.*?)"', line))
        }
        self._texts: dict[Path, list[str]] = {}

    def faulty(self, fault: Fault) -> str:
        """Return the kernels with the fault."""
        lines = self.lines.copy()
        pattern, weaker = KINDS[fault.kind]
        for number in fault.lines:
            lines[number] = re.sub(pattern, weaker, lines[number]) if weaker else ""
        return "\n".join(lines) + "\n"

    def faults(self) -> list[Fault]:
        """Return every fault of every place."""
        found: dict[tuple[str, str, str], Fault] = {}
        function, at = "", (0, 0, 0)
        callers: dict[Position, Position | None] = {}
        for number, line in enumerate(self.lines):
            if m := re.search(r"\.(?:entry|func)\b.*?(\w+)\($", line):
                function, callers = m[1], {}
            if m := LOCATION.match(line):
                at = (int(m[1]), int(m[2]), int(m[3]))
                callers[at] = (int(m[4]), int(m[5]), int(m[6])) if m[4] else None
            code = re.sub(r"^\s*(@!?%p\d+\s+)?", "", line)
            for kind, (pattern, _) in KINDS.items():
                if re.match(pattern, code):
                    what = code.split()[0].rstrip(";")
                    place = self._place(at, callers)
                    fault = found.setdefault((kind, what, place), Fault(kind, what, place))
                    fault.lines.append(number)
                    fault.kernels.add(function)
        return sorted(found.values(), key=lambda f: f.name)

    def _place(self, at: Position | None, callers: dict[Position, Position | None]) -> str:
        frames = []
        while at is not None:
            frames.append(self._text(Path(self._files[at[0]]), at[1]))
            at = callers.get(at)
        # What exchanges values in a warp is one place, wherever it is called.
        of_warp = [text for name, text in frames if name == "cuda/device/warp.cuh"]
        exchanges = [
            text for text in of_warp if "sync" in text and "static void sync()" not in text
        ]
        if exchanges:
            return f"cuda/device/warp.cuh: {exchanges[0]}"
        outside = [f for f in frames if not f[0].startswith(WRAPPERS)] or frames[-1:]
        return ": ".join(outside[0])

    def _text(self, file: Path, line: int) -> tuple[str, str]:
        if file not in self._texts:
            self._texts[file] = file.read_text().splitlines() if file.exists() else []
        lines = self._texts[file]
        parts = str(file).split("/src/")
        name = parts[-1] if len(parts) > 1 else f"include/{file.name}"
        return name, lines[line - 1].strip() if line <= len(lines) else "?"


PROGRAMS_OF = {
    "ultraep_replicate_notice": ["replicate"],
    "ultraep_replicate": ["replicate", "banks", "scenarios", "ready"],
    "slot_gemm": ["ready"],
    "ultraep_reduce": ["reduce", "scenarios"],
    "ultraep_load_plan": ["load_plan"],
    "ultraep_load": ["load"],
    "ultraep_plan": ["plan"],
    "ultraep_plan_in_bank": ["plan"],
    "ultraep_reroute": ["reroute"],
    "ultraep_save": ["save"],
    "educ": ["reduce", "scenarios"],
    "": ["replicate", "banks", "reduce", "scenarios", "ready"],
}
QUICKEST = [
    "save",
    "reroute",
    "ready",
    "load_plan",
    "load",
    "scenarios",
    "plan",
    "reduce",
    "banks",
    "replicate",
]


def programs_of(fault: Fault) -> list[str]:
    """Return the programs that launch kernels with the fault, the quickest first."""
    keys = {next(key for key in PROGRAMS_OF if key in kernel) for kernel in fault.kernels}
    return sorted({name for key in keys for name in PROGRAMS_OF[key]}, key=QUICKEST.index)
