"""The picture of a gradient inversion: each record above its reconstruction."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.report.figures.samples import figure_of, images, mosaic
from fl_sim.report.picture import png
from fl_sim.threats.inversion import Inverted

PICTURE = "inversion.png"
"""The name of the picture's file in a run directory."""
MOST_SHOWN = 12
_GAP, _LEFT, _ABOVE, _RIGHT = 8, 120, 22, 20


def picture_of(found: Sequence[Inverted], title: Sequence[str]) -> bytes:
    """Return a PNG file with up to 12 records above, their reconstructions below, and each peak signal-to-noise ratio.

    ``title``: lines of text. Raises ValueError if the records are not images.
    """
    shown = found[:MOST_SHOWN]
    rows = [images(_bytes([getattr(one, name) for one in shown])) for name in ("record", "found")]
    sheet = mosaic(rows, _GAP)
    figure, axes = figure_of(sheet, title, left=_LEFT, above=_ABOVE, right=_RIGHT)
    height, width = rows[0][0].shape[:2]
    for number, words in enumerate(("record", "reconstruction")):
        axes.text(-10, number * (height + _GAP) + height / 2, words, ha="right", va="center", fontsize=7)
    for number, one in enumerate(shown):
        words = "exact" if math.isinf(one.psnr) else f"{one.psnr:.1f} dB"
        axes.text(number * (width + _GAP) + width / 2, -4, words, ha="center", va="bottom", fontsize=6)
    return png(figure)


def _bytes(tensors: Sequence[torch.Tensor]) -> NDArray[np.uint8]:
    return np.asarray((torch.stack([*tensors]).double() * 255).round().clamp(0, 255).to(torch.uint8).numpy())
