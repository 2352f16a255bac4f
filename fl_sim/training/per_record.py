"""Sums of clipped per-record gradients, by two functions with the same results up to float32 rounding.

``by_layers`` is for models of linear layers, convolutions and group norms. One forward and backward pass gives, for
each layer, the layer's inputs a and the gradient d of the loss with respect to the layer's outputs. For one record, the
gradient of a linear layer's weights is the outer product of d and a. So the norm of this gradient is |d| |a|, and the
weighted sum
over records is one matrix product: no per-record gradient is stored (Goodfellow 2015; "ghost clipping", Li et al. 2022,
section 4).

``by_records`` is for all other models. It computes the gradient of each record from this record only, so no layer can
mix records.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fl_sim import models
from fl_sim.clipping import FLAT, Clipping
from fl_sim.own_loss import OwnLoss, losses_of
from fl_sim.params import copied
from fl_sim.types import Params

ClippedSum: TypeAlias = Callable[[torch.Tensor, torch.Tensor, float], NDArray[np.float64]]
"""A function (inputs (b, *input shape), labels (b,), limit) -> the sum of the records' gradients, shape (size,).

Each record's gradient of all trained parameters is first clipped to the L2 norm ``limit``, as ``Clipping`` describes. A
gradient that is not finite is replaced by zeros. ``size`` is the number of all trained parameters. The sum is computed
in float64.
"""

_MOST_NUMBERS: Final = 2**24
"""The largest number of float32 numbers of all per-record gradients in memory at the same time: 64 MiB."""

_PLAIN: Final = {
    nn.Sequential, nn.Identity, nn.Flatten, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Linear, nn.Conv2d, nn.GroupNorm,
    models.ResidualBlock,
}  # fmt: skip
"""Classes of modules that compute each record's outputs only from this record."""


def clipped_sum_of(model: nn.Module, trained: Params, smoothing: float, clipping: Clipping = FLAT) -> ClippedSum:
    """Return the function that computes sums of clipped gradients of ``model`` at its current weights.

    ``trained``: the trained parameters of the model. ``smoothing``: the label smoothing of the loss. ``clipping``: the
    rule that bounds the gradients.
    """
    return (by_layers if _has_rules(model) else by_records)(model, trained, smoothing, clipping)


def _has_rules(model: nn.Module) -> bool:
    """Return True if ``by_layers`` supports the type of every layer, and no layer and no parameter is used twice."""
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    weights = [weight for _, weight in model.named_parameters(remove_duplicate=False)]
    is_used_once = len({*map(id, modules)}) == len(modules) and len({*map(id, weights)}) == len(weights)
    return is_used_once and all(type(module) in _PLAIN and _has_rule(module) for module in modules)


def _has_rule(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d):
        return True
    return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def by_layers(model: nn.Module, trained: Params, smoothing: float, clipping: Clipping = FLAT) -> ClippedSum:
    """Return a function that sums clipped per-record gradients, from one backward pass.

    The model may have linear layers, convolutions and group norms, and must use each layer only once.
    """
    owners = {name.rpartition(".")[0] for name in trained}  # the layers with trained parameters
    layers = {name: part for name, part in model.named_modules() if name in owners}
    names_of, shares = clipping.parts(trained), clipping.shares(trained)

    def clipped_sum(inputs: torch.Tensor, labels: torch.Tensor, limit: float) -> NDArray[np.float64]:
        if not len(labels):
            return np.zeros(sum(value.numel() for value in trained.values()))
        seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

        def see(name: str) -> Callable[[nn.Module, tuple[torch.Tensor], torch.Tensor], None]:
            def hook(_: nn.Module, given: tuple[torch.Tensor], made: torch.Tensor) -> None:
                assert name not in seen, f"{name} is called twice"
                seen[name] = given[0].detach(), made

            return hook

        with ExitStack() as hooks:
            for name, layer in layers.items():
                handle = layer.register_forward_hook(see(name))
                hooks.callback(handle.remove)
            loss = functional.cross_entropy(model(inputs), labels, reduction="sum", label_smoothing=smoothing)
        backwards = torch.autograd.grad(loss, [made for _, made in seen.values()])
        parts: dict[str, _Part] = {}
        for (name, (given, _)), back in zip(seen.items(), backwards, strict=True):
            parts |= _parts_of(name, layers[name], given, back)
        squares = [torch.stack([parts[name].squares() for name in names]).sum(dim=0) for names in names_of.values()]
        factors = zip(names_of.values(), _factors(squares, shares, clipping.stability, limit), strict=True)
        sums = {name: parts[name].summed(each).flatten() for names, each in factors for name in names}
        return torch.cat([sums[name] for name in trained]).cpu().numpy()

    return clipped_sum


