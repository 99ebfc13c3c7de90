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
from numpy.typing import NDArray
from ranks import plan_alone
from recorded_groups import make_recorder

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.bench.traces import open_trace
from ultraep_comm.plan.topology import Topology
from ultraep_comm.recording.file import Recording, save_recording
from ultraep_comm.viz.cli import main
from ultraep_comm.viz.loads import (
    LoadSeries,
    draw_load,
    make_page,
    plan_trace,
    relative,
    series_of,
)

T, L, G, E, S = 3, 2, 4, 8, 2


def imbalance(loads: NDArray[np.int64], known: NDArray[np.bool_]) -> Any:
    return relative(loads, known).max(axis=-1)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    counts = np.random.default_rng(0).integers(0, 50, (T, L, G, E)).astype(np.int32)
    counts[1, 0, :, 5] *= 20
    np.savez(tmp_path / "trace.npz", counts_src=counts)
    return tmp_path / "trace.npz"


@pytest.fixture
def series(trace: Path) -> LoadSeries:
    shape = {"num_ranks": G, "slots_per_rank": S, "tokens_per_rank": 1}
    return plan_trace(open_trace(trace), source="trace.npz", **shape, target=1.01)


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
    for t, layer in np.ndindex(T, L):
        plan = plan_alone(torch.from_numpy(counts[t, layer]), slots_per_rank=S)
        assert holds(series, t, layer, plan)
        assert imbalance(series.after, series.known)[t, layer] == pytest.approx(plan.imbalance)
    assert imbalance(series.before, series.known)[1, 0] > 2


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
    names = ("slot_expert", "slot_quota", "home_quota")
    return all(np.array_equal(getattr(series, x)[t, layer], getattr(plan, x)) for x in names)


def test_series_of_saved_plans() -> None:
    plans = [plan_of(seed) for seed in range(4)]
    calls: list[tuple[str, uec.Plan | None, int]] = [
        ("replicate_experts", plans[0], tag(3, 7)),
        ("replicate_experts", plans[1], tag(5, 7)),
        ("replicate_experts", plans[2], tag(3, 9)),
        ("replicate_experts", plans[3], tag(3, 7)),  # the backward pass: not another
        ("reduce_expert_grads", plans[3], tag(5, 9)),
        ("replicate_experts", None, tag(5, 9)),  # a plan on a device
    ]
    found = series_of([record(calls)], source="run")
    assert found.steps.tolist() == [7, 9]
    assert found.layers.tolist() == [3, 5]
    assert found.known.tolist() == [[True, True], [True, False]]
    assert holds(found, 0, 0, plans[0])
    assert holds(found, 0, 1, plans[1])
    assert holds(found, 1, 0, plans[2])
    assert not found.before[1, 1].any()


def test_plans_that_were_not_saved_take_turns() -> None:
    plans = [plan_of(seed) for seed in range(5)]
    calls: list[tuple[str, uec.Plan | None, int]] = [("replicate_experts", p, 0) for p in plans]
    found = series_of([record(calls)], source="run", num_layers=2)
    assert found.known.tolist() == [[True, True], [True, True], [True, False]]
    assert all(holds(found, *divmod(i, 2), plan) for i, plan in enumerate(plans))
    short = record(calls, capacity=1)  # what one rank lost, another has
    assert series_of([short], source="run").known.shape == (1, 1)
    found = series_of([short, replace(record(calls), rank=1)], source="run")
    assert all(holds(found, i, 0, plan) for i, plan in enumerate(plans))


def test_recordings_without_quotas() -> None:
    bare = uec.Plan.from_slots(torch.full((G, S), -1), num_experts=E)
    with pytest.raises(errors.InvalidArgumentError, match="no replicate_experts call with quotas"):
        series_of([record([("replicate_experts", bare, 0)])], source="run")


