"""The training of the DP conditional GAN: each client's own part of it, and the steps that a stack takes together."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from clients.dafl.dpcgan.clipping import Pairs, clipped_sums
from clients.dafl.dpcgan.nets import Networks, compiled_generator, generated, kernel_for, paper, scored, small
from clients.dafl.dpcgan.weights import Adam, Weights
from clients.dafl.generator import Request
from fl_sim.errors import RunError
from fl_sim.native.kernel import Kernel
from fl_sim.native.normals import CompiledNormals
from fl_sim.native.perceptrons import Perceptron, TwoWays
from fl_sim.privacy.mechanisms import add_noise, clipping_norm_on_grid, takes_part
from fl_sim.seeding import torch_alone

if TYPE_CHECKING:
    from clients.dafl.dpcgan.settings import DpCgan
    from clients.dafl.dpcgan.with_opacus import OpacusGradients

_Drawn: TypeAlias = "Sequence[tuple[torch.Tensor, torch.Tensor]]"
"""Each client's latent vectors and classes, one-hot."""

_WARM_UP: Final = 0.2
_ROUNDING: Final = 1e-9


class Client:
    """One client's part of a stack. ``shown`` and ``known`` alone are private; all else is released."""

    def __init__(self, settings: "DpCgan", request: Request) -> None:
        records, self.bill, self.noise = request.records, request.bill, request.noise
        self.settings = settings
        present = np.flatnonzero(request.counts)
        self.counts = request.counts[present]
        self.shares = torch.from_numpy(self.counts / self.counts.sum())
        self.num_planes = len(present) if len(present) > 1 else 0
        with torch_alone():
            torch.manual_seed(int(request.generator.integers(2**63)))
            self.nets = self._networks(tuple(records.inputs.shape[1:]))
        self.kernel = kernel_for(self.nets) if settings.is_compilable else None
        if self.kernel:
            self.noise = replace(self.noise, normals=CompiledNormals(self.kernel))
        self.random = torch.Generator().manual_seed(int(request.generator.integers(2**63)))
        self.average = deepcopy(self.nets.generator).requires_grad_(requires_grad=False)
        self.dimension = sum(weight.numel() for weight in self.nets.discriminator.parameters())
        self.std = self.bill.noise_multiplier * settings.clipping_norm
        self.bound = self._bound(len(records.labels)) if self.std else math.inf
        # Which records are drawn when, at random: each class has its share of early and of late ones.
        self.classes = self._one_hot(np.repeat(np.arange(len(present)), self.counts))
        order = torch.randperm(len(self.classes), generator=self.random)
        self.due = list(order.tensor_split(min(settings.snapshots, len(self.classes))))
        self.made: list[torch.Tensor] = []
        # A record of a class that was not released takes part, and its gradient is taken for zero.
        places = np.full(records.num_classes, -1)
        places[present] = np.arange(len(present))
        labels = places[records.labels.numpy()]
        self.known = labels >= 0
        self.shown = self.nets.join(self.nets.view(records.inputs), self._one_hot(np.maximum(labels, 0)))

    def _bound(self, num_records: int) -> float:
        return clipping_norm_on_grid(self.settings.clipping_norm, self.std, self.dimension, summands=num_records)

    def _networks(self, shape: tuple[int, ...]) -> Networks:
        settings = self.settings
        if settings.networks == "paper":
            return paper(shape, self.num_planes, settings.latent_dim)
        widths = settings.discriminator_width, settings.generator_width
        return small(shape, self.num_planes, settings.latent_dim, settings.resolution, widths)

    def _one_hot(self, places: NDArray[np.int64]) -> torch.Tensor:
        if not self.num_planes:
            return torch.empty(len(places), 0)
        return torch.eye(self.num_planes)[torch.from_numpy(places)]

    def batch(self, step: int) -> torch.Tensor:
        """Return D's input for the records of a step: each by a coin of its own. SENSITIVE."""
        coins = self.noise.uniform(len(self.shown), purpose="records of a step", server_round=step)
        chosen = np.flatnonzero(takes_part(coins, self.bill.sampling_rate) & self.known)
        return self.shown.index_select(0, torch.from_numpy(chosen))

    def for_fakes_of_records(self, count: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latent vectors and classes of ``count`` fakes: by the released counts, nothing from another record."""
        latent_dim = self.settings.latent_dim
        latent = self.noise.standard_normal(count * latent_dim, purpose="latent vectors", server_round=step)
        return torch.from_numpy(latent).float().view(count, latent_dim), self._classes_of_fakes(count, step)

    def _classes_of_fakes(self, count: int, step: int) -> torch.Tensor:
        if not self.num_planes:
            return torch.empty(count, 0)
        coins = self.noise.uniform(count, purpose="classes of fakes", server_round=step)
        shares = np.cumsum(self.counts) / self.counts.sum()
        return self._one_hot(np.searchsorted(shares[:-1], coins, side="right"))

    def released(self, clipped_sum: torch.Tensor, step: int) -> torch.Tensor:
        """Return the noised gradient that the sum of a step stands for, flat."""
        total = clipped_sum.numpy()
        if self.std:
            drawn = self.noise.gaussian(self.dimension, self.std, purpose="discriminator gradient", server_round=step)
            total = add_noise(total, self.std, drawn)
        divided = np.empty(self.dimension, np.float32)
        np.divide(total, self.bill.sampling_rate * len(self.shown), out=divided, casting="same_kind")
        return torch.from_numpy(divided)

    def for_fakes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latent vectors and classes of the fakes that G learns from."""
        count = self.settings.generator_batch_size
        drawn = torch.multinomial(self.shares, count, replacement=True, generator=self.random)
        return torch.randn(count, self.settings.latent_dim, generator=self.random), self._one_hot(drawn.numpy())

    def draw_samples(self, done: float) -> None:
        """Draw what is due when a share ``done`` of training is over: equal parts, evenly spaced after the warm-up."""
        while done >= _WARM_UP + (1 - _WARM_UP) * (len(self.made) + 1) / len(self.due) - _ROUNDING:
            classes = self.classes[self.due[len(self.made)]]
            latent = torch.randn(len(classes), self.settings.latent_dim, generator=self.random)
            maker = compiled_generator(self.kernel, self.average) if self.kernel else self.average
            with torch.no_grad():
                self.made += generated([maker], [self.nets.join(latent, classes)])

    def samples(self) -> torch.Tensor:
        """Return as many records of each class as its count says, in order of class."""
        views = torch.cat(self.made)[torch.cat(self.due).argsort()]
        for network, name in (self.nets.discriminator, "discriminator"), (self.nets.generator, "generator"):
            if not all(bool(weight.isfinite().all()) for weight in network.parameters()):
                raise RunError(f"the {name} of the DP conditional GAN is not finite: use a lower learning rate")
        return self.nets.render(views)


class Training:
    """A stack of clients whose training takes equally many steps."""

    def __init__(self, settings: "DpCgan", clients: Sequence[Client]) -> None:
        self.settings, self.clients, kernel = settings, clients, clients[0].kernel
        self.discriminators = [client.nets.discriminator for client in clients]
        self.generators = [client.nets.generator for client in clients]
        self.generator_weights = [list(generator.parameters()) for generator in self.generators]
        self.weights = Weights(self.generators)
        self.average = Weights([client.average for client in clients])
        self.discriminator_adam = Adam(Weights(self.discriminators), settings.discriminator_learning_rate, kernel)
        self.generator_adam = Adam(self.weights, settings.generator_learning_rate, kernel)
        self.compiled = (
            [_Compiled.of(kernel, client.nets) for client in clients] if kernel else []
        )  # where weights lie now
        self.generator_steps = 0
        self.by_opacus = [_opacus(client) for client in clients] if settings.gradients == "opacus" else []

    def step(self, step: int) -> None:
        """Take step number ``step``."""
        self.discriminator_step(step)
        if (step + 1) % self.settings.ratio == 0:
            self.generator_step()
        for client in self.clients:
            client.draw_samples((step + 1) / client.bill.steps)
        if step + 1 == self.clients[0].bill.steps:
            for one in self.by_opacus:
                one.check()

    def discriminator_step(self, step: int) -> None:
        """Release each client's noised sum of clipped gradients, and let Adam take it from there."""
        real = [client.batch(step) for client in self.clients]
        fake = self._fakes_of_records(real, step)
        released = self._by_opacus(real, fake, step) if self.by_opacus else self._by_own_code(real, fake, step)
        self.discriminator_adam.step([[gradient] for gradient in released])

    def _by_own_code(self, real: Sequence[torch.Tensor], fake: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        compiled: list[Perceptron | None] = [one.discriminator for one in self.compiled]
        pairs = [
            Pairs(client.nets.discriminator, records, made, client.bound, discriminator)
            for client, records, made, discriminator in zip(
                self.clients, real, fake, compiled or [None] * len(real), strict=True
            )
        ]
        totals = clipped_sums(pairs)
        return [client.released(total, step) for client, total in zip(self.clients, totals, strict=True)]

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
            for place, fake in zip(some, self._joined_fakes(some, drawn), strict=True):
                fakes[place] = fake
        return fakes

    def generator_step(self) -> None:
        """Let G's fakes pass better with D (non-saturating loss). Touches nothing private."""
        drawn = [client.for_fakes() for client in self.clients]
        self.generator_adam.step(self._by_compiled(drawn) if self.compiled else self._by_autograd(drawn))
        self.generator_steps += 1
        # Early on a short average, else the first weights would linger in it.
        decay = min(self.settings.averaging, self.generator_steps / (self.generator_steps + 10))
        self.average.vector.lerp_(self.weights.vector, 1 - decay)

    def _by_compiled(self, drawn: _Drawn) -> list[list[torch.Tensor]]:
        """Return the gradient of each generator's loss by its parameters, flat."""
        found = []
        for client, compiled, (latents, classes) in zip(self.clients, self.compiled, drawn, strict=True):
            places = classes.argmax(1) if client.num_planes else None
            joined = client.nets.join(latents, classes)
            found.append([compiled.generator.gradient(compiled.discriminator, joined, places)])
        return found

    def _by_autograd(self, drawn: _Drawn) -> list[list[torch.Tensor]]:
        """Return the gradient of each generator's loss by its parameters."""
        scores = scored(self.discriminators, self._joined_fakes(range(len(drawn)), drawn))
        losses = [functional.softplus(-of_fakes).mean() for of_fakes in scores]
        found = iter(torch.autograd.grad(losses, [weight for one in self.generator_weights for weight in one]))
        return [[next(found) for _ in one] for one in self.generator_weights]

    def _joined_fakes(self, places: Sequence[int], drawn: _Drawn) -> list[torch.Tensor]:
        """Return what the G of the client in each place makes of (latent vectors, classes), as D's input."""
        nets = [self.clients[place].nets for place in places]
        generators = [self.compiled[place].generator if self.compiled else self.generators[place] for place in places]
        made = generated(generators, [one.join(*parts) for one, parts in zip(nets, drawn, strict=True)])
        return [one.join(views, classes) for one, views, (_, classes) in zip(nets, made, drawn, strict=True)]


@dataclass(frozen=True)
class _Compiled:
    """A client's networks as compiled code finds them."""

    discriminator: Perceptron
    generator: TwoWays

    @classmethod
    def of(cls, kernel: Kernel, nets: Networks) -> Self:
        return cls(Perceptron(kernel, nets.discriminator), compiled_generator(kernel, nets.generator))


def _opacus(client: Client) -> "OpacusGradients":
    from clients.dafl.dpcgan.with_opacus import OpacusGradients, Terms  # noqa: PLC0415 (loads slowly, few runs need it)

    batch = client.bill.sampling_rate * len(client.shown)
    terms = Terms(client.bill, batch, client.std, client.bound, client.noise)
    return OpacusGradients(client.nets.discriminator, terms)
