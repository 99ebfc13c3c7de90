"""Figures in the documents are those of committed result files."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from ultraep_comm.bench.measure import times_of
from ultraep_comm.model import MACHINES

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import doc_blocks  # noqa: E402
import update_docs  # noqa: E402

RESULTS = ROOT / "bench" / "results"
DOCUMENTS = [path.relative_to(ROOT).as_posix() for path in update_docs.documents(ROOT)]
_FIGURE = re.compile(r"\d[\d.,]*(?:,? (?:to|and|or) \d[\d.]*)*(?: (?:us|ms|GB/s|times)\b|%)")
_BLOCK = re.compile(r"^```(\w*)\n.*?^```\n|(?:^\|[^\n]*\n)+", re.DOTALL | re.MULTILINE)
_SHOWN = re.compile(r"(?<![\w.])\d+\.\d+(?:e[+-]\d+)?(?![\w.])|\d (?:us|ms|GB/s)\b|\d%")
_SOURCE = re.compile(r"<!-- (?:from |drawn by |not measured: |printed by ([^\n]+))[^\n]*-->")
_CODE = re.compile(r"^```.*?^```\n|^\|[^\n]*\n|`[^`]*`", re.DOTALL | re.MULTILINE)


def test_documents_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    status = update_docs.main(["--check"])
    shown = capsys.readouterr()
    assert status == 0, f"run tools/update_docs.py: {shown.out}{shown.err}"


# What was measured before this was a rule, and is to be measured again: nothing may be added.
UNCLEAN = {"h100/costs.json", "h100/critical_path_one_worker.json", "h100/reduce_16M.json"}


def test_results_are_of_clean_commits() -> None:
    commits = {
        path.relative_to(RESULTS).as_posix(): json.loads(path.read_text()).get("commit")
        for path in RESULTS.rglob("*.json")
    }
    unclean = {name for name, c in commits.items() if not re.fullmatch("[0-9a-f]{12}", str(c))}
    assert unclean == UNCLEAN


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_and_printouts_have_a_source(name: str) -> None:
    """The line above one with figures says in a comment where it is from. Code is not printed."""
    text = (ROOT / name).read_text()
    for block in _BLOCK.finditer(text):
        above = text[: block.start()].rpartition("\n\n")[2].strip()
        source = _SOURCE.fullmatch(above)
        shown = "" if block[1] else re.sub("`[^`\n]+`", "", block[0])
        assert source or not _SHOWN.search(shown), block[0]
        program = source and re.match(r"[\w/]+\.py", source[1] or "")
        assert not program or (ROOT / program[0]).exists(), above


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_figure_has_a_source(name: str) -> None:
    """A paragraph with a figure and its unit says in a comment where it is from, or is worked."""
    for paragraph in re.split(r"\n\s*\n", _CODE.sub("", (ROOT / name).read_text())):
        said = "<!--" in paragraph or "Worked:" in paragraph
        assert said or not _FIGURE.search(" ".join(paragraph.split())), paragraph


def test_machines_are_those_of_the_model() -> None:
    text = (ROOT / "docs" / "model.md").read_text()
    for name, machine in MACHINES.items():
        far = "none"
        if machine.cross_gbps:
            far = f"{machine.cross_gbps:g} GB/s, {machine.cross_us:g} us more"
        assert (
            f"| `{name}` | {machine.egress_gbps:g} GB/s | {machine.hop_us:g} us |"
            f" {machine.domain_size} ranks | {far} |"
        ) in text


def test_costs_of_a_byte_are_those_of_the_machine_beside_them() -> None:
    text = "\n".join((ROOT / name).read_text() for name in DOCUMENTS)
    nvl72 = re.findall(r"expert_byte=1 / (\d+e9).*NVL72", text)
    eight = re.findall(r"`1 / (\d+e9)` for 8 H100", text)
    served = re.findall(r'--tensor-parallel-size 8[^`]*"expert_byte": ([\d.e-]+)', text)
    assert nvl72
    assert eight
    assert served
    for name, rates in (
        ("nvl72", map(float, nvl72)),
        ("hgx8", [*map(float, eight), *(1 / float(cost) for cost in served)]),
    ):
        for rate in rates:
            assert rate == pytest.approx(MACHINES[name].egress_gbps * 1e9, rel=0.01), name


def test_every_folder_is_described() -> None:
    """The tables of the architecture page have the folders of the drawings, and true places."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w/]+)` \| [^`]", text, re.MULTILINE)
    python = [name for layer in doc_blocks.layers() for name in layer]
    assert sorted(rows) == sorted([*python, *doc_blocks.BELOW])
    functions = re.findall(r"^\| (`.*?) \| `((?:src|bindings)/.*)` \|$", text, re.MULTILINE)
    assert len(functions) > 10
    for names, file in functions:
        for name in re.findall(r"`(?:\w+::)?(\w+)`", names):
            assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), (name, file)


