"""The training of the DP conditional GAN: PyTorch trains many clients together, compiled code trains one client.

D is the discriminator, G the generator. Both kinds of training use ``GanClient``. It contains a client's random
numbers, its records, and its number of synthetic records of each class. Private label selection made these numbers, so
they may be published. Views are records in D's input form, such as coarse images. A class is released if the client
makes synthetic records of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from clients.dafl.dpcgan.clipping import MARGIN, ClientPairs, clipped_sums
from clients.dafl.dpcgan.nets import Networks, SmallGenerator, generated, kernel_for, paper, scored, small
from clients.dafl.generator import GeneratorRequest
from fl_sim.errors import RunError
from fl_sim.native.images import ImageDiscriminator, ImageGenerator
from fl_sim.native.kernel import CompiledNormals, Kernel
from fl_sim.native.perceptrons import Adversaries, CompiledAdam, GradientNoise, Pairs, Perceptron, Shown, TwoWays
from fl_sim.privacy.mechanisms import add_noise, clipping_norm_on_grid, grid_spacing
from fl_sim.seeding import torch_alone

if TYPE_CHECKING:
    from clients.dafl.dpcgan.settings import DpCgan
    from clients.dafl.dpcgan.with_opacus import OpacusGradients

Drawn: TypeAlias = tuple[torch.Tensor, NDArray[np.int64]]
"""The inputs of G for some fakes: latent vectors, and classes as indices into the released classes."""

BETAS: Final = (0.5, 0.999)
_ALIGNMENT: Final = 64  # each network's weights begin at a multiple of this number of floats (see ``Weights``)
_WARM_UP: Final = 0.2  # the fraction of the training before the first synthetic records are drawn
_ROUNDING: Final = 1e-9
_GENERATOR_STEPS_AHEAD: Final = 50
# the number of steps for which random numbers are drawn at once; so few numbers fit into the processor's cache
_DISCRIMINATOR_STEPS_AHEAD: Final = 16


class GanClient:
    """One client's networks, records and random numbers.

    SENSITIVE, because they could reveal the client's records: ``views``, ``places``, ``known`` and ``noise``. A class
    is released if the client makes synthetic records of it. ``views``: the client's records in D's input form.
    ``places``: the class of each record, as an index into the released classes. ``known``: False for records whose
    class is not released. ``noise``: the secret noise. All other attributes are differentially private or public, so
    they may be published.
    """

    def __init__(self, settings: DpCgan, request: GeneratorRequest) -> None:
        records, self.bill, self.noise = request.records, request.bill, request.noise
        self.settings = settings
        present = np.flatnonzero(request.counts)
        self.counts = request.counts[present]
        self.num_planes = len(present) if len(present) > 1 else 0
        shape = tuple(records.inputs.shape[1:])
        with torch_alone():
            torch.manual_seed(int(request.generator.integers(2**63)))
            if settings.networks == "paper":
                self.nets = paper(shape, self.num_planes, settings.latent_dim)
            else:
                widths = settings.discriminator_width, settings.generator_width
                self.nets = small(shape, self.num_planes, settings.latent_dim, settings.resolution, widths)
        self.kernel = kernel_for(self.nets) if settings.is_compilable else None
        if self.kernel:
            self.noise = replace(self.noise, normals=CompiledNormals(self.kernel))
        self.random = torch.Generator().manual_seed(int(request.generator.integers(2**63)))
        self.shares = torch.from_numpy(self.counts / self.counts.sum())
        self.average = deepcopy(self.nets.generator).requires_grad_(requires_grad=False)
        self.dimension = sum(weight.numel() for weight in self.nets.discriminator.parameters())
        self.std = self.bill.noise_multiplier * settings.clipping_norm
        norm, held = settings.clipping_norm, len(records.labels)
        self.batch = self.bill.sampling_rate * held
        self.bound = clipping_norm_on_grid(norm, self.std, self.dimension, summands=held) if self.std else math.inf
        # Synthetic records are drawn during training, in random order, so that every class has records of early and
        # late steps.
        self.classes = np.repeat(np.arange(len(present)), self.counts)
        order = torch.randperm(len(self.classes), generator=self.random)
        self.due = list(order.tensor_split(min(settings.snapshots, len(self.classes))))
        self.made: list[torch.Tensor] = []
        self.ahead: list[Drawn] = []
        # A record is sampled even if its class is not released. Its gradient then counts as zero.
        places = np.full(records.num_classes, -1)
        places[present] = np.arange(len(present))
        labels = places[records.labels.numpy()]
        self.known = labels >= 0
        self.places = np.maximum(labels, 0)
        self.views = self.nets.view(records.inputs)

    def joined(self, values: torch.Tensor, places: NDArray[np.int64]) -> torch.Tensor:
        """Return the input of a network: ``values`` (views or latent vectors), each row joined to its one-hot class.

        ``places``: the index of each row's class.
        """
        classes = (
            torch.eye(self.num_planes)[torch.from_numpy(places)] if self.num_planes else torch.empty(len(places), 0)
        )
        return self.nets.join(values, classes)

    def chosen(self, step: int) -> NDArray[np.int64]:
        """Draw the records for a step of D by Poisson sampling, and return their indices.

        The indices are SENSITIVE: they must stay secret. Sampled records are left out if the client makes no synthetic
        records of their class. So their gradients count as zero.
        """
        rate = self.bill.sampling_rate
        chosen = np.flatnonzero(
            self.noise.taking_part(len(self.known), rate, purpose="records of a step", server_round=step)
        )
        known: NDArray[np.int64] = chosen[self.known[chosen]]
        return known

    def for_fakes_of_records(self, count: int, step: int) -> Drawn:
        """Return the inputs of G for ``count`` fakes of a step of D.

        The inputs depend only on secret noise, and on the differentially private number of synthetic records of each
        class.
        """
        latent_dim = self.settings.latent_dim
        latent = self.noise.standard_normal(count * latent_dim, purpose="latent vectors", server_round=step)
        classes = np.zeros(count, np.int64)
        if self.num_planes:
            coins = self.noise.uniform(count, purpose="classes of fakes", server_round=step)
            classes = np.searchsorted((np.cumsum(self.counts) / self.counts.sum())[:-1], coins, side="right")
        return torch.from_numpy(latent.astype(np.float32)).view(count, latent_dim), classes

    def noise_of(self, step: int) -> NDArray[np.float64]:
        """Return the noise for the sum of clipped gradients in a step of D.

        Sums and noise are rounded to multiples of a grid step. The noise is returned in grid steps, as whole numbers.

        The standard deviation ``std`` of the noise must not be 0.
        """
        return self.noise.gaussian(self.dimension, self.std, purpose="discriminator gradient", server_round=step)

    def for_fakes(self) -> Drawn:
        """Return the inputs (latent vectors and classes) with which G makes the fakes for a step of G.

        Inputs for many steps are drawn at once, which is faster.
        """
        if not self.ahead:
            size = _GENERATOR_STEPS_AHEAD, self.settings.generator_batch_size
            latents = torch.randn(*size, self.settings.latent_dim, generator=self.random)
            classes = torch.multinomial(self.shares, math.prod(size), replacement=True, generator=self.random)
            self.ahead = list(zip(latents, classes.view(size).numpy(), strict=True))
        return self.ahead.pop()

    def draw_samples(self, done: float, generate: Callable[[Drawn], torch.Tensor]) -> None:
        """Draw and store the synthetic records that are due at this step. ``done``: the finished fraction of training.

        The client's synthetic records are drawn in equal parts, after evenly spaced steps of the training.
        ``generate``: a function that returns views from the averaged G for latent vectors and classes.
        """
        while done >= _WARM_UP + (1 - _WARM_UP) * (len(self.made) + 1) / len(self.due) - _ROUNDING:
            classes = self.classes[self.due[len(self.made)].numpy()]
            latent = torch.randn(len(classes), self.settings.latent_dim, generator=self.random)
            self.made.append(generate((latent, classes)))

    def samples(self) -> torch.Tensor:
        """Return the synthetic records of the client, sorted by class.

        Private label selection determined the number of records of each class. Raises RunError if a weight of the
        networks is not finite.
        """
        views = torch.cat(self.made)[torch.cat(self.due).argsort()]
        for network, name in (self.nets.discriminator, "discriminator"), (self.nets.generator, "generator"):
            if not all(bool(weight.isfinite().all()) for weight in network.parameters()):
                raise RunError(f"the {name} of the DP conditional GAN is not finite: use a lower learning rate")
        return self.nets.render(views)


class StackTraining:
    """The training by PyTorch of many clients together, all with the same number of steps."""

    def __init__(self, settings: DpCgan, clients: Sequence[GanClient]) -> None:
        self.settings, self.clients = settings, clients
        self.discriminators = [client.nets.discriminator for client in clients]
        generators = [client.nets.generator for client in clients]
        self.generator_weights = [list(generator.parameters()) for generator in generators]
        self.weights = Weights(generators)
        self.average = Weights([client.average for client in clients])
        self.discriminator_adam = Adam(Weights(self.discriminators), settings.discriminator_learning_rate)
        self.generator_adam = Adam(self.weights, settings.generator_learning_rate)
        self.by_opacus = [_opacus(client) for client in clients] if settings.gradients == "opacus" else []

    def step(self, step: int) -> None:
        """Execute training step ``step``, from 0: one step of D, and a step of G after every ``ratio`` steps of D."""
        self.discriminator_step(step)
        if (step + 1) % self.settings.ratio == 0:
            self.generator_step()
        for client in self.clients:
            client.draw_samples((step + 1) / client.bill.steps, partial(views_of_average, client))
        if step + 1 == self.clients[0].bill.steps:
            for one in self.by_opacus:
                one.check()

    def discriminator_step(self, step: int) -> None:
        """Compute the noisy sum of clipped gradients for each client, and update the client's D by Adam.

        The noisy sum is differentially private.
        """
        chosen = [client.chosen(step) for client in self.clients]
        real = [
            client.joined(client.views.index_select(0, torch.from_numpy(rows)), client.places[rows])
            for client, rows in zip(self.clients, chosen, strict=True)
        ]
        fake = self._fakes_of_records(real, step)
        if self.by_opacus:
            batches = zip(self.by_opacus, real, fake, strict=True)
            gradients = [one.released(records, made, step) for one, records, made in batches]
        else:
            pairs = [
                ClientPairs(client.nets.discriminator, records, made, client.bound)
                for client, records, made in zip(self.clients, real, fake, strict=True)
            ]
            sums = zip(self.clients, clipped_sums(pairs), strict=True)
            gradients = [_released(client, total, step) for client, total in sums]
        self.discriminator_adam.step([[gradient] for gradient in gradients])

    @torch.no_grad()
    def _fakes_of_records(self, real: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        """Return each client's fakes (generated records) as inputs of D, one for each real record in this step."""
        sizes = [(client, len(rows)) for client, rows in zip(self.clients, real, strict=True) if len(rows)]
        drawn = [client.for_fakes_of_records(size, step) for client, size in sizes]
        made = iter(_joined_fakes([client for client, _ in sizes], drawn) if sizes else ())
        return [next(made) if len(rows) else rows for rows in real]

    def generator_step(self) -> None:
        """Train G against D by one step with the non-saturating loss. The step reads no private data."""
        drawn = [client.for_fakes() for client in self.clients]
        scores = scored(self.discriminators, _joined_fakes(self.clients, drawn))
        losses = [functional.softplus(-of_fakes).mean() for of_fakes in scores]
        found = iter(torch.autograd.grad(losses, [weight for one in self.generator_weights for weight in one]))
        self.generator_adam.step([[next(found) for _ in one] for one in self.generator_weights])
        self.average.vector.lerp_(self.weights.vector, 1 - _decay(self.settings, self.generator_adam.steps))


