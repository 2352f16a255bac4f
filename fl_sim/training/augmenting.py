"""Images moved at random before they are trained on: a window cut out of the padded image, mirrored or not."""

import torch

from fl_sim.types import Augment


def black_of(augment: Augment, device: torch.device) -> torch.Tensor:
    """Return what lies beyond an image's edge, (channels, 1, 1)."""
    return torch.tensor(augment.black, dtype=torch.float32, device=device).reshape(-1, 1, 1)


def moved(images: torch.Tensor, moves: torch.Tensor, augment: Augment, black: torch.Tensor) -> torch.Tensor:
    """Return ``images``, (..., channels, height, width), normalised, each moved as its row of ``moves`` says.

    ``moves``: (..., 3), drawn by ``augment``; ``black``: see ``black_of``. Where nothing moves, records may have any
    shape.
    """
    if not augment.moves:
        return images
    height, width = images.shape[-2:]
    down, right, is_mirrored = moves.unsqueeze(-1).unbind(-2)
    rows, columns = (torch.arange(size, device=images.device) for size in (height, width))
    columns = torch.where(is_mirrored == 1, width - 1 - columns, columns)
    rows, columns = (rows + down - augment.crop).unsqueeze(-1), (columns + right - augment.crop).unsqueeze(-2)
    if augment.reflect:
        rows, columns = _reflected(rows, height), _reflected(columns, width)
    is_inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = (rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)).flatten(-2)
    found = images.flatten(-2).gather(-1, places.unsqueeze(-2).expand(*images.shape[:-2], -1)).view_as(images)
    return torch.where(is_inside.unsqueeze(-3), found, black)


def _reflected(places: torch.Tensor, size: int) -> torch.Tensor:
    """Return where in an image what lies at ``places`` beyond its edges comes from."""
    return ((size - 1) - ((size - 1) - places.abs()).abs()).clamp(min=0)
