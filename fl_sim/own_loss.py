"""Models that compute their loss themselves, such as a language model, which predicts each next token of a text.

Such a model has a method ``loss_of(inputs, labels)``. The method returns the loss and the number of right predictions
of each record. For all other models, the loss is the cross-entropy between their logits, (n, classes), and the labels.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.func import functional_call

from fl_sim.errors import UserError
from fl_sim.local_plan import fields_in_use

_OF_LOGITS = frozenset({
    "mix", "logit_shift", "logit_scale", "distillation", "suppression", "contrast", "pull", "loss_term",
    "class_features", "label_smoothing",
})  # fmt: skip
"""The fields of LocalPlan and LocalSettings that change a cross-entropy of logits (n, classes)."""


class Outcome(NamedTuple):
    """The loss and the predictions of a model on n records.

    ``losses``: (n,), the mean loss of each record's predictions. ``right``: (n,), the number of right predictions of
    each record. ``counts``: (n,), the number of all predictions of each record, which may be 0.
    """

    losses: torch.Tensor
    right: torch.Tensor
    counts: torch.Tensor


@runtime_checkable
class OwnLoss(Protocol):
    """The interface of a model that computes its loss itself."""

    def loss_of(self, inputs: torch.Tensor, labels: torch.Tensor) -> Outcome:
        """Return the outcome for inputs (n, *input shape) with labels (n,), which the model may ignore.

        The losses are differentiable. A record's loss and counts must not depend on the other records.
        """
        ...


def losses_of(model: nn.Module) -> Callable[[Mapping[str, torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of a model that computes its loss itself, as a function of the parameters.

    The function has the arguments (parameters, inputs, labels), and returns the n losses of the records, (n,).
    """
    calling = _Calling(model)

    def losses(params: Mapping[str, torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        named = {f"model.{name}": value for name, value in params.items()}
        found: torch.Tensor = functional_call(calling, named, (inputs, labels)).losses
        return found

    return losses


def check_own_loss(model: nn.Module, *asked: Any) -> None:
    """Raise UserError if a model computes its loss itself, but the plan or the settings change a cross-entropy.

    ``asked``: the local plan (the algorithm's additions to local SGD) and the settings of local training.
    """
    if isinstance(model, OwnLoss) and (found := sorted(frozenset().union(*map(fields_in_use, asked)) & _OF_LOGITS)):
        raise UserError(
            f"the model {type(model).__name__} computes its own loss (loss_of), and {found[0]} changes the "
            "cross-entropy of a classifier: take another method or setting, or a model that classifies"
        )


class _Calling(nn.Module):
    """A module whose ``forward`` calls a model's ``loss_of``.

    PyTorch's ``functional_call``, which replaces parameters, calls only ``forward``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Outcome:
        assert isinstance(self.model, OwnLoss)
        return self.model.loss_of(inputs, labels)
