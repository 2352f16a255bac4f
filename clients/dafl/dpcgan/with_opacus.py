"""The discriminator's private gradient by Opacus (Yousefpour et al. 2021): its hooks, its optimiser, its accountant.

Known faults of Opacus are avoided. Real and fake pass D in two passes and back in one, so that a pair is clipped as one
vector; after two backward passes they would be clipped apart. A batch of no records is a sum of zeros, not an error. A
pair whose gradient is not finite counts as the zero vector, not as NaN in every parameter. The generator's steps use a
discriminator without hooks. Everything is float64, since a vector that is clipped in float32 may be longer than the
bound; and noise comes from the client's secret source and lies on its grid, not from torch's generator.

Opacus is trusted in one point: that a pair's gradient hardly depends on the pairs beside it. It does by float64's
rounding, which ``clients.dafl.dpcgan.clipping`` rules out.
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
    """The terms of the training of a client's discriminator.

    ``batch``: the expected number of pairs; ``std``: of the noise on their sum; ``bound``: the clipping norm of each.
    """

    bill: GeneratorBill
    batch: float
    std: float
    bound: float
    noise: Noise


class SecretOptimizer(DPOptimizer):  # type: ignore[misc] # comes without types
    """Opacus' optimiser with noise from our source, for the first half of a step: clip, sum, add noise, divide.

    The second half, Adam, is this project's own, on the weights of all clients at once.
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
        """Clip and sum, without the pairs that have a gradient that is not finite."""
        finite = torch.stack([gradient.flatten(1).square().sum(1) for gradient in self.grad_samples]).sum(0).isfinite()
        for parameter in self.params:
            parameter.grad_sample = parameter.grad_sample[finite]
        super().clip_and_accumulate()

    def add_noise(self) -> None:
        """Add noise on the grid to the sum, rounded to the grid, and leave it where Opacus does."""
        total = torch.cat([parameter.summed_grad.flatten() for parameter in self.params]).numpy()
        if std := self.terms.std:
            source, number = self.terms.noise, self.number
            drawn = source.gaussian(len(total), std, purpose="discriminator gradient", server_round=number)
            total = add_noise(total, std, drawn)
        sizes = [parameter.numel() for parameter in self.params]
        for parameter, part in zip(self.params, torch.split(torch.from_numpy(total), sizes), strict=True):
            parameter.grad = part.view_as(parameter)


class OpacusGradients:
    """One client's discriminator for Opacus: a float64 copy with hooks, an optimiser and an accountant."""

    def __init__(self, discriminator: nn.Sequential, terms: OpacusTerms) -> None:
        self.discriminator, self.bill = discriminator, terms.bill
        self.copy = deepcopy(discriminator).double()
        self.hooked = GradSampleModule(self.copy, loss_reduction="sum")
        self.weights = list(self.copy.parameters())
        self.optimizer = SecretOptimizer(self.weights, terms)
        self.accountant = RDPAccountant()
        self.optimizer.attach_step_hook(self.accountant.get_optimizer_hook_fn(terms.bill.sampling_rate))

    def released(self, real: torch.Tensor, fake: torch.Tensor, step: int) -> torch.Tensor:
        """Return the noised gradient of a step on (real, fake) pairs, flat and float32."""
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
                weight.grad_sample = weight.new_zeros(0, *weight.shape)  # type: ignore[attr-defined] # Opacus' own
        self.optimizer.number = step
        self.optimizer.pre_step()
        gradients: list[Any] = [weight.grad for weight in self.weights]
        return torch.cat([gradient.flatten() for gradient in gradients]).float()

    def check(self) -> None:
        """Raise AssertionError unless Opacus' accountant has counted exactly the releases of the bill."""
        billed = [(self.bill.noise_multiplier, self.bill.sampling_rate, self.bill.steps)]
        assert self.accountant.history == billed, "Opacus has counted other releases than were charged"
