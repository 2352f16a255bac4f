"""The training of the DP conditional GAN by PyTorch: the steps that a stack of clients takes together."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from clients.dafl.dpcgan.client import Client, Drawn, kept_of_average
from clients.dafl.dpcgan.clipping import Pairs, clipped_sums
from clients.dafl.dpcgan.nets import generated, scored
from clients.dafl.dpcgan.weights import Adam, Weights
from fl_sim.privacy.mechanisms import add_noise

if TYPE_CHECKING:
    from clients.dafl.dpcgan.settings import DpCgan
    from clients.dafl.dpcgan.with_opacus import OpacusGradients


class Training:
    """A stack of clients whose training takes equally many steps."""

    def __init__(self, settings: "DpCgan", clients: Sequence[Client]) -> None:
        self.settings, self.clients = settings, clients
        self.discriminators = [client.nets.discriminator for client in clients]
        self.generators = [client.nets.generator for client in clients]
        self.generator_weights = [list(generator.parameters()) for generator in self.generators]
        self.weights = Weights(self.generators)
        self.average = Weights([client.average for client in clients])
        self.discriminator_adam = Adam(Weights(self.discriminators), settings.discriminator_learning_rate)
        self.generator_adam = Adam(self.weights, settings.generator_learning_rate)
        self.by_opacus = [_opacus(client) for client in clients] if settings.gradients == "opacus" else []

    def step(self, step: int) -> None:
        """Take step number ``step``."""
        self.discriminator_step(step)
        if (step + 1) % self.settings.ratio == 0:
            self.generator_step()
        for client in self.clients:
            client.draw_samples((step + 1) / client.bill.steps, partial(views_of_average, client))
        if step + 1 == self.clients[0].bill.steps:
            for one in self.by_opacus:
                one.check()

    def discriminator_step(self, step: int) -> None:
        """Release each client's noised sum of clipped gradients, and let Adam take it from there."""
        real = [batch_of(client, step) for client in self.clients]
        fake = self._fakes_of_records(real, step)
        released = self._by_opacus(real, fake, step) if self.by_opacus else self._by_own_code(real, fake, step)
        self.discriminator_adam.step([[gradient] for gradient in released])

    def _by_own_code(self, real: Sequence[torch.Tensor], fake: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        pairs = [
            Pairs(client.nets.discriminator, records, made, client.bound)
            for client, records, made in zip(self.clients, real, fake, strict=True)
        ]
        return [released(client, total, step) for client, total in zip(self.clients, clipped_sums(pairs), strict=True)]

    def _by_opacus(self, real: Sequence[torch.Tensor], fake: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        batches = zip(self.by_opacus, real, fake, strict=True)
        return [one.released(records, made, step) for one, records, made in batches]

    @torch.no_grad()
    def _fakes_of_records(self, real: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        """Return as many fakes as each client has records in this step, as D's input."""
        fakes = list(real)  # of no records no fakes
        some = [place for place, rows in enumerate(real) if len(rows)]
        if some:
            drawn = [self.clients[place].for_fakes_of_records(len(real[place]), step) for place in some]
            for place, fake in zip(some, _joined_fakes([self.clients[place] for place in some], drawn), strict=True):
                fakes[place] = fake
        return fakes

    def generator_step(self) -> None:
        """Let G's fakes pass better with D (non-saturating loss). Touches nothing private."""
        drawn = [client.for_fakes() for client in self.clients]
        scores = scored(self.discriminators, _joined_fakes(self.clients, drawn))
        losses = [functional.softplus(-of_fakes).mean() for of_fakes in scores]
        found = iter(torch.autograd.grad(losses, [weight for one in self.generator_weights for weight in one]))
        self.generator_adam.step([[next(found) for _ in one] for one in self.generator_weights])
        self.average.vector.lerp_(self.weights.vector, 1 - kept_of_average(self.settings, self.generator_adam.steps))


def batch_of(client: Client, step: int) -> torch.Tensor:
    """Return D's input for the records of a step. SENSITIVE."""
    chosen = client.chosen(step)
    return client.joined(client.views.index_select(0, torch.from_numpy(chosen)), client.places[chosen])


def released(client: Client, clipped_sum: torch.Tensor, step: int) -> torch.Tensor:
    """Return the noised gradient that the sum of a step stands for, flat."""
    total = clipped_sum.numpy()
    if client.std:
        total = add_noise(total, client.std, client.noise_of(step))
    divided = np.empty(client.dimension, np.float32)
    np.divide(total, client.batch, out=divided, casting="same_kind")
    return torch.from_numpy(divided)


@torch.no_grad()
def views_of_average(client: Client, drawn: Drawn) -> torch.Tensor:
    """Return the views that the average of a client's G makes of what was drawn."""
    [views] = generated([client.average], [client.joined(*drawn)])
    return views


def _joined_fakes(clients: Sequence[Client], drawn: Sequence[Drawn]) -> list[torch.Tensor]:
    """Return what each client's G makes of what was drawn, as D's input."""
    made = generated([client.nets.generator for client in clients], _joined(clients, drawn))
    return _joined(clients, [(views, places) for views, (_, places) in zip(made, drawn, strict=True)])


def _joined(clients: Sequence[Client], drawn: Sequence[Drawn]) -> list[torch.Tensor]:
    return [client.joined(*parts) for client, parts in zip(clients, drawn, strict=True)]


def _opacus(client: Client) -> "OpacusGradients":
    from clients.dafl.dpcgan.with_opacus import OpacusGradients, Terms  # noqa: PLC0415 (loads slowly, few runs need it)

    terms = Terms(client.bill, client.batch, client.std, client.bound, client.noise)
    return OpacusGradients(client.nets.discriminator, terms)
