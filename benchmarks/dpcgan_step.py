"""What privacy costs one discriminator step of the DP conditional GAN: processor time, alternating, medians.

    PYTHONPATH=. python benchmarks/dpcgan_step.py [--json] [--pairs 256] [--repeats 40] [--networks small paper]
        [--clients 10]

Ways to take the same step on the same (real, fake) pairs: without privacy (one backward pass); without privacy by
this project's own code (nothing clipped, nothing added); with joint clipping and noise by this project's own code, on
PyTorch and (small networks) compiled, where the step makes its fakes, too; and with the per-record gradients of Opacus'
hooks, real and fake added before they are clipped. The noise is the same cryptographic one in both private steps, and
counted in both. ``--plain-noise`` takes torch's generator instead, which is what Opacus does unless told otherwise. The
small networks also as a stack of ``--clients`` clients with a discriminator, records and noise each, with privacy and
without: the seconds are those of one client's share.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.grad_sample import GradSampleModule
from torch import nn
from torch.nn import functional

from clients.dafl.dpcgan.clipping import MARGIN, ClientPairs, clipped_sum, clipped_sums
from clients.dafl.dpcgan.nets import Networks, paper, scored, small
from clients.dafl.dpcgan.training import Adam, Weights, adversaries_of
from fl_sim.native.kernel import CompiledNormals, Kernel, load_kernel
from fl_sim.native.perceptrons import GradientNoise, Pairs, Shown
from fl_sim.privacy.mechanisms import Noise, add_noise, clipping_norm_on_grid, grid_spacing

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

    def fresh(self, clients: int = 1) -> tuple[list[nn.Sequential], Adam]:
        """Return every client's discriminator and the optimiser of all."""
        nets = [networks(self.name).discriminator for _ in range(clients)]
        return nets, Adam(Weights(nets), 1e-3)

    def drawn(self, count: int, step: int, client: int = 0) -> NDArray[np.float64]:
        """Return noise of the client's own, in steps of the grid."""
        if self.plain_noise:
            return (torch.randn(count) * (NOISE_MULTIPLIER / grid_spacing(NOISE_MULTIPLIER))).double().numpy()
        return self.source.gaussian(count, NOISE_MULTIPLIER, purpose=f"benchmark {client}", server_round=step)

    def noised(self, total: torch.Tensor, step: int, client: int = 0) -> torch.Tensor:
        """Return ``total`` with noise of the client's own, as float64."""
        drawn = self.drawn(len(total), step, client)
        return torch.from_numpy(add_noise(total.double().numpy(), NOISE_MULTIPLIER, drawn))

    def update(self, adam: Adam, totals: Sequence[torch.Tensor]) -> None:
        """Take the step that every client's total stands for."""
        adam.step([[(total / len(self.real)).float()] for total in totals])


def without_privacy(batch: Batch) -> Step:
    """Return the step of one loss and one backward pass."""
    [net], adam = batch.fresh()
    pairs, weights = len(batch.real), list(net.parameters())

    def step(_: int) -> None:
        loss = loss_of(net(torch.cat([batch.real, batch.fake])), pairs) / pairs
        adam.step([torch.autograd.grad(loss, weights)])

    return step


def stack_without_privacy(batch: Batch, clients: int) -> Step:
    """Return the same for many clients as one computation."""
    nets, adam = batch.fresh(clients)
    pairs, weights = len(batch.real), [list(net.parameters()) for net in nets]

    def step(_: int) -> None:
        rows = [torch.cat([batch.real, batch.fake]) for _ in nets]
        losses = [loss_of(scores, pairs) / pairs for scores in scored(nets, rows)]
        gradients = iter(torch.autograd.grad(losses, [weight for one in weights for weight in one]))
        adam.step([[next(gradients) for _ in one] for one in weights])

    return step


def own_without_privacy(batch: Batch) -> Step:
    """Return the step by this project's code at epsilon inf."""
    [net], adam = batch.fresh()
    return lambda _: batch.update(adam, [clipped_sum(net, batch.real, batch.fake, math.inf)])


def bound_of(net: nn.Sequential, pairs: int) -> float:
    """Return what every pair is clipped to."""
    size = sum(weight.numel() for weight in net.parameters())
    return clipping_norm_on_grid(1.0, NOISE_MULTIPLIER, size, summands=pairs)


