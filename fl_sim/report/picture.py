"""The common parts of all figures: layouts, line styles, axes, legends, file names, and output as PNG, PDF and SVG."""

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fl_sim.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
"""Pixels per inch of PNG files."""


@dataclass(frozen=True)
class Layout:
    """The sizes of a figure and of its text.

    ``suffix``: suffix of the file name. ``width``: width of the figure in inches. ``height``: height of one panel in
    inches. ``text``, ``title``, ``small``: font sizes in points. ``line``: line width in points. ``across``: the
    largest number of panels side by side. ``highest``: the largest height of all panels together, in inches.
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
        """Return matplotlib's settings (rcParams) for figures in this layout."""
        return {
            "font.size": self.text, "axes.labelsize": self.text, "xtick.labelsize": self.text,
            "ytick.labelsize": self.text, "legend.fontsize": self.text, "axes.linewidth": 0.5 * self.line,
            "xtick.major.width": 0.5 * self.line, "ytick.major.width": 0.5 * self.line,
        }  # fmt: skip

    def characters(self, size: float, share: float = 0.85) -> int:
        """Return the approximate number of characters that fit into the given ``share`` of the figure's width.

        ``size``: font size in points.
        """
        return max(12, int(share * self.width * _POINTS / (_LETTER * size)))


_POINTS, _LETTER = 72, 0.58
"""Points per inch, and the assumed width of a letter divided by the font size."""

PAGE = Layout("", 8.0, 4.2, text=9, title=11, small=8, line=1.6)
WIDE_PAGE = Layout("", 11.0, 4.2, text=9, title=11, small=8, line=1.6, across=2)
COLUMN = Layout("-column", 3.3, 2.2, text=7, title=8, small=7, line=0.9, highest=7.0)
TEXT_WIDTH = Layout("-wide", 6.9, 2.6, text=8, title=8, small=7, line=1.1, across=2, highest=7.0)
PAPER = (COLUMN, TEXT_WIDTH)
"""Layouts for papers with two columns of text: one for figures in a column, one for figures across both columns."""

_EMBEDDED: Any = {"pdf.fonttype": 42, "svg.hashsalt": "fl-sim"}
"""Settings of matplotlib: PDF files embed TrueType fonts, and identifiers in SVG files are not random."""

# Dark and light colours alternate, and their hues are clearly different.
# In greyscale, dashes and markers distinguish the lines.
_COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a4b00", "#e69f00",
    "#56b4e9", "#b2182b", "#5e3c99", "#8c9a00", "#444444", "#00a6a6",
)  # fmt: skip
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (1.2, 1.2), (6, 1.5, 1.2, 1.5), (9, 2))
_MARKERS = "os^DvPX<>*hd"

_LEAST_PERCENT = 5.0
"""Smallest range of a vertical axis in percentage points, so that small differences do not look large."""

Style: TypeAlias = tuple[str, tuple[float, ...], str]
"""Colour, dashes and marker of a line."""

Draw: TypeAlias = Callable[[Layout], "Figure"]
"""A function that draws a figure in a given layout."""


@dataclass(frozen=True)
class Picture:
    """A drawn figure.

    ``name``: the file name of the figure. ``heading``: the heading of the figure's section on the report page.
    ``caption``: lines of plain text. ``png``: the content of the PNG file. ``details``: further lines below the
    caption. ``draw``: function that draws the figure again for a paper; None for an image grid, or for a figure that
    must not be published.
    """

    name: str
    heading: str
    caption: tuple[str, ...]
    png: bytes
    details: tuple[str, ...] = ()
    draw: Draw | None = None


def for_papers(picture: Picture) -> dict[str, bytes]:
    """Return {file name: content} of the picture as PDF and SVG, each in the width of one column and of two columns."""
    files: dict[str, bytes] = {}
    if picture.draw is not None:
        for layout in PAPER:
            for kind in ("pdf", "svg"):
                name = f"{picture.name.removesuffix('.png')}{layout.suffix}.{kind}"
                files[name] = _saved(picture.draw, layout, kind)
    return files


def drawn(draw: Draw, layout: Layout) -> bytes:
    """Draw a figure in the given layout, and return the content of its PNG file."""
    return _saved(draw, layout, "png")


def png(figure: "Figure") -> bytes:
    """Draw ``figure`` as a PNG file, and return the content of this file."""
    buffer = io.BytesIO()
    save(figure, buffer, "png")
    return buffer.getvalue()


def save(figure: "Figure", target: Path | io.BytesIO, kind: str) -> None:
    """Write ``figure`` to ``target`` in the format ``kind`` (png, pdf or svg).

    The file contains no date, so that equal figures give identical files.
    """
    from matplotlib import rc_context  # noqa: PLC0415 (a second to import)

    undated: Any = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with rc_context(_EMBEDDED):
        figure.savefig(target, format=kind, dpi=DPI, metadata=undated.get(kind, {}))