class CompiledTraining:
    """The training of one client's networks by compiled code. A step consists of a few long compiled calls.

    During such a call, other threads train other clients. There is little Python code between the calls, because
    waiting for Python's global lock takes more time than the Python code itself.
    """

    def __init__(self, settings: DpCgan, client: GanClient, kernel: Kernel) -> None:
        self.settings, self.client = settings, client
        rates = settings.discriminator_learning_rate, settings.generator_learning_rate
        self.adversaries = adversaries_of(client.nets, client.average, client.num_planes, rates, kernel)
        self.average = _compiled(client.average, client.num_planes, kernel)
        self.records = Shown(client.views.flatten(1).numpy(), client.places)
        self.ahead: dict[int, tuple[NDArray[np.int64], Shown, NDArray[np.float64] | None]] = {}
        self.spacing = grid_spacing(client.std) if client.std else 1.0

    def step(self, step: int) -> None:
        """Execute training step ``step``, from 0: one step of D, and a step of G after every ``ratio`` steps of D."""
        self.discriminator_step(step)
        if (step + 1) % self.settings.ratio == 0:
            self.generator_step()
        self.client.draw_samples((step + 1) / self.client.bill.steps, self.views_of_average)

    def discriminator_step(self, step: int) -> None:
        """Compute the noisy sum of clipped gradients, and update D by Adam.

        The noisy sum is differentially private.
        """
        client = self.client
        if step not in self.ahead:
            steps = range(step, min(step + _DISCRIMINATOR_STEPS_AHEAD, client.bill.steps))
            self.ahead = {number: self._drawn(number) for number in steps}
        chosen, latents, noise = self.ahead.pop(step)
        pairs = Pairs(self.records, chosen, latents, client.bound * (1 - MARGIN))
        self.adversaries.discriminator_step(pairs, GradientNoise(noise, self.spacing, client.batch))

    def _drawn(self, step: int) -> tuple[NDArray[np.int64], Shown, NDArray[np.float64] | None]:
        """Return (record indices, inputs of G for the fakes, noise) for a step of D.

        All three are SENSITIVE: they must stay secret. The noise is None if the client adds none.
        """
        chosen = self.client.chosen(step)
        latents = _shown(self.client.for_fakes_of_records(len(chosen), step))
        return chosen, latents, self.client.noise_of(step) if self.client.std else None

    def generator_step(self) -> None:
        """Train G against D by one step with the non-saturating loss. The step reads no private data."""
        decay = _decay(self.settings, self.adversaries.generator_adam.steps + 1)
        self.adversaries.generator_step(_shown(self.client.for_fakes()), decay)

    def views_of_average(self, drawn: Drawn) -> torch.Tensor:
        """Return the views that the averaged G generates from latent vectors and classes."""
        return torch.from_numpy(self.average.generate(_shown(drawn))).view(-1, *self.client.views.shape[1:])


