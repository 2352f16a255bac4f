"""Images turned, stretched and moved a little: that this leaves their class as it is, is public knowledge."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.importing import torch

_TURN: Final = math.radians(10)
_STRETCH: Final = 0.1  # of a side's length
_MOVE: Final = 0.05  # of a side's length
_AT_A_TIME: Final = 1000  # images


def warped(images: NDArray[np.float32], strength: float, generator: np.random.Generator) -> NDArray[np.float32]:
    """Return ``images`` (n, channels, height, width), each under a warp of its own.

    A warp of ``strength`` 1 turns by up to 10 degrees, makes each side longer or shorter by up to about a tenth, and
    moves by up to a twentieth of each side; of 2, by twice that. Pixels are mixed of their neighbours, those beyond an
    edge are as the edge is. 0 returns the images as they are.
    """
    if not strength or not len(images):
        return images
    height, width = images.shape[2:]
    coins = strength * generator.uniform(-1, 1, (5, len(images)))
    turn, wide, tall = _TURN * coins[0], 1 + _STRETCH * coins[1], 1 + _STRETCH * coins[2]
    cosine, sine, shape = np.cos(turn), np.sin(turn), height / width
    # From where, in an image that reaches from -1 to 1 both ways, a pixel comes: right and down.
    matrices = np.array([[cosine * wide, -sine * tall * shape], [sine * wide / shape, cosine * tall]])
    moves = -np.einsum("rcn,cn->rn", matrices, 2 * _MOVE * coins[3:])
    whole = np.concatenate([matrices, moves[:, None]], axis=1).transpose(2, 0, 1).astype(np.float32)
    made = np.empty_like(images)
    for start in range(0, len(images), _AT_A_TIME):
        part = slice(start, start + _AT_A_TIME)
        made[part] = _sampled(torch.from_numpy(images[part]), torch.from_numpy(whole[part])).clamp(-1, 1).numpy()
    return made


def _sampled(images: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Return ``images`` whose pixels are fetched from where ``matrices`` (n, 2, 3) say."""
    grid = torch.nn.functional.affine_grid(matrices, list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
