"""Sums of clipped gradients of a GAN's discriminator D, with one gradient for each pair of a real and a fake record.

The gradient of a pair is clipped as one vector. Each of the pair's two records is one row in the inputs of D's layers.
One forward pass and one backward pass over all rows are enough. The error e is the derivative of the loss with respect
to a layer's output. The gradient of a linear layer for one row is the outer product of the layer's input a and the
error e. Hence the squared norm of a pair's gradient is the sum of (e_i . e_j)(a_i . a_j) over the pair's two rows i, j
(Goodfellow 2015, "Efficient per-example gradient computations"). The clipped sum is one matrix product of weighted
rows. So the gradients of single pairs need not be computed. A convolution is treated like a linear layer with one row
per output position.

For any weights of D, no pair changes a sum by more than the clipping norm. A pair's inputs and errors are float32.
Their bits do not depend on the other pairs of the step. Norms and sums are float64, which represents products of
float32 exactly. If the two rows of a pair nearly cancel, the squared norm from scalar products may be too small. The
rounding error is at most 2 n u times the sum of the two rows' squared norms (sums of n terms, u = 2^-53; Higham 2002,
section 3.1). This bound is added to the squared norm.

Opacus' hooks compute the gradient of every layer for every record, separately for real and fake records. A step with
these hooks takes about three times as long as a step without privacy (``benchmarks/dpcgan_step.py``). The tests compare
this module with the hooks. The module ``clients.dafl.dpcgan.with_opacus`` trains with the hooks on request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from clients.dafl.dpcgan.nets import Layers, filled_up, stacked

MARGIN: Final = 1e-5
"""Gradients of pairs are clipped to (1 - MARGIN) C, where C is the clipping norm.

The margin covers the float64 rounding of a sum of gradients. This rounding is below 1e-6 C for 1,000 pairs."""

_SLACK: Final = 2.0**-32
"""A bound on the rounding error of a squared norm of up to 2^20 terms.

The bound is relative to the sum of the squared norms of the rows."""


@dataclass(frozen=True)
class ClientPairs:
    """One client's pairs of a real record and a fake in one training step of its discriminator D.

    ``discriminator``: D. D's score of a row must not depend on other rows. The layers of D are Linear, Conv2d,
    InstanceNorm2d without running statistics, and layers without parameters. ``real``, ``fake``: the records and the
    fakes of all pairs, (pairs, *input shape of D). ``clipping_norm``: the bound on the norm of a pair's gradient; inf
    means no clipping.
    """

    discriminator: nn.Sequential
    real: torch.Tensor
    fake: torch.Tensor
    clipping_norm: float


def clipped_sum(
    discriminator: nn.Sequential, real: torch.Tensor, fake: torch.Tensor, clipping_norm: float
) -> torch.Tensor:
    """Return the sum of the clipped gradients of one client's pairs as a flat float64 vector: see ``clipped_sums``."""
    return clipped_sums([ClientPairs(discriminator, real, fake, clipping_norm)])[0]


def clipped_sums(clients: Sequence[ClientPairs]) -> list[torch.Tensor]:
    """Return for each client the sum of the clipped gradients of the client's pairs.

    A pair is a real and a fake record. The loss of a pair is loss(D(real), 1) + loss(D(fake), 0). The gradient of each
    pair is clipped as one vector. The sums are flat float64 vectors, in the order of ``D.parameters()``. A pair whose
    gradient is not finite counts as the zero vector. The sum of no pairs is zero. All clients' networks must have the
    same kinds of layers. A client's sum does not depend on other clients.
    """
    found = iter(_sums([one for one in clients if len(one.real)]))
    sizes = [sum(weight.numel() for weight in one.discriminator.parameters()) for one in clients]
    return [
        next(found) if len(one.real) else torch.zeros(size, dtype=torch.float64)
        for one, size in zip(clients, sizes, strict=True)
    ]


