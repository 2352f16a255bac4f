"""PSG: a conditional GAN under record-level DP (Tang, Wang, Liu 2023; Xie et al. 2018; Bie, Kamath, Zhang 2023).

The discriminator D alone sees records, and learns by DP-SGD: each step takes every record by an independent coin of
probability q, pairs it with a fake, clips the gradient of loss(D(real), 1) + loss(D(fake), 0) as one vector to C, sums,
adds N(0, (z C)^2) and divides by the public qn. The generator G learns from D, which is released already. Noise and
number of steps follow from the budget before the first record is read.

Coins, latent vectors and classes of the fakes of a D step come from the secret source: if a fake's latent vector were
known and assigned by position in the batch, one record more would change the fakes of all that follow it.

Many clients train as one stack (``clients.dafl.dpcgan.nets``), each with its own records, coins, noise, bill and
generator of random numbers. The stack shares only the time to start an operation: a client by itself is a stack of one,
and gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.dafl.generator import Check, GeneratorBill, GeneratorRequest, Made, PrivateRecords
from fl_sim.errors import RunError, UserError
from fl_sim.importing import torch
from fl_sim.privacy.mechanisms import Noise
from fl_sim.settings import Settings

if TYPE_CHECKING:
    from clients.dafl.dpcgan.training import GanClient


class DpCgan(Settings):
    """The DP conditional GAN.

    The defaults were chosen for ten one-class clients of MNIST at epsilon 10 and one CPU thread, by what a classifier
    trained on the samples made of the last sixth of the training records.

    ``gradients``: "own" code, or "opacus": its hooks, its optimiser's clipping and its accountant, with noise from the
    same secret source: the same release up to rounding, several times slower.
    ``networks``: "small" perceptrons, or the "paper"'s convolutions (a step costs a hundred times as much).
    ``discriminator_steps``: D's steps, each a release; 300 are enough for 8x8 digits. ``batch_size``: expected records
    in one; a client with no more records than that takes all in every step. ``ratio``: D's steps for one of G, with
    ``generator_batch_size`` fakes. ``clipping_norm``: C. ``averaging``: decay of the moving average of G's weights,
    which makes the samples. ``snapshots``: samples are drawn at so many moments of training, since G alone
    mode-collapses and its mode moves during training (as in herding, Welling 2009). ``latent_dim``: the length of G's
    noise vectors. ``resolution`` (pixels a side that D sees), ``discriminator_width``, ``generator_width``: of the
    small networks alone. ``discriminator_learning_rate`` and ``generator_learning_rate``: of Adam on each network.
    """

    kind: Literal["dp-cgan"] = "dp-cgan"
    gradients: Literal["own", "opacus"] = "own"
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

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UserError for tables where the networks are the paper's."""
        if self.networks == "paper" and len(shape) != 3:
            raise UserError(
                f'preprocess.generator.networks "paper" need images, these records have shape {shape}: choose "small"'
            )

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:  # noqa: ARG002 (the protocol's)
        """Return the cost of ``discriminator_steps`` steps with the least noise that (epsilon, delta) allows.

        Refused if that noise, in every single parameter, is longer than all gradients of an expected batch together
        can be, z > qn: then no step can tell the records from the noise.
        """
        # dp_accounting loads slowly, and most runs need no generator.
        from dp_accounting import dp_event  # noqa: PLC0415

        from fl_sim.privacy.accounting import poisson_noise_multiplier  # noqa: PLC0415
        from fl_sim.privacy.events import amplify_poisson  # noqa: PLC0415

        if num_records == 0:
            return GeneratorBill(dp_event.NoOpDpEvent(), 0, 0.0, 0.0, refused="the client holds no records")
        rate = min(1.0, self.batch_size / num_records)
        if epsilon == math.inf:
            return GeneratorBill(dp_event.NonPrivateDpEvent(), self.discriminator_steps, 0.0, rate)
        noise = poisson_noise_multiplier(rate, self.discriminator_steps, epsilon, delta)
        refused = ""
        if noise > rate * num_records:
            refused = (
                f"{num_records} records are too few for epsilon {epsilon:g}: the noise of a step, {noise:.3g} clipping "
                f"norms in every parameter, exceeds the sum of {rate * num_records:.3g} expected gradients"
            )
        event = amplify_poisson(dp_event.GaussianDpEvent(noise), sampling_rate=rate)
        return GeneratorBill(event, self.discriminator_steps, noise, rate, refused)

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: GeneratorBill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        """Train within ``bill`` and return (sum of counts, *input shape): see ``Generator``."""
        [made] = self.generate_stacked([GeneratorRequest(records, counts, bill, noise, generator)])
        if isinstance(made, Exception):
            raise made
        return made

    def generate_stacked(self, requests: Sequence[GeneratorRequest], check: Check = lambda: None) -> list[Made]:
        """Train all clients, as one stack if sharing operations saves time: see ``Generator``."""
        from clients.dafl.dpcgan.training import GanClient  # noqa: PLC0415 (needs torch as it is imported)

        made: list[Made] = [torch.empty(0, *request.records.inputs.shape[1:]) for request in requests]
        clients: dict[int, GanClient] = {}
        for place, request in enumerate(requests):
            assert not request.bill.refused
            try:
                if request.counts.sum():
                    clients[place] = GanClient(self, request)
            except UserError as error:
                made[place] = error
        for num_steps, step in self._trainings(list(clients.values())):
            for number in range(num_steps):
                check()
                step(number)
        for place, client in clients.items():
            try:
                made[place] = client.samples()
            except RunError as error:
                made[place] = error
        return made

    def trainer(self) -> str:
        """Return the name of the trainer: compiled code for the small networks, if there is such code."""
        from fl_sim.native.kernel import load_kernel  # noqa: PLC0415 (needs torch as it is imported)

        kernel, why_not = load_kernel()
        if self.is_compilable and kernel is not None:
            return "native trainer"
        left = "Opacus needs it" if self.gradients == "opacus" else "the paper's networks are left to it"
        return f"PyTorch: {left if kernel is not None else f'there is no native trainer here, {why_not}'}"

    @property
    def is_compilable(self) -> bool:
        """Return True if compiled code trains these networks, provided there is such code for the processor."""
        return self.networks == "small" and self.gradients == "own"

    def shortened(self, steps: int) -> tuple[DpCgan, float]:
        """Return the generator with ``steps`` D steps at most, and its share of the steps."""
        fewer = min(steps, self.discriminator_steps)
        return self.model_copy(update={"discriminator_steps": fewer}), fewer / self.discriminator_steps

    def _trainings(self, clients: Sequence[GanClient]) -> Iterator[tuple[int, Callable[[int], None]]]:
        """Yield (number of steps, a function that takes a step) of all clients that train together: of as many steps.

        Each by itself if steps are long (the paper's networks), or compiled: its weights then stay in the cache.
        """
        from clients.dafl.dpcgan.training import CompiledTraining, StackTraining  # noqa: PLC0415 (as above)

        for client in clients:
            if client.kernel:
                yield client.bill.steps, CompiledTraining(self, client, client.kernel).step
            elif self.networks == "paper":
                yield client.bill.steps, StackTraining(self, [client]).step
        others = [client for client in clients if not client.kernel and self.networks != "paper"]
        for steps in sorted({client.bill.steps for client in others}):
            yield steps, StackTraining(self, [client for client in others if client.bill.steps == steps]).step
