"""The private generator of DA-FL: a conditional GAN with record-level differential privacy (DP).

The sources are Tang, Wang, Liu 2023; Xie et al. 2018; Bie, Kamath, Zhang 2023.

Only the discriminator D reads records. It is trained by DP-SGD. Each step samples every record independently with
probability q, and pairs each sampled record with a fake. The gradient of loss(D(real), 1) + loss(D(fake), 0) is clipped
as one vector to norm C. The step sums the gradients of all pairs, and adds noise from N(0, (z C)^2). It divides the
result by qn, which is public (n is the client's number of records). The generator G reads no records. It is trained
against D, and the weights of D are already differentially private. The noise multiplier z follows from the privacy
budget and the number of steps, before the first record is read.

The sampling of records uses secret random numbers. In a step of D, the latent vectors and the classes of the fakes use
secret random numbers, too. With public random numbers, an attacker would know the latent vector of each position in the
batch. One more record in the batch moves all later records by one position, so it would change the fakes of all these
records.

Many clients train together as one tensor computation, a stack (``clients.dafl.dpcgan.nets``). Each client has its own
records, sampling, noise, privacy cost and random generator. The stack only saves the overhead of starting operations. A
client gets the same bits without a stack.
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
    """The DP conditional GAN, with a discriminator D and a generator G.

    The defaults were chosen for ten one-class clients of MNIST at epsilon 10 and one CPU thread. The criterion was the
    accuracy of a classifier that is trained on the synthetic records. The accuracy was measured on the last sixth of
    the training records.

    ``gradients``: "own" is fl-sim's code; "opacus" uses Opacus' hooks, clipping and accountant, with noise from the
    same secret source. The private gradients of "own" and "opacus" are equal up to rounding, but Opacus takes several
    times as long. ``networks``: "small" for perceptrons, or "paper" for the paper's convolutions, whose steps take many
    times as long. ``discriminator_steps``: the number of D's steps, each with a privacy cost; 300 are enough for 8x8
    digits. ``batch_size``: the expected number of records in a D step; a client with at most this number of records
    uses all records in every step. ``ratio``: the number of D's steps for each step of G. ``generator_batch_size``: the
    number of fakes in a step of G. ``clipping_norm``: C, the norm to which the gradient of each pair of a record and a
    fake is clipped. ``averaging``: the decay of the moving average of G's weights; the averaged G makes the synthetic
    records. ``snapshots``: the number of times during training at which a part of the synthetic records is drawn. At
    any one time, G makes only a few kinds of records (mode collapse), and these kinds change during training (as in
    herding, Welling 2009). ``latent_dim``: the length of G's latent vectors. ``resolution``: the largest side, in
    pixels, of the images that D sees, for the small networks only. ``discriminator_width``: the width of D's hidden
    layers, for the small networks only. ``generator_width``: the width of G's hidden layers, for the small networks
    only. ``discriminator_learning_rate``: the learning rate of Adam for D. ``generator_learning_rate``: the learning
    rate of Adam for G.
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
        """Raise UserError if the networks are the paper's and the records are not images."""
        if self.networks == "paper" and len(shape) != 3:
            raise UserError(
                f'preprocess.generator.networks "paper" need images, these records have shape {shape}: choose "small"'
            )

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:  # noqa: ARG002 (part of the protocol)
        """Return the privacy cost of ``discriminator_steps`` steps with the least noise that (epsilon, delta) allows.

        No synthetic records are made if the noise of a step would hide the records; the bill's ``refused`` is the
        reason. The condition is z > q n, with the noise multiplier z, the sampling probability q and the number of
        records n. Then the noise on a single parameter exceeds the largest norm of the summed gradients of an expected
        batch.
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
                f"{num_records} records are too few for epsilon {epsilon:g}: in a step, the noise on every parameter "
                f"({noise:.3g} clipping norms) exceeds the sum of the expected {rate * num_records:.3g} gradients"
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
        """Train D and G with the steps and the noise in ``bill``, and return synthetic records from G.

        The arguments are those of ``Generator.generate``.
        """
        [made] = self.generate_stacked([GeneratorRequest(records, counts, bill, noise, generator)])
        if isinstance(made, Exception):
            raise made
        return made

    def generate_stacked(self, requests: Sequence[GeneratorRequest], check: Check = lambda: None) -> list[Made]:
        """Train the networks of all clients, and return each client's synthetic records: see ``StackedGenerator``."""
        from clients.dafl.dpcgan.training import GanClient  # noqa: PLC0415 (its import needs torch)

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
        """Return the name of the code that trains the networks on this machine.

        The name is "native trainer" for the compiled C++ trainer. Otherwise it is PyTorch, with the reason.
        """
        from fl_sim.native.kernel import load_kernel  # noqa: PLC0415 (its import needs torch)

        kernel, reason = load_kernel()
        if self.is_compilable and kernel is not None:
            return "native trainer"
        return f"PyTorch: {'Opacus needs it' if kernel is not None else f'there is no native trainer here, {reason}'}"

    @property
    def is_compilable(self) -> bool:
        """Return True if the compiled trainer supports these settings, even if this machine has no compiled trainer."""
        return self.gradients == "own"

    def shortened(self, steps: int) -> tuple[DpCgan, float]:
        """Return a generator with at most ``steps`` D steps, and its number of steps divided by the original number."""
        fewer = min(steps, self.discriminator_steps)
        return self.model_copy(update={"discriminator_steps": fewer}), fewer / self.discriminator_steps

    def _trainings(self, clients: Sequence[GanClient]) -> Iterator[tuple[int, Callable[[int], None]]]:
        """Yield (number of steps, function that executes one step) for each set of clients that train together.

        Clients with equal numbers of steps train together. A client trains separately if its steps are long (the
        paper's networks) or compiled, so that its weights stay in the processor's cache.
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
