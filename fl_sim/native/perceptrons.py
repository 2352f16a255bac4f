"""The compiled perceptrons of a GAN, generator and discriminator: sums of clipped gradients, and Adam steps."""

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_sim.native.kernel import Kernel

_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_STRANGE = 3  # an error code (see ``Outcome`` in gan.cpp): an index of a row or class does not exist

_LEAST = 1e-8  # the constant epsilon of Adam


class _Linear(ctypes.Structure):
    """A linear layer: the C structure ``Linear`` of perceptron.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("weights", _POINTER), ("bias", _POINTER), *((name, _LONG) for name in ("inputs", "outputs", "stride")),
        ("slope", _DOUBLE),
    ]  # fmt: skip


class _Perceptron(ctypes.Structure):
    """A multilayer perceptron: the C structure ``Perceptron`` of perceptron.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("layers", ctypes.POINTER(_Linear)), ("num_layers", _LONG), ("num_classes", _LONG)
    ]  # fmt: skip


class _Generator(ctypes.Structure):
    """A generator of two perceptrons: the C structure ``Generator`` of generator.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("curved", _Perceptron), ("straight", _Perceptron)]


class _NetworkRows(ctypes.Structure):
    """Input rows of a network, such as records or latent vectors: the C structure ``Shown`` of perceptron.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("values", _POINTER), ("classes", _POINTER), ("count", _LONG)]


