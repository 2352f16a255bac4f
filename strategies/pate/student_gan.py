"""PATE-G: the student as the discriminator of a semi-supervised GAN (Salimans et al. 2016, sections 3.1 and 5).

A classifier's L logits also say whether a record is real: D(x) = Z / (Z + 1), Z the sum of their exponentials, which is
an extra class "fake" whose logit is 0. The generator matches the mean of the classifier's features on real records.
Without the start from data (Salimans and Kingma 2016, section 3) the noise between the layers drowns what they say.
"""

import copy
from itertools import pairwise
from typing import Final, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from fl_sim.errors import UserError
from fl_sim.seeding import seed_torch, torch_kept
from fl_sim.settings import Settings
from strategies.pate.student import StudentData, Watch, batches, descend, generator_for, move_average, nobody, set_rate

_NOISE: Final = 100
_START: Final = 500


class FeatureMatchingGan(Settings):
    """Adam on both networks, one step each in turn, as in the paper; ``averaging`` of the weights that are returned.

    The learning rate falls to 0 over the second half of the ``steps``.
    """

    kind: Literal["pate-g"] = "pate-g"
    steps: int = Field(2000, ge=1)
    batch_size: int = Field(100, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    averaging: float = Field(0.99, ge=0, lt=1)

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return a convolutional classifier for colour images, the paper's for MNIST for all else."""
        colour = len(input_shape) == 3 and input_shape[0] == 3 and min(input_shape[1:]) >= 8
        return (conv_classifier if colour else gan_classifier)(input_shape, num_classes)

    def train(self, data: StudentData, model: nn.Module, seed: int, watch: Watch = nobody) -> nn.Module:
        """Return a trained copy of ``model``, in evaluation mode; its last linear layer's input are the features."""
        if len(data.unlabelled) == 0:
            raise UserError("student pate-g learns from unlabelled records and there are none: take supervised")
        with torch_kept():
            seed_torch(seed, "pate-g student")
            random, model = generator_for(seed, "pate-g student"), copy.deepcopy(model).train()
            start_from(model, data.unlabelled[:_START])
            average, game = copy.deepcopy(model).eval(), _Game(model, data)
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            learner = torch.optim.Adam(trained, self.learning_rate, betas=(0.5, 0.999), fused=True)
            forger = torch.optim.Adam(game.forger.parameters(), self.learning_rate, betas=(0.5, 0.999), fused=True)
            labelled = batches(len(data.labels), self.batch_size, random)
            public = batches(len(data.unlabelled), self.batch_size, random)
            for step in range(self.steps):
                rate = self.learning_rate * min(1.0, 2 * (1 - step / self.steps))
                for optimizer in (learner, forger):
                    set_rate(optimizer, rate)
                real, theirs = data.unlabelled[next(public)], next(labelled)
                descend(learner, game.classifier_loss(data.labelled[theirs], data.labels[theirs], real))
                descend(forger, game.forger_loss(real))
                move_average(average, model, min(self.averaging, (step + 1) / (step + 10)))
                watch(step + 1, rate, average)
        return average


def gan_classifier(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the paper's classifier for MNIST: six linear layers, Gaussian noise before each, weight normalisation.

    The paper's noise of 0.3 on pixels in 0 to 1 is about 1 on normalised ones.
    """
    widths = [int(torch.Size(input_shape).numel()), 1000, 500, 250, 250, 250]
    layers: list[nn.Module] = [nn.Flatten(), GaussianNoise(1.0)]
    for inputs, outputs in pairwise(widths):
        layers += [_normalised(nn.Linear(inputs, outputs)), nn.ReLU(), GaussianNoise(0.5)]
    return nn.Sequential(*layers, _normalised(nn.Linear(widths[-1], num_classes)))


def conv_classifier(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a classifier for colour images after the paper's for CIFAR-10, with six convolutions instead of nine."""
    layers: list[nn.Module] = [nn.Dropout(0.2)]
    inputs = input_shape[0]
    for outputs, stride, drop in ((32, 1, 0.0), (32, 2, 0.5), (64, 1, 0.0), (64, 2, 0.5), (128, 1, 0.0), (128, 1, 0.0)):
        layers += [_normalised(nn.Conv2d(inputs, outputs, 3, stride, 1)), nn.LeakyReLU(0.2)]
        layers += [nn.Dropout(drop)] if drop else []
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), _normalised(nn.Linear(inputs, num_classes)))


