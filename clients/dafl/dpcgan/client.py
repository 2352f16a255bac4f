"""One client's part in the training of the DP conditional GAN: networks, records, coins, noise, and samples drawn."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from clients.dafl.dpcgan.nets import Networks, kernel_for, paper, small
from clients.dafl.generator import Request
from fl_sim.errors import RunError
from fl_sim.native.kernel import CompiledNormals
from fl_sim.privacy.mechanisms import clipping_norm_on_grid
from fl_sim.seeding import torch_alone

if TYPE_CHECKING:
    from clients.dafl.dpcgan.settings import DpCgan

Drawn: TypeAlias = "tuple[torch.Tensor, NDArray[np.int64]]"
"""What fakes are made of: latent vectors, and each fake's class by its place among those of the client."""

_WARM_UP: Final = 0.2
_ROUNDING: Final = 1e-9
_STEPS_AHEAD: Final = 50  # of G, whose fakes need no secret


class Client:
    """One client. ``views``, ``places`` and ``known`` alone are private; all else is released.

    ``views``: what D sees of the records, and ``places``: where each record's class lies among those that the client
    releases. ``known``: whether it lies there at all.
    """

    def __init__(self, settings: "DpCgan", request: Request) -> None:
        records, self.bill, self.noise = request.records, request.bill, request.noise
        self.settings = settings
        present = np.flatnonzero(request.counts)
        self.counts = request.counts[present]
        self.num_planes = len(present) if len(present) > 1 else 0
        with torch_alone():
            torch.manual_seed(int(request.generator.integers(2**63)))
            self.nets = self._networks(tuple(records.inputs.shape[1:]))
        self.kernel = kernel_for(self.nets) if settings.is_compilable else None
        if self.kernel:
            self.noise = replace(self.noise, normals=CompiledNormals(self.kernel))
        self.random = torch.Generator().manual_seed(int(request.generator.integers(2**63)))
        self.shares = torch.from_numpy(self.counts / self.counts.sum())
        self.average = deepcopy(self.nets.generator).requires_grad_(requires_grad=False)
        self.dimension = sum(weight.numel() for weight in self.nets.discriminator.parameters())
        self.std = self.bill.noise_multiplier * settings.clipping_norm
        self.batch = self.bill.sampling_rate * len(records.labels)
        self.bound = self._bound(len(records.labels)) if self.std else math.inf
        # Which records are drawn when, at random: each class has its share of early and of late ones.
        self.classes = np.repeat(np.arange(len(present)), self.counts)
        order = torch.randperm(len(self.classes), generator=self.random)
        self.due = list(order.tensor_split(min(settings.snapshots, len(self.classes))))
        self.made: list[torch.Tensor] = []
        self.ahead: list[Drawn] = []
        # A record of a class that was not released takes part, and its gradient is taken for zero.
        places = np.full(records.num_classes, -1)
        places[present] = np.arange(len(present))
        labels = places[records.labels.numpy()]
        self.known = labels >= 0
        self.places = np.maximum(labels, 0)
        self.views = self.nets.view(records.inputs)

    def _bound(self, num_records: int) -> float:
        return clipping_norm_on_grid(self.settings.clipping_norm, self.std, self.dimension, summands=num_records)

    def _networks(self, shape: tuple[int, ...]) -> Networks:
        settings = self.settings
        if settings.networks == "paper":
            return paper(shape, self.num_planes, settings.latent_dim)
        widths = settings.discriminator_width, settings.generator_width
        return small(shape, self.num_planes, settings.latent_dim, settings.resolution, widths)

    def joined(self, values: torch.Tensor, places: NDArray[np.int64]) -> torch.Tensor:
        """Return what the networks take: ``values`` of rows of the classes in ``places``."""
        if not self.num_planes:
            return self.nets.join(values, torch.empty(len(places), 0))
        return self.nets.join(values, torch.eye(self.num_planes)[torch.from_numpy(places)])

    def chosen(self, step: int) -> NDArray[np.int64]:
        """Return the records of a step: each by a coin of its own. SENSITIVE."""
        taking_part = self.noise.taking_part(
            len(self.known), self.bill.sampling_rate, purpose="records of a step", server_round=step
        )
        chosen = np.flatnonzero(taking_part)
        known: NDArray[np.int64] = chosen[self.known[chosen]]
        return known

    def for_fakes_of_records(self, count: int, step: int) -> Drawn:
        """Return what ``count`` fakes of a D step are made of: by the released counts, nothing from another record."""
        latent_dim = self.settings.latent_dim
        latent = self.noise.standard_normal(count * latent_dim, purpose="latent vectors", server_round=step)
        return torch.from_numpy(latent.astype(np.float32)).view(count, latent_dim), self._classes_of_fakes(count, step)

    def _classes_of_fakes(self, count: int, step: int) -> NDArray[np.int64]:
        if not self.num_planes:
            return np.zeros(count, np.int64)
        coins = self.noise.uniform(count, purpose="classes of fakes", server_round=step)
        shares = np.cumsum(self.counts) / self.counts.sum()
        return np.searchsorted(shares[:-1], coins, side="right")

    def noise_of(self, step: int) -> NDArray[np.float64]:
        """Return the noise on the sum of a step's clipped gradients, in steps of the grid. Needs some: ``std`` > 0."""
        return self.noise.gaussian(self.dimension, self.std, purpose="discriminator gradient", server_round=step)

    def for_fakes(self) -> Drawn:
        """Return what the fakes that G learns from are made of."""
        if not self.ahead:
            self.ahead = self._drawn_ahead()
        return self.ahead.pop()

    def _drawn_ahead(self) -> list[Drawn]:
        """Return what many steps take: to draw little by little takes longer, above all where threads share Python."""
        size = _STEPS_AHEAD, self.settings.generator_batch_size
        latents = torch.randn(*size, self.settings.latent_dim, generator=self.random)
        classes = torch.multinomial(self.shares, math.prod(size), replacement=True, generator=self.random)
        return list(zip(latents, classes.view(size).numpy(), strict=True))

    def draw_samples(self, done: float, made_of: Callable[[Drawn], torch.Tensor]) -> None:
        """Draw what is due when a share ``done`` of training is over: equal parts, evenly spaced after the warm-up.

        ``made_of``: returns the views that the average of G makes of latent vectors and classes.
        """
        while done >= _WARM_UP + (1 - _WARM_UP) * (len(self.made) + 1) / len(self.due) - _ROUNDING:
            classes = self.classes[self.due[len(self.made)].numpy()]
            latent = torch.randn(len(classes), self.settings.latent_dim, generator=self.random)
            self.made.append(made_of((latent, classes)))

    def samples(self) -> torch.Tensor:
        """Return as many records of each class as its count says, in order of class."""
        views = torch.cat(self.made)[torch.cat(self.due).argsort()]
        for network, name in (self.nets.discriminator, "discriminator"), (self.nets.generator, "generator"):
            if not all(bool(weight.isfinite().all()) for weight in network.parameters()):
                raise RunError(f"the {name} of the DP conditional GAN is not finite: use a lower learning rate")
        return self.nets.render(views)


def kept_of_average(settings: "DpCgan", generator_steps: int) -> float:
    """Return what step number ``generator_steps`` leaves of the average of G's weights."""
    # Early on a short average, else the first weights would linger in it.
    return min(settings.averaging, generator_steps / (generator_steps + 10))
