"""The compiled convolutional networks of the DP conditional GAN against float64 PyTorch."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from clients.dafl.dpcgan.nets import paper, with_planes
from clients.dafl.dpcgan.training import BETAS, Weights
from fl_sim.native.images import ImageDiscriminator, ImageGenerator, are_painters
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.native.perceptrons import Adversaries, CompiledAdam, GradientNoise, Pairs, Shown

LATENT, PAIRS, KEPT = 10, 11, 0.9
CLEAR = 5e-7  # float32 errs by some 1e-7 in what a LeakyReLU is given
Case = tuple[nn.Sequential, nn.Sequential, Shown, torch.Tensor]
every_shape = pytest.mark.parametrize(("channels", "num_classes"), [(1, 0), (3, 3)])


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    """The compiled code."""
    found, why_not = load_kernel()
    return found if found is not None else pytest.skip(why_not)


def case(channels: int, num_classes: int) -> Case:
    """Return D, G, latent vectors with classes, and the same as joined float64 rows."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        nets = paper((channels, 32, 32), num_classes, LATENT)
        generator = nets.generator
        assert isinstance(generator, nn.Sequential)
        for weights in generator.parameters():  # a shift of zeros would hide a wrong one
            weights.data += 0.05 * torch.randn_like(weights)
        latents = torch.randn(PAIRS, LATENT)
    classes = np.arange(PAIRS) % max(1, num_classes)
    rows = Shown(latents.numpy(), classes if num_classes else None)
    return nets.discriminator, generator, rows, joined(latents.double(), classes, num_classes)


def joined(values: torch.Tensor, classes: np.ndarray, num_classes: int) -> torch.Tensor:
    """Return ``values`` with one further channel for every class."""
    hot = functional.one_hot(torch.from_numpy(classes), num_classes) if num_classes else torch.zeros(len(values), 0)
    return with_planes(values, hot.to(values))


def exact(net: nn.Sequential) -> nn.Sequential:
    """Return the network in float64."""
    return copy.deepcopy(net).double()


def flat(values: list[torch.Tensor]) -> np.ndarray:
    """Return tensors as one vector."""
    return torch.cat([one.detach().flatten() for one in values]).numpy()


def classes_of(rows: Shown) -> np.ndarray:
    """Return the class of every row, zeros where there are none."""
    return rows.classes if rows.classes is not None else np.zeros(PAIRS, np.int64)


def distance_to_kink(net: nn.Sequential, images: torch.Tensor) -> float:
    """Return the smallest absolute input of a LeakyReLU.

    Where it is smaller than float32's error, float32 and float64 may take different slopes, and neither is wrong.
    """
    smallest, values = np.inf, images.detach()
    for layer in net:
        if isinstance(layer, nn.LeakyReLU):
            smallest = min(smallest, float(values.abs().min()))
        values = layer(values).detach()
    return smallest


def clear_images(net: nn.Sequential, classes: np.ndarray, channels: int, num_classes: int) -> torch.Tensor:
    """Return ``PAIRS`` flat images whose inputs of LeakyReLU are all clear of zero."""
    draws, found = torch.Generator().manual_seed(4), []
    while len(found) < PAIRS:
        image = torch.rand(1, channels * 32 * 32, generator=draws) * 2 - 1
        shown = joined(image.double().view(1, channels, 32, 32), classes[len(found) : len(found) + 1], num_classes)
        if distance_to_kink(net, shown) > CLEAR:
            found.append(image)
    return torch.cat(found)


@every_shape
def test_a_generator_paints_the_images_of_pytorch(kernel: Kernel, channels: int, num_classes: int) -> None:
    discriminator, generator, rows, latents = case(channels, num_classes)
    assert are_painters(discriminator, generator)
    expected = exact(generator)(latents).flatten(1)
    Weights([generator])
    made = ImageGenerator(kernel, generator, num_classes).generate(rows)
    assert np.abs(made - expected.detach().numpy()).max() < 1e-5


@every_shape
def test_a_step_of_both_networks_is_that_of_pytorch(kernel: Kernel, channels: int, num_classes: int) -> None:
    discriminator, generator, rows, latents = case(channels, num_classes)
    d64, g64 = exact(discriminator), exact(generator)
    images = clear_images(d64, classes_of(rows), channels, num_classes)
    vectors = [Weights([net]).parts[0] for net in (discriminator, generator)]
    adams = [CompiledAdam(vector, BETAS, 1e-3) for vector in vectors]
    mean = vectors[1].clone()
    before = mean.numpy().copy()
    nets = ImageDiscriminator(kernel, discriminator, num_classes), ImageGenerator(kernel, generator, num_classes)
    both = Adversaries(nets, adams[0], adams[1], mean)
    classes = classes_of(rows)

    # The generator's gradient, of the non-saturating loss.
    both.generator_step(rows, KEPT)
    fakes = g64(latents).flatten(1)
    seen = joined(fakes.view(-1, channels, 32, 32), classes, num_classes)
    loss = functional.softplus(-d64(seen)).mean()
    expected = flat(list(torch.autograd.grad(loss, list(g64.parameters()))))
    assert np.linalg.norm(adams[1].gradient - expected) < 1e-5 * np.linalg.norm(expected)
    moved = vectors[1].numpy()
    assert 0 < np.abs(moved - before).max() < 1.001e-3  # Adam's first step is the learning rate
    assert np.allclose(mean.numpy(), KEPT * before + (1 - KEPT) * moved, atol=1e-7)

    # The discriminator's private gradient, with the generator's new weights: clipped sums, noise, divisor.
    noise, bound, spacing, divisor = 1e5 * (np.arange(both.total.size) % 5 - 2), 0.3, 2.0**-20, 7.0
    real = Shown(images.numpy(), rows.classes)
    both.discriminator_step(Pairs(real, np.arange(PAIRS), rows, bound), GradientNoise(noise, spacing, divisor))
    fakes = exact(generator)(latents)
    assert distance_to_kink(d64, joined(fakes.view(-1, channels, 32, 32), classes, num_classes)) > CLEAR
    halves = [joined(half, classes, num_classes) for half in (images.double().view(-1, channels, 32, 32), fakes)]
    total = np.zeros(both.total.size)
    for pair in range(PAIRS):
        true, fake = (d64(half[pair : pair + 1].detach()) for half in halves)
        gradients = torch.autograd.grad(
            (functional.softplus(-true) + functional.softplus(fake)).sum(), list(d64.parameters())
        )
        one = flat(list(gradients))
        assert np.linalg.norm(one) > bound  # every pair is clipped
        total += one * min(1.0, bound / np.linalg.norm(one))
    assert np.linalg.norm(both.total - total) < 1e-5 * np.linalg.norm(total)
    sent = (np.round(total / spacing) + noise) * spacing / divisor
    assert np.abs(adams[0].gradient - sent).max() < 2e-5
