"""The training of one client's small networks by compiled code: a step is a handful of long calls.

While one of them works, other clients' threads run. Between them there is hardly anything for which a thread needs
Python's lock, since to wait for that costs more than what is done in the meantime.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clients.dafl.dpcgan.client import Client, Drawn, kept_of_average
from clients.dafl.dpcgan.clipping import MARGIN
from clients.dafl.dpcgan.nets import Networks, SmallGenerator
from clients.dafl.dpcgan.weights import BETAS, Weights
from fl_sim.native.kernel import Kernel
from fl_sim.native.perceptrons import Adversaries, CompiledAdam, Pairs, Perceptron, Release, Shown, TwoWays
from fl_sim.privacy.mechanisms import grid_spacing

if TYPE_CHECKING:
    from clients.dafl.dpcgan.settings import DpCgan

_STEPS_AHEAD: Final = 16
"""For how many steps chance is asked at a time: what Python needs for it is in the processor's cache then."""


class CompiledTraining:
    """The training of one client whose networks compiled code takes."""

    def __init__(self, settings: "DpCgan", client: Client, kernel: Kernel) -> None:
        self.settings, self.client = settings, client
        rates = settings.discriminator_learning_rate, settings.generator_learning_rate
        self.adversaries = adversaries_of(client.nets, client.average, client.num_planes, rates, kernel)
        self.average = _compiled(client.average, client.num_planes, kernel)
        self.records = Shown(client.views.numpy(), client.places)
        self.ahead: dict[int, _Drawn] = {}
        self.spacing = grid_spacing(client.std) if client.std else 1.0

    def step(self, step: int) -> None:
        """Take step number ``step``."""
        self.discriminator_step(step)
        if (step + 1) % self.settings.ratio == 0:
            self.generator_step()
        self.client.draw_samples((step + 1) / self.client.bill.steps, self.views_of_average)

    def discriminator_step(self, step: int) -> None:
        """Release the noised sum of clipped gradients, and let Adam take it from there."""
        if step not in self.ahead:
            steps = range(step, min(step + _STEPS_AHEAD, self.client.bill.steps))
            self.ahead = {number: self._drawn(number) for number in steps}
        drawn, client = self.ahead.pop(step), self.client
        pairs = Pairs(self.records, drawn.chosen, drawn.latents, client.bound * (1 - MARGIN))
        self.adversaries.discriminator_step(pairs, Release(drawn.noise, self.spacing, client.batch))

    def _drawn(self, step: int) -> "_Drawn":
        chosen = self.client.chosen(step)
        latents = _shown(self.client.for_fakes_of_records(len(chosen), step))
        return _Drawn(chosen, latents, self.client.noise_of(step) if self.client.std else None)

    def generator_step(self) -> None:
        """Let G's fakes pass better with D (non-saturating loss). Touches nothing private."""
        kept = kept_of_average(self.settings, self.adversaries.generator_adam.steps + 1)
        self.adversaries.generator_step(_shown(self.client.for_fakes()), kept)

    def views_of_average(self, drawn: Drawn) -> torch.Tensor:
        """Return the views that the average of G makes of what was drawn."""
        return torch.from_numpy(self.average.generate(_shown(drawn)))


@dataclass(frozen=True)
class _Drawn:
    """What chance decides in a D step: the records, the latent vectors of their fakes, and the noise. SENSITIVE."""

    chosen: NDArray[np.int64]
    latents: Shown
    noise: NDArray[np.float64] | None


def adversaries_of(
    nets: Networks, average: nn.Module, num_classes: int, learning_rates: tuple[float, float], kernel: Kernel
) -> Adversaries:
    """Return D and G as compiled code trains them; moves their weights, and those of ``average``, into a row each."""
    rows = [_in_a_row(net) for net in (nets.discriminator, nets.generator, average)]
    adams = [CompiledAdam(row, BETAS, rate) for row, rate in zip(rows[:2], learning_rates, strict=True)]
    networks = Perceptron(kernel, nets.discriminator, num_classes), _compiled(nets.generator, num_classes, kernel)
    return Adversaries(networks, adams[0], adams[1], rows[2])


def _in_a_row(net: nn.Module) -> torch.Tensor:
    weights = Weights([net])
    [row] = weights.parts_of(weights.vector)
    return row


def _compiled(generator: nn.Module, num_classes: int, kernel: Kernel) -> TwoWays:
    assert isinstance(generator, SmallGenerator)
    return TwoWays(kernel, generator.curved, generator.straight, num_classes)


def _shown(drawn: Drawn) -> Shown:
    latents, places = drawn
    return Shown(latents.numpy(), places)
