"""The page of ranks' loads: one HTML file with its data inside, which needs no network."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from ultraep_comm.viz.load import describe_series
from ultraep_comm.viz.loads import LoadSeries

TITLE = "Load per rank before and after replication"


def make_page(series: LoadSeries) -> str:
    """Return the page: step and layer, then rank, then expert; the same text for equal series."""
    template = resources.files("ultraep_comm.viz").joinpath("load.html").read_text("utf-8")
    text = json.dumps(page_data(series), separators=(",", ":"))
    # In a script element "</script" and "<!--" would be read as HTML, wherever they stand.
    return template.replace("@DATA@", text.replace("<", "\\u003c"))


def page_data(series: LoadSeries) -> dict[str, Any]:
    """Return what the page shows: plans by step and layer, null where none is known."""
    before, after = series.before, series.after
    cells = [
        [
            {
                "before": before[t, layer].tolist(),
                "after": after[t, layer].tolist(),
                "slot_expert": series.slot_expert[t, layer].tolist(),
                "slot_quota": series.slot_quota[t, layer].tolist(),
                "home_quota": series.home_quota[t, layer].tolist(),
            }
            if series.known[t, layer]
            else None
            for layer in range(len(series.layers))
        ]
        for t in range(len(series.steps))
    ]
    return {
        "title": TITLE,
        "source": describe_series(series),
        "num_ranks": series.num_ranks,
        "steps": series.steps.tolist(),
        "layers": series.layers.tolist(),
        "home": series.home.tolist(),
        "cells": cells,
    }
