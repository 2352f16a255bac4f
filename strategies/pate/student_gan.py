"""PATE-G: the student as the discriminator of a semi-supervised GAN (Salimans et al. 2016, sections 3.1 and 5).

A classifier's L logits also say whether a record is real: D(x) = Z / (Z + 1), Z the sum of their exponentials, which is
an extra class "fake" whose logit is 0. The generator matches the mean of the classifier's features on real records.
Without the start from data (Salimans and Kingma 2016, section 3) the noise between the layers drowns what they say.
"""

from __future__ import annotations

import copy
from typing import Final, Literal

from pydantic import Field

from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.seeding import seed_torch, torch_kept
from fl_sim.settings import Settings
from strategies.pate.student import (
    Batches,
    Coins,
    Part,
    StudentData,
    Watch,
    descend,
    generator_for,
    move_average,
    nobody,
    set_rate,
)

_LATENT: Final = 100  # how many random numbers a forger starts from
_START: Final = 500


class FeatureMatchingGan(Settings):
    """Adam on both networks, one step each in turn, as in the paper; ``averaging`` of the weights that are returned.

    ``learning_rate``: Adam's; it falls to 0 over the second half of the ``steps``. ``batch_size``: labelled records in
    a step, and as many unlabelled and made ones.
    """

    kind: Literal["pate-g"] = "pate-g"
    steps: int = Field(2000, ge=1)
    batch_size: int = Field(100, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    averaging: float = Field(0.99, ge=0, lt=1)

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return a convolutional classifier for colour images, the paper's for MNIST for all else."""
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        colour = len(input_shape) == 3 and input_shape[0] == 3 and min(input_shape[1:]) >= 8
        build = networks.conv_classifier if colour else networks.gan_classifier
        return build(input_shape, num_classes)

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a trained copy of ``model``, in evaluation mode; its last linear layer's input are the features."""
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        if len(data.unlabelled) == 0:
            raise UserError("student pate-g learns from unlabelled records and there are none: take supervised")
        with torch_kept():
            seed_torch(seed, "pate-g student")
            random, model = generator_for(seed, "pate-g student"), copy.deepcopy(model).train()
            networks.start_from(model, data.unlabelled[:_START])
            average, game = copy.deepcopy(model).eval(), _Game(model, data)
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            learner = torch.optim.Adam(trained, self.learning_rate, betas=(0.5, 0.999), fused=True)
            forger = torch.optim.Adam(game.forger.parameters(), self.learning_rate, betas=(0.5, 0.999), fused=True)
            labelled = Batches(len(data.labels), self.batch_size, random)
            public = Batches(len(data.unlabelled), self.batch_size, random)
            parts: dict[str, Part] = {
                "model": model, "average": average, "forger": game.forger, "optimizer": learner,
                "forger optimizer": forger, "labelled": labelled, "public": public, "coins": Coins(random),
            }  # fmt: skip
            for step in range(watch.begin(parts), self.steps):
                rate = self.learning_rate * min(1.0, 2 * (1 - step / self.steps))
                for optimizer in (learner, forger):
                    set_rate(optimizer, rate)
                real, theirs = data.unlabelled[next(public)], next(labelled)
                descend(learner, game.classifier_loss(data.labelled[theirs], data.labels[theirs], real))
                descend(forger, game.forger_loss(real))
                move_average(average, model, min(self.averaging, (step + 1) / (step + 10)))
                watch(step + 1, rate, average)
        return average


class _Game:
    """The classifier, in two parts between which its features lie, the forger, and the losses of both."""

    def __init__(self, model: torch.nn.Module, data: StudentData) -> None:
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        layers = list(model.children())
        last = -2 if isinstance(layers[-2], networks.GaussianNoise) else -1
        self.body, self.head = torch.nn.Sequential(*layers[:last]), torch.nn.Sequential(*layers[last:])
        self.shape = data.unlabelled.shape[1:]
        self.forger = networks.forger(self.shape, _LATENT).to(data.unlabelled.device)
        self.low, self.high = data.unlabelled.amin(), data.unlabelled.amax()

    def classifier_loss(self, labelled: torch.Tensor, labels: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fake = self._forged(len(real))
        # At once: weights are normalised again in every pass.
        logits = self.head(self.body(torch.cat([labelled, real, fake])))
        ours, logits_real, logits_fake = torch.split(logits, [len(labelled), len(real), len(fake)])
        mass_real, mass_fake = logits_real.logsumexp(dim=1), logits_fake.logsumexp(dim=1)
        # -log D(real) = softplus(-mass), -log(1 - D(fake)) = softplus(mass)
        is_real = torch.nn.functional.softplus(-mass_real).mean() + torch.nn.functional.softplus(mass_fake).mean()
        return torch.nn.functional.cross_entropy(ours, labels) + is_real / 2

    def forger_loss(self, real: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.body(real).mean(dim=0)
        trained = [weight for weight in self.body.parameters() if weight.requires_grad]
        for weight in trained:
            weight.requires_grad = False  # the forger's step is not the classifier's
        features = self.body(self._forged(len(real))).mean(dim=0)
        for weight in trained:
            weight.requires_grad = True
        loss: torch.Tensor = (features - target).square().mean()
        return loss

    def _forged(self, count: int) -> torch.Tensor:
        forged = self.forger(torch.rand(count, _LATENT, device=self.low.device))
        images: torch.Tensor = self.low + (self.high - self.low) * forged
        return images.reshape(count, *self.shape)