def _normalised(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    """Return the layer with normalised weights, of the directions that the paper's program begins with."""
    nn.init.normal_(layer.weight, std=0.05)  # how long a direction is decides how far a step of Adam turns it
    normalised: nn.Module = nn.utils.parametrizations.weight_norm(layer)
    return normalised


class GaussianNoise(nn.Module):
    """Adds N(0, ``std``^2) while training."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs`` with noise, or as they are in evaluation mode."""
        return inputs + self.std * torch.randn_like(inputs) if self.training else inputs


def start_from(model: nn.Module, records: torch.Tensor) -> None:
    """Give every weight-normalised layer of a ``Sequential`` outputs of mean 0 and deviation 1 on ``records``.

    The lengths of the weights stay as they are from then on but for the last layer's, as in the paper's program.
    """
    length = None
    with torch.no_grad():
        for layer in model.children():
            if nn.utils.parametrize.is_parametrized(layer):
                weights, outputs = dict(layer.named_parameters()), layer(records)
                over = [axis for axis in range(outputs.ndim) if axis != 1]
                spread = outputs.std(dim=over).clamp(min=1e-6)
                weights["bias"].sub_(outputs.mean(dim=over)).div_(spread)
                length = weights["parametrizations.weight.original0"]
                length.div_(spread.view(-1, *[1] * (length.ndim - 1)))
                length.requires_grad = False
            records = layer(records)
    if length is not None:
        length.requires_grad = True


def _forger(shape: torch.Size) -> nn.Module:
    """Return a generator of records in 0 to 1: transposed convolutions for colour images, else three linear layers."""
    if len(shape) == 3 and shape[0] == 3 and shape[1] % 8 == shape[2] % 8 == 0:
        height, width = shape[1] // 8, shape[2] // 8
        return nn.Sequential(
            nn.Linear(_NOISE, 128 * height * width), nn.BatchNorm1d(128 * height * width), nn.ReLU(),
            nn.Unflatten(1, (128, height, width)),
            nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip
    return nn.Sequential(
        nn.Linear(_NOISE, 500), nn.BatchNorm1d(500), nn.Softplus(),
        nn.Linear(500, 500), nn.BatchNorm1d(500), nn.Softplus(),
        nn.Linear(500, int(shape.numel())), nn.Sigmoid(),
    )  # fmt: skip


class _Game:
    """The classifier, in two parts between which its features lie, the forger, and the losses of both."""

    def __init__(self, model: nn.Module, data: StudentData) -> None:
        layers = list(model.children())
        last = -2 if isinstance(layers[-2], GaussianNoise) else -1
        self.body, self.head = nn.Sequential(*layers[:last]), nn.Sequential(*layers[last:])
        self.shape = data.unlabelled.shape[1:]
        self.forger = _forger(self.shape).to(data.unlabelled.device)
        self.low, self.high = data.unlabelled.amin(), data.unlabelled.amax()

    def classifier_loss(self, labelled: torch.Tensor, labels: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fake = self._forged(len(real))
        # At once: weights are normalised again in every pass.
        logits = self.head(self.body(torch.cat([labelled, real, fake])))
        ours, logits_real, logits_fake = torch.split(logits, [len(labelled), len(real), len(fake)])
        mass_real, mass_fake = logits_real.logsumexp(dim=1), logits_fake.logsumexp(dim=1)
        # -log D(real) = softplus(-mass), -log(1 - D(fake)) = softplus(mass)
        is_real = functional.softplus(-mass_real).mean() + functional.softplus(mass_fake).mean()
        return functional.cross_entropy(ours, labels) + is_real / 2

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
        forged = self.forger(torch.rand(count, _NOISE, device=self.low.device))
        images: torch.Tensor = self.low + (self.high - self.low) * forged
        return images.reshape(count, *self.shape)