@torch.no_grad()
def views_of_average(client: GanClient, drawn: Drawn) -> torch.Tensor:
    """Return the views that a client's averaged G generates from latent vectors and classes."""
    [views] = generated([client.average], [client.joined(*drawn)])
    return views


def adversaries_of(
    nets: Networks, average: nn.Module, num_classes: int, learning_rates: tuple[float, float], kernel: Kernel
) -> Adversaries[Perceptron] | Adversaries[ImageDiscriminator]:
    """Return D and G of ``nets`` as objects of the compiled trainer. ``average``: the G with averaged weights.

    The weights of each of the three networks are moved into one vector per network.
    """
    rows = [Weights([net]).parts[0] for net in (nets.discriminator, nets.generator, average)]
    adams = [CompiledAdam(row, BETAS, rate) for row, rate in zip(rows[:2], learning_rates, strict=True)]
    generator = _compiled(nets.generator, num_classes, kernel)
    if isinstance(generator, TwoWays):
        return Adversaries(
            (Perceptron(kernel, nets.discriminator, num_classes), generator), adams[0], adams[1], rows[2]
        )
    return Adversaries(
        (ImageDiscriminator(kernel, nets.discriminator, num_classes), generator), adams[0], adams[1], rows[2]
    )


class Weights:
    """All parameters of ``nets`` in one ``vector``. The networks' parameters become tensor views of this vector.

    Each network's part of the vector begins at a multiple of 64 numbers. Zeros fill the gaps. Vectorised code computes
    the last few numbers of a vector by other operations, which round differently. With this alignment, the bits of a
    client do not depend on the other clients that train in the same computation.
    """

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        sizes = [sum(weight.numel() for weight in net.parameters()) for net in nets]
        self.gaps = [torch.zeros(-size % _ALIGNMENT) for size in sizes]
        self.vector = torch.zeros(sum(sizes) + sum(map(len, self.gaps)))
        self.parts: list[torch.Tensor] = []
        start = 0
        for net, size, gap in zip(nets, sizes, self.gaps, strict=True):
            self.parts.append(self.vector[start : start + size])
            for weight in net.parameters():
                place = self.vector[start : start + weight.numel()].view_as(weight)
                weight.data = place.copy_(weight.data)
                start += weight.numel()
            start += len(gap)


