"""Analytic gradient inversion: the gradient of one record in a linear layer with a bias contains the layer's input.

For a layer z = W x + b and one record, dL/dW = (dL/dz) x^T and dL/db = dL/dz. So row c of dL/dW divided by entry c of
dL/db is x, for each c with dL/db_c != 0 (Phong et al. 2018, section 3). The label is the only class with a negative
entry in the gradient of the last layer's bias (iDLG, Zhao et al. 2020, section 3.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fl_sim.errors import UserError
from fl_sim.types import Params


@dataclass(frozen=True)
class Inverted:
    """The result for one record.

    ``error``: the largest absolute difference between the record and its reconstruction, divided by the largest
    absolute value of the record. ``label_found``: True if the label was read off the gradient.
    """

    error: float
    label_found: bool


def linear_layers(model: nn.Module) -> tuple[str, str]:
    """Return the names of the first and of the last layer of ``model``, two linear layers with biases.

    The first layer must receive the record itself. Raises UserError if the first or the last layer with parameters is
    no such layer.
    """
    layers = [(name, part) for name, part in model.named_modules() if any(True for _ in part.parameters(recurse=False))]
    for which, (name, part) in (("first", layers[0]), ("last", layers[-1])):
        if not isinstance(part, nn.Linear) or part.bias is None:
            raise UserError(
                f"the {which} layer with parameters ({name or 'the model'}) is {type(part).__name__}, and analytic "
                "inversion needs a linear layer with a bias there: give a run of model=logistic, mlp or 2nn"
            )
    return layers[0][0], layers[-1][0]


def gradient_of(model: nn.Module, record: torch.Tensor, label: torch.Tensor) -> Params:
    """Return the gradient of the cross-entropy of one record, (1, *input shape), by the names of the parameters."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    loss = functional.cross_entropy(model(record), label)
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def protected(gradient: Params, clipping_norm: float, noise_multiplier: float, coins: np.random.Generator) -> Params:
    """Return the gradient after a step of DP-SGD for one record: clipped to ``clipping_norm``, with Gaussian noise.

    ``noise_multiplier``: the standard deviation of the noise divided by ``clipping_norm``.
    """
    norm = float(torch.cat([value.flatten() for value in gradient.values()]).double().norm())
    factor, spread = min(1.0, clipping_norm / max(norm, 1e-30)), noise_multiplier * clipping_norm
    return {
        name: value * factor + torch.from_numpy(coins.normal(0, spread, tuple(value.shape))).to(value)
        for name, value in gradient.items()
    }


def invert(gradient: Params, layers: Sequence[str], record: torch.Tensor, label: int) -> Inverted:
    """Reconstruct ``record``, (1, *input shape), and ``label`` from ``gradient``; return the errors.

    ``layers``: the names of the first and of the last layer, as from ``linear_layers``.
    """
    first, last = layers
    weight, bias = gradient[_named(first, "weight")].double(), gradient[_named(first, "bias")].double()
    row = int(bias.abs().argmax())
    whole = record.flatten().double()
    found = weight[row] / bias[row] if float(bias[row]) else torch.zeros_like(whole)
    error = float((found - whole).abs().max() / whole.abs().max().clamp(min=1e-30))
    return Inverted(error, int(gradient[_named(last, "bias")].argmin()) == label)


def _named(layer: str, part: str) -> str:
    return f"{layer}.{part}" if layer else part
