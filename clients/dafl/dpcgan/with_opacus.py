"""The private gradient of the discriminator D by Opacus (Yousefpour et al. 2021): hooks, optimiser and accountant.

This module avoids known faults of Opacus. Real and fake records take two forward passes through D and one backward
pass. So a pair of a record and a fake is clipped as one vector. After two backward passes, the gradients of the record
and of the fake would be clipped separately. An empty batch gives a sum of zeros, not an error. A pair whose gradient is
not finite counts as the zero vector, not as NaN in every parameter. The generator's steps use a discriminator without
hooks. All computation is float64, because the norm of a vector that is clipped in float32 may exceed the bound. The
noise is fl-sim's secret noise, rounded to fl-sim's rounding grid. PyTorch's random generator is not used.

One weakness of Opacus remains. A pair's gradient depends on the other pairs of the batch, although only in the rounding
of float64. The module ``clients.dafl.dpcgan.clipping`` does not have this weakness.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from opacus.accountants import RDPAccountant
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn import functional

from clients.dafl.dpcgan.clipping import MARGIN
from clients.dafl.generator import GeneratorBill
from fl_sim.privacy.mechanisms import Noise, add_noise


@dataclass(frozen=True)
class OpacusTerms:
    """The privacy parameters of the training of a client's discriminator.

    ``bill``: the stated privacy cost. ``batch``: the expected number of pairs in a step. ``std``: the standard
    deviation of the noise on the sum of the pairs' gradients. ``bound``: the clipping norm of a pair's gradient.
    ``noise``: the source of the noise.
    """

    bill: GeneratorBill
    batch: float
    std: float
    bound: float
    noise: Noise


class SecretOptimizer(DPOptimizer):  # type: ignore[misc] # Opacus comes without types
    """Opacus' optimiser with noise from fl-sim. It computes a private gradient, but does not update the weights.

    It clips the pairs' gradients, adds them up, adds noise, and divides. fl-sim's ``Adam`` then updates the weights of
    all clients at once.
    """

    def __init__(self, parameters: list[nn.Parameter], terms: OpacusTerms) -> None:
        super().__init__(
            torch.optim.SGD(parameters, lr=1.0),
            noise_multiplier=terms.bill.noise_multiplier,
            max_grad_norm=terms.bound * (1 - MARGIN),
            expected_batch_size=terms.batch,
        )
        self.terms, self.number = terms, 0

    def clip_and_accumulate(self) -> None:
        """Clip the pairs' gradients and add them up. A pair is left out if its gradient is not finite."""
        finite = torch.stack([gradient.flatten(1).square().sum(1) for gradient in self.grad_samples]).sum(0).isfinite()
        for parameter in self.params:
            parameter.grad_sample = parameter.grad_sample[finite]
        super().clip_and_accumulate()

    def add_noise(self) -> None:
        """Round the sum of gradients, add noise, and store the result as the parameters' ``grad``."""
        total = torch.cat([parameter.summed_grad.flatten() for parameter in self.params]).numpy()
        if std := self.terms.std:
            source, number = self.terms.noise, self.number
            drawn = source.gaussian(len(total), std, purpose="discriminator gradient", server_round=number)
            total = add_noise(total, std, drawn)
        sizes = [parameter.numel() for parameter in self.params]
        for parameter, part in zip(self.params, torch.split(torch.from_numpy(total), sizes), strict=True):
            parameter.grad = part.view_as(parameter)


class OpacusGradients:
    """Computes one client's private gradients by Opacus, with a float64 copy of D, an optimiser and an accountant."""

    def __init__(self, discriminator: nn.Sequential, terms: OpacusTerms) -> None:
        self.discriminator, self.bill = discriminator, terms.bill
        self.copy = deepcopy(discriminator).double()
        self.hooked = GradSampleModule(self.copy, loss_reduction="sum")
        self.weights = list(self.copy.parameters())
        self.optimizer = SecretOptimizer(self.weights, terms)
        self.accountant = RDPAccountant()
        self.optimizer.attach_step_hook(self.accountant.get_optimizer_hook_fn(terms.bill.sampling_rate))

    def released(self, real: torch.Tensor, fake: torch.Tensor, step: int) -> torch.Tensor:
        """Return D's noisy gradient for a step on pairs of a real and a fake record, as a flat float32 vector."""
        with torch.no_grad():
            for weight, current in zip(self.weights, self.discriminator.parameters(), strict=True):
                weight.copy_(current)
        self.optimizer.zero_grad()
        if len(real):
            real, fake = (half.double().requires_grad_() for half in (real, fake))
            scores = self.hooked(real), self.hooked(fake)
            torch.autograd.backward(functional.softplus(-scores[0]).sum() + functional.softplus(scores[1]).sum())
        else:
            for weight in self.weights:
                weight.grad_sample = weight.new_zeros(0, *weight.shape)  # type: ignore[attr-defined] # an attribute of Opacus
        self.optimizer.number = step
        self.optimizer.pre_step()
        gradients: list[Any] = [weight.grad for weight in self.weights]
        return torch.cat([gradient.flatten() for gradient in gradients]).float()

    def check(self) -> None:
        """Raise AssertionError if noise, sampling rate or steps in Opacus' accountant differ from those in the bill."""
        billed = [(self.bill.noise_multiplier, self.bill.sampling_rate, self.bill.steps)]
        assert self.accountant.history == billed, "the releases in Opacus' accountant differ from the charged releases"
