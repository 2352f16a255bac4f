"""A figure on a report's page, and what every figure needs: a file name of its own, text that is no formula, a PNG."""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fl_sim.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150


@dataclass(frozen=True)
class Layout:
    """How large a figure is drawn.

    ``suffix`` stands in the file's name. ``width``: of the figure, ``height``: of one panel, in inches. ``text``,
    ``title``, ``small``: sizes of text, and ``line``: the width of lines, in points. ``across``: how many panels stand
    side by side at most. ``highest``: inches that all panels have together at most.
    """

    suffix: str
    width: float
    height: float
    text: float
    title: float
    small: float
    line: float
    across: int = 1
    highest: float = math.inf

    def style(self) -> Any:
        """Return matplotlib's settings."""
        return {
            "font.size": self.text, "axes.labelsize": self.text, "xtick.labelsize": self.text,
            "ytick.labelsize": self.text, "legend.fontsize": self.text, "axes.linewidth": 0.5 * self.line,
            "xtick.major.width": 0.5 * self.line, "ytick.major.width": 0.5 * self.line,
        }  # fmt: skip

    def characters(self, size: float, share: float = 0.85) -> int:
        """Return about how many characters of ``size`` points fit into this share of the width."""
        return max(12, int(share * self.width * _POINTS / (_LETTER * size)))


_POINTS, _LETTER = 72, 0.58
"""Points of an inch, and the width of a letter in parts of its size, with some room."""

PAGE = Layout("", 8.0, 4.2, text=9, title=11, small=8, line=1.6)
WIDE_PAGE = Layout("", 11.0, 4.2, text=9, title=11, small=8, line=1.6, across=2)
COLUMN = Layout("-column", 3.3, 2.2, text=7, title=8, small=7, line=0.9, highest=7.0)
TEXT_WIDTH = Layout("-wide", 6.9, 2.6, text=8, title=8, small=7, line=1.1, across=2, highest=7.0)
PAPER = (COLUMN, TEXT_WIDTH)
"""One column of a paper, and both."""

_EMBEDDED: Any = {"pdf.fonttype": 42, "svg.hashsalt": "fl-sim"}
"""Text is embedded as TrueType, and names in an SVG are not drawn at random."""

Draw: TypeAlias = Callable[[Layout], "Figure"]


@dataclass(frozen=True)
class Picture:
    """A drawn figure: its file name, the section of the page it stands in, lines of plain text below it, its PNG.

    ``details``: statements that go with it, shown below the caption in full. ``draw``: draws it once more for a paper;
    None for what is no diagram, or not to be published.
    """

    name: str
    heading: str
    caption: tuple[str, ...]
    png: bytes
    details: tuple[str, ...] = ()
    draw: Draw | None = None


def for_papers(picture: Picture) -> dict[str, bytes]:
    """Return {file name: content}: the picture as PDF and as SVG, at the width of one column and of two."""
    files: dict[str, bytes] = {}
    if picture.draw is not None:
        for layout in PAPER:
            for kind in ("pdf", "svg"):
                name = f"{picture.name.removesuffix('.png')}{layout.suffix}.{kind}"
                files[name] = _saved(picture.draw, layout, kind)
    return files


def drawn(draw: Draw, layout: Layout) -> bytes:
    """Return a diagram as a PNG of ``DPI`` pixels an inch."""
    return _saved(draw, layout, "png")


def save(figure: "Figure", target: Path | io.BytesIO, kind: str) -> None:
    """Write ``figure`` as ``kind`` (png, pdf, svg): without its date, so that the same figure has the same bytes."""
    from matplotlib import rc_context  # noqa: PLC0415 (a second to import)

    undated: Any = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with rc_context(_EMBEDDED):
        figure.savefig(target, format=kind, dpi=DPI, metadata=undated.get(kind, {}))


def _saved(draw: Draw, layout: Layout, kind: str) -> bytes:
    from matplotlib import rc_context  # noqa: PLC0415

    buffer = io.BytesIO()
    with rc_context(layout.style()):
        save(draw(layout), buffer, kind)
    return buffer.getvalue()


def save_plot(figure: "Figure", path: Path) -> None:
    """Write ``figure`` where a user asked for it. Raises UserError where that is not possible."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot write the plot to {path}: {error}; give a writable path such as epsilon.png"
        ) from error


def file_names(titles: Sequence[str]) -> list[str]:
    """Return a file name's part for each title, no two the same."""
    names: list[str] = []
    for title in titles:
        name = re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-.")[-120:] or "panel"
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


def plain(text: str) -> str:
    """Return ``text`` such that matplotlib sees no formula in it."""
    return text.replace("$", r"\$")


def png(figure: "Figure") -> bytes:
    """Return a figure as a PNG of ``DPI`` pixels an inch."""
    buffer = io.BytesIO()
    save(figure, buffer, "png")
    return buffer.getvalue()