def own_stack(batch: Batch, clients: int) -> Step:
    """Return the private step of many clients as this project's own code takes it with PyTorch."""
    nets, adam = batch.fresh(clients)
    bound = bound_of(nets[0], len(batch.real))
    pairs = [ClientPairs(net, batch.real, batch.fake, bound) for net in nets]

    def step(number: int) -> None:
        totals = clipped_sums(pairs)
        batch.update(adam, [batch.noised(total, number, client) for client, total in enumerate(totals)])

    return step


def own(batch: Batch) -> Step:
    """Return the private step of one client: a stack of one."""
    return own_stack(batch, 1)


def compiled(batch: Batch, kernel: Kernel) -> Step:
    """Return the same of one client by compiled code, which makes the fakes, too."""
    nets = networks(batch.name)
    adversaries = adversaries_of(nets, networks(batch.name).generator, 0, (1e-3, 1e-3), kernel)
    latents = Shown(torch.randn(len(batch.real), 10).numpy())
    bound = bound_of(nets.discriminator, len(batch.real)) * (1 - MARGIN)
    pairs = Pairs(Shown(batch.real.numpy()), np.arange(len(batch.real)), latents, bound)
    source = replace(batch, source=replace(batch.source, normals=CompiledNormals(kernel)))

    def step(number: int) -> None:
        noise = source.drawn(len(adversaries.total), number)
        adversaries.discriminator_step(pairs, GradientNoise(noise, grid_spacing(NOISE_MULTIPLIER), len(latents)))

    return step


def opacus(batch: Batch) -> Step:
    """Return the private step from the gradients that Opacus' hooks leave for every record."""
    [net], adam = batch.fresh()
    hooked, pairs = GradSampleModule(net, loss_reduction="sum"), len(batch.real)
    weights = list(net.parameters())

    def step(number: int) -> None:
        loss_of(hooked(torch.cat([batch.real, batch.fake])), pairs).backward()
        samples = [weight.grad_sample[:pairs] + weight.grad_sample[pairs:] for weight in weights]
        norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1)
        total = torch.cat([torch.einsum("p,p...->...", factors, sample).flatten() for sample in samples])
        batch.update(adam, [batch.noised(total, number)])
        for weight in weights:
            weight.grad, weight.grad_sample = None, None

    return step


WAYS: dict[str, Callable[[Batch], Step]] = {
    "without privacy": without_privacy, "own code, nothing clipped or added": own_without_privacy,
    "own joint clipping": own, "Opacus hooks": opacus,
}  # fmt: skip


def ways_of(batch: Batch, clients: int) -> dict[str, tuple[Step, int]]:
    """Return {way: (step, clients who take it)}."""
    ways = {way: (step_of(batch), 1) for way, step_of in WAYS.items()}
    kernel, _ = load_kernel()
    if batch.name == "small" and kernel:
        ways["compiled joint clipping"] = compiled(batch, kernel), 1
    if batch.name == "paper":  # its clients train one after another
        return ways
    return ways | {
        "stack without privacy": (stack_without_privacy(batch, clients), clients),
        "stack, own joint clipping": (own_stack(batch, clients), clients),
    }


def measure(name: str, pairs: int, repeats: int, clients: int, *, plain_noise: bool) -> dict[str, float]:
    """Return {step: median processor seconds of a client}; steps take turns, so that a busy machine disturbs all."""
    nets = networks(name)
    rows = nets.join(nets.view(torch.rand(2 * pairs, *SHAPE) * 2 - 1), torch.empty(2 * pairs, 0))
    batch = Batch(name, rows[:pairs], rows[pairs:], Noise.seeded(0), plain_noise)
    ways = ways_of(batch, clients)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 3):
        for way, (step, number) in ways.items():
            start = time.process_time()
            step(repeat)
            if repeat >= 3:
                seconds[way].append((time.process_time() - start) / number)
    return {way: statistics.median(taken) for way, taken in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--networks", nargs="+", choices=["small", "paper"], default=["small", "paper"])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--plain-noise", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)  # glibc keeps freed memory from here on, as in runs
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    found = {
        name: measure(name, arguments.pairs, arguments.repeats, arguments.clients, plain_noise=arguments.plain_noise)
        for name in arguments.networks
    }
    if arguments.json:
        print(json.dumps(found))
        return
    for name, taken in found.items():
        print(f"{name} networks, {arguments.pairs} pairs, one thread")
        for way, median in taken.items():
            ratio = median / taken["stack without privacy" if way.startswith("stack") else "without privacy"]
            print(f"  {way:36} {1e3 * median:8.2f} ms {ratio:6.2f} x {arguments.pairs / median:10.0f} pairs/s")


if __name__ == "__main__":
    main()
