"""Call the compiled steps of a generative adversarial network of perceptrons, one client a call."""

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from fl_sim.native.kernel import Kernel

_LEAST = 1e-8  # what Adam adds to the root of a mean square
_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Linear(ctypes.Structure):
    """``Linear`` of perceptron.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("weights", _POINTER), ("bias", _POINTER), ("inputs", _LONG), ("outputs", _LONG), ("slope", _DOUBLE)
    ]  # fmt: skip


class _Perceptron(ctypes.Structure):
    """``Perceptron`` of perceptron.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("layers", ctypes.POINTER(_Linear)), ("num_layers", _LONG)]


class _Generator(ctypes.Structure):
    """``Generator`` of generator.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("curved", _Perceptron), ("straight", _Perceptron)]


def is_perceptron(net: nn.Module) -> bool:
    """Say whether the compiled code takes a network: linear layers with ReLU or LeakyReLU between them, float32."""
    layers = list(net) if isinstance(net, nn.Sequential) else []
    linear, between = layers[::2], layers[1::2]
    if len(layers) % 2 == 0 or not all(map(_is_plain, linear)) or not all(map(_is_relu, between)):
        return False
    return all(before.out_features == after.in_features for before, after in pairwise(linear))


class Perceptron:
    """A network that ``is_perceptron``, as compiled code finds it: its weights must stay where they are."""

    def __init__(self, kernel: Kernel, net: nn.Sequential) -> None:
        self.kernel, self.weights = kernel, list(net.parameters())
        layers = [layer for layer in net if isinstance(layer, nn.Linear)]
        slopes = [getattr(layer, "negative_slope", 0.0) for layer in net if not isinstance(layer, nn.Linear)]
        self.num_inputs, self.num_outputs = layers[0].in_features, layers[-1].out_features
        self.num_parameters = sum(weight.numel() for weight in self.weights)
        self._addresses = [weight.data_ptr() for weight in self.weights]
        described = [_described(*of_layer) for of_layer in zip(layers, [*slopes, 1.0], strict=True)]
        self._layers = (_Linear * len(layers))(*described)

    def described(self) -> _Perceptron:
        """Return where the weights lie, to be used while this object lives."""
        assert [weight.data_ptr() for weight in self.weights] == self._addresses, "the weights have been moved"
        return _Perceptron(self._layers, len(self._layers))

    def clipped_sum(self, real: torch.Tensor, fake: torch.Tensor, bound: float) -> torch.Tensor:
        """Return the sum over pairs of the gradients of softplus(-D(real)) + softplus(D(fake)), each clipped.

        Each pair's gradient is clipped to ``bound`` as one vector; one that is not finite counts as the zero vector.
        ``real``, ``fake``: float32, (pairs, inputs). The sum is flat and float64, in the order of the network's
        parameters. Raises ValueError for rows of another kind.
        """
        rows = [_rows("the records", real, self.num_inputs), _rows("the fakes", fake, self.num_inputs)]
        if len(rows[0]) != len(rows[1]):
            raise ValueError(f"{len(rows[0])} records and {len(rows[1])} fakes are no pairs")
        made = torch.empty(self.num_parameters, dtype=torch.float64)
        net, pairs = ctypes.byref(self.described()), _LONG(len(rows[0]))
        _call(self.kernel, "clipped_sum", net, *map(_address, rows), pairs, _DOUBLE(bound), _address(made))
        return made


class TwoWays:
    """A generator that makes sigmoid(2 (curved(x) + straight(x))) of x, (n, inputs): as ``Perceptron``."""

    def __init__(self, kernel: Kernel, curved: nn.Sequential, straight: nn.Sequential) -> None:
        self.kernel, self.curved, self.straight = kernel, Perceptron(kernel, curved), Perceptron(kernel, straight)
        self.num_inputs, self.num_outputs = self.curved.num_inputs, self.straight.num_outputs

    def generate(self, latents: torch.Tensor) -> torch.Tensor:
        """Return what the generator makes of float32 ``latents``, (n, outputs). Raises ValueError for others."""
        rows = _rows("the latent vectors", latents, self.num_inputs)
        made = torch.empty(len(rows), self.num_outputs)
        _call(self.kernel, "generate", self._described(), _address(rows), _LONG(len(rows)), _address(made))
        return made

    def gradient(
        self, discriminator: Perceptron, latents: torch.Tensor, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the gradient of mean softplus(-D(G(latents))) by G's parameters, flat: curved's, then straight's.

        ``places``: int64, (n,), each row's class: D takes the view and a one for every class, zeros for all classes but
        the row's. None: D takes the views as they are. Raises ValueError where shapes or types do not fit.
        """
        rows = _rows("the latent vectors", latents, self.num_inputs)
        _check_places(places, len(rows), self.num_outputs, discriminator.num_inputs)
        made = torch.empty(self.curved.num_parameters + self.straight.num_parameters)
        where = _POINTER(None) if places is None else _address(places)
        judge, count = ctypes.byref(discriminator.described()), _LONG(len(rows))
        _call(self.kernel, "generator_gradient", self._described(), judge, _address(rows), where, count, _address(made))
        return made

    def _described(self) -> Any:
        return ctypes.byref(_Generator(self.curved.described(), self.straight.described()))


