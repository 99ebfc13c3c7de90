"""Shared by all pictures: colours, matplotlib settings, writing files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ultraep_comm.errors import UltraEPError, UnsupportedError
from ultraep_comm.system import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinguishable with any kind of colour vision, and in grey.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE = "#56B4E9", "#CC79A7"
INK, MUTED, FAINT = "#1a1a1a", "#5c5c5c", "#d9d9d9"
# From no load through the mean, in the middle, to the largest.
DIVERGING = (
    (0.0, "#0072B2"),
    (0.25, "#8fc1e0"),
    (0.5, "#f7f7f5"),
    (0.65, "#f6b57e"),
    (0.82, "#D55E00"),
    (1.0, "#6b2700"),
)

DPI = 150
_MARGIN = 0.1  # inches


@contextmanager
def plain_settings() -> Iterator[None]:
    """Use matplotlib's defaults instead of the user's settings; ``$`` in names is literal.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise UnsupportedError(
            "PNG pictures need matplotlib, which is not installed; run: .venv/bin/pip install -c"
            " constraints.txt -e '.[viz]'. Other kinds of output do without it"
        ) from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["text.parse_math"] = False
        yield


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """Return an empty figure of this size in inches, with automatic layout."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white", **options)


def save(content: Figure | str, path: Path) -> None:
    """Write a picture as PNG, or a text; equal ones give equal bytes.

    Raises:
        UltraEPError: the file cannot be written. An existing file is left as it was.
    """

    def write(file: BinaryIO) -> None:
        if isinstance(content, str):
            file.write(content.encode())
            return
        with plain_settings():
            content.savefig(file, format="png", dpi=DPI, metadata={"Software": None})

    try:
        write_whole(path, write)
    except OSError as error:
        raise UltraEPError(
            f"{path} cannot be written: {error.strerror}; choose another file"
        ) from None


def set_titles(figure: Figure, title: str, subtitle: str) -> None:
    """Put a title and a subtitle above the axes and their legend, left-aligned.

    The layout ignores them: a long line would push columns of axes apart.
    """
    width, height = figure.get_size_inches()
    x = _MARGIN / width
    texts = (
        figure.suptitle(
            title, x=x, y=1 - _MARGIN / height, fontsize=15, fontweight="bold", color=INK
        ),
        figure.text(x, 1 - 0.42 / height, subtitle, fontsize=9.5, color=MUTED, gid="subtitle"),
    )
    for text in texts:
        text.set(ha="left", va="top", in_layout=False)
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0, 0, 1, 1 - 0.66 / height))


def add_legend(axis: Axes, *shown: Any, **options: Any) -> None:
    """Put a legend without a frame above an axis, left-aligned; arguments as for matplotlib."""
    place: dict[str, Any] = {
        "loc": "lower left",
        "bbox_to_anchor": (0, 1),
        "borderpad": 0,
        "borderaxespad": 0.5,
    }
    axis.legend(*shown, frameon=False, fontsize=9.5, **place, **options)


def clean(axis: Axes) -> None:
    """Remove the top and right edges of an axis' frame, and soften the rest."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(FAINT)
    axis.tick_params(color=FAINT, labelcolor=INK, labelsize=9)
    axis.xaxis.label.set_color(INK)
    axis.yaxis.label.set_color(INK)


def short(name: str, most: int = 60) -> str:
    """Return a file's name for a subtitle: printable, shortened in the middle."""
    text = "".join(c if c.isprintable() else "?" for c in name)
    return text if len(text) <= most else f"{text[: most // 2]}\u2026{text[1 - most // 2 :]}"


def count(number: int, what: str) -> str:
    """Return ``1 step`` or ``2 steps``."""
    return f"{number:,} {what}{'s' * (number != 1)}"