class Adam:
    """Adam (Kingma and Ba 2015) on the weights of many clients, without the slow import of torch.optim."""

    def __init__(self, weights: Weights, learning_rate: float) -> None:
        self.weights, self.learning_rate, self.steps = weights, learning_rate, 0
        self.mean = torch.zeros_like(weights.vector)
        self.square = torch.zeros_like(weights.vector)

    @torch.no_grad()
    def step(self, gradients: Iterable[Sequence[torch.Tensor]]) -> None:
        """Update the weights by one step.

        ``gradients``: the gradient of each network, as tensors in the order of the network's parameters.
        """
        self.steps += 1
        first, second = (1 - beta**self.steps for beta in BETAS)
        parts = zip(gradients, self.weights.gaps, strict=True)
        gradient = torch.cat([one.reshape(-1) for part, gap in parts for one in (*part, gap)])
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        spread = (self.square / second).sqrt_().add_(1e-8)
        self.weights.vector.addcdiv_(self.mean, spread, value=-self.learning_rate / first)


def _opacus(client: GanClient) -> OpacusGradients:
    from clients.dafl.dpcgan.with_opacus import OpacusGradients, OpacusTerms  # noqa: PLC0415 (loads slowly, rarely used)

    terms = OpacusTerms(client.bill, client.batch, client.std, client.bound, client.noise)
    return OpacusGradients(client.nets.discriminator, terms)


