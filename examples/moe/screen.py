"""What rank 0 shows: progress and the closing table, with rich where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from claims import Claim
from training import ShowStep

from ultraep_comm.bench.progress import show_progress
from ultraep_comm.bench.table import format_table

try:
    import rich.console
    import rich.progress
    import rich.table

    HAS_RICH = True
except ImportError:
    HAS_RICH = False

NO_RICH = (
    "rich is not installed, so progress and table are plain text;"
    " to have it: .venv/bin/pip install -c constraints.txt -e '.[examples]'"
)
HEADER = ("", "plain", "with replicas", "value", "limit", "holds")


@contextmanager
def phase(title: str, steps: int, *, shown: bool) -> Iterator[ShowStep]:
    """Show how far a phase of ``steps`` has come; the caller reports each step and its loss."""
    if not shown:
        yield lambda step, loss: None
    elif HAS_RICH:
        columns = (
            rich.progress.TextColumn("{task.description:<32}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("loss {task.fields[loss]:.4f}"),
            rich.progress.TimeElapsedColumn(),
        )
        console = rich.console.Console(stderr=True)
        with rich.progress.Progress(*columns, console=console) as bars:
            bar = bars.add_task(title, total=steps, loss=float("nan"))
            yield lambda step, loss: bars.update(bar, completed=step + 1, loss=loss)
    else:
        yield lambda step, loss: show_progress(step + 1, steps, f"{title}, loss {loss:.4f}")
        print(f"{title}: {steps} steps done", file=sys.stderr, flush=True)


def print_table(title: str, claims: Sequence[Claim]) -> None:
    """Print the closing table."""
    rows = [_cells(claim) for claim in claims]
    print(f"# {title}", flush=True)
    if not HAS_RICH:
        print(format_table([HEADER], rows), flush=True)
        return
    table = rich.table.Table(box=None, pad_edge=False)
    for i, name in enumerate(HEADER):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = rich.console.Console()
    if not console.is_terminal:  # a file has no width to keep to
        console.width = 200
    console.print(table)


def _cells(claim: Claim) -> tuple[str, ...]:
    judged = claim.limit is not None
    return (
        claim.text,
        claim.plain,
        claim.replicated,
        f"{claim.value:.3g}" if judged else "",
        f"{claim.limit:.3g}" if judged else "",
        ("yes" if claim.holds else "NO") if judged else "",
    )
