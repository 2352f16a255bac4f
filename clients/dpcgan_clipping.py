"""Sums of jointly clipped gradients of (real, fake) pairs, from one forward and one backward pass over both halves.

The gradient of a linear layer for one row is the outer product of its input a and the error e at its output. Hence a
pair's squared norm is a sum of products of scalar products, (e_i . e_j)(a_i . a_j) over its two rows (Goodfellow 2015,
"Efficient per-example gradient computations"), and the clipped sum is one matrix product of weighted rows: the gradient
of a single record is never formed. A convolution is the same with a row per position of its output.

Why not Opacus: its hooks form every record's gradient of every layer, of real and fake apart, at about three times the
cost of a step without privacy (``benchmarks/dpcgan_step.py``). They are what the tests hold this file against.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import nn
from torch.nn import functional

_MARGIN: Final = 1e-3
"""Records are clipped to (1 - margin) C: room for the rounding of float32 in their norms and in the sum."""


def clipped_sum(
    discriminator: nn.Sequential, real: torch.Tensor, fake: torch.Tensor, clipping_norm: float
) -> torch.Tensor:
    """Return the sum over pairs of the gradients of loss(D(real), 1) + loss(D(fake), 0), each clipped as one vector.

    ``real``, ``fake``: (pairs, *input shape of D). D scores each row by itself and consists of Linear, Conv2d,
    InstanceNorm2d without running statistics, and layers without parameters. The result is flat and float64, in the
    order of ``D.parameters()``. ``clipping_norm`` inf: the plain sum. A pair whose gradient is not finite counts as the
    zero vector; no pairs at all sum to zero.
    """
    if len(real) == 0:
        return torch.zeros(sum(weight.numel() for weight in discriminator.parameters()), dtype=torch.float64)
    layers = _backward(discriminator, real, fake)
    norms = torch.stack([layer.squared_norms() for layer in layers]).sum(0).clamp(min=0).sqrt()
    finite = torch.isfinite(norms)
    factors = torch.where(finite, (clipping_norm * (1 - _MARGIN) / norms).clamp(max=1), 0.0)
    if not bool(finite.all()):  # 0 * nan is nan: what is not finite must go, not be multiplied by 0
        for layer in layers:
            layer.forget(~finite)
    return torch.cat([gradient.flatten() for layer in layers for gradient in layer.weighted_sum(factors)]).double()


class _Layer(Protocol):
    """The gradients of a layer for every pair, in the form they are cheapest in."""

    def squared_norms(self) -> torch.Tensor:
        """Return each pair's share of its squared gradient norm, (pairs,)."""
        ...

    def forget(self, pairs: torch.Tensor) -> None:
        """Make the gradients of ``pairs`` (a mask) zero."""
        ...

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        """Return the sum over pairs of factor times gradient, for each of the layer's parameters."""
        ...


def _backward(discriminator: nn.Sequential, real: torch.Tensor, fake: torch.Tensor) -> list[_Layer]:
    """Return D's layers with parameters, with what entered each and the loss's derivative by what left it."""
    layers, inputs, outputs = [], [], []
    rows = torch.cat([real, fake])
    for layer in discriminator:
        entered, rows = rows, layer(rows)
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.InstanceNorm2d):
            layers.append(layer)
            inputs.append(entered.detach())
            outputs.append(rows)
    scores = rows.flatten()
    loss = functional.softplus(-scores[: len(real)]).sum() + functional.softplus(scores[len(real) :]).sum()
    errors: Sequence[torch.Tensor] = torch.autograd.grad(loss, outputs)
    return [_layer(*parts) for parts in zip(layers, inputs, errors, strict=True)]


def _layer(layer: nn.Module, entered: torch.Tensor, error: torch.Tensor) -> _Layer:
    if isinstance(layer, nn.Linear):
        return _Linear(layer, entered, error)
    if isinstance(layer, nn.Conv2d):
        return _Convolution(layer, entered, error)
    assert isinstance(layer, nn.InstanceNorm2d)
    return _InstanceNorm(layer, entered, error)


