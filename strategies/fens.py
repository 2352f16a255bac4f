"""FENS: a small network, trained by the clients, combines the outputs of their models (Allouah et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, kind_of
from fl_sim.types import Params
from strategies.ensemble import SeesModels


class Fens(SeesModels):
    """FedAvg; after the last round, clients train a combiner, a small model that combines their models' predictions.

    The combiner maps the logits of the m models of the last round to one vector of logits. The server sends these
    models once, and they are not trained further. A client computes their logits on records that it has held out of
    training (``evaluate.validation``, a tenth by default). Then the combiner is trained by FedAvg for
    ``combiner_rounds`` rounds. Each client runs ``combiner_epochs`` epochs of SGD with the learning rate
    ``combiner_rate`` on batches of ``combiner_batch`` records. The weight of a client is its number of held-out
    records.

    ``combiner``: "weights" is a weighted sum of logits. It has one weight per model and class, initially 1/m, so with 0
    combiner rounds the result is the mean of the logits. "network" is the paper's first choice, with one hidden layer
    of 2 m units. (The released code trains this network for 500 rounds, with FedAdam at the server, and sends models as
    8-bit numbers.)

    The final accuracy is that of the ensemble of all models with the combiner. Compare it with ensembles, not with one
    model. ``model.safetensors`` contains the mean model. ``ensemble-DIGEST.safetensors`` contains the models and the
    combiner. The validation accuracy is that of the mean model.
    """

    kind: Literal["fens"] = "fens"
    title: ClassVar[str] = "FENS"
    stage: ClassVar[str] = "fl_sim.stages.fens:TrainedCombiner"
    starts_with: ClassVar[Mapping[str, Any]] = {"evaluate": {"validation": 0.1}}
    combiner: Literal["weights", "network"] = "weights"
    combiner_rounds: int = Field(50, ge=0, le=10**5)
    combiner_epochs: int = Field(1, ge=1)
    combiner_rate: float = Field(0.01, gt=0)
    combiner_batch: int = Field(128, ge=1)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if clients are hostile, hold no records out, or hide their models from the server."""
        super().check(experiment)
        if experiment.attack.clients:
            raise ValueError(
                f"algorithm fens cannot run with attack {kind_of(experiment.attack)}: hostile clients would send an "
                "honest combiner, which no attack here changes; leave attack out, or take algorithm feddf or dense"
            )
        if not isinstance(experiment.evaluate.validation, float) or not experiment.evaluate.validation:
            raise ValueError(
                "algorithm fens trains its combiner on records that clients hold out of training, and "
                f"evaluate.validation={experiment.evaluate.validation} holds out none: set evaluate.validation=0.1"
            )

    def first(self, num_models: int, num_classes: int, generator: np.random.Generator) -> Params:
        """Return the initial parameters of the combiner, the small model that combines the logits of the models."""
        if self.combiner == "weights":
            return {"weights": torch.full((num_models, num_classes), 1 / num_models)}
        made, before = dict[str, torch.Tensor](), num_models * num_classes
        for name, after in (("hidden", 2 * num_models), ("output", num_classes)):
            bound = before**-0.5
            made[name] = torch.from_numpy(generator.uniform(-bound, bound, (after, before))).float()
            made[f"{name} bias"], before = torch.zeros(after), after
        return made

    def trained(
        self, combiner: Params, logits: torch.Tensor, labels: torch.Tensor, generator: np.random.Generator
    ) -> Params:
        """Return the combiner after a client's local training on the models' ``logits`` of its held-out records.

        ``logits``: (n, models, classes). ``labels``: (n,).
        """
        weights = {name: value.clone().requires_grad_() for name, value in combiner.items()}
        sgd = torch.optim.SGD(list(weights.values()), lr=self.combiner_rate)
        for _ in range(self.combiner_epochs if len(labels) else 0):
            for rows in torch.split(torch.from_numpy(generator.permutation(len(labels))), self.combiner_batch):
                sgd.zero_grad()
                loss = torch.nn.functional.cross_entropy(combined(weights, logits[rows]), labels[rows])
                torch.autograd.backward(loss)
                sgd.step()
        return {name: value.detach() for name, value in weights.items()}

    def note(self) -> str:
        """Return the note below result tables: the accuracy is that of an ensemble."""
        return "FENS: the accuracy is that of all clients' models under a trained combiner, not of one model."


def combined(combiner: Params, logits: torch.Tensor) -> torch.Tensor:
    """Return the combiner's logits, (n, classes), from the models' ``logits``, (n, models, classes)."""
    if "weights" in combiner:
        return (logits * combiner["weights"]).sum(1)
    functional = torch.nn.functional
    hidden = functional.linear(logits.flatten(1), combiner["hidden"], combiner["hidden bias"]).relu()
    return functional.linear(hidden, combiner["output"], combiner["output bias"])
