"""Tables and outputs of documents, made of result files: a function of a document for each kind."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ultraep_comm.bench.show import print_document
from ultraep_comm.bench.table import format_table

Document = Mapping[str, Any]


def _fence(text: str) -> str:
    return f"```\n{text.rstrip()}\n```\n"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines).replace("| --- ", "|---")


def shown(document: Document) -> str:
    """What ``python -m ultraep_comm.bench show`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_document(document)
    return _fence(printed.getvalue())


def example(document: Document) -> str:
    """The closing table of examples/moe."""
    rows = []
    for claim in document["claims"].values():
        judged = claim["limit"] is not None
        figures = [f"{claim[key]:.3g}" if judged else "" for key in ("value", "limit")]
        holds = ("yes" if claim["holds"] else "NO") if judged else ""
        rows.append([claim["text"], claim["plain"], claim["replicated"], *figures, holds])
    header = ("", "plain", "with replicas", "value", "limit", "holds")
    return _fence(format_table([header], rows))


def published(document: Document) -> str:
    """Published times of direct fan-out and relays beside the model's."""
    header = ["imbalance", "replicas", "most of one"]
    header += ["direct, published", "model", "relay, published", "model"]
    rows = []
    for row in document["published"]:
        theirs, ours = row["published_us"], row["model_us"]
        rows.append(
            [
                *(f"{row['imbalance']:.2f}", str(row["replicas"]), str(row["max_replicas"])),
                *(f"{theirs['direct']:.0f} us", f"{ours['direct']:.1f}"),
                *(f"{theirs['relay']:.0f} us", f"{ours['relay']:.1f}"),
            ]
        )
    return _markdown(header, rows)


def claims(document: Document) -> str:
    """Modelled time over its target, by size."""
    rows: dict[str, list[str]] = {}
    for claim in document["claims"]:
        over = claim["over_target"]
        rows.setdefault(claim["size"], []).extend(f"{over[k]:.3f}" for k in ("mean", "worst"))
    header = ["size", "push, mean", "worst", "pull, mean", "worst"]
    return _markdown(header, [[size, *cells] for size, cells in rows.items()])


_CHANGES = {  # those that the document shows, and what it calls them
    "as described": "none",
    "0 us a hop and a load": "0 us a hop and a load",
    "4 us a hop and a load": "4 us",
    "32 workers with 4 tiles each": "32 workers with 4 tiles each",
    "32 workers with 8 tiles each": "32 workers with 8 tiles each",
    "128 workers with 4 tiles each": "128 workers with 4 tiles each",
    "tiles of 64 KiB": "tiles of 64 KiB",
    "remote loads at 80% of the rate": "remote loads at 80% of the rate",
    "loads first come, first served": "loads first come, first served",
    "experts of 5 MB": "experts of 5 MB",
    "experts of 90 MB": "experts of 90 MB",
}


def sensitivity(document: Document) -> str:
    """What modelled times hang on: microseconds beyond T*, push and pull, of three plans."""
    records = {record["change"]: record["plans"] for record in document["records"]}
    rows = []
    for change, name in _CHANGES.items():
        beyond = [f"{plan['beyond_us']:.1f}" for plan in records[change].values()]
        pairs = zip(beyond[::2], beyond[1::2], strict=True)
        rows.append([name, *(f"{push}, {pull}" for push, pull in pairs)])
    return _markdown(["change", "common", "two imports", "one expert"], rows)


BLOCKS: dict[str, Callable[[Document], str]] = {
    made.__name__: made for made in (shown, example, published, claims, sensitivity)
}