class _Adam(ctypes.Structure):
    """The state of Adam: the C structure ``Adam`` of adam.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, _POINTER) for name in ("weights", "means", "squares", "gradient")), ("count", _LONG),
        *((name, _DOUBLE) for name in ("mean_kept", "square_kept", "least", "learning_rate")),
    ]  # fmt: skip


class Shown:
    """The rows that a network reads as input, such as records.

    ``values``: float32, (n, width). ``classes``: int64, (n,), the class of each row; None if there is one class
    only. Raises ValueError for arrays of another type or shape.
    """

    def __init__(self, values: NDArray[np.float32], classes: NDArray[np.int64] | None = None) -> None:
        if values.dtype != np.float32 or values.ndim != 2:
            raise ValueError(f"input rows must be float32 of shape (n, width), not {values.dtype} {values.shape}")
        if classes is not None and (classes.dtype != np.int64 or classes.shape != values.shape[:1]):
            raise ValueError(f"classes of {len(values)} rows must be int64, not {classes.dtype} {classes.shape}")
        self.values = np.ascontiguousarray(values)
        self.classes = None if classes is None else np.ascontiguousarray(classes)
        where = None if self.classes is None else address(self.classes)
        self.described = _NetworkRows(address(self.values), where, len(values))

    def __len__(self) -> int:
        return len(self.values)


def is_perceptron(net: nn.Module) -> bool:
    """Return True if the compiled code supports a network.

    The network must have float32 linear layers, with ReLU or LeakyReLU between them.
    """
    layers = list(net) if isinstance(net, nn.Sequential) else []
    if len(layers) % 2 == 0:
        return False
    for layer in layers[1::2]:  # slopes >= 0: the backward pass needs outputs with the signs of the inputs
        if not isinstance(layer, nn.ReLU) and not (isinstance(layer, nn.LeakyReLU) and layer.negative_slope >= 0):
            return False
    linear = layers[::2]
    for layer in linear:
        if type(layer) is not nn.Linear or not all(
            weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
            for weight in layer.parameters()
        ):
            return False
    return all(before.out_features == after.in_features for before, after in pairwise(linear))


class Perceptron:
    """A multilayer perceptron for the compiled code. Its weights must keep their memory addresses.

    ``net``: a network for which ``is_perceptron`` is True. ``num_classes``: with a number of classes above 0, the input
    of the first layer has one block for each class. The block of a row's class contains the row's values and a 1; all
    other blocks are zero. With 0, the input is the row itself.
    """

    def __init__(self, kernel: Kernel, net: nn.Sequential, num_classes: int = 0) -> None:
        self.kernel, self.weights, self.num_classes = kernel, list(net.parameters()), num_classes
        layers = [layer for layer in net if isinstance(layer, nn.Linear)]
        slopes = [getattr(layer, "negative_slope", 0.0) for layer in net if not isinstance(layer, nn.Linear)]
        num_inputs, self.num_outputs = layers[0].in_features, layers[-1].out_features
        if num_classes and num_inputs % num_classes:
            raise ValueError(f"{num_inputs} inputs cannot be divided into equal blocks for {num_classes} classes")
        self.width = num_inputs // num_classes - 1 if num_classes else num_inputs
        self.num_parameters = sum(weight.numel() for weight in self.weights)
        self._addresses = [weight.data_ptr() for weight in self.weights]
        self._layers = (_Linear * len(layers))()
        for place, (layer, slope) in enumerate(zip(layers, [*slopes, 1.0], strict=True)):
            bias, inputs = None if layer.bias is None else layer.bias.data_ptr(), layer.in_features
            self._layers[place] = _Linear(layer.weight.data_ptr(), bias, inputs, layer.out_features, inputs, slope)

    def described(self) -> _Perceptron:
        """Return the C structure with the addresses of the weights. The structure is valid while this object exists."""
        assert [weight.data_ptr() for weight in self.weights] == self._addresses, "the weights have been moved"
        return _Perceptron(self._layers, len(self._layers), self.num_classes)

    def check(self, rows: Shown) -> None:
        """Raise ValueError if ``rows`` have the wrong width, or lack the classes that the network needs."""
        if rows.values.shape[1] != self.width or (self.num_classes > 0 and rows.classes is None):
            kind = f"{self.width} numbers and a class" if self.num_classes else f"{self.width} numbers"
            raise ValueError(f"the network takes rows of {kind}, not of the shape {rows.values.shape}")

    def clipped_sum(
        self, real: Shown, fake: Shown, bound: float, chosen: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """Return the sum, over all pairs (real, fake), of the clipped gradients of the discriminator loss.

        The loss of a pair is softplus(-D(real)) + softplus(D(fake)). Each pair's gradient, as one vector, is clipped to
        an L2 norm of ``bound``; a gradient that is not finite counts as the zero vector. ``chosen``: the index of a row
        of ``real`` for each row of ``fake``; None means all rows in order. The sum is one vector in the order of the
        network's parameters. Raises ValueError for rows of wrong type or number, and IndexError for rows or classes
        that do not exist.
        """
        self.check(real)
        self.check(fake)
        places = np.arange(len(real)) if chosen is None else chosen
        if places.dtype != np.int64 or places.shape != (len(fake),) or not places.flags.c_contiguous:
            raise ValueError(
                f"{len(fake)} fake records need {len(fake)} indices of real records, int64, not {places.dtype} "
                f"{places.shape}"
            )
        made = np.empty(self.num_parameters)
        rows = ctypes.byref(real.described), _POINTER(address(places)), ctypes.byref(fake.described)
        call(self.kernel, "clipped_sum", ctypes.byref(self.described()), *rows, _DOUBLE(bound), _POINTER(address(made)))
        return made


class TwoWays:
    """A generator of two networks: its output for x, (n, inputs), is sigmoid(2 (curved(x) + straight(x))).

    The two networks are ``curved`` and ``straight``. ``num_classes``: the number of blocks in the input of both
    networks, as in ``Perceptron``.
    """

    prefix: ClassVar[str] = ""

    def __init__(self, kernel: Kernel, curved: nn.Sequential, straight: nn.Sequential, num_classes: int = 0) -> None:
        self.kernel = kernel
        self.curved, self.straight = (Perceptron(kernel, part, num_classes) for part in (curved, straight))
        self.weights = [*self.curved.weights, *self.straight.weights]
        self.num_parameters = sum(weight.numel() for weight in self.weights)
        self.num_outputs, self.num_classes = self.straight.num_outputs, num_classes

    def check(self, rows: Shown) -> None:
        """Raise ValueError if the networks cannot read ``rows``: see ``Perceptron.check``."""
        self.curved.check(rows)

    def arguments(self, discriminator: Perceptron) -> list[Any]:
        """Return C structures with the generator and the discriminator: the first arguments of the C functions."""
        return [ctypes.byref(self.described()), ctypes.byref(discriminator.described())]

    def described(self) -> _Generator:
        """Return the C structure with the addresses of the weights. The structure is valid while this object exists."""
        return _Generator(self.curved.described(), self.straight.described())

    def generate(self, latents: Shown) -> NDArray[np.float32]:
        """Return the generator's outputs, (n, outputs), for the n rows of ``latents``.

        Raises ValueError for rows of wrong width, and IndexError for classes that do not exist.
        """
        self.check(latents)
        made = np.empty((len(latents), self.num_outputs), np.float32)
        net, rows = ctypes.byref(self.described()), ctypes.byref(latents.described)
        call(self.kernel, "generate", net, rows, _POINTER(address(made)))
        return made


def call(kernel: Kernel, name: str, *arguments: Any) -> None:
    """Call the C function ``fl_sim_NAME`` of the library. Other Python threads can run during the call.

    Raises MemoryError if there is not enough memory, and IndexError for rows or classes that do not exist.
    """
    outcome = kernel.function(name)(*arguments)
    if outcome == _STRANGE:
        raise IndexError("a step of the generator contains indices of records or classes that do not exist")
    if outcome:
        raise MemoryError("no memory for a step of the generator: choose a smaller batch_size, or narrower networks")


def address(values: NDArray[Any]) -> int:
    """Return the memory address of the numbers in an array, which C code reads or writes.

    The address is valid while the array exists.
    """
    return values.ctypes.data


class CompiledAdam:
    """The state of Adam for one vector of ``weights``. An Adam step updates the vector in place.

    ``kept``: Adam's decay rates for the running means of gradients and of squared gradients (beta_1, beta_2).
    ``gradient``: the gradient of the last step. Raises ValueError unless ``weights`` are a contiguous float32 vector.
    """

    def __init__(self, weights: torch.Tensor, kept: tuple[float, float], learning_rate: float) -> None:
        self.weights = row_of(weights)
        self.means, self.squares, self.gradient = np.zeros((3, len(weights)), np.float32)
        vectors = self.weights, self.means, self.squares, self.gradient
        self.described = _Adam(*map(address, vectors), len(weights), *kept, _LEAST, learning_rate)
        self.steps = 0


@dataclass(frozen=True)
class Pairs:
    """The (real, fake) pairs of one discriminator step.

    The real records are the rows of ``real`` with the indices ``chosen``. The fake records are the generator's
    outputs for the same number of ``latents``. Each pair's gradient is clipped to an L2 norm of ``bound``.
    """

    real: Shown
    chosen: NDArray[np.int64]
    latents: Shown
    bound: float


@dataclass(frozen=True)
class GradientNoise:
    """The noise and the divisor that turn a sum of clipped gradients into a private mean gradient.

    ``noise``: the noise of each coordinate in multiples of ``spacing``, the step of the rounding grid (see
    ``add_noise`` in fl_sim/privacy/mechanisms.py); None means no noise. The sum with noise is divided by ``divisor``.
    """

    noise: NDArray[np.float64] | None
    spacing: float
    divisor: float


class DiscriminatorRows(Protocol):
    """The interface of a discriminator that ``Adversaries`` trains. An example is ``Perceptron``."""

    weights: list[torch.nn.Parameter]
    num_parameters: int
    width: int
    num_classes: int

    def check(self, rows: Shown) -> None:
        """Raise ValueError if the network cannot read ``rows``, as ``Perceptron.check`` does."""


D = TypeVar("D", bound=DiscriminatorRows)
_Of_contra = TypeVar("_Of_contra", bound=DiscriminatorRows, contravariant=True)


class GeneratorOf(Protocol[_Of_contra]):
    """The interface of a generator that ``Adversaries`` trains. An example is ``TwoWays``.

    ``prefix``: the prefix of the names of the C functions.
    """

    prefix: ClassVar[str]
    kernel: Kernel
    weights: list[torch.nn.Parameter]
    num_parameters: int
    num_outputs: int
    num_classes: int

    def check(self, rows: Shown) -> None:
        """Raise ValueError if the network cannot read ``rows``, as ``TwoWays.check`` does."""

    def arguments(self, discriminator: _Of_contra) -> list[Any]:
        """Return the first arguments of the C functions, as ``TwoWays.arguments`` does."""

    def generate(self, latents: Shown) -> NDArray[np.float32]:
        """Return the outputs for the rows of ``latents``, as ``TwoWays.generate`` does."""


class Adversaries(Generic[D]):
    """A discriminator and a generator. Each has an Adam optimizer for the vector of all its parameters.

    ``networks``: (discriminator, generator), perceptrons or networks of images. ``mean``: the moving average of the
    generator's weights. ``total``: the last sum of clipped gradients of the discriminator. Raises ValueError if the
    optimizers, the average or the two networks do not fit together.
    """

    def __init__(
        self,
        networks: tuple[D, GeneratorOf[D]],
        discriminator_adam: CompiledAdam,
        generator_adam: CompiledAdam,
        mean: torch.Tensor,
    ) -> None:
        self.discriminator, self.generator = networks
        self.discriminator_adam, self.generator_adam, self.mean = discriminator_adam, generator_adam, row_of(mean)
        if not (
            _lie_in(discriminator_adam.weights, self.discriminator.weights)
            and _lie_in(generator_adam.weights, self.generator.weights)
            and len(self.mean) == self.generator.num_parameters
        ):
            raise ValueError(
                "each network's weights must be views of the vector of its Adam optimizer, in order and without gaps, "
                f"and the moving average must have {self.generator.num_parameters} numbers, one for each weight of the "
                f"generator, not {len(self.mean)}: pass the optimizers and the average of these two networks"
            )
        self.total = np.zeros(self.discriminator.num_parameters)
        made = self.generator.num_outputs, self.generator.num_classes
        if made != (self.discriminator.width, self.discriminator.num_classes):
            raise ValueError(
                f"the discriminator does not accept the generator's outputs: {made[0]} numbers and {made[1]} classes"
            )

    def discriminator_step(self, pairs: Pairs, release: GradientNoise) -> None:
        """Update the discriminator by one Adam step on the noisy sum of the clipped gradients of all ``pairs``.

        The sum of clipped gradients, without noise, is stored in the attribute ``total``. Raises ValueError for rows or
        noise of wrong type or number, and IndexError for rows or classes that do not exist.
        """
        adam, noise, number = self.discriminator_adam, release.noise, len(pairs.latents)
        self.discriminator.check(pairs.real)
        self.generator.check(pairs.latents)
        if not _are_plain(pairs.chosen, np.int64, number) or not (
            noise is None or _are_plain(noise, np.float64, len(adam.weights))
        ):
            raise ValueError(
                f"{number} fake records need {number} indices of real records, and {len(adam.weights)} weights need as "
                "many numbers of noise"
            )
        adam.steps += 1
        call(
            self.generator.kernel, f"{self.generator.prefix}discriminator_step",
            *self.generator.arguments(self.discriminator), ctypes.byref(pairs.real.described),
            _POINTER(address(pairs.chosen)), ctypes.byref(pairs.latents.described), _DOUBLE(pairs.bound),
            _POINTER(None if noise is None else address(noise)), _DOUBLE(release.spacing), _DOUBLE(release.divisor),
            ctypes.byref(adam.described), _LONG(adam.steps), _POINTER(address(self.total)),
        )  # fmt: skip

    def generator_step(self, latents: Shown, kept: float) -> None:
        """Update the generator by one Adam step, and then its moving average.

        The loss is the mean of softplus(-D(G(latents))). ``kept``: the decay rate of the moving average. Raises
        ValueError and IndexError as ``TwoWays.generate`` does.
        """
        adam = self.generator_adam
        self.generator.check(latents)
        adam.steps += 1
        call(
            self.generator.kernel, f"{self.generator.prefix}generator_step",
            *self.generator.arguments(self.discriminator), ctypes.byref(latents.described),
            ctypes.byref(adam.described), _LONG(adam.steps), _DOUBLE(kept), _POINTER(address(self.mean)),
        )  # fmt: skip


def row_of(numbers: torch.Tensor) -> NDArray[np.float32]:
    """Return a tensor as a NumPy array on the same memory.

    Raises ValueError unless the tensor is a contiguous float32 vector.
    """
    if numbers.dtype is not torch.float32 or numbers.ndim != 1 or not numbers.is_contiguous():
        raise ValueError(f"compiled steps need a contiguous float32 vector, not {numbers.dtype} {tuple(numbers.shape)}")
    vector: NDArray[np.float32] = numbers.detach().numpy()
    return vector


def _lie_in(vector: NDArray[np.float32], weights: list[torch.nn.Parameter]) -> bool:
    """Return True if the tensors ``weights``, in this order, fill the memory of ``vector`` without gaps."""
    starts = np.cumsum([0, *(weight.numel() for weight in weights)])
    places = [weight.data_ptr() - address(vector) for weight in weights]
    return places == [4 * start for start in starts[:-1]] and len(vector) == starts[-1]


def _are_plain(numbers: NDArray[Any], kind: type[np.generic], count: int) -> bool:
    return numbers.dtype == kind and numbers.shape == (count,) and numbers.flags.c_contiguous
