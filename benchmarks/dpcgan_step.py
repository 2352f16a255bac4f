"""What privacy costs one discriminator step of the DP conditional GAN: processor time, alternating, medians.

    PYTHONPATH=. python benchmarks/dpcgan_step.py [--json] [--pairs 256] [--repeats 40] [--networks small paper]

Four ways to take the same step on the same (real, fake) pairs: without privacy (one backward pass); without privacy by
this project's own code (nothing clipped, nothing added); with joint clipping and noise by this project's own code; and
with the per-record gradients of Opacus' hooks, real and fake added before they are clipped. The noise is the same
cryptographic one in both private steps, and counted in both. ``--plain-noise`` takes torch's generator instead, which
is what Opacus does unless told otherwise.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from opacus.grad_sample import GradSampleModule
from torch import nn
from torch.nn import functional

from clients.dpcgan import _Adam
from clients.dpcgan_clipping import clipped_sum
from clients.dpcgan_nets import Networks, paper, small
from fl_sim.privacy.mechanisms import Noise, add_noise, clipping_norm_on_grid

Step = Callable[[int], None]
SHAPE, NOISE_MULTIPLIER = (1, 28, 28), 1.1


def networks(name: str) -> Networks:
    """Return fresh networks for 28x28 images of one class."""
    torch.manual_seed(0)
    if name == "paper":
        return paper(SHAPE, 0, latent_dim=10)
    return small(SHAPE, 0, latent_dim=10, resolution=14, widths=(64, 64))


def loss_of(scores: torch.Tensor, pairs: int) -> torch.Tensor:
    """Return the discriminator's loss, summed over pairs."""
    scores = scores.flatten()
    return functional.softplus(-scores[:pairs]).sum() + functional.softplus(scores[pairs:]).sum()


@dataclass(frozen=True)
class Batch:
    """The pairs that every step takes, and the source of its noise."""

    name: str
    real: torch.Tensor
    fake: torch.Tensor
    source: Noise
    plain_noise: bool

    def fresh(self) -> tuple[nn.Sequential, _Adam]:
        """Return a discriminator and its optimiser."""
        net = networks(self.name).discriminator
        return net, _Adam(list(net.parameters()), 1e-3)

    def noised(self, total: torch.Tensor, step: int) -> torch.Tensor:
        """Return ``total`` with noise, as float64."""
        if self.plain_noise:
            return total + torch.randn_like(total) * NOISE_MULTIPLIER
        normal = self.source.standard_normal(len(total), purpose="benchmark", server_round=step)
        return torch.from_numpy(add_noise(total.double().numpy(), NOISE_MULTIPLIER, normal))

    def update(self, adam: _Adam, total: torch.Tensor) -> None:
        """Take the step that ``total`` stands for."""
        gradient = (total / len(self.real)).float()
        adam.step(torch.split(gradient, [weight.numel() for weight in adam.weights]))


def without_privacy(batch: Batch) -> Step:
    """Return the step of one loss and one backward pass."""
    net, adam = batch.fresh()
    pairs = len(batch.real)

    def step(_: int) -> None:
        loss = loss_of(net(torch.cat([batch.real, batch.fake])), pairs) / pairs
        adam.step(torch.autograd.grad(loss, adam.weights))

    return step


def own_without_privacy(batch: Batch) -> Step:
    """Return the step by this project's code at epsilon inf."""
    net, adam = batch.fresh()
    return lambda _: batch.update(adam, clipped_sum(net, batch.real, batch.fake, math.inf))


def own(batch: Batch) -> Step:
    """Return the private step as this project takes it."""
    net, adam = batch.fresh()
    bound = clipping_norm_on_grid(1.0, NOISE_MULTIPLIER, sum(weight.numel() for weight in adam.weights))
    return lambda step: batch.update(adam, batch.noised(clipped_sum(net, batch.real, batch.fake, bound), step))


def opacus(batch: Batch) -> Step:
    """Return the private step from the gradients that Opacus' hooks leave for every record."""
    net, adam = batch.fresh()
    hooked, pairs = GradSampleModule(net, loss_reduction="sum"), len(batch.real)

    def step(number: int) -> None:
        loss_of(hooked(torch.cat([batch.real, batch.fake])), pairs).backward()
        samples = [weight.grad_sample[:pairs] + weight.grad_sample[pairs:] for weight in adam.weights]
        norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1)
        total = torch.cat([torch.einsum("p,p...->...", factors, sample).flatten() for sample in samples])
        batch.update(adam, batch.noised(total, number))
        for weight in adam.weights:
            weight.grad, weight.grad_sample = None, None

    return step


WAYS: dict[str, Callable[[Batch], Step]] = {
    "without privacy": without_privacy, "own code, nothing clipped or added": own_without_privacy,
    "own joint clipping": own, "Opacus hooks": opacus,
}  # fmt: skip


def measure(name: str, pairs: int, repeats: int, *, plain_noise: bool) -> dict[str, float]:
    """Return {step: median processor seconds}, with the steps taking turns so that a busy machine disturbs all."""
    nets = networks(name)
    rows = nets.join(nets.view(torch.rand(2 * pairs, *SHAPE) * 2 - 1), torch.empty(2 * pairs, 0))
    batch = Batch(name, rows[:pairs], rows[pairs:], Noise.seeded(0), plain_noise)
    ways = {way: step_of(batch) for way, step_of in WAYS.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 3):
        for way, step in ways.items():
            start = time.process_time()
            step(repeat)
            if repeat >= 3:
                seconds[way].append(time.process_time() - start)
    return {way: statistics.median(taken) for way, taken in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--networks", nargs="+", choices=["small", "paper"], default=["small", "paper"])
    parser.add_argument("--plain-noise", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    found = {
        name: measure(name, arguments.pairs, arguments.repeats, plain_noise=arguments.plain_noise)
        for name in arguments.networks
    }
    if arguments.json:
        print(json.dumps(found))
        return
    for name, taken in found.items():
        print(f"{name} networks, {arguments.pairs} pairs, one thread")
        for way, median in taken.items():
            ratio = median / taken["without privacy"]
            print(f"  {way:36} {1e3 * median:8.2f} ms {ratio:6.2f} x {arguments.pairs / median:10.0f} pairs/s")


if __name__ == "__main__":
    main()
