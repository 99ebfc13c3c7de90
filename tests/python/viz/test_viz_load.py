"""Pictures of loads: the numbers that they show are those of the plans."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import close_all, plan_alone, start_all
from recorded_groups import make_recorder

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.bench.traces import open_trace
from ultraep_comm.plan.topology import Topology
from ultraep_comm.recording.file import Recording
from ultraep_comm.viz.cli import main
from ultraep_comm.viz.loads import (
    LoadSeries,
    draw_load,
    imbalance,
    make_page,
    plan_trace,
    series_of,
)

T, L, G, E, S = 3, 2, 4, 8, 2


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    counts = np.random.default_rng(0).integers(0, 50, (T, L, G, E)).astype(np.int32)
    counts[1, 0, :, 5] *= 20
    np.savez(tmp_path / "trace.npz", counts_src=counts)
    return tmp_path / "trace.npz"


@pytest.fixture
def series(trace: Path) -> LoadSeries:
    return plan_trace(
        open_trace(trace),
        source="trace.npz",
        num_ranks=G,
        slots_per_rank=S,
        tokens_per_rank=1,
        target=1.01,
    )


def without_plan(series: LoadSeries, step: int, layer: int) -> LoadSeries:
    known = series.known.copy()
    known[step, layer] = False
    return replace(series, known=known)


def test_series_of_a_trace_are_its_plans(series: LoadSeries, trace: Path) -> None:
    counts = np.load(trace)["counts_src"]
    assert series.known.shape == (T, L)
    assert np.array_equal(series.expert_load, counts.sum(axis=2))
    assert np.array_equal(series.before, counts.sum(axis=2).reshape(T, L, G, -1).sum(axis=3))
    assert np.array_equal(series.before.sum(axis=2), series.after.sum(axis=2))
    for t in range(T):
        for layer in range(L):
            plan = plan_alone(torch.from_numpy(counts[t, layer]), slots_per_rank=S)
            assert np.array_equal(series.slot_expert[t, layer], plan.slot_expert.numpy())
            assert imbalance(series.after, series.known)[t, layer] == pytest.approx(plan.imbalance)
    assert imbalance(series.before, series.known)[1, 0] > 2


# ---- recordings -----------------------------------------------------------------------------


def record(calls: list[tuple[str, uec.Plan | None, int]], **options: Any) -> Recording:
    """A recording of such calls: operation, plan, tag."""
    topology = Topology.make(num_ranks=G, num_experts=E, slots_per_rank=S)
    recorder = make_recorder(0, topology, loads=False, **options)
    for i, (operation, plan, tag) in enumerate(calls):
        recorder.enter()
        recorder.add(i + 1, operation, "push", plan, tag, 1 << 20)
    return recorder.recording()


def plan_of(seed: int) -> uec.Plan:
    generator = torch.Generator().manual_seed(seed)
    load = torch.randint(0, 100, (G, E), generator=generator, dtype=torch.int32)
    return plan_alone(load, slots_per_rank=S)


def tag(layer: int, microbatch: int) -> int:
    return (layer + 1) << 32 | microbatch


def holds(series: LoadSeries, t: int, layer: int, plan: uec.Plan) -> bool:
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    return (
        np.array_equal(series.slot_expert[t, layer], plan.slot_expert.numpy())
        and np.array_equal(series.slot_quota[t, layer], plan.slot_quota.numpy())
        and np.array_equal(series.home_quota[t, layer], plan.home_quota.numpy())
    )


def test_series_of_saved_plans() -> None:
    plans = [plan_of(seed) for seed in range(4)]
    found = series_of(
        [
            record(
                [
                    ("replicate_experts", plans[0], tag(3, 7)),
                    ("replicate_experts", plans[1], tag(5, 7)),
                    ("replicate_experts", plans[2], tag(3, 9)),
                    ("replicate_experts", plans[3], tag(3, 7)),  # the backward pass: not another
                    ("reduce_expert_grads", plans[3], tag(5, 9)),
                    ("replicate_experts", None, tag(5, 9)),  # a plan on a device
                ]
            )
        ],
        source="run",
    )
    assert found.steps.tolist() == [7, 9]
    assert found.layers.tolist() == [3, 5]
    assert found.known.tolist() == [[True, True], [True, False]]
    assert holds(found, 0, 0, plans[0])
    assert holds(found, 0, 1, plans[1])
    assert holds(found, 1, 0, plans[2])
    assert not found.before[1, 1].any()


def test_plans_that_were_not_saved_take_turns() -> None:
    plans = [plan_of(seed) for seed in range(5)]
    recording = record([("replicate_experts", plan, 0) for plan in plans])
    found = series_of([recording], source="run", num_layers=2)
    assert found.known.tolist() == [[True, True], [True, True], [True, False]]
    assert all(holds(found, *divmod(i, 2), plan) for i, plan in enumerate(plans))
    assert series_of([recording], source="run").known.shape == (5, 1)


def test_what_one_rank_lost_another_has() -> None:
    plans = [plan_of(seed) for seed in range(3)]
    calls = [("replicate_experts", plan, 0) for plan in plans]
    short = record(calls, capacity=1)
    assert series_of([short], source="run").known.shape == (1, 1)
    found = series_of([short, replace(record(calls), rank=1)], source="run")
    assert all(holds(found, i, 0, plan) for i, plan in enumerate(plans))


def test_recordings_without_quotas() -> None:
    bare = uec.Plan.from_slots(torch.full((G, S), -1), num_experts=E)
    with pytest.raises(errors.InvalidArgumentError, match="no replicate_experts call with quotas"):
        series_of([record([("replicate_experts", bare, 0)])], source="run")


# ---- PNG ------------------------------------------------------------------------------------


def test_the_picture_shows_every_load(series: LoadSeries) -> None:
    pytest.importorskip("matplotlib")
    series = without_plan(series, 2, 1)
    known = series.known
    figure = draw_load(series)
    lines, before, after, _ = figure.axes
    for axis, loads in ((before, series.before), (after, series.after)):
        image = np.asarray(axis.images[0].get_array().filled(np.nan))
        assert image.shape == (G, T * L)
        shares = loads / loads.mean(axis=2, keepdims=True)
        expected = shares.swapaxes(0, 1).reshape(T * L, G).T  # by layer: there are more steps
        assert np.allclose(image[:, :-1], expected[:, :-1])
        assert np.isnan(image[:, -1]).all()
    for line, loads in zip(lines.lines, (series.before, series.after), strict=False):
        drawn = np.asarray(line.get_ydata())
        shown = drawn[~np.isnan(drawn)]
        assert np.allclose(shown, imbalance(loads, known).T.ravel()[:-1])
    texts = [text.get_text() for text in lines.get_legend().get_texts()]
    worst = np.nanmax(imbalance(series.before, known))
    assert f"worst {worst:.3f}" in texts[0]
    (subtitle,) = [text for text in figure.texts if text.get_gid() == "subtitle"]
    assert "1 of these plans not recorded" in subtitle.get_text()
    low, high = lines.get_ylim()
    assert low < 1
    assert high > worst


# ---- HTML -----------------------------------------------------------------------------------


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_every_number(series: LoadSeries) -> None:
    series = without_plan(series, 0, 1)
    known = series.known
    data = data_of(make_page(series))
    assert (len(data["steps"]), len(data["layers"]), data["num_ranks"]) == (T, L, G)
    assert data["home"] == series.home.tolist()
    for t in range(T):
        for layer in range(L):
            cell = data["cells"][t][layer]
            if not known[t, layer]:
                assert cell is None
                continue
            assert cell["before"] == series.before[t, layer].tolist()
            assert cell["after"] == series.after[t, layer].tolist()
            assert sum(cell["before"]) == sum(cell["after"]) == series.expert_load[t, layer].sum()
            for rank in range(G):  # what the tables of a rank add up to
                own = sum(
                    q for q, h in zip(cell["home_quota"], data["home"], strict=True) if h == rank
                )
                assert own + sum(cell["slot_quota"][rank]) == cell["after"][rank]


def test_the_page_needs_no_network(series: LoadSeries) -> None:
    page = make_page(replace(series, source="</script><script>alert(1)//<!--"))
    assert page.count("</script>") == 2  # its own
    assert "alert(1)" in data_of(page)["source"]
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, never fetched
    assert not re.search(r"\bsrc=|@import|url\(|fetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page  # and a browser would not let it
    assert 'lang="en"' in page
    assert "<title>Load per rank" in page


@pytest.fixture
def show(tmp_path: Path) -> Callable[[str, str], str]:
    """Return a page's elements after its scripts have run in a browser without a network."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser to open the page in: none of {', '.join(names)}")

    def run(page: str, where: str) -> str:
        path = tmp_path / "page.html"
        path.write_text(page)
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += [f"--user-data-dir={tmp_path / 'profile'}"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"{path.as_uri()}#{where}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def text_of(dom: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>(.*?)</(h1|h2|h3|p|dl|table|svg)>', dom, re.DOTALL)
    assert found is not None, name
    return " ".join(re.sub(r"<[^>]+>", " ", found[1]).split())


def test_the_page_in_a_browser(series: LoadSeries, show: Callable[[str, str], str]) -> None:
    t, layer, rank, expert = 1, 0, 2, 5
    dom = show(make_page(series), f"step={t}&layer={layer}&rank={rank}&expert={expert}")
    known = series.known
    before, after = imbalance(series.before, known), imbalance(series.after, known)
    tiles = text_of(dom, "tiles")
    assert f"{before.max():.3f} \u2192 {after.max():.3f}" in tiles
    assert text_of(dom, "ranks-title") == "Step 1, layer 0: tokens of every rank"
    assert f"{before[t, layer]:.3f} before, {after[t, layer]:.3f} after" in text_of(
        dom, "ranks-text"
    )
    for r in range(G):  # the hover texts, which screen readers read
        one, two = series.before[t, layer, r], series.after[t, layer, r]
        assert re.search(
            rf"rank {r}: {one:,} tokens before \([\d.]+ of the mean\), {two:,} after", dom
        )
    assert len(re.findall(r'<rect class="after"', dom)) == G
    assert f"{series.after[t, layer, rank]:,} after" in text_of(dom, "experts-text")
    assert text_of(dom, "expert-text").startswith(
        f"{series.expert_load[t, layer, expert]:,} tokens"
    )
    replicas = np.argwhere(series.slot_expert[t, layer] == expert)
    assert len(replicas) > 0
    table = text_of(dom, "instances")
    assert f"home {series.home_quota[t, layer, expert]:,} " in table
    for r, slot in replicas:
        quota = series.slot_quota[t, layer, r, slot]
        assert f"rank {r} replica, slot {slot} {quota:,} " in table
    history = re.findall(r'data-key="history-(\d)"[^>]*aria-label="step \d: ([\d,]+) tokens"', dom)
    assert [int(n.replace(",", "")) for _, n in history] == series.expert_load[
        :, layer, expert
    ].tolist()


ACTS = """<script>
const grid = document.getElementById("grid-after"), box = grid.getBoundingClientRect();
const at = {clientX: box.left + LEFT + 2.5 * cellW, clientY: box.top + TOP + 1.5 * cellH};
grid.dispatchEvent(new MouseEvent("mousemove", at));  // step 2, layer 1
fetch("data:,x").catch(() => { document.body.dataset.fetched = "nothing"; });
const hover = document.getElementById("tip").textContent;
grid.dispatchEvent(new MouseEvent("click", at));
grid.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft"}));
const bar = (rank) => document.querySelector(`[data-key="rank-${rank}"]`);
bar(1).dispatchEvent(new MouseEvent("click"));
bar(3).focus();
bar(3).dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
const focused = document.activeElement.dataset.key;
document.querySelector("#experts button").click();
document.body.dataset.hover = hover;
document.body.dataset.focused = focused;
</script></body>"""


def test_the_page_answers_pointer_and_keys(
    series: LoadSeries, show: Callable[[str, str], str]
) -> None:
    page = make_page(series).replace("</body>", ACTS)
    dom = show(page, "step=0&layer=0&rank=0&expert=0")
    before, after = (
        imbalance(loads, series.known)[2, 1] for loads in (series.before, series.after)
    )
    expected = f"step 2, layer 1\nimbalance {before:.3f} before, {after:.3f} after"
    assert f'data-hover="{expected}"' in dom
    assert 'data-fetched="nothing"' in dom
    assert text_of(dom, "ranks-title") == "Step 1, layer 1: tokens of every rank"
    assert text_of(dom, "experts-title").startswith("Rank 3: ")
    assert 'data-focused="rank-3"' in dom  # drawn anew, and still where the keys go
    quotas = [(series.home_quota[1, 1, e], -e) for e in np.flatnonzero(series.home == 3)]
    for slot, expert in enumerate(series.slot_expert[1, 1, 3]):
        if expert >= 0:
            quotas.append((series.slot_quota[1, 1, 3, slot], -expert))
    assert text_of(dom, "expert-title").startswith(f"Expert {-max(quotas)[1]}: ")


def test_a_page_of_many_steps_shows_each_of_them(
    series: LoadSeries, show: Callable[[str, str], str]
) -> None:
    steps = 7000
    arrays = {
        name: getattr(series, name) for name in ("known", "slot_expert", "slot_quota", "home_quota")
    }
    long: dict[str, Any] = {name: np.repeat(a[:1, :1], steps, axis=0) for name, a in arrays.items()}
    wide = replace(series, steps=np.arange(steps), layers=series.layers[:1], **long)
    act = """<script>
    const cell = document.getElementById("grid-before").getContext("2d").getImageData(
      Math.round((LEFT + 3) * devicePixelRatio), (TOP + 4) * devicePixelRatio, 1, 1).data;
    document.body.dataset.cell = cell[3];
    document.body.dataset.left = document.querySelector(".scroll").scrollLeft > 100;
    </script></body>"""
    dom = show(make_page(wide).replace("</body>", act), "step=6900")
    opaque = re.search(r'data-cell="(\d+)"', dom)
    assert opaque is not None
    assert int(opaque[1]) > 100
    assert 'data-left="true"' in dom  # the chosen step is in view


def test_the_page_in_a_browser_with_lost_plans(
    series: LoadSeries, show: Callable[[str, str], str]
) -> None:
    page = make_page(without_plan(series, 0, 0))
    dom = show(page, "step=0&layer=0&rank=99&expert=x")
    assert "No plan was recorded" in text_of(dom, "ranks-text")
    assert "No plan was recorded" in text_of(dom, "expert-text")


# ---- the command ----------------------------------------------------------------------------


def test_the_command_draws_traces_and_runs(trace: Path, tmp_path: Path) -> None:
    groups = uec.testing.new_loopback_groups(
        2, num_experts=4, slots_per_rank=1, expert={"w": ((4,), torch.float32)}
    )
    recorders = [group.start_recording() for group in groups]
    load = torch.tensor([[9, 1, 1, 1], [3, 1, 1, 1]], dtype=torch.int32)
    plan = plan_alone(load, slots_per_rank=1)
    for work in start_all(groups, [{"w": torch.zeros(2, 4)}] * 2, plan):
        work.wait()
    (tmp_path / "run").mkdir()
    for recorder in recorders:
        recorder.dump(tmp_path / "run" / "{rank}.npz")
    close_all(groups)
    pages = [tmp_path / "trace.html", tmp_path / "run.html"]
    assert main(["load", "--trace", str(trace), "--out", str(pages[0])]) == 0
    assert main(["load", str(tmp_path / "run"), "--out", str(pages[1])]) == 0
    assert data_of(pages[0].read_text())["source"].startswith(
        "trace.npz: 4 ranks, 8 experts, 2 slots"
    )
    (cell,) = data_of(pages[1].read_text())["cells"][0]
    assert cell["before"] == [14, 4]
    assert sum(cell["after"]) == 18


def test_the_same_input_gives_the_same_files(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / name for name in ("a.png", "a.html", "b.png", "b.html")]
    for pair in (paths[:2], paths[2:]):
        assert main(["load", "--trace", str(trace), "--out", *map(str, pair)]) == 0
    assert paths[0].read_bytes() == paths[2].read_bytes()
    assert paths[1].read_bytes() == paths[3].read_bytes()
    assert paths[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


BAD = {
    "--trace FILE, or files": ["load"],
    "one of the two": ["load", "x.npz", "--trace", "TRACE"],
    "missing.npz: No such file": ["load", "--trace", "missing.npz"],
    "gone.npz: No such file": ["load", "gone.npz"],
    "not a recording": ["load", "TRACE"],
    "target imbalance is 0.5": ["load", "--trace", "TRACE", "--target", "0.5"],
    "--layers is for recordings": ["load", "--trace", "TRACE", "--layers", "2"],
    "damaged": ["load", "--trace", "DAMAGED"],
    "not enough memory": ["load", "--trace", "TRACE", "--ranks", "1000000", "--slots", "1000000"],
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    out = tmp_path / "out.html"
    damaged = bytearray(trace.read_bytes())
    damaged[len(damaged) // 2] ^= 1  # a compressed or stored array, whose checksum is wrong then
    (tmp_path / "damaged.npz").write_bytes(damaged)
    files = {"TRACE": str(trace), "DAMAGED": str(tmp_path / "damaged.npz")}
    arguments = [files.get(a, a) for a in BAD[text]]
    assert main([*arguments, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert text in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ("picture.pdf", "ends in .png or .html"),
        ("missing/page.html", "there is no folder"),
        ("folder.html", "is a folder"),
    ],
)
def test_bad_outputs(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str, text: str
) -> None:
    (tmp_path / "folder.html").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main(["load", "--trace", str(trace), "--out", str(tmp_path / out)]) == 2
    assert text in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_without_matplotlib(
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["load", "--trace", str(trace), "--out", str(tmp_path / "a.png")]) == 2
    assert "pip install -c constraints.txt -e '.[viz]'" in capsys.readouterr().err
    assert main(["load", "--trace", str(trace), "--out", str(tmp_path / "a.html")]) == 0
