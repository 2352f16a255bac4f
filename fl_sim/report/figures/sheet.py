"""Contact sheets of images: every pixel of an image is a square of whole pixels on the sheet, so nothing is blurred."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.report.picture import DPI, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Tile: TypeAlias = NDArray[np.uint8]
"""An RGB image, (height, width, 3). All tiles of a sheet are of one size."""
EMPTY = 238
"""The grey of a place where an image would be."""
BOTTOM = 16
"""Pixels below the tiles."""
_PAPER = 255
_TARGET = 52
_LINE, _LETTER = 25, 8.4  # pixels of a title in 8 points


def images(inputs: NDArray[np.uint8]) -> list[Tile]:
    """Return images, (records, channels, height, width), as tiles, enlarged to about 50 pixels where they are smaller.

    Channels other than 1 (grey) and 3 (RGB) are averaged. Raises ValueError for records that are no images.
    """
    if inputs.ndim != 4:
        raise ValueError(f"records of shape {inputs.shape[1:]} are no images")
    if inputs.shape[1] not in {1, 3}:
        inputs = inputs.mean(axis=1, keepdims=True).astype(np.uint8)
    factor = max(1, round(_TARGET / max(inputs.shape[2:])))
    large = inputs.repeat(factor, axis=2).repeat(factor, axis=3)
    return [np.broadcast_to(one.transpose(1, 2, 0), (*one.shape[1:], 3)) for one in large]


def mosaic(rows: Sequence[Sequence[Tile | None]], gap: int) -> Tile:
    """Return the tiles in rows and columns, ``gap`` white pixels apart; None stays white."""
    height, width = next(tile.shape[:2] for row in rows for tile in row if tile is not None)
    across = max(len(row) for row in rows)
    sheet = np.full((len(rows) * (height + gap) - gap, across * (width + gap) - gap, 3), _PAPER, dtype=np.uint8)
    for number, row in enumerate(rows):
        for column, tile in enumerate(row):
            if tile is not None:
                top, left = number * (height + gap), column * (width + gap)
                sheet[top : top + height, left : left + width] = tile
    return sheet


def figure_of(
    sheet: Tile, title: Sequence[str], *, left: int, above: int, right: int, narrowest: int = 900
) -> "tuple[Figure, Axes]":
    """Return a figure that shows ``sheet`` pixel by pixel under ``title``, and its axes.

    The axes' coordinates are the sheet's pixels. ``left``, ``above``, ``right``: pixels left free around the sheet for
    labels; more on the right where the figure would be narrower than ``narrowest``.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second to import)

    height, width = sheet.shape[:2]
    wide = max(left + width + right, narrowest)
    lines = [line for text in title for line in textwrap.wrap(text, int((wide - 30) / _LETTER))]
    high = 20 + len(lines) * _LINE + above + height + BOTTOM
    figure = Figure(figsize=(wide / DPI, high / DPI))
    axes = figure.add_axes((left / wide, BOTTOM / high, width / wide, height / high))
    axes.imshow(sheet, interpolation="nearest", aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    figure.text(14 / wide, 1 - 10 / high, plain("\n".join(lines)), fontsize=8, va="top", linespacing=1.3)
    return figure, axes
