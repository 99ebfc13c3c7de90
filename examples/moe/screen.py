"""Rank 0's output: progress, with rich if it is installed, and the closing table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from claims import Claim
from training import ShowStep

from ultraep_comm.bench.table import format_table

try:
    from rich import progress
    from rich.console import Console

    HAS_RICH = True
except ImportError:
    HAS_RICH = False

NO_RICH = (
    "rich is not installed, so there are no progress bars;"
    " to install it: .venv/bin/pip install -c constraints.txt -e '.[examples]'"
)
HEADER = ("", "plain", "with replicas", "value", "limit", "holds")


@contextmanager
def phase(title: str, steps: int, *, shown: bool) -> Iterator[ShowStep]:
    """Show the progress of a phase; the caller reports each step and its loss."""
    if not shown:
        yield lambda step, loss: None
    elif HAS_RICH:
        columns = (
            progress.TextColumn("{task.description:<32}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("loss {task.fields[loss]:.4f}"),
            progress.TimeElapsedColumn(),
        )
        with progress.Progress(*columns, console=Console(stderr=True)) as bars:
            bar = bars.add_task(title, total=steps, loss=float("nan"))
            yield lambda step, loss: bars.update(bar, completed=step + 1, loss=loss)
    else:
        yield lambda step, loss: None
        print(f"{title}: {steps} steps done", file=sys.stderr, flush=True)


def print_table(title: str, claims: Sequence[Claim]) -> None:
    """Print the closing table."""
    print(f"# {title}\n{format_table([HEADER], [_cells(claim) for claim in claims])}", flush=True)


def _cells(claim: Claim) -> tuple[str, ...]:
    if claim.limit is None:
        return (claim.text, claim.plain, claim.replicated, "", "", "")
    figures = f"{claim.value:.3g}", f"{claim.limit:.3g}", "yes" if claim.holds else "NO"
    return (claim.text, claim.plain, claim.replicated, *figures)
