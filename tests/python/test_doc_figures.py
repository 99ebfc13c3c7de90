"""Figures in the documents are those of committed result files."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import doc_sentences  # noqa: E402
import update_docs  # noqa: E402
from doc_sentences import NO_RESULTS, SENTENCES, Sentence  # noqa: E402

DOCUMENTS = [path.relative_to(ROOT).as_posix() for path in update_docs.documents(ROOT)]
_FIGURE = re.compile(r"\d[\d.,]*(?:,? (?:to|and|or) \d[\d.]*)*(?: (?:us|ms|GB/s|times)\b|%)")
_GENERATED = re.compile(
    r"^<!-- (?:from|printed)[^\n]*-->\n(?:```\n.*?^```\n|(?:\|[^\n]*\n)+)", re.DOTALL | re.MULTILINE
)
_CODE = re.compile(r"^```.*?^```\n", re.DOTALL | re.MULTILINE)


def test_documents_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    status = update_docs.main(["--check"])
    shown = capsys.readouterr()
    assert status == 0, f"run tools/update_docs.py: {shown.out}{shown.err}"


def bare(name: str) -> str:
    """A document without code, without tables that are made, and without sentences that are."""
    text = _CODE.sub("", _GENERATED.sub("", (ROOT / name).read_text()))
    for sentence in SENTENCES.get(name, []):
        found = sentence.find(text)
        text = text[: found.start()] + text[found.end() :]
    return text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_figure_has_a_source(name: str) -> None:
    text = " ".join(bare(name).split())
    for words in NO_RESULTS.get(name, []):
        assert words in text, f"{words!r} is no longer in {name}: take it out of NO_RESULTS"
        text = text.replace(words, "")
    left = [text[max(0, m.start() - 60) : m.end() + 20] for m in _FIGURE.finditer(text)]
    assert not left, f"figures that no sentence of tools/doc_sentences.py makes: {left}"


def test_there_are_figures_of_all_kinds() -> None:
    assert set(SENTENCES) | set(NO_RESULTS) <= set(DOCUMENTS)
    markers = [
        kind
        for name in DOCUMENTS
        for _, kind in update_docs._MARKER.findall((ROOT / name).read_text())
    ]
    assert set(markers) == set(update_docs.BLOCKS)
    assert markers.count("shown") >= 4


def test_result_files_are_listed() -> None:
    text = (ROOT / "bench" / "results" / "README.md").read_text()
    text = text.replace("trace_{2,4,8}ranks", "trace_2ranks.json trace_4ranks.json trace_8ranks")
    for path in (ROOT / "bench" / "results").glob("*.json"):
        assert path.name in text, path.name


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


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path in [*update_docs.documents(ROOT), *(ROOT / "bench" / "results").glob("*.json")]:
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
    path = tree / "bench" / "results" / "replicate_4ranks_16M.json"
    document = json.loads(path.read_text())
    document["header"][0] = "another run"
    (record,) = (r for r in document["records"] if r["mode"] == "auto")
    record["time_us"]["p50"] = 98765.4
    path.write_text(json.dumps(document))
    before = {name: (tree / name).read_text() for name in DOCUMENTS}
    assert update_docs.main(["--check", "--root", str(tree)]) == 1
    assert "+# another run" not in capsys.readouterr().out  # the header's lines are as recorded
    assert {name: (tree / name).read_text() for name in DOCUMENTS} == before
    assert update_docs.main(["--root", str(tree)]) == 0
    changed = [name for name in DOCUMENTS if (tree / name).read_text() != before[name]]
    assert changed == ["README.md", "docs/first-run.md", "bench/METRICS.md"]
    for name in changed:
        assert "98765.4" in (tree / name).read_text()
        assert "98765.4" not in before[name]
    assert "another run" in (tree / "README.md").read_text()
    assert update_docs.main(["--check", "--root", str(tree)]) == 0


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("README.md", " p2p  ", " p2p. "),
        ("README.md", "A call with nothing to move takes ", "A call with nothing to move takes 1"),
        ("docs/model.md", "| 3.03 | 51 | 6 | 317 us | ", "| 3.03 | 51 | 6 | 317 us | 1"),
        ("docs/model.md", "| 72/288/2 | ", "| 72/288/2 | 1"),
        ("docs/model.md", "| tiles of 64 KiB | ", "| tiles of 64 KiB | 1"),
        ("docs/first-run.md", "outputs differ at most by", "outputs differ at most by 1"),
        ("docs/problem.md", "rank 0  2.9", "rank 0  3.9"),
    ],
)
def test_what_was_changed_by_hand_is_found_and_put_right(
    tree: Path, name: str, old: str, new: str
) -> None:
    was = (tree / name).read_text()
    change(tree, name, old, new)
    assert update_docs.main(["--check", "--root", str(tree)]) == 1
    assert update_docs.main(["--root", str(tree)]) == 0
    assert (tree / name).read_text() == was


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("README.md", "A call with nothing to move takes", "An empty call takes", "0 times"),
        ("README.md", "json: shown -->\n```\n", "json: shown -->\n\n", "no code block"),
        ("README.md", "json: shown -->", "json: drawn -->", "expected one of shown"),
        ("README.md", "/replicate_4ranks_16M.json: sh", "/none.json: sh", "none.json"),
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


def test_sentences_across_lines() -> None:
    sentence = Sentence("takes {} to {} us, or {}%", lambda results: [])
    assert sentence.put("It takes 1.5 to\n  12,000 us,\nor 3%.", ["7", "8.25", "9"]) == (
        "It takes 7 to\n  8.25 us,\nor 9%."
    )
    with pytest.raises(ValueError, match="2 figures for"):
        sentence.put("takes 1 to 2 us, or 3%", ["1", "2"])
    with pytest.raises(ValueError, match="2 times"):
        sentence.find("takes 1 to 2 us, or 3%; takes 1 to 2 us, or 3%")
    assert doc_sentences._range([3, 1, 2], ".1f") == ["1.0", "3.0"]