def test_the_picture_shows_every_load(series: LoadSeries) -> None:
    pytest.importorskip("matplotlib")
    series = without_plan(series, 2, 1)
    lines, before, after, _ = draw_load(series).axes
    for line, axis, loads in zip(
        lines.lines, (before, after), (series.before, series.after), strict=False
    ):
        shares = loads / loads.mean(axis=2, keepdims=True)
        expected = shares.swapaxes(0, 1).reshape(T * L, G).T  # by layer: there are more steps
        image = np.asarray(axis.images[0].get_array().filled(np.nan))
        assert np.allclose(image[:, :-1], expected[:, :-1])
        assert np.isnan(image[:, -1]).all()
        drawn = np.asarray(line.get_ydata())
        assert np.allclose(drawn[~np.isnan(drawn)], expected[:, :-1].max(axis=0))
    (subtitle,) = [text for text in lines.figure.texts if text.get_gid() == "subtitle"]
    assert "1 of these plans not recorded" in subtitle.get_text()
    low, high = lines.get_ylim()
    assert low < 1
    assert high > np.nanmax(imbalance(series.before, series.known))


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
    for t, layer in np.ndindex(T, L):
        cell = data["cells"][t][layer]
        assert (cell is not None) == known[t, layer]
        for name in () if cell is None else sorted(cell):
            assert cell[name] == getattr(series, name)[t, layer].tolist()


