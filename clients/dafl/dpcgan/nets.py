"""The networks of the DP conditional GAN: small perceptrons, or the paper's four convolutions each (Tang et al. 2023).

None keeps statistics of a batch, so every record is scored by itself: clipping record by record needs that.

The networks of several clients work as a stack: one below the other lie the rows of all, and what has no weights is
done to them at once. Every client's rows are padded to a multiple of 32, because vectorised kernels compute the rest in
another way, which rounds otherwise: so a client's bits do not depend on the others in the stack.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from fl_sim.errors import UserError
from fl_sim.models import Shape
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.native.perceptrons import is_perceptron

Map: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_SIDE: Final = 32
_BLOCK: Final = 32
_WITH_WEIGHTS: Final = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.InstanceNorm2d)
_SPREAD: Final = 1.0
"""Standard deviation of a fresh generator's logits over latent vectors."""


@dataclass(frozen=True)
class Networks:
    """A pair of networks. Classes are one-hot, (n, classes), and of no width if there is one class only.

    ``view``: records, (n, *shape) in [-1, 1] -> D's views of them: a public map of each record by itself.
    ``join``: (views or latent vectors, classes) -> one tensor, the input of the networks.
    ``discriminator``: joined views -> scores, (n, 1); real is high.
    ``generator``: joined latent vectors -> views.
    ``render``: views as G makes them -> records.
    """

    view: Map
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    discriminator: nn.Sequential
    generator: nn.Module
    render: Map


@dataclass(frozen=True)
class Layers:
    """One layer of every client's network, the input of each, (rows, ...), and all outputs, one below the other."""

    layers: tuple[nn.Module, ...]
    entered: tuple[torch.Tensor, ...]
    left: torch.Tensor