def _released(client: GanClient, clipped_sum: torch.Tensor, step: int) -> torch.Tensor:
    """Return the noisy mean gradient of a client's D in one step as a flat vector.

    It is the sum of clipped gradients plus noise, divided by the expected batch size.
    """
    total = clipped_sum.numpy()
    if client.std:
        total = add_noise(total, client.std, client.noise_of(step))
    divided = np.empty(client.dimension, np.float32)
    np.divide(total, client.batch, out=divided, casting="same_kind")
    return torch.from_numpy(divided)


def _joined_fakes(clients: Sequence[GanClient], drawn: Sequence[Drawn]) -> list[torch.Tensor]:
    """Return the inputs of D for fakes: views joined with their classes.

    Each client's G generates the views from the latent vectors and classes in ``drawn``.
    """
    latents = [client.joined(*parts) for client, parts in zip(clients, drawn, strict=True)]
    made = zip(clients, generated([client.nets.generator for client in clients], latents), drawn, strict=True)
    return [client.joined(views, places) for client, views, (_, places) in made]


def _decay(settings: DpCgan, generator_steps: int) -> float:
    """Return the decay of the moving average of G's weights after ``generator_steps`` steps.

    The decay is small early in training, so that the initial weights have little influence on the average.
    """
    return min(settings.averaging, generator_steps / (generator_steps + 10))


def _compiled(generator: nn.Module, num_classes: int, kernel: Kernel) -> TwoWays | ImageGenerator:
    if isinstance(generator, SmallGenerator):
        return TwoWays(kernel, generator.curved, generator.straight, num_classes)
    assert isinstance(generator, nn.Sequential)
    return ImageGenerator(kernel, generator, num_classes)


def _shown(drawn: Drawn) -> Shown:
    latents, places = drawn
    return Shown(latents.numpy(), places)
