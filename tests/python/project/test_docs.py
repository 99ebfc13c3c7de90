"""What the documents show works, and what they list exists."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import forkserver, prepare_forked
from tiers import sampled

import ultraep_comm as uec
from studies.cli import main as studies
from ultraep_comm import env
from ultraep_comm.bench.cli import main as bench
from ultraep_comm.viz.cli import main as viz

ROOT = Path(__file__).resolve().parents[3]
USAGE = (ROOT / "docs" / "usage.md").read_text()
README = (ROOT / "README.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [*sorted((ROOT / "bench").glob("*.md")), ROOT / "bench" / "results" / "README.md"]


def run_as_rank(command: list[str], folder: Path, rank: int, variables: dict[str, str]) -> None:
    """Run a program in this process, as one that ``torchrun`` has started."""
    prepare_forked()
    os.chdir(folder)
    with Path(f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def run_ranks(command: list[str], ranks: int, folder: Path) -> str:
    """Run a program on some ranks, in a folder; return what they printed, rank by rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    variables |= {"WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    started = [
        forkserver().Process(
            target=run_as_rank, args=(command, folder, rank, variables), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(240)
    printed = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
    assert [process.exitcode for process in started] == [0] * ranks, printed
    return printed


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("page", "name", "ranks"),
    [
        ("usage", "health", 2),
        ("usage", "instances", 2),
    ],
)
def test_programs_run(tmp_path: Path, page: str, name: str, ranks: int) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    shown = re.search(rf"```python\n(# {name}\.py: torchrun .*?)```", text, re.DOTALL)
    assert shown is not None
    script = tmp_path / f"{name}.py"
    script.write_text(shown[1])
    run_ranks([str(script)], ranks, tmp_path)


@pytest.mark.parametrize("launcher", sampled(["forked", "torchrun"], lambda name: name == "forked"))
def test_the_page_of_one_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: str,
) -> None:
    """Train, count, plan and decide by the page's own commands; they print lines like its own."""
    page = (ROOT / "docs" / "one-node.md").read_text()
    command = re.search(r"^\.venv/bin/torchrun (.* examples/.*)$", page, re.MULTILINE)
    planning = re.search(
        r"^\.venv/bin/python -m ultraep_comm\.bench (plan .*)$", page, re.MULTILINE
    )
    program = re.search(r"```python\n(# pays\.py: .*?)```", page, re.DOTALL)
    assert command is not None
    assert planning is not None
    assert program is not None
    *options, ranks, script, counts = shlex.split(command[1])
    script = str(ROOT / script)
    if launcher == "forked":
        printed = run_ranks([script, counts], int(ranks), tmp_path)
    else:
        run = [sys.executable, "-m", "torch.distributed.run", *options, ranks, script, counts]
        done = subprocess.run(
            run, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    lines = [line for line in printed.splitlines() if "without replicas" in line]
    plain, replicated, before, after = map(float, re.findall(r"\d+\.\d+", "".join(lines)))
    assert plain == pytest.approx(replicated, abs=1e-3)
    assert plain < 2.5  # of ln 256 = 5.5: it learns
    assert before > 1.2
    assert after <= 1.011

    monkeypatch.chdir(tmp_path)
    assert bench(shlex.split(planning[1])) == 0
    assert f"  {ranks}/16/1  trace " in capsys.readouterr().out
    (tmp_path / "pays.py").write_text(program[1])
    monkeypatch.setattr(sys, "argv", ["pays.py", counts])
    runpy.run_path("pays.py", run_name="__main__")
    shown = re.sub(r"\s+|[\d.]+", " ", page)
    for line in [*lines, capsys.readouterr().out]:
        assert re.sub(r"\s+|[\d.]+", " ", line.strip()) in shown, line


def test_ids_of_experts_that_ranks_have_unevenly() -> None:
    (shown,) = re.findall(
        r"```python\n([^`]*uec\.testing\.new_loopback_groups.*?)```", USAGE, re.DOTALL
    )
    exec(shown, {"torch": torch, "uec": uec})


def anchors(page: Path) -> list[str]:
    """Return what GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```\n", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            found = page.parent / path if path else page
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), target
    folders = "docs|bench|tests|tools|examples|src|bindings|ultraep_comm"
    for name in re.findall(rf"`((?:{folders})/[\w/.]+)", text):
        assert (ROOT / name).exists(), name


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "README.md" or f"]({name})" in index, name


def test_pictures_are_made_by_the_commands_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = (
        r"^(?:\.venv/bin/)?python (-m ultraep_comm\.viz|bench/studies) (.*) --out"
        r" (docs/pictures/.*)$"
    )
    picture = r"!\[[^]]*\]\(((?:docs/)?pictures/[^)]+)\)"
    commands, shown = set(), set()
    for page in PAGES:
        commands |= set(re.findall(command, page.read_text(), re.MULTILINE))
        shown |= {page.parent / name for name in re.findall(picture, page.read_text())}
    for program, arguments, name in commands:
        again = tmp_path / Path(name).name
        given = [str(ROOT / a) if a.startswith("bench/") else a for a in arguments.split()]
        draw = studies if program == "bench/studies" else viz
        assert draw([*given, "--out", str(again)]) == 0
        committed = (ROOT / name).read_bytes()
        assert len(committed) < 200_000
        assert committed[:24] == again.read_bytes()[:24]  # a PNG of as many pixels
    made = {ROOT / name for *_, name in commands}
    assert made == shown == set((ROOT / "docs" / "pictures").iterdir())


def test_environment_variables_are_documented() -> None:
    assert env.__doc__ is not None
    for variable in re.findall(r"ULTRAEP_[A-Z_]+", inspect.getsource(env)):
        assert variable in env.__doc__
        assert variable in USAGE


def test_every_error_is_documented() -> None:
    for name, kind in vars(uec.errors).items():
        if inspect.isclass(kind) and issubclass(kind, uec.errors.UltraEPError):
            assert kind.__doc__
            own = name == kind.__name__ and name not in ("UltraEPError", "TransferError")
            assert not own or name in USAGE, name


def test_public_names_are_documented() -> None:
    for name in uec.__all__:
        assert name in USAGE + README, name


def test_new_group_of_the_docs_is_the_one_of_the_code() -> None:
    parameters = inspect.signature(uec.new_group).parameters
    shown = re.search(r"group = uec\.new_group\((.*?)\n\)", USAGE, re.DOTALL)
    assert shown is not None
    for name in re.findall(r"^    (\w+)=", shown[1], re.MULTILINE):
        assert name in parameters, name
