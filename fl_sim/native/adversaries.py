"""Call the compiled steps of Adam (Kingma and Ba 2015) on a discriminator and on a generator of perceptrons."""

import ctypes
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.native.perceptrons import Perceptron, Shown, TwoWays, address, call

_LEAST = 1e-8  # what Adam adds to the root of a mean square
_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Adam(ctypes.Structure):
    """``Adam`` of adam.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, _POINTER) for name in ("weights", "means", "squares", "gradient")), ("count", _LONG),
        *((name, _DOUBLE) for name in ("mean_kept", "square_kept", "least", "learning_rate")),
    ]  # fmt: skip


class CompiledAdam:
    """Adam on a vector of ``weights``, which it keeps; ``kept``: what a step leaves of its running means.

    ``gradient`` is that of the last step. Raises ValueError for anything but a row of float32 numbers.
    """

    def __init__(self, weights: torch.Tensor, kept: tuple[float, float], learning_rate: float) -> None:
        self.weights = vector_of(weights)
        self.means, self.squares, self.gradient = np.zeros((3, len(weights)), np.float32)
        vectors = self.weights, self.means, self.squares, self.gradient
        self.described = _Adam(*map(address, vectors), len(weights), *kept, _LEAST, learning_rate)
        self.steps = 0


@dataclass(frozen=True)
class Pairs:
    """The (real, fake) pairs of a step: the ``chosen`` rows of ``real``, and what G makes of as many ``latents``.

    Each pair's gradient is clipped to ``bound``.
    """

    real: Shown
    chosen: NDArray[np.int64]
    latents: Shown
    bound: float


@dataclass(frozen=True)
class Release:
    """What makes a gradient of a sum: see ``add_noise`` of fl_sim/privacy/mechanisms.py.

    ``noise`` is in steps of the grid, which are ``spacing``; None: the sum as it is. The noised sum is divided by
    ``divisor``.
    """

    noise: NDArray[np.float64] | None
    spacing: float
    divisor: float


class Adversaries:
    """A discriminator, a generator, and Adam on each, over all their parameters in a row.

    ``mean``: the moving mean of the generator's weights. ``total``: the last sum of clipped gradients. Raises
    ValueError where the parts do not fit.
    """

    def __init__(
        self,
        networks: tuple[Perceptron, TwoWays],
        discriminator_adam: CompiledAdam,
        generator_adam: CompiledAdam,
        mean: torch.Tensor,
    ) -> None:
        self.discriminator, self.generator = networks
        self.discriminator_adam, self.generator_adam, self.mean = discriminator_adam, generator_adam, vector_of(mean)
        if not (
            _lie_in(discriminator_adam.weights, self.discriminator.weights)
            and _lie_in(generator_adam.weights, self.generator.weights)
            and len(self.mean) == self.generator.num_parameters
        ):
            raise ValueError("Adam's vectors are not the networks' weights")
        self.total = np.zeros(self.discriminator.num_parameters)
        made = self.generator.straight.num_outputs, self.generator.curved.num_classes
        if made != (self.discriminator.width, self.discriminator.num_classes):
            raise ValueError(f"the discriminator does not take what the generator makes: {made} numbers and classes")

    def discriminator_step(self, pairs: Pairs, release: Release) -> None:
        """Take Adam's step on the discriminator by the noised sum of its pairs' clipped gradients, ``total``.

        Raises ValueError for rows or noise of another kind or number, and IndexError for rows and classes that are not
        there.
        """
        adam, noise, number = self.discriminator_adam, release.noise, len(pairs.latents)
        self.discriminator.check(pairs.real)
        self.generator.curved.check(pairs.latents)
        if not _are_plain(pairs.chosen, np.int64, number) or not (
            noise is None or _are_plain(noise, np.float64, len(adam.weights))
        ):
            raise ValueError(
                f"{number} fakes go with as many places of records, and {len(adam.weights)} weights with noise"
            )
        adam.steps += 1
        call(
            self.discriminator.kernel, "discriminator_step", ctypes.byref(self.generator.described()),
            ctypes.byref(self.discriminator.described()), ctypes.byref(pairs.real.described),
            _POINTER(address(pairs.chosen)), ctypes.byref(pairs.latents.described), _DOUBLE(pairs.bound),
            _POINTER(None if noise is None else address(noise)), _DOUBLE(release.spacing), _DOUBLE(release.divisor),
            ctypes.byref(adam.described), _LONG(adam.steps), _POINTER(address(self.total)),
        )  # fmt: skip

    def generator_step(self, latents: Shown, kept: float) -> None:
        """Take Adam's step on mean softplus(-D(G(latents))) by the generator's weights, and their mean's.

        ``kept``: what stays of the mean. Raises ValueError and IndexError as ``TwoWays.generate`` does.
        """
        adam = self.generator_adam
        self.generator.curved.check(latents)
        adam.steps += 1
        call(
            self.generator.kernel, "generator_step", ctypes.byref(self.generator.described()),
            ctypes.byref(self.discriminator.described()), ctypes.byref(latents.described), ctypes.byref(adam.described),
            _LONG(adam.steps), _DOUBLE(kept), _POINTER(address(self.mean)),
        )  # fmt: skip


def vector_of(numbers: torch.Tensor) -> NDArray[np.float32]:
    """Return the same memory as an array. Raises ValueError for anything but float32 numbers in a row."""
    if numbers.dtype is not torch.float32 or numbers.ndim != 1 or not numbers.is_contiguous():
        raise ValueError(f"compiled steps want float32 numbers in a row, not {numbers.dtype} {tuple(numbers.shape)}")
    vector: NDArray[np.float32] = numbers.detach().numpy()
    return vector


def _lie_in(vector: NDArray[np.float32], weights: list[torch.nn.Parameter]) -> bool:
    """Say whether ``weights`` lie one behind the other in all of ``vector``."""
    starts = np.cumsum([0, *(weight.numel() for weight in weights)])
    places = [weight.data_ptr() - address(vector) for weight in weights]
    return places == [4 * start for start in starts[:-1]] and len(vector) == starts[-1]


def _are_plain(numbers: NDArray[Any], kind: type[np.generic], count: int) -> bool:
    return numbers.dtype == kind and numbers.shape == (count,) and numbers.flags.c_contiguous
