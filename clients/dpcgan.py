"""PSG: a conditional GAN under record-level DP (Tang, Wang, Liu 2023; Xie et al. 2018; Bie, Kamath, Zhang 2023).

The discriminator D alone sees records, and learns by DP-SGD: each step takes every record by an independent coin of
probability q, pairs it with a fake, clips the gradient of loss(D(real), 1) + loss(D(fake), 0) as one vector to C, sums,
adds N(0, (z C)^2) and divides by the public qn. The generator G learns from D, which is released already. Noise and
number of steps are fixed from the budget before the first record is looked at.

Coins, and what the fakes of a D step are made of, come from the secret source: were a fake's latent vector known, and
dealt out by position in the batch, one record more would change the fakes of all that follow it.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch.nn import functional

from clients.dpcgan_clipping import clipped_sum
from clients.dpcgan_nets import Networks, paper, small
from clients.generation import Bill, PrivateRecords
from fl_sim.config import Settings
from fl_sim.privacy.mechanisms import Noise, add_noise, clipping_norm_on_grid
from fl_sim.seeding import torch_kept
from fl_sim.types import RunError

_BETAS: Final = (0.5, 0.999)
_WARM_UP: Final = 0.2
_ROUNDING: Final = 1e-9


class DpCgan(Settings):
    """The DP conditional GAN.

    The defaults were chosen for ten one-class clients of MNIST at epsilon 10 and one CPU thread, by what a classifier
    trained on the samples made of the last sixth of the training records.

    ``networks``: "small" perceptrons, or the "paper"'s convolutions (a step costs a hundred times as much).
    ``discriminator_steps``: D's steps, each a release; 300 are enough for 8x8 digits. ``batch_size``: expected records
    in one; a client with no more records than that takes all in every step. ``ratio``: D's steps for one of G, with
    ``generator_batch_size`` fakes. ``clipping_norm``: C. ``averaging``: decay of the moving average of G's weights,
    which makes the samples. ``snapshots``: moments of training that the samples are drawn at; G by itself collapses to
    a lump that follows D about, and where the lump has been is what D has learnt of the records (as in herding,
    Welling 2009). ``latent_dim``: G's noise. ``resolution`` (pixels a side that D sees), ``discriminator_width``,
    ``generator_width``: of the small networks alone.
    """

    kind: Literal["dp-cgan"] = "dp-cgan"
    networks: Literal["small", "paper"] = "small"
    discriminator_steps: int = Field(2000, ge=1)
    batch_size: int = Field(256, ge=1)
    ratio: int = Field(1, ge=1)
    generator_batch_size: int = Field(128, ge=1)
    clipping_norm: float = Field(1.0, gt=0)
    discriminator_learning_rate: float = Field(2e-3, gt=0)
    generator_learning_rate: float = Field(2e-3, gt=0)
    averaging: float = Field(0.8, ge=0, lt=1)
    snapshots: int = Field(100, ge=1)
    latent_dim: int = Field(10, ge=1)
    resolution: int = Field(14, ge=1)
    discriminator_width: int = Field(64, ge=1)
    generator_width: int = Field(64, ge=1)

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> Bill:  # noqa: ARG002 (the protocol's)
        """Return the cost of ``discriminator_steps`` steps with the least noise that (epsilon, delta) allows.

        Refused where that noise, in every single parameter, is longer than all gradients of an expected batch together
        could be, z > qn: then no step can tell the records from the noise.
        """
        # dp_accounting loads slowly, and most runs need no generator.
        from dp_accounting import dp_event  # noqa: PLC0415

        from fl_sim.privacy.accounting import amplify_poisson  # noqa: PLC0415
        from fl_sim.privacy.planning import noise_multiplier  # noqa: PLC0415

        if num_records == 0:
            return Bill(dp_event.NoOpDpEvent(), 0, 0.0, 0.0, refused="the client holds no records")
        rate = min(1.0, self.batch_size / num_records)
        if epsilon == math.inf:
            return Bill(dp_event.NonPrivateDpEvent(), self.discriminator_steps, 0.0, rate)
        amplify = partial(amplify_poisson, sampling_rate=rate)
        noise = noise_multiplier(amplify, self.discriminator_steps, epsilon, delta)
        refused = ""
        if noise > rate * num_records:
            refused = (
                f"{num_records} records are too few for epsilon {epsilon:g}: the noise of a step, {noise:.3g} clipping "
                f"norms in every parameter, exceeds the sum of {rate * num_records:.3g} expected gradients"
            )
        return Bill(amplify(dp_event.GaussianDpEvent(noise)), self.discriminator_steps, noise, rate, refused)

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: Bill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        """Train within ``bill`` and return (sum of counts, *input shape): see ``Generator``."""
        assert not bill.refused
        if counts.sum() == 0:
            return torch.empty(0, *records.inputs.shape[1:])
        with torch_kept():
            torch.manual_seed(int(generator.integers(2**63)))
            training = _Training(self, records, counts, bill, noise)
            for step in range(bill.steps):
                training.discriminator_step(step)
                if (step + 1) % self.ratio == 0:
                    training.generator_step()
                training.draw_samples((step + 1) / bill.steps)
            return training.samples()


class _Training:
    """The state of one client's training. ``shown`` and ``known`` alone are private; all else is released."""

    def __init__(
        self, settings: DpCgan, records: PrivateRecords, counts: NDArray[np.int64], bill: Bill, noise: Noise
    ) -> None:
        self.settings, self.bill, self.noise = settings, bill, noise
        present = np.flatnonzero(counts)
        self.counts = counts[present]
        self.num_planes = len(present) if len(present) > 1 else 0
        self.nets = self._networks(tuple(records.inputs.shape[1:]))
        self.sizes = [weight.numel() for weight in self.nets.discriminator.parameters()]
        self.average = deepcopy(self.nets.generator).requires_grad_(requires_grad=False)
        self.generator_steps = 0
        # Which records are drawn when, at random: each class has its share of early and of late ones.
        self.classes = self._one_hot(np.repeat(np.arange(len(present)), self.counts))
        self.due = list(torch.randperm(len(self.classes)).tensor_split(min(settings.snapshots, len(self.classes))))
        self.made: list[torch.Tensor] = []
        rates = settings.discriminator_learning_rate, settings.generator_learning_rate
        self.discriminator_adam, self.generator_adam = (
            _Adam(list(net.parameters()), rate)
            for net, rate in zip((self.nets.discriminator, self.nets.generator), rates, strict=True)
        )
        # A record of a class that was not released takes part, and its gradient is taken for zero.
        places = np.full(records.num_classes, -1)
        places[present] = np.arange(len(present))
        labels = places[records.labels.numpy()]
        self.known = labels >= 0
        self.shown = self.nets.join(self.nets.view(records.inputs), self._one_hot(np.maximum(labels, 0)))

    def _networks(self, shape: tuple[int, ...]) -> Networks:
        settings = self.settings
        if settings.networks == "paper":
            return paper(shape, self.num_planes, settings.latent_dim)
        widths = settings.discriminator_width, settings.generator_width
        return small(shape, self.num_planes, settings.latent_dim, settings.resolution, widths)

    def _one_hot(self, places: NDArray[np.int64]) -> torch.Tensor:
        return torch.eye(len(self.counts))[torch.from_numpy(places)][:, : self.num_planes]

    def discriminator_step(self, step: int) -> None:
        """Release one noised sum of clipped gradients, and let Adam take it from there."""
        settings, discriminator = self.settings, self.nets.discriminator
        coins = self.noise.uniform(len(self.shown), purpose="records of a step", server_round=step)
        batch = torch.from_numpy(np.flatnonzero((coins < self.bill.sampling_rate) & self.known))
        real = self.shown[batch]
        fake = self._fakes_of_records(len(batch), step) if len(batch) else real
        std = self.bill.noise_multiplier * settings.clipping_norm
        dimension = sum(self.sizes)
        bound = clipping_norm_on_grid(settings.clipping_norm, std, dimension) if std else math.inf
        total = clipped_sum(discriminator, real, fake, bound).numpy()
        if std:
            normal = self.noise.standard_normal(dimension, purpose="discriminator gradient", server_round=step)
            total = add_noise(total, std, normal)
        gradient = torch.from_numpy(total / (self.bill.sampling_rate * len(self.shown))).float()
        self.discriminator_adam.step(torch.split(gradient, self.sizes))

    @torch.no_grad()
    def _fakes_of_records(self, count: int, step: int) -> torch.Tensor:
        """Return D's input for ``count`` fakes: labels by the released counts, nothing from another record."""
        latent_dim = self.settings.latent_dim
        latent = self.noise.standard_normal(count * latent_dim, purpose="latent vectors", server_round=step)
        coins = self.noise.uniform(count, purpose="classes of fakes", server_round=step)
        shares = np.cumsum(self.counts) / self.counts.sum()
        classes = self._one_hot(np.searchsorted(shares[:-1], coins, side="right"))
        made = self.nets.generator(self.nets.join(torch.from_numpy(latent).float().view(count, latent_dim), classes))
        return self.nets.join(made, classes)

    def generator_step(self) -> None:
        """Let G's fakes pass better with D (non-saturating loss). Touches nothing private."""
        nets = self.nets
        made, classes = self._fakes(self.settings.generator_batch_size)
        scores = nets.discriminator(nets.join(made, classes))
        weights = list(nets.generator.parameters())
        self.generator_adam.step(torch.autograd.grad(functional.softplus(-scores).mean(), weights))
        self.generator_steps += 1
        # Early on a short average, else the first weights would linger in it.
        decay = min(self.settings.averaging, self.generator_steps / (self.generator_steps + 10))
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), weights, strict=True):
                mean.lerp_(weight, 1 - decay)

    def _fakes(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shares = torch.from_numpy(self.counts / self.counts.sum())
        classes = self._one_hot(torch.multinomial(shares, count, replacement=True).numpy())
        return self.nets.generator(self.nets.join(torch.randn(count, self.settings.latent_dim), classes)), classes

    def draw_samples(self, done: float) -> None:
        """Draw what is due when a share ``done`` of training is over: equal parts, evenly spaced after the warm-up."""
        while done >= _WARM_UP + (1 - _WARM_UP) * (len(self.made) + 1) / len(self.due) - _ROUNDING:
            classes = self.classes[self.due[len(self.made)]]
            latent = torch.randn(len(classes), self.settings.latent_dim)
            with torch.no_grad():
                self.made.append(self.average(self.nets.join(latent, classes)))

    def samples(self) -> torch.Tensor:
        """Return as many records of each class as its count says, in order of class."""
        views = torch.cat(self.made)[torch.cat(self.due).argsort()]
        for network, name in (self.nets.discriminator, "discriminator"), (self.nets.generator, "generator"):
            if not all(bool(weight.isfinite().all()) for weight in network.parameters()):
                raise RunError(f"the {name} of the DP conditional GAN is not finite: use a lower learning rate")
        return self.nets.render(views)


class _Adam:
    """Adam (Kingma and Ba 2015); torch.optim's costs over a second of imports at first use."""

    def __init__(self, weights: list[torch.Tensor], learning_rate: float) -> None:
        self.weights, self.learning_rate, self.steps = weights, learning_rate, 0
        self.means = [torch.zeros_like(weight) for weight in weights]
        self.squares = [torch.zeros_like(weight) for weight in weights]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Move the weights; each gradient has as many elements as its weight."""
        self.steps += 1
        first, second = (1 - beta**self.steps for beta in _BETAS)
        for weight, gradient, mean, square in zip(self.weights, gradients, self.means, self.squares, strict=True):
            shaped = gradient.view_as(weight)
            mean.lerp_(shaped, 1 - _BETAS[0])
            square.mul_(_BETAS[1]).addcmul_(shaped, shaped, value=1 - _BETAS[1])
            weight.addcdiv_(mean, (square / second).sqrt_().add_(1e-8), value=-self.learning_rate / first)