def filled_up(num_rows: int) -> int:
    """Return the next number of rows that suits a stack."""
    return -(-num_rows // _BLOCK) * _BLOCK


def stacked(
    nets: Sequence[nn.Sequential], parts: Sequence[torch.Tensor], seen: Callable[[Layers], None] | None = None
) -> torch.Tensor:
    """Return the outputs of ``nets``, alike but for their weights and inputs, for their own rows, one below the other.

    ``parts``: every net's input, of as many rows as suit a stack. ``seen`` is called with each layer of weights.
    """
    sizes = [len(part) for part in parts]
    rows: torch.Tensor | None = None  # until a layer with weights, whose inputs may be of unequal width
    for layers in zip(*nets, strict=True):
        if not isinstance(layers[0], _WITH_WEIGHTS):
            if rows is None:
                parts = [layers[0](part) for part in parts]
            else:
                rows = layers[0](rows)
            continue
        entered = tuple(parts) if rows is None else torch.split(rows, sizes)
        made = [layer(part) for layer, part in zip(layers, entered, strict=True)]
        rows = torch.cat(made) if len(made) > 1 else made[0]
        if seen:
            seen(Layers(layers, entered, rows))
    assert rows is not None
    return rows


def scored(discriminators: Sequence[nn.Sequential], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each discriminator's scores of its own joined views, (rows, 1)."""
    return _emptied(stacked(discriminators, [_filled(part) for part in parts]), parts)


def kernel_for(nets: Networks) -> Kernel | None:
    """Return the compiled code for the steps of these networks; None if there is none and PyTorch computes them."""
    generator = nets.generator
    parts = [nets.discriminator, generator.curved, generator.straight] if isinstance(generator, SmallGenerator) else []
    return load_kernel()[0] if parts and all(map(is_perceptron, parts)) else None


def generated(generators: Sequence[nn.Module], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the views that each generator makes of its own joined latent vectors."""
    filled = [_filled(part) for part in parts]
    small_ones = [net for net in generators if isinstance(net, SmallGenerator)]
    others = [net for net in generators if isinstance(net, nn.Sequential)]
    return _emptied(SmallGenerator.stacked(small_ones, filled) if small_ones else stacked(others, filled), parts)


def _filled(rows: torch.Tensor) -> torch.Tensor:
    missing = -len(rows) % _BLOCK
    return functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows


def _emptied(rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    made = torch.split(rows, [filled_up(len(part)) for part in parts])
    return [rows[: len(part)] for rows, part in zip(made, parts, strict=True)]


def gated(values: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Return (n, classes x (d + 1)): the values and a one in the place of the row's class, zeros in all others.

    So every class has first-layer weights of its own, which records of other classes do not move: joined to the values
    as a few more inputs, classes are hardly noticed before the budget is spent.
    """
    if not classes.shape[1]:
        return values
    return (classes[:, :, None] * functional.pad(values, (0, 1), value=1.0)[:, None]).flatten(1)


def with_planes(values: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Return (n, channels + classes, ...): a further channel for every class, one where the row is of that class."""
    planes = classes.reshape(*classes.shape, *[1] * (values.ndim - 2)).expand(-1, -1, *values.shape[2:])
    return torch.cat([values, planes], 1)


def small(shape: Shape, num_classes: int, latent_dim: int, resolution: int, widths: tuple[int, int]) -> Networks:
    """Return perceptrons that work on images averaged down to at most ``resolution`` pixels a side.

    ``widths``: of D's and of G's two hidden layers. Few parameters, because the noise on D's gradient grows with the
    root of their number; coarse images, because detail is what that noise drowns first. Rendered images are smoothed
    before they are squashed to [-1, 1], so their edges stay sharp. Records that are not images are taken as they are.
    """
    image = len(shape) == 3
    coarse = (shape[0], *(min(side, resolution) for side in shape[1:])) if image else shape
    size = torch.Size(coarse).numel()
    wide, wide_g = widths

    def view(records: torch.Tensor) -> torch.Tensor:
        pooled = functional.adaptive_avg_pool2d(records, (coarse[1], coarse[2])) if coarse != shape else records
        return (pooled.flatten(1) + 1) / 2

    def render(views: torch.Tensor) -> torch.Tensor:
        pixels = views.reshape(-1, *coarse)
        if coarse == shape:
            return 2 * pixels - 1
        logits = functional.interpolate(torch.logit(pixels, eps=1e-6), shape[1:], mode="bilinear")
        return 2 * torch.sigmoid(logits) - 1

    discriminator = nn.Sequential(
        _first_layer(size, num_classes, wide), nn.LeakyReLU(0.2),
        nn.Linear(wide, wide), nn.LeakyReLU(0.2),
        nn.Linear(wide, 1),
    )  # fmt: skip
    return Networks(view, gated, discriminator, SmallGenerator(latent_dim, num_classes, wide_g, size), render)


def _first_layer(num_inputs: int, num_classes: int, width: int, *, bias: bool = True) -> nn.Linear:
    """Return a linear layer on gated inputs, with weights as large as if each class had a layer to itself."""
    layer = nn.Linear((num_inputs + 1) * num_classes if num_classes else num_inputs, width, bias=bias)
    nn.init.uniform_(layer.weight, -(num_inputs**-0.5), num_inputs**-0.5)
    return layer


class SmallGenerator(nn.Module):
    """A perceptron and, beside it, a linear map straight from latent vector to logits.

    Without the linear map all fakes start, and stay, about the same: this network would have to learn to spread.
    """

    def __init__(self, latent_dim: int, num_classes: int, width: int, size: int) -> None:
        super().__init__()
        self.curved = nn.Sequential(
            _first_layer(latent_dim, num_classes, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, size),
        )  # fmt: skip
        straight = _first_layer(latent_dim, num_classes, size, bias=False)
        nn.init.normal_(straight.weight, std=_SPREAD / latent_dim**0.5)
        self.straight = nn.Sequential(straight)

    @staticmethod
    def stacked(nets: Sequence["SmallGenerator"], latents: Sequence[torch.Tensor]) -> torch.Tensor:
        """Map every client's gated latent vectors to views in (0, 1)."""
        curved = stacked([net.curved for net in nets], latents)
        return torch.sigmoid(2 * (curved + stacked([net.straight for net in nets], latents)))


def paper(shape: Shape, num_classes: int, latent_dim: int) -> Networks:
    """Return four convolutions (LeakyReLU) and four transposed ones (ReLU, tanh) on 32x32 images, as in the paper.

    The paper states neither widths nor kernels: here 32, 64, 128 channels, 4x4, stride 2. InstanceNorm with scale and
    shift, no statistics kept; not on D's first layer, as in DCGAN, nor on maps of one pixel, which it would erase.
    Images of 17 to 32 pixels a side are padded with the lowest value, others resized. Raises UserError for records
    that are not images.
    """
    if len(shape) != 3:
        raise UserError(f'networks "paper" need images, these records have shape {shape}: choose networks "small"')
    padded = all(_SIDE / 2 < side <= _SIDE for side in shape[1:])
    top, left = ((_SIDE - side) // 2 for side in shape[1:])
    around = left, _SIDE - shape[2] - left, top, _SIDE - shape[1] - top

    def view(records: torch.Tensor) -> torch.Tensor:
        if padded:
            return functional.pad(records, around, value=-1.0)
        return functional.interpolate(records, (_SIDE, _SIDE), mode="bilinear")

    def render(views: torch.Tensor) -> torch.Tensor:
        if padded:
            return views[:, :, top : top + shape[1], left : left + shape[2]].contiguous()
        return functional.interpolate(views, shape[1:], mode="bilinear", antialias=True)

    discriminator = nn.Sequential(
        nn.Conv2d(shape[0] + num_classes, 32, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1, bias=False), nn.InstanceNorm2d(64, affine=True), nn.LeakyReLU(0.2),
        nn.Conv2d(64, 128, 4, 2, 1, bias=False), nn.InstanceNorm2d(128, affine=True), nn.LeakyReLU(0.2),
        nn.Conv2d(128, 1, 4), nn.Flatten(),
    )  # fmt: skip
    generator = nn.Sequential(
        nn.Unflatten(1, (-1, 1, 1)),
        nn.ConvTranspose2d(latent_dim + num_classes, 128, 4, bias=False),
        nn.InstanceNorm2d(128, affine=True), nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False), nn.InstanceNorm2d(64, affine=True), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.InstanceNorm2d(32, affine=True), nn.ReLU(),
        nn.ConvTranspose2d(32, shape[0], 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    return Networks(view, with_planes, discriminator, generator, render)
