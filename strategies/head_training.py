"""Training of a model's head at the server, on features that the server has drawn, as in CCVR and FedPFT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import Diverged
from fl_sim.importing import torch
from fl_sim.params import is_finite, trainable
from fl_sim.types import Params

if TYPE_CHECKING:
    from torch import nn

_Step: TypeAlias = Callable[[list["torch.Tensor"]], None]


@dataclass(frozen=True)
class HeadTraining:
    """The settings of the head's training: cross-entropy, and plain SGD or torch's AdamW with its default values.

    ``setting``: the name of the setting with the learning rate, for error messages. ``epochs``: the number of passes
    over the feature vectors. ``batch_size``: the number of feature vectors in a step.
    """

    setting: str
    learning_rate: float
    epochs: int
    batch_size: int
    optimizer: Literal["sgd", "adamw"] = "sgd"

    def stepping(self, values: list[torch.Tensor]) -> _Step:
        """Return a function that makes one optimiser step on ``values``. Its argument: the gradients of ``values``."""
        if self.optimizer == "sgd":

            def step(gradients: list[torch.Tensor]) -> None:  # torch.optim is not used: its import takes seconds
                for value, gradient in zip(values, gradients, strict=True):
                    value.sub_(gradient, alpha=self.learning_rate)

            return step
        adamw = torch.optim.AdamW(values, lr=self.learning_rate)

        def adamw_step(gradients: list[torch.Tensor]) -> None:
            for value, gradient in zip(values, gradients, strict=True):
                value.grad = gradient
            adamw.step()

        return adamw_step


def with_trained_head(
    training: HeadTraining,
    model: nn.Module,
    params: Params,
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    generator: np.random.Generator,
) -> Params:
    """Return ``params`` with a head trained on ``features`` (n, d) and ``labels`` (n,), shuffled in each epoch.

    ``model``: gives the architecture; its head is overwritten. Raises Diverged if the trained head is not finite.
    """
    from fl_sim.training.features import head_of  # noqa: PLC0415 (loads torch, and settings come from here)

    head = head_of(model).eval()
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is head)
    own = trainable(head)
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(params[prefix + name])
    inputs, targets, step = torch.from_numpy(features), torch.from_numpy(labels), training.stepping(list(own.values()))
    for _ in range(training.epochs):
        order = torch.from_numpy(generator.permutation(len(targets)))
        for batch in torch.split(order, training.batch_size):
            loss = torch.nn.functional.cross_entropy(head(inputs[batch]), targets[batch])
            gradients = torch.autograd.grad(loss, list(own.values()))
            with torch.no_grad():
                step(list(gradients))
    trained = {prefix + name: value.detach() for name, value in own.items()}
    if not is_finite({"head": trained}):
        raise Diverged(f"the head is not finite after its training; try a smaller {training.setting}.learning_rate")
    return {name: trained.get(name, value) for name, value in params.items()}