def test_result_files_are_listed() -> None:
    text = (ROOT / "bench" / "results" / "README.md").read_text()
    files = {path.name for path in RESULTS.glob("*.json")}
    assert set(re.findall(r"^\| `(\w+\.json)`", text, re.MULTILINE)) == files


def test_worked_numbers_are_worked_right() -> None:
    """What stands on both sides of an equals sign is equal, to the last digit that is shown."""
    text = " ".join((ROOT / "bench" / "METRICS.md").read_text().replace("10^6", "1e6").split())
    number = r"[\d.]+(?:e\d+)?"
    factor = rf"(?:{number}|\({number} \+ {number}\))"
    equation = rf"({factor}(?: (?:B|us|GB/s))?(?: [*/] {factor}(?: (?:B|us|GB/s))?)+) = ({number})"
    found = re.findall(equation, text)
    assert len(found) >= 8
    for left, right in found:
        units = re.sub(" (?:B|us|GB/s)", "", left)
        value = eval(units)  # digits, brackets, * and /, as the pattern says
        value /= 1e3 if " B" in left else 1  # B / us in GB/s, and B / (GB/s) in us
        places = len(right.partition(".")[2])
        assert value == pytest.approx(float(right), abs=0.51 * 10**-places, rel=2e-3), left


def test_the_time_of_an_iteration_is_as_worked() -> None:
    text = " ".join((ROOT / "bench" / "METRICS.md").read_text().split())
    span = r"from (\d+) to (\d+) us"
    found = re.search(
        rf"\*\*Time of an iteration\*\*: the last rank's end minus the first rank's start\."
        rf".*? with one rank in the call {span} and another {span} it is (\d+) us,"
        r" and across machines (\d+) us\.",
        text,
    )
    assert found is not None
    *spans, together, across = (float(x) for x in found.groups())
    for one_clock, expected in ((True, together), (False, across)):
        (times,) = times_of(np.reshape(spans, (2, 2, 1, 1)), one_clock=one_clock)
        assert times.iterations.tolist() == [expected]


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path in [*update_docs.documents(ROOT), *RESULTS.rglob("*.json")]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return tmp_path


def change(tree: Path, name: str, old: str, new: str) -> None:
    path = tree / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def test_a_new_result_refreshes_blocks_and_sentences(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tree / "bench" / "results"
    document = json.loads((results / "replicate_4ranks_16M.json").read_text())
    document["header"][0] = "another run"
    (results / "replicate_4ranks_16M.json").write_text(json.dumps(document))
    document = json.loads((results / "empty_plan_4ranks.json").read_text())
    document["records"][0]["time_us"]["p50"] = 98765.4
    (results / "empty_plan_4ranks.json").write_text(json.dumps(document))
    before = {name: (tree / name).read_text() for name in DOCUMENTS}
    assert update_docs.main(["--check", "--root", str(tree)]) == 1
    assert "+another run" in capsys.readouterr().out
    assert {name: (tree / name).read_text() for name in DOCUMENTS} == before
    assert update_docs.main(["--root", str(tree)]) == 0
    changed = [name for name in DOCUMENTS if (tree / name).read_text() != before[name]]
    assert changed == ["README.md", "docs/first-run.md"]
    assert "98765<!--=" in (tree / "README.md").read_text()
    assert "another run" in (tree / "docs" / "first-run.md").read_text()
    assert update_docs.main(["--check", "--root", str(tree)]) == 0


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("docs/first-run.md", "json: shown -->\n```\n", "json: shown -->\n\n", "no code block"),
        ("docs/first-run.md", "json: shown -->", "json: drawn -->", "drawn"),
        ("README.md", "<!--= empty_plan_4ranks:", "<!--= none:", "none.json"),
        ("README.md", ":records.0.time_us", ":records.9.time_us", "out of range"),
    ],
)
def test_documents_that_cannot_be_updated(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, old: str, new: str, text: str
) -> None:
    change(tree, name, old, new)
    assert update_docs.main(["--root", str(tree)]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert name in error