class _Linear:
    """Rows i and i + pairs make a pair."""

    def __init__(self, layer: nn.Linear, entered: torch.Tensor, error: torch.Tensor) -> None:
        self.a, self.e, self.has_bias = entered, error, layer.bias is not None

    def squared_norms(self) -> torch.Tensor:
        inputs, inputs_across = _products(self.a)
        errors, errors_across = _products(self.e)
        if self.has_bias:  # a bias is the weight of one more input, which is always 1
            inputs, inputs_across = inputs + 1, inputs_across + 1
        own = inputs * errors
        return own[: len(own) // 2] + own[len(own) // 2 :] + 2 * inputs_across * errors_across

    def forget(self, pairs: torch.Tensor) -> None:
        both = torch.cat([pairs, pairs])
        self.a, self.e = self.a.clone(), self.e.clone()
        self.a[both], self.e[both] = 0.0, 0.0

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        errors = self.e * torch.cat([factors, factors])[:, None]
        weight = errors.T @ self.a
        return [weight, errors.sum(0)] if self.has_bias else [weight]


def _products(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows' squares, (2 pairs,), and the products of real with fake, (pairs,)."""
    real, fake = rows.chunk(2)
    return torch.linalg.vecdot(rows, rows), torch.linalg.vecdot(real, fake)


class _Convolution:
    """As a linear layer, with a row for every position of the output: a pair's gradient is e_r a_r' + e_f a_f'."""

    def __init__(self, layer: nn.Conv2d, entered: torch.Tensor, error: torch.Tensor) -> None:
        assert layer.groups == 1
        self.a = functional.unfold(entered, layer.kernel_size, layer.dilation, _ints(layer.padding), layer.stride)
        self.e = error.flatten(2)  # (2 pairs, outputs, positions), as a is (2 pairs, inputs, positions)
        self.bias = self._halves_added(self.e.sum(2)) if layer.bias is not None else None
        (_, num_inputs, positions), num_outputs = self.a.shape, self.e.shape[1]
        # Where scalar products of all rows would be dearer than the gradients, each pair's gradient is formed: once.
        self.each = None
        if 2 * positions * (num_inputs + num_outputs) > num_inputs * num_outputs:
            (real, fake), (real_e, fake_e) = self.a.chunk(2), self.e.chunk(2)
            self.each = torch.baddbmm(real_e @ real.mT, fake_e, fake.mT)

    def _halves_added(self, rows: torch.Tensor) -> torch.Tensor:
        real, fake = rows.chunk(2)
        return real + fake

    def squared_norms(self) -> torch.Tensor:
        if self.each is None:
            (real, fake), (real_e, fake_e) = self.a.chunk(2), self.e.chunk(2)
            own = ((self.a.mT @ self.a) * (self.e.mT @ self.e)).sum((1, 2))
            weight = self._halves_added(own) + 2 * ((real.mT @ fake) * (real_e.mT @ fake_e)).sum((1, 2))
        else:
            weight = self.each.flatten(1).square().sum(1)
        return weight if self.bias is None else weight + self.bias.square().sum(1)

    def forget(self, pairs: torch.Tensor) -> None:
        self.e = self.e.clone()  # it may be a view of what other layers hold
        for rows in (self.a, self.e):
            rows[torch.cat([pairs, pairs])] = 0.0
        for gradients in (self.each, self.bias):
            if gradients is not None:
                gradients[pairs] = 0.0

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        if self.each is None:
            errors = self.e * torch.cat([factors, factors])[:, None, None]
            weight = torch.einsum("nop,nip->oi", errors, self.a)
        else:
            weight = factors @ self.each.flatten(1)
        return [weight] if self.bias is None else [weight, factors @ self.bias]


def _ints(padding: str | tuple[int, ...]) -> tuple[int, ...]:
    assert not isinstance(padding, str)
    return padding


class _InstanceNorm:
    """The gradient of its scale is the sum over positions of error times normalised input."""

    def __init__(self, layer: nn.InstanceNorm2d, entered: torch.Tensor, error: torch.Tensor) -> None:
        assert layer.affine
        assert not layer.track_running_stats
        scale, fake_scale = (error * functional.instance_norm(entered, eps=layer.eps)).sum((2, 3)).chunk(2)
        shift, fake_shift = error.sum((2, 3)).chunk(2)
        self.gradients = scale + fake_scale, shift + fake_shift  # (pairs, channels) each

    def squared_norms(self) -> torch.Tensor:
        return torch.stack(self.gradients).square().sum((0, 2))

    def forget(self, pairs: torch.Tensor) -> None:
        for gradient in self.gradients:
            gradient[pairs] = 0.0

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        return [factors @ gradient for gradient in self.gradients]
