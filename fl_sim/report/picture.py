"""A figure on a report's page, and what every figure needs: a file name of its own, text that is no formula, a PNG."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fl_sim.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150


@dataclass(frozen=True)
class Picture:
    """A drawn figure: its file name, the section of the page it stands in, lines of plain text below it, its PNG.

    ``details``: statements that go with it, shown below the caption in full.
    """

    name: str
    heading: str
    caption: tuple[str, ...]
    png: bytes
    details: tuple[str, ...] = ()


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
        name = re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-.")[-60:] or "panel"
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


def plain(text: str) -> str:
    """Return ``text`` such that matplotlib sees no formula in it."""
    return text.replace("$", r"\$")


def png(figure: "Figure") -> bytes:
    """Return a figure as a PNG of ``DPI`` pixels an inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()
