"""Random views of images, one drawn per image: small moves (weak), large ones with a part erased (strong)."""

from __future__ import annotations

import math

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.settings import Settings


class Augmentation(Settings):
    """How far a strong view may be from its image; a weak one stays within a quarter of that and keeps every part.

    ``rotation`` in degrees, ``scale`` and ``shear`` as shares, ``shift`` as a share of half the image's width, as is
    ``elastic``, the standard deviation of a smooth random displacement (Simard et al. 2003); ``erase`` is the longest
    side of the erased square as a share of the width. ``flip`` mirrors every other image: not for digits. The defaults
    suit digits and other small images whose upright position means something.
    """

    rotation: float = Field(25.0, ge=0, le=180)
    scale: float = Field(0.25, ge=0, lt=1)
    shear: float = Field(0.3, ge=0, lt=1)
    shift: float = Field(0.2, ge=0, le=1)
    elastic: float = Field(0.07, ge=0, le=1)
    erase: float = Field(0.4, ge=0, le=1)
    flip: bool = False

    def weak(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return a slightly moved view of each of ``images``, shape (n, channels, height, width)."""
        return self._moved(images, generator, 0.25)

    def strong(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return a view that is moved further and has a square erased."""
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


def _erased(images: torch.Tensor, generator: torch.Generator, longest: float) -> torch.Tensor:
    """Return ``images`` with a square of random side and place set to the darkest value."""
    num_images, _, height, width = images.shape
    row, column, half = torch.rand(3, num_images, 1, 1, 1, generator=generator).to(images.device)
    rows = torch.arange(height, device=images.device).view(1, 1, -1, 1) + 0.5
    columns = torch.arange(width, device=images.device).view(1, 1, 1, -1) + 0.5
    half = half * longest * width / 2
    inside = ((rows - row * height).abs() < half) & ((columns - column * width).abs() < half)
    return torch.where(inside, images.amin(), images)
