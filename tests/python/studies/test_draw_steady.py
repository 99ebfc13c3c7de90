"""The picture of steps: its squares are the file's moves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from studies.cli import main
from studies.draw.steady import draw_steady, load_panels


def record(way: str, slots: int, moves: list[list[int]]) -> dict[str, Any]:
    """A record as ``steady`` writes it."""
    figures = {"imbalance": {"mean": 1.005, "worst": 1.01}, "moves_by_step": moves}
    return {"op": "steady", "way": way, "slots": slots, **figures}


RECORDS = [
    record("empty", 1, [[5, 6, 7], [5, 5, 5]]),
    record("residents", 1, [[0, 1, 2], [0, 0, 3]]),
    record("empty", 2, [[5, 6, 7], [5, 5, 5]]),
]


def test_a_square_for_each_layer_and_step(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"records": RECORDS}))
    figure = draw_steady(load_panels(path), source="a.json")
    figure.draw_without_rendering()
    images = {image.get_gid(): image for axis in figure.axes for image in axis.get_images()}
    images = {name: image for name, image in images.items() if name}
    assert set(images) == {"empty 1", "residents 1", "empty 2"}
    for image, expected in zip(images.values(), RECORDS, strict=True):
        assert np.array(image.get_array()).T.tolist() == expected["moves_by_step"]
        assert image.get_clim() == (0, 7)  # one scale for all
    assert main(["draw", str(path), "--out", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert "residents, 1 slot: 1.00 moves, 50% nothing" in titles


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"op": "plan"}, "record 1 has op 'plan'; expected 'steady'"),
        ({"moves_by_step": [1, 2]}, r"shape \(2,\)"),
        ({"moves_by_step": []}, r"shape \(0,\)"),
        ({"moves_by_step": [[-1]]}, "values from 0"),
        ({"imbalance": None}, "wrong or missing"),
    ],
)
def test_other_files_are_refused(
    change: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([RECORDS[0], RECORDS[1] | change]))
    assert main(["draw", str(path), "--out", str(tmp_path / "a.png")]) == 2
    error = capsys.readouterr().err
    assert re.search(text, error)
