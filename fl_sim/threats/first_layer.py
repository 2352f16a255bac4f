"""The exact reconstruction of records from the gradient of a linear first layer.

For a linear layer z = W x + b, dL/dW = sum_i (dL/dz_i) x_i^T and dL/db = sum_i dL/dz_i, over the records i of a batch.
So row c of dL/dW divided by entry c of dL/db is a weighted mean of the records that activate neuron c. With one record
in the batch, this mean is the record (Phong et al. 2018, section 3). If a ReLU follows, a neuron may be active for only
one record of a batch. The mean of this neuron is then this record (Boenisch et al. 2023, "When the curious abandon
honesty", section 4).

**An imprint layer** is a layer that a malicious server sends (Fowl et al. 2022, "Robbing the Fed", section 3). All
neurons compute the same mean of the inputs, with different thresholds, and the next layer treats all of them alike. So
each record adds equal numbers to the gradients of all neurons below its mean. The difference of two neurons with
neighbouring thresholds is the gradient of the records between these thresholds.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.threats.candidates import Noisy
from fl_sim.types import Params


def linear_first(model: nn.Module) -> str:
    """Return the name of the first layer with parameters in ``model``. It must be a linear layer with a bias.

    The input of this layer must be the unchanged record. Raises UserError for another kind of layer.
    """
    name, part = _with_parameters(model)[0]
    if not isinstance(part, nn.Linear) or part.bias is None:
        raise UserError(
            f"the first layer with parameters ({name or 'the model'}) is {type(part).__name__}, but analytic inversion "
            "needs a linear layer with a bias: leave --method out, or give a run of model=logistic, mlp or 2nn"
        )
    return name


def quotient(gradient: Params, layer: str) -> torch.Tensor:
    """Return the input of the linear layer ``layer``, (inputs,), computed from the gradient of one record."""
    rows = RowMeans.of(gradient, layer)
    return rows.inputs[int(rows.entries.abs().argmax())]


@dataclass(frozen=True, eq=False)
class RowMeans:
    """The weighted means of records that the rows of a linear layer's gradient give.

    ``inputs``: one mean for each neuron, (neurons, inputs), float64; zeros where the gradient is 0. ``entries``: the
    entries of the bias gradient by which the rows were divided, (neurons,).
    """

    inputs: torch.Tensor
    entries: torch.Tensor

    @classmethod
    def of(cls, gradient: Params, layer: str) -> Self:
        """Return the means from the ``gradient`` of a batch, which must contain the linear layer ``layer``."""
        weight, bias = (gradient[name].double() for name in _names(layer))
        return cls._divided(weight, bias)

    @classmethod
    def between(cls, gradient: Params, layer: str) -> Self:
        """Return the means between neighbouring thresholds of an imprint layer, from the ``gradient`` of a batch.

        Neuron c gives the mean of the records above its threshold and not above the threshold of neuron c + 1.
        """
        weight, bias = (gradient[name].double() for name in _names(layer))
        return cls._divided(
            weight - torch.cat([weight[1:], torch.zeros_like(weight[:1])]),
            bias - torch.cat([bias[1:], torch.zeros_like(bias[:1])]),
        )

    @classmethod
    def _divided(cls, weight: torch.Tensor, bias: torch.Tensor) -> Self:
        is_zero = bias == 0
        return cls(torch.where(is_zero[:, None], 0.0, weight / torch.where(is_zero, 1.0, bias)[:, None]), bias)

    def nearest(self, records: torch.Tensor) -> torch.Tensor:
        """Return the index of the mean that is nearest to each of ``records``, (n, *input shape): shape (n,)."""
        return torch.cdist(records.double().flatten(1), self.inputs).argmin(1)


def label_of(seen: Noisy, layer: str, neuron: int, record: torch.Tensor, entry: float, num_classes: int) -> int:
    """Return the label with which ``record``, (*input shape), has the bias gradient ``entry`` at ``neuron``.

    ``seen``: the client's gradients. If ``entry`` comes from several records, the result is the label with the nearest
    gradient.
    """
    bias, labels = _names(layer)[1], torch.arange(num_classes, device=record.device)
    found = torch.stack([seen.summed(record[None], label[None])[bias][neuron] for label in labels])
    return int((found.double() - entry).abs().argmin())


def imprinted(model: nn.Module, layer: str, records: torch.Tensor) -> Params:
    """Return the parameters of an imprint layer, which replaces ``layer`` of ``model``, and of the next layer.

    ``records``: the attacker's own records, (n, *input shape). Their quantiles are the thresholds, in ascending order.
    Raises UserError if the next layer with parameters is not linear.
    """
    (_, first), (name, second) = (*_with_parameters(model)[:2], ("", None))[:2]
    if not isinstance(second, nn.Linear) or not isinstance(first, nn.Linear):
        raise UserError(
            f"an imprint layer needs a linear layer after the first layer, but the model has "
            f"{type(second).__name__ if second else 'none'} there: leave --imprint out, or give a run of model=mlp or "
            "2nn"
        )
    means = records.flatten(1).double().mean(1)
    places = torch.arange(first.out_features, device=means.device).double() / first.out_features
    thresholds = torch.quantile(means, places)
    weight, bias = _names(layer)
    return {
        weight: torch.full_like(first.weight, 1 / first.in_features),
        bias: -thresholds.to(first.bias),
        _names(name)[0]: second.weight.detach()[:, :1].expand_as(second.weight) / first.out_features,
    }


def _with_parameters(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of all layers of ``model`` that directly contain parameters."""
    return [(name, part) for name, part in model.named_modules() if [*part.parameters(recurse=False)]]


def _names(layer: str) -> tuple[str, str]:
    """Return the names of the weight and of the bias of ``layer``, "" for a model that is a single layer."""
    prefix = f"{layer}." if layer else ""
    return f"{prefix}weight", f"{prefix}bias"
