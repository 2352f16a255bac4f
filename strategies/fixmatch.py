"""Parts of FixMatch (Sohn et al. 2020, algorithm 1): weak and strong views of images, and confident pseudo-labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.settings import Settings

_Move: TypeAlias = "Callable[[torch.Tensor, torch.Generator], torch.Tensor]"


class Augmentation(Settings):
    """Random changes of images. Strong views use full ranges; weak views use a quarter of each, and erase nothing.

    Each image is changed by random amounts. ``rotation``: the largest rotation, in degrees. ``scale``: the largest
    change of size, as a share of the size. ``shear``: the largest shear factor. ``shift``: the largest shift, as a
    share of half the image's width. ``elastic``: the standard deviation of a smooth random displacement (Simard et al.
    2003), as a share of half the image's width. ``erase``: the longest side of the erased square, as a share of the
    image's width. ``flip``: if true, each image is mirrored with probability 1/2; leave it false for digits. The
    defaults suit digits and other small images whose orientation has a meaning.
    """

    rotation: float = Field(25.0, ge=0, le=180)
    scale: float = Field(0.25, ge=0, lt=1)
    shear: float = Field(0.3, ge=0, lt=1)
    shift: float = Field(0.2, ge=0, le=1)
    elastic: float = Field(0.07, ge=0, le=1)
    erase: float = Field(0.4, ge=0, le=1)
    flip: bool = False

    def weak(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return a slightly changed view of each of ``images``, shape (n, channels, height, width)."""
        return self._moved(images, generator, 0.25)

    def strong(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return a strongly changed view of each of ``images``, with one square erased."""
        return _erased(self._moved(images, generator, 1.0), generator, self.erase)

    def _moved(self, images: torch.Tensor, generator: torch.Generator, reach: float) -> torch.Tensor:
        def draw(most: float) -> torch.Tensor:
            return (2 * torch.rand(len(images), generator=generator) - 1) * most * reach

        angle, shear = draw(math.radians(self.rotation)), draw(self.shear)
        size, width = torch.exp(draw(self.scale)), torch.exp(draw(self.scale / 2))
        cos, sin = angle.cos(), angle.sin()
        across = torch.stack([cos * size * width, (cos * shear - sin) * size, draw(self.shift)], dim=1)
        down = torch.stack([sin * size * width, (sin * shear + cos) * size, draw(self.shift)], dim=1)
        if self.flip:
            across = across * torch.where(torch.rand(len(images), 1, generator=generator) < 0.5, -1.0, 1.0)
        where = torch.stack([across, down], dim=1).to(images.device)
        grid = torch.nn.functional.affine_grid(where, list(images.shape), align_corners=False)
        bends = torch.randn(len(images), 2, 5, 5, generator=generator).to(images.device) * self.elastic * reach
        smooth = torch.nn.functional.interpolate(bends, list(images.shape[2:]), mode="bicubic", align_corners=True)
        grid = grid + smooth.permute(0, 2, 3, 1)
        return torch.nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def view(move: _Move, records: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return ``records`` changed by the function ``move``, such as a rotation. Only images are changed."""
    return move(records, generator) if records.ndim == 4 else records


def pseudo_labels(guess: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FixMatch's pseudo-label of each record, (n,), and a mask, (n,): True if the label is confident.

    ``guess``: class probabilities, (n, classes). ``threshold``: the smallest probability of a confident label.
    """
    sure, pseudo = guess.max(dim=1)
    return pseudo, sure >= threshold


def _erased(images: torch.Tensor, generator: torch.Generator, longest: float) -> torch.Tensor:
    """Return ``images`` with a square of random size and position set to the smallest value of all images."""
    num_images, _, height, width = images.shape
    row, column, half = torch.rand(3, num_images, 1, 1, 1, generator=generator).to(images.device)
    rows = torch.arange(height, device=images.device).view(1, 1, -1, 1) + 0.5
    columns = torch.arange(width, device=images.device).view(1, 1, 1, -1) + 0.5
    half = half * longest * width / 2
    inside = ((rows - row * height).abs() < half) & ((columns - column * width).abs() < half)
    return torch.where(inside, images.amin(), images)
