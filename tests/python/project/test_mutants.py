"""Programs with one broken rule each: all of them have to be caught."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from cpp_build import ROOT, CppBuild
from tiers import sampled


def families(folder: str) -> dict[str, str]:
    """Return the heading of each mutant of a mutants.cmake."""
    text = (ROOT / f"tests/{folder}/mutants.cmake").read_text()
    heading, found = "", {}
    for line in text.splitlines():
        if section := re.match(r"# -{4} (.*?) -+$", line):
            heading = f"{folder}: {section[1]}"
        elif heading and (entry := re.match(r"\w*mutant\((\w+) ", line)):
            found[entry[1]] = heading
    return found


SIMULATED = families("simulation")
SANITIZED: dict[str, str] = {}
for folder in ("core", "host", "c10d", "cuda", "device"):
    SANITIZED |= families(folder)

# One of each family that the simulation catches.
SAMPLE = re.findall(
    r"\w+",
    """
    publish_when_reusable relaxed_publish missing_open epoch_reused ring_overrun done_not_awaited
    no_abort sum_read_early parts_in_another_order cleared_early reducer_drain_ignores_stores
    stale_residents
""",
)


def test_no_mutant_is_lost() -> None:
    assert len(SIMULATED) >= 98
    assert len(SANITIZED) >= 293


def test_the_sample_has_one_of_each_family() -> None:
    assert sorted(SIMULATED[name] for name in SAMPLE) == sorted(set(SIMULATED.values()))


MUTANTS_OF = {"cpu": "mutants", "tsan": "mutants-tsan"}  # test presets


class Runs:
    """The mutants that this session's tests ask for, built and run side by side."""

    def __init__(self, cpp: CppBuild, items: list[pytest.Item]) -> None:
        self._cpp = cpp
        self._items = items
        self._texts: dict[str, str] = {}

    def line(self, request: pytest.FixtureRequest, preset: str, *targets: str) -> str:
        """Return the line that says what became of the test's mutant, and have it printed."""
        function, name = request.node.originalname, request.node.callspec.params["name"]
        if function not in self._texts:
            self._cpp.build(preset, *targets)
            tests = [item for item in self._items if isinstance(item, pytest.Function)]
            names = [t.callspec.params["name"] for t in tests if t.originalname == function]
            self._texts[function] = self._cpp.ctest(
                MUTANTS_OF[preset],
                *("--parallel", self._cpp.num_jobs, "--verbose"),
                *("--tests-regex", f"^mutant_({'|'.join(names)})$"),
                check=False,  # each test looks for its own line
            )
        text = self._texts[function]
        found = re.search(rf"mutant {name}: (?:caught|survived).*", text)
        number = re.search(rf"Start +(\d+): mutant_{name}$", text, re.M)
        own = re.findall(rf"^{number[1]}: .*", text, re.M) if number else [text]
        assert found, "\n".join(own)
        say: Callable[[str], None] = request.getfixturevalue("say")
        say(found.group())
        return found.group()


@pytest.fixture(scope="module")
def runs(cpp: CppBuild, request: pytest.FixtureRequest) -> Runs:
    return Runs(cpp, request.session.items)


@pytest.mark.builds("cpu", "mutants")
@pytest.mark.timeout(1800)  # the first builds and runs all
@pytest.mark.parametrize("name", sampled(SIMULATED, SAMPLE.__contains__))
def test_mutant_is_caught(runs: Runs, name: str, request: pytest.FixtureRequest) -> None:
    line = runs.line(request, "cpu", "mutants")
    caught = re.match(rf"mutant {name}: caught: (.*?); (\d+) schedules; \"(.*?)\"", line)
    assert caught, line
    examples = {
        "blocked_hub_item_first": "counter-example",
        "blocked_home_item_first": "counter-example of sums",
    }
    if name in examples:
        assert caught[3] == examples[name]
        assert caught[1] == "deadlock or lost wake-up"


@pytest.mark.exhaustive
@pytest.mark.builds("tsan", "mutants")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SANITIZED)
def test_sanitized_mutant_is_caught(runs: Runs, name: str, request: pytest.FixtureRequest) -> None:
    assert "caught (by " in runs.line(request, "tsan", "mutants")


# Else what is caught above could be something that is wrong without any mutant.
# Under ThreadSanitizer, test_cpp.py has the programs without a mutant.
@pytest.mark.exhaustive
@pytest.mark.builds("cpu", "mutants")
@pytest.mark.timeout(1800)
def test_nothing_is_caught_where_no_rule_is_broken(cpp: CppBuild) -> None:
    cpp.build("cpu", "mutants")
    text = cpp.ctest("mutants", "--tests-regex", "^unmutated_")
    assert "tests passed, 0 tests failed out of 1" in text