class CompiledAdam:
    """Adam (Kingma and Ba 2015) on a vector of weights.

    ``moments``: running means of the gradient and of its squares; ``kept``: what each step leaves of them.
    """

    def __init__(
        self,
        kernel: Kernel,
        weights: torch.Tensor,
        moments: Sequence[torch.Tensor],
        kept: tuple[float, float],
        learning_rate: float,
    ) -> None:
        self.kernel, self.vectors = kernel, (weights, *moments)
        for vector in self.vectors:
            _check_vector(vector, len(weights))
        self._addresses = [_address(vector) for vector in self.vectors]
        self._numbers = [_DOUBLE(number) for number in (*kept, _LEAST, learning_rate)]

    def step(self, gradient: torch.Tensor, number: int) -> None:
        """Take step ``number``, from 1, in place. Raises ValueError for a gradient of another length or type."""
        count = len(self.vectors[0])
        _check_vector(gradient, count)
        _call(
            self.kernel, "adam", *self._addresses, _address(gradient), _LONG(count), _LONG(number), *self._numbers
        )  # fmt: skip


def _call(kernel: Kernel, name: str, *arguments: Any) -> None:
    """Call a function of the library; other threads run meanwhile."""
    if getattr(kernel.library, f"fl_sim_{name}_{kernel.lanes}")(*arguments):
        raise MemoryError("no memory for a step of the generator: take a smaller batch_size, or narrower networks")


def _is_plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and all(
        weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
        for weight in layer.parameters()
    )


def _is_relu(layer: nn.Module) -> bool:
    # Of a slope below 0 nobody could tell from what left it what entered it.
    return isinstance(layer, nn.ReLU) or (isinstance(layer, nn.LeakyReLU) and layer.negative_slope >= 0)


def _described(layer: nn.Linear, slope: float) -> _Linear:
    bias = None if layer.bias is None else layer.bias.data_ptr()
    return _Linear(layer.weight.data_ptr(), bias, layer.in_features, layer.out_features, slope)


def _check_vector(vector: torch.Tensor, count: int) -> None:
    if vector.dtype is not torch.float32 or vector.shape != (count,) or not vector.is_contiguous():
        raise ValueError(f"the compiled step of Adam wants {count} float32 numbers in a row, not {tuple(vector.shape)}")


def _rows(what: str, values: torch.Tensor, width: int) -> torch.Tensor:
    """Return rows as they are read. Raises ValueError where they are not inputs of a network."""
    if values.dtype is not torch.float32 or values.device.type != "cpu" or values.ndim != 2 or values.shape[1] != width:
        raise ValueError(
            f"{what} are {values.dtype} of the shape {tuple(values.shape)} on {values.device}; the compiled step wants "
            f"float32 of the shape (any, {width}) in main memory"
        )
    return values.contiguous()


def _check_places(places: torch.Tensor | None, count: int, size: int, width: int) -> None:
    if not (size == width if places is None else _are_places(places, count, *divmod(width, size + 1))):
        raise ValueError(
            f"a discriminator of {width} inputs does not take {count} rows of {size} numbers and these classes"
        )


def _are_places(places: torch.Tensor, count: int, num_classes: int, rest: int) -> bool:
    if rest or places.dtype is not torch.int64 or places.shape != (count,):
        return False
    return count == 0 or bool(places.min() >= 0 and places.max() < num_classes)


def _address(values: torch.Tensor) -> Any:
    return _POINTER(values.data_ptr())