def save_plot(figure: "Figure", path: Path) -> None:
    """Write ``figure`` to a path that the user gave. Raise UserError if the file cannot be written."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot write the plot to {path}: {error}; give a writable path such as epsilon.png"
        ) from error


def file_names(titles: Sequence[str]) -> list[str]:
    """Return a text for each title that can be a part of a file name. All these texts are different."""
    names: list[str] = []
    for title in titles:
        name = re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-.")[-120:] or "panel"
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


def plain(text: str) -> str:
    """Return ``text`` with escaped dollar signs, because matplotlib reads text between dollar signs as a formula."""
    return text.replace("$", r"\$")


def styled(names: Iterable[str]) -> list[Style]:
    """Return a line style for each name. Up to 60 names get distinct styles, of 12 colours and 5 dash patterns."""
    styles: list[Style] = []
    for number, _ in enumerate(names):
        repeat = number // len(_COLORS)
        color, dashes = _COLORS[number % len(_COLORS)], _DASHES[(number + repeat) % len(_DASHES)]
        styles.append((color, dashes, _MARKERS[(number + 5 * repeat) % len(_MARKERS)]))
    return styles


def one_panel(layout: Layout, lines_below: int, title: str) -> "tuple[Figure, Axes]":
    """Return (figure with one panel, its axes). ``lines_below``: number of lines of text below the panel."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second to import)

    height = 1.1 * layout.height + 0.027 * layout.text * lines_below
    figure = Figure(figsize=(layout.width, height), layout="constrained")
    axes = figure.subplots()
    with_grid(axes, layout)
    wrapped = "\n".join(textwrap.fill(line, layout.characters(layout.title)) for line in title.split("\n"))
    axes.set_title(plain(wrapped), fontsize=layout.title, loc="left")
    return figure, axes


def with_grid(axes: "Axes", layout: Layout) -> None:
    """Draw a light grid behind the lines, and remove the top and right borders."""
    axes.grid(color="0.92", linewidth=0.5 * layout.line)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def percent_axis(axes: "Axes", lows: Sequence[float], highs: Sequence[float], *, full: bool) -> None:
    """Set the range of a vertical axis in percent: at least from the lowest of ``lows`` to the highest of ``highs``.

    ``full``: True sets the range from 0 to 100.
    """
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 (a second to import)

    low, high = max(0.0, min(lows, default=0.0)), min(100.0, max(highs, default=100.0))
    if full or low > high:
        low, high = 0.0, 100.0
    room = max(0.04 * (high - low), _LEAST_PERCENT - (high - low)) / 2
    ticks = MaxNLocator(10, steps=[1, 2, 5, 10]).tick_values(max(0.0, low - room), min(100.0, high + room))
    shown = [float(tick) for tick in ticks if 0 <= tick <= 100]
    axes.set(ylim=(shown[0], shown[-1]), yticks=shown)


def draw_points(
    axes: "Axes", places: Sequence[float], means: Sequence[float], bars: Sequence[float] | None, style: Style,
    layout: Layout, label: str,
) -> None:  # fmt: skip
    """Draw the points of one line with error bars, and add one entry ``label`` for them to the legend.

    ``places``: horizontal positions. ``means``: vertical positions. ``bars``: half lengths of the error bars; None: no
    error bars.
    """
    axes.errorbar(
        places, means, yerr=bars, color=style[0], fmt=style[2], markersize=3.5 * layout.line,
        capsize=2.5 * layout.line, linewidth=0.8 * layout.line,
        label=plain(textwrap.fill(label, layout.characters(layout.text))),
    )  # fmt: skip


def with_legend(figure: "Figure", last: str = "") -> "Figure":
    """Add a legend below the only panel of ``figure``, and return ``figure``.

    Labels that begin with ``last`` come last in the legend.
    """
    entries = zip(*figure.axes[0].get_legend_handles_labels(), strict=True)
    ordered = sorted(entries, key=lambda entry: entry[1].startswith(last))
    figure.legend(
        handles=[handle for handle, _ in ordered], labels=[label for _, label in ordered],
        loc="outside lower center", ncols=1, frameon=False, handlelength=4.2,
    )  # fmt: skip
    return figure


def _saved(draw: Draw, layout: Layout, kind: str) -> bytes:
    from matplotlib import rc_context  # noqa: PLC0415

    buffer = io.BytesIO()
    with rc_context(layout.style()):
        save(draw(layout), buffer, kind)
    return buffer.getvalue()
