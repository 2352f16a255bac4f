"""The compiled convolutional networks of the DP conditional GAN: a discriminator and a generator of images."""

import ctypes
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_sim.native.kernel import Kernel
from fl_sim.native.perceptrons import Shown, address, call

_SIDE, _MOST_CHANNELS = 32, 4  # these constants have the same values as in images.h


class _Painters(ctypes.Structure):
    """A discriminator and a generator of images: the C structure ``Painters`` of images.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("discriminator", ctypes.c_void_p), ("generator", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("channels", "num_classes", "latent_dim")),
    ]  # fmt: skip


def are_painters(discriminator: nn.Module, generator: nn.Module) -> bool:
    """Return True if the compiled code supports this discriminator and this generator of images.

    The networks must have the same shapes of weights and slopes of LeakyReLU as the compiled networks.
    """
    if not (isinstance(discriminator, nn.Sequential) and isinstance(generator, nn.Sequential)):
        return False
    weights = [*discriminator.parameters(), *generator.parameters()]
    if len(weights) != 21 or not all(one.dtype is torch.float32 and one.device.type == "cpu" for one in weights):
        return False
    planes, inputs, channels = weights[0].shape[1], weights[10].shape[0], len(weights[20])
    shapes = [
        (32, planes, 4, 4), (32,), (64, 32, 4, 4), (64,), (64,), (128, 64, 4, 4), (128,), (128,), (1, 128, 4, 4), (1,),
        (inputs, 128, 4, 4), (128,), (128,), (128, 64, 4, 4), (64,), (64,), (64, 32, 4, 4), (32,), (32,),
        (32, channels, 4, 4), (channels,),
    ]  # fmt: skip
    slopes = {layer.negative_slope for layer in discriminator if isinstance(layer, nn.LeakyReLU)}
    return [tuple(one.shape) for one in weights] == shapes and slopes == {0.2} and channels <= _MOST_CHANNELS


class _Images:
    """A network for images (discriminator or generator) that compiled code computes.

    Its weights must be consecutive parts of one vector in memory, and must keep their memory addresses. Raises
    ValueError for other weights.
    """

    prefix: ClassVar[str] = "image_"

    def __init__(self, kernel: Kernel, net: nn.Sequential, channels: int, num_classes: int) -> None:
        self.kernel, self.weights = kernel, list(net.parameters())
        self.channels, self.num_classes = channels, num_classes
        self.num_parameters = sum(weight.numel() for weight in self.weights)
        self._addresses = [weight.data_ptr() for weight in self.weights]
        ends = [weight.data_ptr() + 4 * weight.numel() for weight in self.weights]
        if ends[:-1] != self._addresses[1:]:
            raise ValueError("the weights of a network of images must be consecutive parts of one vector")

    def start(self) -> int:
        """Return the memory address of the network's first weight, which the C functions receive."""
        assert [weight.data_ptr() for weight in self.weights] == self._addresses, "the weights have been moved"
        return self._addresses[0]

    def _check(self, rows: Shown, width: int) -> None:
        if rows.values.shape[1] != width or (self.num_classes > 0 and rows.classes is None):
            kind = f"{width} numbers and a class" if self.num_classes else f"{width} numbers"
            raise ValueError(f"the network takes rows of {kind}, not of the shape {rows.values.shape}")


class ImageDiscriminator(_Images):
    """The discriminator of images. Each of its input rows is one record, (channels, 32, 32), as a vector."""

    def __init__(self, kernel: Kernel, net: nn.Sequential, num_classes: int = 0) -> None:
        planes = next(net.parameters()).shape[1]
        super().__init__(kernel, net, planes - num_classes, num_classes)
        self.width = self.channels * _SIDE * _SIDE

    def check(self, rows: Shown) -> None:
        """Raise ValueError if ``rows`` have the wrong width, or lack the classes that the network needs."""
        self._check(rows, self.width)

    def clipped_sum(self, real: Shown, fake: Shown, bound: float) -> NDArray[np.float64]:
        """Return the sum of the clipped gradients of all pairs (real, fake), as ``Perceptron.clipped_sum`` does."""
        self.check(real)
        self.check(fake)
        if len(real) != len(fake):
            raise ValueError(f"{len(fake)} fake records need {len(fake)} real records, not {len(real)}")
        made, chosen = np.empty(self.num_parameters), np.arange(len(real))
        nets = _Painters(self.start(), None, self.channels, self.num_classes, 0)
        call(
            self.kernel, "image_clipped_sum", ctypes.byref(nets), ctypes.byref(real.described),
            ctypes.c_void_p(address(chosen)), ctypes.byref(fake.described), ctypes.c_double(bound),
            ctypes.c_void_p(address(made)),
        )  # fmt: skip
        return made


class ImageGenerator(_Images):
    """The generator of images, (channels, 32, 32). Its inputs are latent vectors."""

    def __init__(self, kernel: Kernel, net: nn.Sequential, num_classes: int = 0) -> None:
        weights = list(net.parameters())
        super().__init__(kernel, net, len(weights[-1]), num_classes)
        self.latent_dim = weights[0].shape[0] - num_classes
        self.num_outputs = self.channels * _SIDE * _SIDE

    def check(self, rows: Shown) -> None:
        """Raise ValueError if ``rows`` have the wrong width, or lack the classes that the network needs."""
        self._check(rows, self.latent_dim)

    def arguments(self, discriminator: ImageDiscriminator) -> list[Any]:
        """Return C structures with the generator and the discriminator: the first arguments of the C functions."""
        start = discriminator.start()
        return [ctypes.byref(_Painters(start, self.start(), self.channels, self.num_classes, self.latent_dim))]

    def generate(self, latents: Shown) -> NDArray[np.float32]:
        """Return the images, (n, channels * 32 * 32), for the n rows of ``latents``: see ``TwoWays.generate``."""
        self.check(latents)
        made = np.empty((len(latents), self.num_outputs), np.float32)
        nets = _Painters(None, self.start(), self.channels, self.num_classes, self.latent_dim)
        rows = ctypes.byref(nets), ctypes.byref(latents.described)
        call(self.kernel, "image_generate", *rows, ctypes.c_void_p(address(made)))
        return made