def test_the_page_needs_no_network(series: LoadSeries) -> None:
    page = make_page(replace(series, source="</script><script>alert(1)//<!--"))
    assert page.count("</script>") == 2  # its own
    assert "alert(1)" in data_of(page)["source"]
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, never fetched
    assert not re.search(r"\bsrc=|@import|url\(|fetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page  # and a browser would not let it


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


ACTS = """<script>
const titles = ["ranks", "experts", "expert"].map((name) => $(name + "-title").textContent);
document.body.dataset.first = titles.join("; ");
const grid = $("grid-after"), box = grid.getBoundingClientRect();
const at = {clientX: box.left + LEFT + 2.5 * cellW, clientY: box.top + TOP + 0.5 * cellH};
grid.dispatchEvent(new MouseEvent("mousemove", at));  // step 2, layer 0
fetch("data:,x").catch(() => { document.body.dataset.fetched = "nothing"; });
document.body.dataset.hover = $("tip").textContent;
grid.dispatchEvent(new MouseEvent("click", at));
grid.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft"}));
const bar = (rank) => document.querySelector(`[data-key="rank-${rank}"]`);
bar(1).dispatchEvent(new MouseEvent("click"));
bar(3).focus();
bar(3).dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
document.body.dataset.focused = document.activeElement.dataset.key;
document.querySelector("#experts button").click();
</script></body>"""


def test_the_page_in_a_browser(series: LoadSeries, show: Callable[[str, str], str]) -> None:
    """From an address by pointer and keys to the hot expert on rank 3 in step 1, layer 0."""
    page = make_page(series).replace("</body>", ACTS)
    dom = show(page, "step=0&layer=1&rank=1&expert=2")
    before, after = (imbalance(loads, series.known) for loads in (series.before, series.after))
    first = "Step 0, layer 1: [^;]*; Rank 1: its experts [^;]*; Expert 2: "
    assert re.search(f'data-first="{first}', dom)
    hover = f"step 2, layer 0\nimbalance {before[2, 0]:.3f} before, {after[2, 0]:.3f} after"
    assert f'data-hover="{hover}"' in dom
    assert 'data-fetched="nothing"' in dom
    assert 'data-focused="rank-3"' in dom  # drawn anew, and still where the keys go
    assert f"{before.max():.3f} \u2192 {after.max():.3f}" in text_of(dom, "tiles")
    t, layer, rank, expert = 1, 0, 3, 5
    assert text_of(dom, "ranks-title") == "Step 1, layer 0: tokens of every rank"
    shown = f"{before[t, layer]:.3f} before, {after[t, layer]:.3f} after"
    assert shown in text_of(dom, "ranks-text")
    for r in range(G):  # the hover texts, which screen readers read
        one, two = series.before[t, layer, r], series.after[t, layer, r]
        text = rf"rank {r}: {one:,} tokens before \([\d.]+ of the mean\), {two:,} after"
        assert re.search(text, dom)
    assert len(re.findall(r'<rect class="after"', dom)) == G
    assert text_of(dom, "experts-title").startswith("Rank 3: ")
    assert f"{series.after[t, layer, rank]:,} after" in text_of(dom, "experts-text")
    load = series.expert_load[:, layer, expert]
    assert text_of(dom, "expert-title").startswith("Expert 5: ")
    assert text_of(dom, "expert-text").startswith(f"{load[t]:,} tokens")
    table = text_of(dom, "instances")
    assert f"home {series.home_quota[t, layer, expert]:,} " in table
    replicas = np.argwhere(series.slot_expert[t, layer] == expert)
    assert 3 in replicas[:, 0]
    for r, slot in replicas:
        quota = series.slot_quota[t, layer, r, slot]
        assert f"rank {r} replica, slot {slot} {quota:,} " in table
    history = re.findall(r'data-key="history-\d"[^>]*aria-label="step \d: ([\d,]+) tokens"', dom)
    assert [int(n.replace(",", "")) for n in history] == load.tolist()


def test_a_page_of_many_steps_shows_each_of_them_and_says_which_are_lost(
    series: LoadSeries, show: Callable[[str, str], str]
) -> None:
    names = ("known", "slot_expert", "slot_quota", "home_quota")
    long: Any = {x: np.repeat(getattr(series, x)[:1, :1], 7000, axis=0) for x in names}
    wide = replace(series, steps=np.arange(7000), layers=series.layers[:1], **long)
    act = """<script>
    const cell = document.getElementById("grid-before").getContext("2d").getImageData(
      Math.round((LEFT + 3) * devicePixelRatio), (TOP + 4) * devicePixelRatio, 1, 1).data;
    document.body.dataset.opaque = cell[3] > 100;
    document.body.dataset.left = document.querySelector(".scroll").scrollLeft > 100;
    </script></body>"""
    page = make_page(without_plan(wide, 6900, 0)).replace("</body>", act)
    dom = show(page, "step=6900&layer=0&rank=99&expert=x")
    assert 'data-opaque="true"' in dom
    assert 'data-left="true"' in dom  # the chosen step is in view
    assert "No plan was recorded" in text_of(dom, "ranks-text")
    assert "No plan was recorded" in text_of(dom, "expert-text")


def test_the_command_draws_traces_and_runs(trace: Path, tmp_path: Path) -> None:
    """And the same input gives the same files."""
    pytest.importorskip("matplotlib")
    one, two = ([tmp_path / f"{name}.png", tmp_path / f"{name}.html"] for name in ("a", "b"))
    for outs in (one, two):
        assert main(["load", "--trace", str(trace), "--out", *map(str, outs)]) == 0
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    assert one[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    data = data_of(one[1].read_text())
    assert data["source"].startswith("trace.npz: 4 ranks, 8 experts, 2 slots")
    plan = plan_of(0)
    save_recording(record([("replicate_experts", plan, 0)]), tmp_path / "0.npz")
    assert main(["load", str(tmp_path / "0.npz"), "--out", str(one[1])]) == 0
    (cell,) = data_of(one[1].read_text())["cells"][0]
    assert cell["slot_expert"] == plan.slot_expert.tolist()


BAD = {
    "": "--trace FILE, or files",
    "x.npz --trace trace.npz": "one of the two",
    "--trace missing.npz": "missing.npz: No such file",
    "trace.npz": "not a recording",
    "--trace damaged.npz": "damaged",
    "--trace trace.npz --target 0.5": "--target is 0.5",
    "--trace trace.npz --layers 2": "--layers is for recordings",
    "x.npz --slots 4": "--slots is for --trace: a recording has its own",
    "--trace trace.npz --ranks 1025": "at most 1024",
    "--trace trace.npz --slots 9": "no more slots than experts",
    "--trace trace.npz --out picture.pdf": "ends in .png or .html",
    "--trace trace.npz --out missing/page.html": "cannot be written to: No such file or directory",
    "--trace trace.npz --out folder.html": "is a folder",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    damaged = bytearray(trace.read_bytes())
    damaged[len(damaged) // 2] ^= 1  # a compressed or stored array, whose checksum is wrong then
    Path("damaged.npz").write_bytes(damaged)
    Path("folder.html").mkdir()
    before = sorted(tmp_path.rglob("*"))
    out = [] if "--out" in arguments else ["--out", "o.html"]
    assert main(["load", *arguments.split(), *out]) == 2
    error = capsys.readouterr().err
    assert BAD[arguments] in error
    assert error.count("\n") == 1
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