class _Part:
    """The gradients of one parameter for b records.

    If ``right`` is None, the gradient of record i is ``left[i]``. Otherwise this gradient is the outer product of
    ``left[i]`` and ``right[i]``, which is never stored.
    """

    def __init__(self, left: torch.Tensor, right: torch.Tensor | None = None) -> None:
        self.left, self.right = left.double(), None if right is None else right.double()

    def squares(self) -> torch.Tensor:
        """Return the squared norm of each record's gradient, shape (b,), in float64."""
        squares = self.left.flatten(1).square().sum(dim=1)
        return squares if self.right is None else squares * self.right.square().sum(dim=1)

    def summed(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of factor * gradient over all records. Gradients with factor 0, also NaN, are left out."""
        kept = factors > 0
        left, factors = self.left[kept], factors[kept]
        if self.right is None:
            return torch.einsum("b,b...->...", factors, left)
        return torch.mm((left * factors[:, None]).T, self.right[kept])


def _parts_of(name: str, layer: nn.Module, given: torch.Tensor, back: torch.Tensor) -> Mapping[str, _Part]:
    """Return the per-record gradients of the parameters of ``layer``.

    ``given``: the layer's inputs. ``back``: the gradient of the loss with respect to the layer's outputs.
    """
    prefix = f"{name}." if name else ""
    if isinstance(layer, nn.Linear) and given.ndim == 2:
        return {f"{prefix}weight": _Part(back, given), f"{prefix}bias": _Part(back)}
    if isinstance(layer, nn.Linear):  # inputs with more than two axes, such as (batch, tokens, features)
        outer, inner = back.flatten(1, -2), given.flatten(1, -2)
        return {
            f"{prefix}weight": _Part(torch.bmm(outer.transpose(1, 2), inner)),
            f"{prefix}bias": _Part(outer.sum(dim=1)),
        }
    if isinstance(layer, nn.Conv2d):
        columns = functional.unfold(given, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type] # padding is no text here
        weight = torch.bmm(back.flatten(2), columns.transpose(1, 2))
        return {f"{prefix}weight": _Part(weight), f"{prefix}bias": _Part(back.flatten(2).sum(dim=2))}
    assert isinstance(layer, nn.GroupNorm)
    normal = functional.group_norm(given, layer.num_groups, eps=layer.eps)
    by_channel = (*back.shape[:2], -1)
    return {
        f"{prefix}weight": _Part((back * normal).reshape(by_channel).sum(dim=2)),
        f"{prefix}bias": _Part(back.reshape(by_channel).sum(dim=2)),
    }


def by_records(model: nn.Module, trained: Params, smoothing: float, clipping: Clipping = FLAT) -> ClippedSum:
    """Return a function that sums clipped per-record gradients, for any model.

    The gradient of each record is computed from only this record. One call of ``vmap`` computes the gradients of all
    records. If a layer of the model does not support ``vmap``, such as a GRU, the gradients are computed record by
    record.
    """
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    rest = {name: value for name, value in everything.items() if name not in trained}
    size = sum(value.numel() for value in trained.values())
    names_of, shares = clipping.parts(trained), clipping.shares(trained)
    twin = copied(model)  # a copy: if the model uses a module twice, functional_call changes this module

    own_losses = losses_of(twin) if isinstance(model, OwnLoss) else None

    def loss(weights: Params, record: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if own_losses is not None:
            return own_losses({**rest, **weights}, record[None], label[None])[0]
        logits = functional_call(twin, {**rest, **weights}, (record[None],))
        return functional.cross_entropy(logits, label[None], label_smoothing=smoothing)

    together = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    # True if ``vmap`` supports the model, None if this is not known before the first batch, False for recurrent layers.
    works: bool | None = False if any(isinstance(part, nn.RNNBase) for part in model.modules()) else None

    def gradients(weights: Params, inputs: torch.Tensor, labels: torch.Tensor) -> Mapping[str, torch.Tensor]:
        nonlocal works
        fixed = {name: weight.detach() for name, weight in weights.items()}
        if works is not False:
            try:
                found: dict[str, torch.Tensor] = together(fixed, inputs, labels)
            except RuntimeError:
                if works:
                    raise
                works = False
            else:
                works = True
                return found
        leaves = {name: weight.requires_grad_() for name, weight in fixed.items()}
        losses = (loss(leaves, record, label) for record, label in zip(inputs, labels, strict=True))
        each = [torch.autograd.grad(one, list(leaves.values())) for one in losses]
        return {name: torch.stack(parts) for name, parts in zip(leaves, zip(*each, strict=True), strict=True)}

    def clipped_sum(inputs: torch.Tensor, labels: torch.Tensor, limit: float) -> NDArray[np.float64]:
        total = torch.zeros(size, dtype=torch.float64, device=inputs.device)
        for chunk in torch.split(torch.arange(len(labels), device=inputs.device), max(1, _MOST_NUMBERS // size)):
            if not len(chunk):
                continue
            each = gradients(trained, inputs[chunk], labels[chunk])
            parts = [
                _Part(torch.cat([each[name].detach().flatten(1) for name in names], dim=1))
                for names in names_of.values()
            ]
            factors = _factors([part.squares() for part in parts], shares, clipping.stability, limit)
            total += torch.cat([part.summed(each) for part, each in zip(parts, factors, strict=True)])
        return total.cpu().numpy()

    return clipped_sum


def _factors(
    squares: Sequence[torch.Tensor], shares: Sequence[float], stability: float, limit: float
) -> list[torch.Tensor]:
    """Return the clipping factors of b records, one tensor (b,) for each group of parameters.

    ``squares``: the squared gradient norms of each group, (b,). ``limit``: the clipping norm of a whole gradient.
    ``shares``: the clipping norm of each group, divided by ``limit``. Without ``stability``, a factor is min(1,
    clipping norm / norm). With ``stability``, a factor is clipping norm / (norm + ``stability``), as in ``Clipping``.
    If any part of a record's gradient is not finite, all factors of the record are 0.
    """
    norms = [square.sqrt() for square in squares]
    is_finite = torch.stack(norms).isfinite().all(dim=0)

    def factor(norm: torch.Tensor, most: float) -> torch.Tensor:
        if stability:
            return most / (norm + stability)
        return torch.where(norm <= most, 1.0, most / norm)

    found = [factor(norm, limit * share) for norm, share in zip(norms, shares, strict=True)]
    return [torch.where(is_finite, one, 0.0) for one in found]
