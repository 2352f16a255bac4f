"""Call the compiled steps of a generative adversarial network of perceptrons, one client a call."""

import ctypes
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from fl_sim.native.kernel import Kernel

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


class TwoWays(Protocol):
    """A generator that makes sigmoid(2 (curved(x) + straight(x))) of x, (n, inputs)."""

    curved: nn.Sequential
    straight: nn.Sequential


class Moments(NamedTuple):
    """Adam's running means of a gradient and of its squares, and what each step leaves of them."""

    mean: torch.Tensor
    square: torch.Tensor
    kept: tuple[float, float]


def is_perceptron(net: nn.Module) -> bool:
    """Say whether the compiled code takes a network: linear layers with ReLU or LeakyReLU between them, float32."""
    layers = list(net) if isinstance(net, nn.Sequential) else []
    linear, between = layers[::2], layers[1::2]
    if len(layers) % 2 == 0 or not all(map(_is_plain, linear)) or not all(map(_is_relu, between)):
        return False
    return all(before.out_features == after.in_features for before, after in pairwise(linear))


def clipped_sum(
    kernel: Kernel, discriminator: nn.Sequential, real: torch.Tensor, fake: torch.Tensor, bound: float
) -> torch.Tensor:
    """Return the sum over pairs of the gradients of softplus(-D(real)) + softplus(D(fake)), each clipped to ``bound``.

    ``real``, ``fake``: float32, (pairs, inputs). The sum is flat and float64, in the order of ``D.parameters()``. A
    pair whose gradient is not finite counts as the zero vector. Raises ValueError for rows of another kind.
    """
    net = _described(discriminator)
    rows = [_rows(what, values, net, len(real)) for what, values in (("the records", real), ("the fakes", fake))]
    made = torch.empty(_num_parameters(net), dtype=torch.float64)
    _call(
        kernel, "clipped_sum", ctypes.byref(net), *map(_address, rows), _LONG(len(real)), _DOUBLE(bound), _address(made)
    )
    return made


def generate(kernel: Kernel, generator: TwoWays, latents: torch.Tensor) -> torch.Tensor:
    """Return what the generator makes of float32 ``latents``, (n, outputs). Raises ValueError for others."""
    nets = _both(generator)
    rows = _rows("the latent vectors", latents, nets.curved, len(latents))
    made = torch.empty(len(rows), _num_outputs(nets.straight))
    _call(kernel, "generate", ctypes.byref(nets), _address(rows), _LONG(len(rows)), _address(made))
    return made


def generator_gradient(
    kernel: Kernel,
    generator: TwoWays,
    discriminator: nn.Sequential,
    latents: torch.Tensor,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of mean softplus(-D(G(latents))) by G's parameters, flat: curved's first, then straight's.

    ``places``: int64, (n,), each row's class: D takes the view and a one for every class, zeros for all classes but the
    row's. None: D takes the views as they are. Raises ValueError where shapes or types do not fit.
    """
    nets, judge = _both(generator), _described(discriminator)
    rows = _rows("the latent vectors", latents, nets.curved, len(latents))
    _check_places(places, len(rows), _num_outputs(nets.straight), judge)
    made = torch.empty(_num_parameters(nets.curved) + _num_parameters(nets.straight))
    where = _POINTER(None) if places is None else _address(places)
    _call(kernel, "generator_gradient", ctypes.byref(nets), ctypes.byref(judge), _address(rows), where,
          _LONG(len(rows)), _address(made))  # fmt: skip
    return made


def adam_step(
    kernel: Kernel, weights: torch.Tensor, gradient: torch.Tensor, moments: Moments, step: int, learning_rate: float
) -> None:
    """Take Adam's step number ``step``, from 1, in place. All are contiguous float32 vectors of one length."""
    vectors = weights, moments.mean, moments.square, gradient
    if any(one.dtype is not torch.float32 or one.shape != weights.shape or not one.is_contiguous() for one in vectors):
        raise ValueError("the compiled step of Adam wants contiguous float32 vectors of one length")
    numbers = [_DOUBLE(number) for number in (*moments.kept, 1e-8, learning_rate)]
    _call(kernel, "adam", *map(_address, vectors), _LONG(weights.numel()), _LONG(step), *numbers)


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


def _described(net: nn.Sequential) -> _Perceptron:
    """Return where the weights of a network lie that ``is_perceptron``; it must live as long as that is used."""
    layers = [_Linear(slope=1.0)]
    for layer in net:
        if isinstance(layer, nn.Linear):
            bias = None if layer.bias is None else layer.bias.data_ptr()
            layers.append(_Linear(layer.weight.data_ptr(), bias, layer.in_features, layer.out_features, 1.0))
        else:
            layers[-1].slope = layer.negative_slope if isinstance(layer, nn.LeakyReLU) else 0.0
    return _Perceptron((_Linear * (len(layers) - 1))(*layers[1:]), len(layers) - 1)


def _both(generator: TwoWays) -> _Generator:
    return _Generator(_described(generator.curved), _described(generator.straight))


def _num_outputs(net: _Perceptron) -> int:
    return int(net.layers[net.num_layers - 1].outputs)


def _num_parameters(net: _Perceptron) -> int:
    layers = net.layers[: net.num_layers]
    return sum(layer.outputs * (layer.inputs + (layer.bias is not None)) for layer in layers)


def _rows(what: str, values: torch.Tensor, net: _Perceptron, count: int) -> torch.Tensor:
    """Return rows as they are read. Raises ValueError where they are not ``count`` inputs of the network."""
    wanted = count, net.layers[0].inputs
    if values.dtype is not torch.float32 or values.device.type != "cpu" or values.shape != wanted:
        raise ValueError(
            f"{what} are {values.dtype} of the shape {tuple(values.shape)} on {values.device}; the compiled step wants "
            f"float32 of the shape {wanted} in main memory"
        )
    return values.contiguous()


def _check_places(places: torch.Tensor | None, count: int, size: int, discriminator: _Perceptron) -> None:
    width = discriminator.layers[0].inputs
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
