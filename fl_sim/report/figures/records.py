"""A sheet of real images: a row for each class, the first records of it in the training part."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fl_sim.report.figures.sheet import figure_of, images, mosaic
from fl_sim.types import Examples

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PER_CLASS = 10
MOST_CLASSES = 40
MOST_PIXELS = 128
_GAP = 4
_LEFT = 150  # pixels


def draw_records(part: Examples, classes: Sequence[str], title: Sequence[str]) -> "Figure":
    """Draw up to ten images of each class of ``part``, a row a class, of at most 40 classes.

    Of images of more than 128 pixels every second, third ... pixel is shown.
    """
    shown = min(len(classes), MOST_CLASSES)
    every = -(-max(part.inputs.shape[2:]) // MOST_PIXELS)
    small = part.inputs[:, :, ::every, ::every]
    places = [np.flatnonzero(part.labels == label)[:PER_CLASS] for label in range(shown)]
    rows = [images(np.asarray(small[some])) if len(some) else [] for some in places]
    sheet = mosaic([[*row, *[None] * (PER_CLASS - len(row))] for row in rows], _GAP)
    more = [f"the first {shown} of {len(classes)} classes"] if shown < len(classes) else []
    figure, axes = figure_of(sheet, [*title, *more], left=_LEFT, above=0, right=20)
    step = (sheet.shape[0] + _GAP) / shown
    for label in range(shown):
        name = classes[label] if len(classes[label]) <= 18 else f"{classes[label][:17]}..."
        axes.text(-10, label * step + (step - _GAP) / 2, name, ha="right", va="center", fontsize=8)
    return figure
