"""A trainer of your own: DP-SGD on clients, which clips every record's gradient and adds noise to their sum.

    fl-sim run algorithm=private_steps:PrivateSteps algorithm.noise_multiplier=1 model=logistic

This is a short version of Abadi et al. 2016, algorithm 1, which only shows how a trainer is added. It gives no privacy
guarantee: no ledger is charged and no epsilon printed, the noise follows from the run's seed, and floating-point noise
leaks information about the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.func import functional_call, grad, vmap

from fl_sim.errors import UserError
from fl_sim.local_plan import fields_in_use
from fl_sim.training.trainer import LocalJob, LocalTrainer
from fl_sim.types import Params, Trained
from strategies.algorithm import Averaging


class PrivateSteps(Averaging):
    """FedAvg with noisy local steps.

    The noise on a sum of gradients has standard deviation ``noise_multiplier`` times ``clipping_norm``.
    """

    title: ClassVar[str] = "FedAvg with private steps"
    clipping_norm: float = Field(1.0, gt=0)
    noise_multiplier: float = Field(1.0, ge=0)

    def trainers(self, model: nn.Module) -> Sequence[LocalTrainer]:
        """Return the trainer ``RecordLevel``, which trains every job or raises an error."""
        return [RecordLevel(model, self.clipping_norm, self.noise_multiplier)]


@dataclass(frozen=True)
class RecordLevel:
    """Trains one client by DP-SGD with Poisson batches of ``batch_size`` records on average."""

    model: nn.Module
    clipping_norm: float
    noise_multiplier: float

    def supports(self, job: LocalJob) -> bool:
        """Return True, or raise UserError: after False, fl-sim would take another trainer, which adds no noise."""
        known = {"learning_rate", "batch_size", "epochs", "steps", "momentum", "weight_decay"}
        if unknown := sorted((fields_in_use(job.task.settings) | fields_in_use(job.plan)) - known):
            raise UserError(f"private steps are steps of SGD without {', '.join(unknown)}: leave {unknown[0]} out")
        return True

    def train(self, job: LocalJob) -> Trained:
        """Return the trained parameters after as many steps as plain SGD would take."""
        settings, (inputs, labels) = job.task.settings, job.records.tensors()
        params = dict(job.task.params)
        steps = settings.num_steps(len(labels))
        rate = min(1.0, settings.batch_size / max(1, len(labels)))
        loss_of = partial(_loss, self.model)
        velocity = {name: torch.zeros_like(value) for name, value in params.items()}
        losses: list[float] = []
        for _ in range(steps):
            batch = torch.from_numpy(np.flatnonzero(job.generator.random(len(labels)) < rate))
            summed = self._summed(loss_of, params, inputs[batch], labels[batch])
            for name, value in list(params.items()):
                noise = torch.from_numpy(job.generator.standard_normal(value.shape)).to(value.dtype)
                noisy = summed[name] + self.noise_multiplier * self.clipping_norm * noise
                step = noisy / (rate * len(labels)) + settings.weight_decay * value
                velocity[name] = settings.momentum * velocity[name] + step
                params[name] = value - settings.learning_rate * velocity[name]
            losses.append(float(_loss(self.model, params, inputs, labels)))
        return Trained(params, {}, steps, float(np.mean(losses)) if losses else None)

    def _summed(
        self, loss_of: partial[torch.Tensor], params: Params, inputs: torch.Tensor, labels: torch.Tensor
    ) -> Params:
        """Return the sum of the records' gradients, each clipped as a whole."""
        if not len(labels):
            return {name: torch.zeros_like(value) for name, value in params.items()}
        each = vmap(grad(lambda weights, x, y: loss_of(weights, x[None], y[None])), (None, 0, 0))(
            dict(params), inputs, labels
        )
        norms = torch.stack([value.flatten(1).double().norm(dim=1) for value in each.values()]).norm(dim=0)
        factors = (self.clipping_norm / norms.clamp_min(self.clipping_norm)).float()
        return {name: torch.tensordot(factors, value, 1) for name, value in each.items()}


def _loss(model: nn.Module, params: Params, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(functional_call(model, dict(params), (inputs,)), labels)
