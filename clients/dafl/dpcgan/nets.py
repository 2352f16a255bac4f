"""The networks of the DP conditional GAN, a discriminator and a generator.

The networks are small perceptrons, or networks of four convolutions each, as in the paper (Tang et al. 2023). No
network uses batch statistics, so the score of a record does not depend on other records. The clipping of gradients for
each record requires this.

The networks of several clients compute together as a stack, which is one tensor computation. The rows of all clients
are concatenated, and layers without weights process all rows at once. Every client's rows are padded to a multiple of
32. The reason: vectorised code processes rows in groups, and an incomplete last group is rounded differently. With the
padding, the bits of a client do not depend on the other clients in the stack.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from fl_sim.errors import UserError
from fl_sim.models import Shape
from fl_sim.native.images import are_painters
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.native.perceptrons import is_perceptron

Map: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_SIDE: Final = 32
_BLOCK: Final = 32
_WITH_WEIGHTS: Final = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.InstanceNorm2d)
_SPREAD: Final = 1.0
"""The standard deviation, over latent vectors, of the logits of an untrained generator."""


@dataclass(frozen=True)
class Networks:
    """A discriminator D, a generator G, and the transforms of their inputs and outputs.

    Classes are one-hot, (n, classes). If there is only one class, the shape is (n, 0).
    ``view``: records, (n, *shape) in [-1, 1] -> views (records in D's input form). A view depends on one record only.
    ``join``: (views or latent vectors, classes) -> one tensor, the input of a network.
    ``discriminator``: joined views -> scores, (n, 1), high for real records.
    ``generator``: joined latent vectors -> views.
    ``render``: views from G -> records.
    """

    view: Map
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    discriminator: nn.Sequential
    generator: nn.Module
    render: Map


@dataclass(frozen=True)
class Layers:
    """The layers at one position of all clients' networks, with their inputs and outputs.

    ``inputs``: the input of each client's layer, (rows, ...). ``outputs``: the outputs of all clients, concatenated.
    """

    layers: tuple[nn.Module, ...]
    inputs: tuple[torch.Tensor, ...]
    outputs: torch.Tensor


def filled_up(num_rows: int) -> int:
    """Return ``num_rows`` rounded up to a multiple of 32.

    The result is a client's number of rows after padding, in the joint computation of many clients.
    """
    return -(-num_rows // _BLOCK) * _BLOCK


def stacked(
    nets: Sequence[nn.Sequential], parts: Sequence[torch.Tensor], seen: Callable[[Layers], None] | None = None
) -> torch.Tensor:
    """Return the outputs of several clients' networks for their own inputs, concatenated.

    ``nets``: the networks, one for each client, with the same kinds of layers. ``parts``: the input of each network,
    with a padded number of rows (see ``filled_up``). ``seen``: a function that is called with the ``Layers`` at each
    position that has weights.
    """
    sizes = [len(part) for part in parts]
    rows: torch.Tensor | None = (
        None  # the rows of all clients; None before the first layer with weights, because inputs may differ in width
    )
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
    """Return the scores (rows, 1) that each discriminator computes for its own input: views joined with classes.

    ``parts``: the input of each discriminator.
    """
    return _unpadded(stacked(discriminators, [_padded(part) for part in parts]), parts)


def kernel_for(nets: Networks) -> Kernel | None:
    """Return the compiled code (kernel) for the training steps of ``nets``; None if only PyTorch can compute them."""
    generator = nets.generator
    if isinstance(generator, SmallGenerator):
        fits = all(map(is_perceptron, (nets.discriminator, generator.curved, generator.straight)))
    else:
        fits = are_painters(nets.discriminator, generator)
    return load_kernel()[0] if fits else None


def generated(generators: Sequence[nn.Module], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the views that each generator makes from its own input: latent vectors joined with classes.

    ``parts``: the input of each generator.
    """
    filled = [_padded(part) for part in parts]
    small_ones = [net for net in generators if isinstance(net, SmallGenerator)]
    others = [net for net in generators if isinstance(net, nn.Sequential)]
    return _unpadded(SmallGenerator.stacked(small_ones, filled) if small_ones else stacked(others, filled), parts)


def _padded(rows: torch.Tensor) -> torch.Tensor:
    missing = -len(rows) % _BLOCK
    return functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows


def _unpadded(rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    made = torch.split(rows, [filled_up(len(part)) for part in parts])
    return [rows[: len(part)] for rows, part in zip(made, parts, strict=True)]


def gated(values: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Return the input of a network's first layer, (n, classes x (d + 1)), for ``values`` (n, d) and ``classes``.

    ``classes`` is one-hot. Each class has d + 1 columns in the result. In every row, the columns of the row's class
    contain the d values and a one. All other columns contain zeros. So every class has its own weights in the first
    layer, and records of other classes do not change them. If the one-hot class were simply appended to the values, the
    networks would hardly learn to use the class within the privacy budget. Without classes the values are returned
    unchanged.
    """
    if not classes.shape[1]:
        return values
    return (classes[:, :, None] * functional.pad(values, (0, 1), value=1.0)[:, None]).flatten(1)


def with_planes(values: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Return ``values`` with one further channel for every class, shape (n, channels + classes, ...).

    The channel of the row's class is filled with ones, the channels of other classes with zeros.
    """
    planes = classes.reshape(*classes.shape, *[1] * (values.ndim - 2)).expand(-1, -1, *values.shape[2:])
    return torch.cat([values, planes], 1)


def small(shape: Shape, num_classes: int, latent_dim: int, resolution: int, widths: tuple[int, int]) -> Networks:
    """Return perceptrons for images that are averaged down to at most ``resolution`` pixels per side.

    ``widths``: two numbers, the width of D's two hidden layers and the width of G's two hidden layers. D is the
    discriminator, and G the generator. The norm of the noise on D's gradient grows with the square root of the number
    of parameters. So the networks have few parameters. The networks use coarse images, because noise hides fine detail
    first. To make an image of full size, the code interpolates the logits and then applies the sigmoid. This order
    keeps edges sharp. Records that are not images are used without averaging.
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
    """Return a linear layer for inputs from ``gated``. The initial weights treat each class as a separate layer."""
    layer = nn.Linear((num_inputs + 1) * num_classes if num_classes else num_inputs, width, bias=bias)
    nn.init.uniform_(layer.weight, -(num_inputs**-0.5), num_inputs**-0.5)
    return layer


class SmallGenerator(nn.Module):
    """A generator of two parts: a perceptron and a linear map. Each part computes logits from latent vectors.

    The output is the sigmoid of twice the sum of the logits of both parts.

    Without the linear map, all fakes are nearly equal at the start of training and remain so.
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
        """Return the outputs of all generators, in (0, 1), concatenated. ``latents``: each generator's input."""
        curved = stacked([net.curved for net in nets], latents)
        return torch.sigmoid(2 * (curved + stacked([net.straight for net in nets], latents)))


def paper(shape: Shape, num_classes: int, latent_dim: int) -> Networks:
    """Return the paper's networks for images of 32x32 pixels.

    The discriminator has four convolutions with LeakyReLU. The generator has four transposed convolutions with ReLU,
    and tanh at the end.

    The paper states neither widths nor kernels. Here the layers have 32, 64 and 128 channels, 4x4 kernels and stride 2.
    InstanceNorm has a scale and a shift, and keeps no running statistics. As in DCGAN, the first layer of the
    discriminator D has no InstanceNorm. Layers whose feature maps have one pixel have no InstanceNorm either, because
    it would set these maps to zero. Images of 17 to 32 pixels a side are padded with the lowest value. Images of other
    sizes are resized. Raises UserError for records that are not images.
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
