"""The model of the protocol, searched in full by spin: correct ones hold, mutants do not."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiers import sampled

MODEL = Path(__file__).resolve().parent / "protocol.pml"
MEGABYTES = 2048
MODES = ("PUSH", "PULL", "DIRECT")
EVERYBODY_ENDS = "invalid end state"

# Every configuration has two plans; mutants name the ones that tell them apart.
CYCLE = {"PLANS": "CYCLE"}
SPLIT = {"PLANS": "SPLIT"}
WIDE = {"PLANS": "WIDE", "RANKS": "4"}
TROUBLES = ("NOTHING", "CRASH", "EXPIRY", "MISMATCH")

CORRECT = [
    *({"MODE": mode, "TROUBLE": trouble, **SPLIT} for mode in MODES for trouble in TROUBLES),
    *({"MODE": "PUSH", "TROUBLE": trouble, **CYCLE} for trouble in TROUBLES),
    {"MODE": "PULL", "TROUBLE": "CRASH", **CYCLE},
    *({"MODE": mode, "TROUBLE": "NOTHING", **WIDE} for mode in MODES),
    *({"MODE": mode, "TROUBLE": "CRASH", **WIDE} for mode in MODES),
]

# Each mutant, a configuration where its rule matters, and a property that breaks there.
PUSH, PULL, DIRECT = ({"MODE": mode} for mode in MODES)
CRASH, EXPIRY, MISMATCH = ({"TROUBLE": trouble} for trouble in TROUBLES[1:])
MUTANTS: list[tuple[str, Mapping[str, str], str]] = [
    ("PUBLISH_REUSABLE", PUSH | SPLIT, "slot_is_ready"),
    ("PUBLISH_REUSABLE", DIRECT | SPLIT, "slots_are_filled"),
    ("DONE_EARLY", PUSH | SPLIT, "slots_are_filled"),
    ("NO_OPEN", PUSH | CYCLE, "slot_is_open"),
    ("NO_CALL", PUSH | CYCLE | MISMATCH, "slot_is_open"),
    ("NO_HOME_OPEN", PULL | CYCLE, "main_is_final"),
    ("NO_READY", PUSH | CYCLE, "slot_is_ready"),
    ("STALE_FLAG", PUSH | CYCLE, "slot_is_ready"),
    ("STALE_FLAG", DIRECT | CYCLE, "slots_are_filled"),
    ("BLOCKING_HUB", PUSH | CYCLE, EVERYBODY_ENDS),
    ("WITHHELD", PUSH | CYCLE, EVERYBODY_ENDS),
    ("DONE_ASTRAY", PUSH | CYCLE, EVERYBODY_ENDS),
    ("DONE_NOT_TO_HUB", PUSH | CYCLE, EVERYBODY_ENDS),
    ("NEXT_EARLY", PUSH | CYCLE, "slot_is_open"),
    ("PULLED_IGNORED", PULL | CYCLE, "main_is_final"),
    ("PULLED_EARLY", PULL | CYCLE, "main_is_final"),
    ("DIGEST_IGNORED", PUSH | CYCLE | MISMATCH, "slot_is_open"),
    ("ABORT_UNREAD", PULL | CYCLE | EXPIRY, "slots_are_filled"),
    ("ABORT_LATE", PULL | CYCLE | EXPIRY, "slots_are_filled"),
    ("NO_ABORT", DIRECT | SPLIT | CRASH, EVERYBODY_ENDS),
    ("LATER_ABORT", DIRECT | CYCLE | EXPIRY, "fault_has_cause"),
    ("NO_TIMEOUT", DIRECT | CYCLE | CRASH, EVERYBODY_ENDS),
    ("NO_REREAD", PUSH | CYCLE, "fault_has_cause"),
]

# States that a search which is worth something has to come by.
REACHED = {
    "a rank is a call ahead": (PUSH | SPLIT, "inside[0] == 2 && inside[1] == 1"),
    "a rank stops half announced": (
        PUSH | CYCLE | CRASH,
        "stopped == 0 && call[AT(1, 0)] == 4 && call[AT(2, 0)] == 2",
    ),
    "one stops, others succeed": (
        DIRECT | SPLIT | CRASH,
        "stopped == 1 && trouble == 2 && epoch[0] == 3 && epoch[2] == 3",
    ),
    "one stops, all others fail": (
        PUSH | CYCLE | CRASH,
        "stopped == 0 && failed[1] && failed[2]",
    ),
    "one fails a call ahead": (
        PUSH | CYCLE | EXPIRY,
        "failed[2] && epoch[2] == 2 && inside[1] == 1 && epoch[1] == 1",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Search:
    """What pan says of one model."""

    text: str
    seconds: float

    @property
    def states(self) -> int:
        return int(self.find(r"(\d+) states, stored"))

    @property
    def errors(self) -> int:
        return int(self.find(r"errors: (\d+)"))

    @property
    def violated(self) -> list[str]:
        """Properties, in the order in which they first broke."""
        found = re.findall(
            rf"^pan:\d+: (?:assertion violated (\w+)|({EVERYBODY_ENDS}))", self.text, re.M
        )
        return list(dict.fromkeys(name or end for name, end in found))

    def find(self, pattern: str) -> str:
        match = re.search(pattern, self.text)
        assert match, self.text
        return match[1]

    def assert_complete(self) -> None:
        for sign in ("max search depth too small", "Search not completed", "MEMLIM", "truncated"):
            assert sign not in self.text, self.text
        assert "full statespace search" in self.text.lower(), self.text


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: apt-get install spin gcc")
    return found


def search(folder: Path, options: Mapping[str, str], *flags: str, optimize: str = "-O0") -> Search:
    """Search one configuration; pan, its sources and its trail stay in `folder`.

    Only a long search repays the time that the compiler takes to optimize it.
    """
    spin, gcc = tool("spin"), tool("gcc")
    started = time.monotonic()
    # spin hands these to a shell.
    defines = [f"-D{name}={shlex.quote(value)}" for name, value in options.items()]
    compile_pan = [gcc, optimize, "-w", "-DSAFETY", "-DNOREDUCE", f"-DMEMLIM={MEGABYTES}"]
    done = None
    for command in (
        [spin, "-a", *defines, str(MODEL)],
        [*compile_pan, "-o", "pan", "pan.c"],
        ["./pan", "-m100000", "-w20", *flags],
    ):
        done = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}"
    assert done is not None
    return Search(text=done.stdout, seconds=time.monotonic() - started)


def name_of(options: Mapping[str, str]) -> str:
    trouble = options.get("TROUBLE", "NOTHING").lower()
    return " ".join(
        [
            options["MODE"].lower(),
            f"ranks={options.get('RANKS', '3')}",
            f"plans={options['PLANS'].lower()}",
            *([] if trouble == "nothing" else [trouble]),
        ]
    )


@pytest.mark.parametrize(
    "options", sampled(CORRECT, lambda o: o == PULL | CYCLE | CRASH), ids=name_of
)
def test_protocol_holds(
    options: Mapping[str, str], tmp_path: Path, say: Callable[[str], None]
) -> None:
    long = options["PLANS"] == "WIDE" and options["TROUBLE"] == "CRASH"
    result = search(tmp_path, options, optimize="-O1" if long else "-O0")
    result.assert_complete()
    assert result.errors == 0, f"{result.violated}\n{result.text}"
    say(f"model {name_of(options)}: {result.states} states, no error")


@pytest.mark.parametrize(
    "mutant, options, expected",
    sampled(MUTANTS, lambda m: m[0] in ("NO_OPEN", "NO_TIMEOUT")),
    ids=[f"{mutant.lower()}-{options['MODE'].lower()}" for mutant, options, _ in MUTANTS],
)
def test_model_without_a_rule_fails(
    mutant: str,
    options: Mapping[str, str],
    expected: str,
    tmp_path: Path,
    say: Callable[[str], None],
) -> None:
    # Past the first error too: one broken rule often breaks several properties.
    result = search(tmp_path, {**options, "MUTANT": mutant}, "-c20000")
    outcome = f"caught, {', '.join(result.violated)}" if result.violated else "survived"
    say(f"model mutant {mutant} {name_of(options)}: {outcome}")
    assert expected in result.violated, result.text


@pytest.mark.parametrize("name", sampled(REACHED, lambda name: name.endswith("all others fail")))
def test_model_reaches(name: str, tmp_path: Path) -> None:
    options, state = REACHED[name]
    result = search(tmp_path, {**options, "PROBE": state})
    assert result.violated == ["0"], result.text


def test_the_model_names_its_tests() -> None:
    named = re.findall(r"tests/[\w/]+\.py", MODEL.read_text())
    assert named == [Path(__file__).relative_to(MODEL.parents[2]).as_posix()]
