"""What the documents show works, and what they list exists."""

from __future__ import annotations

import inspect
import os
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import forkserver, prepare_forked
from tiers import sampled

import ultraep_comm as uec
from studies.cli import main as studies
from ultraep_comm import env
from ultraep_comm.viz.cli import main as viz

ROOT = Path(__file__).resolve().parents[3]
USAGE = (ROOT / "docs" / "usage.md").read_text()
README = (ROOT / "README.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [*sorted((ROOT / "bench").glob("*.md")), ROOT / "bench" / "results" / "README.md"]


def run_as_rank(script: Path, rank: int, variables: dict[str, str]) -> None:
    """Run a program in this process, as one that ``torchrun`` has started."""
    prepare_forked()
    with script.with_suffix(f".{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize(
    ("page", "name", "ranks"),
    sampled(
        [
            ("usage", "train", 2),
            ("usage", "health", 2),
            ("usage", "instances", 2),
        ],
        lambda program: "train" in program,
    ),
)
def test_programs_run(tmp_path: Path, page: str, name: str, ranks: int) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    shown = re.search(rf"```python\n(# {name}\.py: torchrun .*?)```", text, re.DOTALL)
    assert shown is not None
    script = tmp_path / f"{name}.py"
    script.write_text(shown[1])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    variables |= {"WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    started = [
        forkserver().Process(target=run_as_rank, args=(script, rank, variables), daemon=True)
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(240)
    printed = [path.read_text() for path in sorted(tmp_path.glob("*.log"))]
    assert [process.exitcode for process in started] == [0] * ranks, "\n".join(printed)


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