def _sums(clients: Sequence[ClientPairs]) -> list[torch.Tensor]:
    if not clients:
        return []
    bounds, sizes = [], []
    for one in clients:
        sizes.append(filled_up(2 * len(one.real)) // 2)
        # The clipping norm of padding pairs is zero, so that padding adds nothing to a sum.
        bounds += [
            torch.full((len(one.real),), one.clipping_norm * (1 - MARGIN), dtype=torch.float64),
            torch.zeros(sizes[-1] - len(one.real), dtype=torch.float64),
        ]
    layers = _backward(clients, sizes)
    norms = torch.stack([layer.squared_norms() for layer in layers]).sum(0).sqrt()
    finite = torch.isfinite(norms)
    bound = torch.cat(bounds)
    factors = torch.where(finite & (bound > 0), (bound / norms).clamp(max=1), 0.0)
    if not bool(finite.all()):  # 0 * nan is nan, so a factor of 0 does not remove a gradient of nan
        for layer in layers:
            layer.forget(~finite)
    by_layer = [layer.weighted_sums(factors) for layer in layers]
    return [torch.cat([part.flatten() for parts in one for part in parts]) for one in zip(*by_layer, strict=True)]


def _backward(clients: Sequence[ClientPairs], sizes: Sequence[int]) -> "list[_LinearGradients | _SeparateGradients]":
    """Return the gradients of each layer of D that has parameters, for all pairs of all clients.

    The function makes one forward and one backward pass. ``sizes``: the number of pairs of each client, after padding.
    """
    rows: list[torch.Tensor] = []
    for one, size in zip(clients, sizes, strict=True):
        pairs = one.real.new_zeros(size, 2, *one.real.shape[1:])
        pairs[: len(one.real), 0], pairs[: len(one.real), 1] = one.real, one.fake
        rows.append(pairs.flatten(0, 1))  # pair i: row 2i is real, row 2i + 1 is fake
    passed: list[Layers] = []
    scores = stacked([one.discriminator for one in clients], rows, passed.append).view(-1, 2)
    loss = functional.softplus(scores * torch.tensor([-1.0, 1.0])).sum()
    errors: Sequence[torch.Tensor] = torch.autograd.grad(loss, [layers.outputs for layers in passed])
    found: list[_LinearGradients | _SeparateGradients] = []
    for layers, error in zip(passed, errors, strict=True):
        entered, first = [part.detach() for part in layers.inputs], layers.layers[0]
        if isinstance(first, nn.Linear):
            found.append(_LinearGradients(entered, error, has_bias=first.bias is not None))
        else:
            kind = _ConvolutionGradients if isinstance(first, nn.Conv2d) else _InstanceNormGradients
            parts = zip(layers.layers, entered, torch.split(error, [len(part) for part in entered]), strict=True)
            found.append(_SeparateGradients([kind(*part) for part in parts]))
    return found


class _LinearGradients:
    """The float64 gradients of one linear layer: one gradient for each pair of a real and a synthetic record.

    ``entered``: for each client, the inputs of the layer, one row per record. ``errors``: the derivatives of the loss
    with respect to the layer's outputs; the rows of all clients are concatenated.
    """

    def __init__(self, entered: Sequence[torch.Tensor], errors: torch.Tensor, *, has_bias: bool) -> None:
        self.has_bias, self.a, self.e = has_bias, [part.double() for part in entered], errors.double()

    def squared_norms(self) -> torch.Tensor:
        """Return an upper bound of the squared norm of each pair's gradient in this layer, (pairs,)."""
        products = [_scalar_products(part) for part in self.a]
        inputs, inputs_across = (torch.cat(parts) for parts in zip(*products, strict=True))
        errors, errors_across = _scalar_products(self.e)
        if self.has_bias:  # a bias is the weight of one more input, which is always 1
            inputs, inputs_across = inputs + 1, inputs_across + 1
        own = (inputs * errors).view(-1, 2).sum(1)
        return own + 2 * inputs_across * errors_across + _SLACK * own

    def forget(self, pairs: torch.Tensor) -> None:
        """Set the gradients of some pairs to zero, because they are not finite.

        ``pairs``: a mask, (pairs,), that is True for these pairs.
        """
        both = pairs.repeat_interleave(2)
        self.e = self.e.masked_fill(both[:, None], 0.0)
        sizes = [len(part) for part in self.a]
        self.a = [
            part.masked_fill(mask[:, None], 0.0) for part, mask in zip(self.a, torch.split(both, sizes), strict=True)
        ]

    def weighted_sums(self, factors: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return weighted sums of the pairs' gradients, for each client and each parameter of the layer.

        ``factors``: for each pair, the clipping factor by which its gradient is multiplied.
        """
        errors = (self.e.view(-1, 2, self.e.shape[1]) * factors[:, None, None]).flatten(0, 1)
        parts = zip(torch.split(errors, [len(part) for part in self.a]), self.a, strict=True)
        return [[error.T @ entered, *([error.sum(0)] if self.has_bias else [])] for error, entered in parts]


def _scalar_products(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the squared norms of all rows, (2 pairs,), and the scalar product of each pair's two rows, (pairs,)."""
    real, fake = rows.view(-1, 2, rows.shape[1]).unbind(1)
    return torch.linalg.vecdot(rows, rows), torch.linalg.vecdot(real, fake)


class _SeparateGradients:
    """The gradients of a convolution or InstanceNorm layer, for every pair of all clients.

    Each client's gradients are computed separately, because joint operations save no time. The methods have the same
    meaning as the methods of ``_LinearGradients``.
    """

    def __init__(self, layers: "Sequence[_ConvolutionGradients | _InstanceNormGradients]") -> None:
        self.layers = layers
        self.sizes = [layer.num_pairs for layer in layers]

    def squared_norms(self) -> torch.Tensor:
        return torch.cat([layer.squared_norms() for layer in self.layers])

    def forget(self, pairs: torch.Tensor) -> None:
        for layer, mask in zip(self.layers, torch.split(pairs, self.sizes), strict=True):
            layer.forget(mask)

    def weighted_sums(self, factors: torch.Tensor) -> list[list[torch.Tensor]]:
        parts = zip(self.layers, torch.split(factors, self.sizes), strict=True)
        return [layer.weighted_sum(part) for layer, part in parts]


class _ConvolutionGradients:
    """The gradients of a convolution. It is treated like a linear layer with one row for every output position.

    The gradient of a pair is e_r a_r' + e_f a_f', with inputs a and errors e of the real (r) and the fake (f) record.
    """

    def __init__(self, layer: nn.Module, entered: torch.Tensor, error: torch.Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        assert layer.groups == 1
        assert not isinstance(layer.padding, str)
        self.num_pairs = len(entered) // 2
        self.a = functional.unfold(entered, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        self.e = error.flatten(2)  # e: (2 pairs, outputs, positions); a: (2 pairs, inputs, positions)
        self.bias = torch.add(*_halves(self.e.sum(2))).double() if layer.bias is not None else None
        (_, num_inputs, positions), num_outputs = self.a.shape, self.e.shape[1]
        # ``each``: every pair's gradient, if this is faster than scalar products of rows; otherwise None.
        self.each = None
        if 2 * positions * (num_inputs + num_outputs) > num_inputs * num_outputs:
            (real, fake), (real_e, fake_e) = _halves(self.a), _halves(self.e)
            self.each = torch.baddbmm(real_e @ real.mT, fake_e, fake.mT).flatten(1).double()
        else:
            self.a, self.e = self.a.double(), self.e.double()

    def squared_norms(self) -> torch.Tensor:
        if self.each is None:
            (real, fake), (real_e, fake_e) = _halves(self.a), _halves(self.e)
            own = ((self.a.mT @ self.a) * (self.e.mT @ self.e)).sum((1, 2))
            weight = torch.add(*_halves(own)) + 2 * ((real.mT @ fake) * (real_e.mT @ fake_e)).sum((1, 2))
            weight += _SLACK * torch.add(*_halves(_squared_norms(self.a) * _squared_norms(self.e)))
        else:
            weight = _squared_norms(self.each)
        return weight if self.bias is None else weight + _squared_norms(self.bias)

    def forget(self, pairs: torch.Tensor) -> None:
        self.e = self.e.clone()  # a copy, because this tensor may share its memory with tensors of other layers
        for rows in (self.a, self.e):
            rows[pairs.repeat_interleave(2)] = 0.0
        for gradients in (self.each, self.bias):
            if gradients is not None:
                gradients[pairs] = 0.0

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        if self.each is None:
            errors = self.e * factors.repeat_interleave(2)[:, None, None]
            weight = torch.einsum("nop,nip->oi", errors, self.a)
        else:
            weight = factors @ self.each
        return [weight] if self.bias is None else [weight, factors @ self.bias]


def _squared_norms(rows: torch.Tensor) -> torch.Tensor:
    """Return the squared norm of each row, (rows,). Further dimensions are flattened."""
    rows = rows.flatten(1)
    squares: torch.Tensor = torch.linalg.vecdot(rows, rows)
    return squares


def _halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the real rows and the fake rows of all pairs. Real and fake rows alternate in ``rows``."""
    return rows[0::2], rows[1::2]


class _InstanceNormGradients:
    """The gradients of an InstanceNorm layer.

    The gradient of the scale is the sum over positions of error times normalised input; the gradient of the shift is
    the sum of errors.
    """

    def __init__(self, layer: nn.Module, entered: torch.Tensor, error: torch.Tensor) -> None:
        assert isinstance(layer, nn.InstanceNorm2d)
        assert layer.affine
        assert not layer.track_running_stats
        self.num_pairs = len(entered) // 2
        scale, fake_scale = _halves((error * functional.instance_norm(entered, eps=layer.eps)).sum((2, 3)))
        shift, fake_shift = _halves(error.sum((2, 3)))
        self.gradients = (scale + fake_scale).double(), (shift + fake_shift).double()  # (pairs, channels) each

    def squared_norms(self) -> torch.Tensor:
        return torch.stack(self.gradients).square().sum((0, 2))

    def forget(self, pairs: torch.Tensor) -> None:
        for gradient in self.gradients:
            gradient[pairs] = 0.0

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        return [factors @ gradient for gradient in self.gradients]
