"""One discriminator step of DP-CGAN on a worst case, and versions with faults, for ``release_audit.py``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, TypeAlias
from unittest import mock

import numpy as np
import torch
from dp_accounting import dp_event
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from clients.dafl.dpcgan import training as dpcgan
from clients.dafl.dpcgan.clipping import ClientPairs
from clients.dafl.dpcgan.settings import DpCgan
from clients.dafl.dpcgan.training import Adam, CompiledTraining, GanClient, StackTraining
from clients.dafl.generator import GeneratorBill, GeneratorRequest, PrivateRecords
from fl_sim.privacy.audit import World
from fl_sim.privacy.mechanisms import Noise

Array = NDArray[np.float64]

_CLIPPING: Final = 0.1
"""The clipping norm. It is smaller than any pair's gradient, so an unclipped gradient is detected."""

FAR: Final = 1e4
"""The distance of an audited record from [-1, 1]. Clipping must hold for any record."""


@dataclass(frozen=True)
class DiscriminatorStep:
    """One D step and what is wrong with it. The release is the noised SUM of gradients, flat.

    ``record``: the input of the audited record, and ``networks``: the seed of the first weights, together the worst
    case. Compiled code takes the step where it can. ``clipping_norm``: the step's, noise staying what it is.
    ``apart``: real and fake are clipped one by one, which PyTorch does.
    ``histogram``: fakes get their classes from the client's own records. ``realised``: the sum is divided by the size
    of the batch.
    """

    name: str
    noise_multiplier: float
    sampling_rate: float = 1.0
    record: float = -FAR
    networks: int = 4
    clipping_norm: float = _CLIPPING
    apart: bool = False
    histogram: bool = False
    realised: bool = False

    _BYSTANDERS = 3

    def __call__(self, world: World, run: int) -> Array:
        """Take the first step of a training on some bystanders of class 0 and the audited record of class 1."""
        total = _prepared(self, world)(Noise.seeded(run)) * self.sampling_rate * (self._BYSTANDERS + 1)
        return total * (self._BYSTANDERS + 1) / (self._BYSTANDERS + world) if self.realised else total

    def prepared(self, world: World) -> "Gradient":
        """Return the function of a training's first step, which does not change the weights."""
        others = self._BYSTANDERS
        inputs = torch.full((others + 1, 1), -1.0)
        inputs[-1] = self.record
        labels = torch.tensor([*[0] * others, 1 if world else 2])
        settings = DpCgan(
            discriminator_steps=1, batch_size=len(inputs), clipping_norm=self.clipping_norm, latent_dim=2,
            discriminator_width=4, generator_width=4,
        )  # fmt: skip
        noise_multiplier = self.noise_multiplier * _CLIPPING / self.clipping_norm
        bill = GeneratorBill(dp_event.GaussianDpEvent(noise_multiplier), 1, noise_multiplier, self.sampling_rate)
        first_weights = mock.create_autospec(np.random.Generator, instance=True)
        first_weights.integers.return_value = self.networks
        request = GeneratorRequest(
            PrivateRecords(inputs, labels, 3), np.array([1, 1, 0]), bill, Noise.seeded(0), first_weights
        )
        client = GanClient(settings, request)
        if self.histogram:
            client.counts = np.array([others, world])
        if client.kernel and not self.apart:
            return partial(_by_compiled, client, CompiledTraining(settings, client, client.kernel))
        training = StackTraining(settings, [client, *self.neighbours(settings)])
        return partial(_by_pytorch, training, _clipped_apart if self.apart else dpcgan.clipped_sums)

    def neighbours(self, settings: DpCgan) -> list[GanClient]:
        """Return two more clients of the stack, of other sizes. They have no effect on the audited client."""
        return [
            GanClient(settings, GeneratorRequest(
                PrivateRecords(torch.full((number, 1), 1.0), torch.zeros(number, dtype=torch.int64), 3),
                np.array([2, 0, 0]), GeneratorBill(dp_event.GaussianDpEvent(1.0), 1, 1.0, 0.5), Noise.seeded(number),
                np.random.default_rng(number),
            ))
            for number in (1, 40)
        ]  # fmt: skip


Gradient: TypeAlias = Callable[[Noise], Array]
"""From the source of coins and noise to the gradient that a step releases."""


@lru_cache(maxsize=2)
def _prepared(step: DiscriminatorStep, world: World) -> Gradient:
    """Return the prepared training. All runs share it, because no step changes it."""
    return step.prepared(world)


def _by_compiled(client: GanClient, training: CompiledTraining, noise: Noise) -> Array:
    client.noise = noise
    adam = training.adversaries.discriminator_adam
    adam.described.learning_rate = 0.0
    training.discriminator_step(0)
    return adam.gradient.astype(np.float64)


def _by_pytorch(
    training: StackTraining, sums: Callable[[Sequence[ClientPairs]], list[torch.Tensor]], noise: Noise
) -> Array:
    training.clients[0].noise = noise
    released: list[Sequence[torch.Tensor]] = []
    with (
        mock.patch.object(dpcgan, "clipped_sums", sums),
        mock.patch.object(Adam, "step", lambda _, each: released.extend(each)),
    ):
        training.discriminator_step(0)
    [gradient] = released[0]  # of the audited client, the first
    vector: Array = gradient.double().numpy()
    return vector


def _clipped_apart(clients: Sequence[ClientPairs]) -> list[torch.Tensor]:
    return [_one_clipped_apart(one.discriminator, one.real, one.fake, one.clipping_norm) for one in clients]


def _one_clipped_apart(net: nn.Sequential, real: torch.Tensor, fake: torch.Tensor, bound: float) -> torch.Tensor:
    total = torch.zeros(sum(weight.numel() for weight in net.parameters()), dtype=torch.float64)
    for row, sign in [*((row, -1) for row in real), *((row, 1) for row in fake)]:
        gradients = torch.autograd.grad(functional.softplus(sign * net(row[None])).sum(), list(net.parameters()))
        flat = torch.cat([part.flatten() for part in gradients]).double()
        total += flat * (bound / flat.norm()).clamp(max=1)
    return total
