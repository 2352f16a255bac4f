"""Compiled perceptrons and what is summed over their rows: PyTorch's to rounding, the same bits on any processor."""

import itertools
import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from clients.dafl.dpcgan.clipping import MARGIN, clipped_sum
from fl_sim.native.kernel import Kernel
from fl_sim.native.perceptrons import (
    Adversaries,
    CompiledAdam,
    GradientNoise,
    Pairs,
    Perceptron,
    Shown,
    TwoWays,
    is_perceptron,
)
from fl_sim.privacy.mechanisms import Noise, add_noise, grid_spacing


class Generator(nn.Module):
    """Of latent vectors, or of those gated by ``classes``."""

    def __init__(self, inputs: int, wide: int, outputs: int, classes: int = 0) -> None:
        super().__init__()
        self.classes = classes
        self.curved = perceptron((inputs + 1) * classes or inputs, wide, wide, outputs, between=nn.ReLU())
        self.straight = nn.Sequential(nn.Linear((inputs + 1) * classes or inputs, outputs, bias=False))

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(2 * (self.curved(latents) + self.straight(latents)))

    def compiled(self, kernel: Kernel) -> TwoWays:
        return TwoWays(kernel, self.curved, self.straight, self.classes)


def perceptron(*widths: int, between: nn.Module | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for entered, left in itertools.pairwise(widths):
        layers += [between or nn.LeakyReLU(0.2), nn.Linear(entered, left)]
    return nn.Sequential(*layers[1:])


def gated(views: torch.Tensor, places: torch.Tensor, classes: int) -> torch.Tensor:
    with_one = functional.pad(views, (0, 1), value=1.0)
    return (functional.one_hot(places, classes)[:, :, None] * with_one[:, None]).flatten(1)


def shown(values: torch.Tensor, places: torch.Tensor | None = None) -> Shown:
    return Shown(values.numpy(), None if places is None else places.numpy())


def learning(
    kernel: Kernel, discriminator: nn.Sequential, generator: Generator, rates: tuple[float, float] = (0.0, 0.0)
) -> Adversaries:
    """Return both networks with their weights in a row, and Adam on them."""
    rows = [parameters_to_vector(net.parameters()).detach() for net in (discriminator, generator)]
    for row, net in zip(rows, (discriminator, generator), strict=True):
        places = torch.split(row, [weight.numel() for weight in net.parameters()])
        for weight, place in zip(net.parameters(), places, strict=True):
            weight.data = place.view_as(weight)
    adams = [CompiledAdam(row, (0.5, 0.999), rate) for row, rate in zip(rows, rates, strict=True)]
    networks = Perceptron(kernel, discriminator, generator.classes), generator.compiled(kernel)
    return Adversaries(networks, adams[0], adams[1], rows[1].clone())


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


SIZES = [(1, 1, 1, 1), (5, 10, 64, 196), (7, 3, 17, 33), (130, 10, 64, 196)]
CLASSES = pytest.mark.parametrize("classes", [0, 1, 3])


@CLASSES
@pytest.mark.parametrize(("rows", "inputs", "wide", "outputs"), SIZES)
def test_what_a_generator_makes_is_what_pytorch_makes_of_it(
    kernel: Kernel, rows: int, inputs: int, wide: int, outputs: int, classes: int
) -> None:
    generator, latents = Generator(inputs, wide, outputs, classes), 3 * torch.randn(rows, inputs)
    places = torch.randint(classes, (rows,)) if classes else None
    expected = generator(latents if places is None else gated(latents, places, classes)).detach()
    found = torch.from_numpy(generator.compiled(kernel).generate(shown(latents, places)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@CLASSES
@pytest.mark.parametrize(("rows", "inputs", "wide", "outputs"), SIZES)
def test_a_generators_gradient_is_pytorchs(
    kernel: Kernel, rows: int, inputs: int, wide: int, outputs: int, classes: int
) -> None:
    generator, latents = Generator(inputs, wide, outputs, classes), torch.randn(rows, inputs)
    discriminator = perceptron((outputs + 1) * classes or outputs, wide, wide, 1)
    places = torch.randint(classes, (rows,)) if classes else None
    views = generator(latents if places is None else gated(latents, places, classes))
    loss = functional.softplus(-discriminator(views if places is None else gated(views, places, classes))).mean()
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(generator.parameters()))])
    adversaries = learning(kernel, discriminator, generator)
    adversaries.generator_step(shown(latents, places), 0.5)
    found = torch.from_numpy(adversaries.generator_adam.gradient)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


@CLASSES
@pytest.mark.parametrize("pairs", [9, 300])
def test_the_clipped_sum_of_chosen_records_is_that_of_their_gated_rows(
    kernel: Kernel, classes: int, pairs: int
) -> None:
    net = perceptron(38 * classes or 37, 12, 12, 1)
    views, made, chosen = torch.rand(50, 37), torch.rand(pairs, 37), torch.randint(50, (pairs,))
    views[chosen[3]] *= 1e3
    views[chosen[4], 7] = math.nan
    places, of_fakes = (torch.randint(max(1, classes), (number,)) for number in (50, pairs))
    found = Perceptron(kernel, net, classes).clipped_sum(
        shown(views, places), shown(made, of_fakes), 0.7, chosen.numpy()
    )
    real, fake = views[chosen], made
    if classes:
        real, fake = gated(real, places[chosen], classes), gated(made, of_fakes, classes)
    np.testing.assert_allclose(found, Perceptron(kernel, net).clipped_sum(shown(real), shown(fake), 0.7), atol=1e-12)
    expected = clipped_sum(net, real, fake, 0.7 / (1 - MARGIN))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@CLASSES
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3, 1e30, math.inf, math.nan])
def test_no_record_moves_the_sum_by_more_than_the_bound(kernel: Kernel, classes: int, scale: float) -> None:
    net = Perceptron(kernel, perceptron(38 * classes or 37, 12, 12, 1), classes)
    views, places = torch.rand(2, 270, 37), torch.randint(max(1, classes), (2, 270))
    views[0, 5] *= scale
    rest = [row for row in range(270) if row != 5]

    def summed(rows: list[int]) -> NDArray[np.float64]:
        return net.clipped_sum(*(shown(views[half][rows], places[half][rows]) for half in range(2)), 0.1)

    moved = float(np.linalg.norm(summed([*rest, 5]) - summed(rest)))
    assert moved <= 0.1 * (1 + 1e-9)
    assert (moved < 1e-9) == (not math.isfinite(scale))


def test_numbers_far_out_and_no_numbers_pass_a_generator_as_in_pytorch(kernel: Kernel) -> None:
    generator = Generator(1, 2, 3)
    with torch.no_grad():
        for weight in generator.parameters():
            weight.fill_(1.0)
    latents = torch.tensor([0.0, 1e-30, 60.0, -60.0, 1e4, -1e4, float("inf"), float("nan")])[:, None]
    found = torch.from_numpy(generator.compiled(kernel).generate(shown(latents)))
    torch.testing.assert_close(found, generator(latents).detach(), rtol=1e-6, atol=1e-30, equal_nan=True)


@CLASSES
def test_a_row_becomes_the_same_bits_whatever_rows_are_beside_it(kernel: Kernel, classes: int) -> None:
    generator, latents = Generator(10, 64, 196, classes).compiled(kernel), torch.randn(120, 10)
    places = torch.randint(max(1, classes), (120,))
    together = generator.generate(shown(latents, places))
    for rows in (slice(0, 1), slice(3, 20), slice(95, 98), slice(119, 120)):
        assert np.array_equal(generator.generate(shown(latents[rows], places[rows])), together[rows])


def test_adams_steps_are_their_definition_and_the_mean_follows_the_generators_weights(kernel: Kernel) -> None:
    discriminator, generator = perceptron(3, 4, 1), Generator(2, 4, 3)
    adversaries = learning(kernel, discriminator, generator, (1e-2, 3e-3))
    nets = [deepcopy(discriminator), deepcopy(generator)]
    adams = [
        torch.optim.Adam(net.parameters(), lr=lr, betas=(0.5, 0.999))
        for net, lr in zip(nets, (1e-2, 3e-3), strict=True)
    ]
    mean = adversaries.mean.copy()
    for _ in range(5):
        adversaries.discriminator_step(pairs_of(torch.rand(9, 3), torch.randn(9, 2)), GradientNoise(None, 1.0, 4.0))
        adversaries.generator_step(shown(torch.randn(6, 2)), 0.75)
        for net, adam, taken in zip(
            nets, adams, (adversaries.discriminator_adam, adversaries.generator_adam), strict=True
        ):
            vector_to_parameters(torch.from_numpy(taken.gradient.copy()), [weight.grad for weight in zeroed(net)])
            adam.step()
            own = parameters_to_vector(net.parameters()).detach()
            torch.testing.assert_close(torch.from_numpy(taken.weights), own, rtol=1e-5, atol=1e-7)
        mean += 0.25 * (adversaries.generator_adam.weights - mean)
        np.testing.assert_allclose(adversaries.mean, mean, rtol=1e-6)


def pairs_of(
    views: torch.Tensor, latents: torch.Tensor, places: torch.Tensor | None = None, bound: float = 0.5
) -> Pairs:
    return Pairs(shown(views, places), np.arange(len(views))[::-1].copy(), shown(latents, places), bound)


def zeroed(net: nn.Module) -> list[nn.Parameter]:
    """Return the parameters, with gradients of zeros to be written."""
    for weight in net.parameters():
        weight.grad = torch.zeros_like(weight)
    return list(net.parameters())


@pytest.mark.parametrize("std", [0.65, 3e-7, 0.0])
@pytest.mark.parametrize("divisor", [256.0, 85.33333333])
def test_the_noised_gradient_is_that_of_the_definition_bit_for_bit(kernel: Kernel, std: float, divisor: float) -> None:
    discriminator = perceptron(300, 60, 1)
    adversaries = learning(kernel, discriminator, Generator(2, 4, 300))
    size = len(adversaries.discriminator_adam.weights)
    noise = Noise.seeded(0).gaussian(size, std, purpose="noise", server_round=0) if std else None
    pairs = pairs_of(torch.rand(70, 300), torch.randn(70, 2))
    fakes = shown(torch.from_numpy(adversaries.generator.generate(pairs.latents)))
    summed = adversaries.discriminator.clipped_sum(pairs.real, fakes, pairs.bound, pairs.chosen)
    adversaries.discriminator_step(pairs, GradientNoise(noise, grid_spacing(std) if std else 1.0, divisor))
    assert adversaries.total.tobytes() == summed.tobytes()
    expected = np.empty(size, np.float32)
    released = summed if noise is None else add_noise(summed, std, noise)
    np.divide(released, divisor, out=expected, casting="same_kind")
    assert adversaries.discriminator_adam.gradient.tobytes() == expected.tobytes()


@CLASSES
def test_every_width_of_vectors_gives_the_same_bits(kernels: list[Kernel], classes: int) -> None:
    generator, discriminator = Generator(10, 20, 37, classes), perceptron(38 * classes or 37, 33, 20, 1)
    latents, places = torch.randn(41, 10), torch.randint(max(1, classes), (2, 41))
    real, fake = torch.rand(2, 41, 37)
    real[3, 5] = float("nan")

    def everything(kernel: Kernel) -> list[NDArray[Any]]:
        nets = deepcopy(discriminator), deepcopy(generator)
        adversaries = learning(kernel, *nets, (1e-2, 1e-2))
        rows = shown(real, places[0]), shown(fake, places[1])
        sums = [adversaries.discriminator.clipped_sum(*rows, norm) for norm in (0.1, math.inf)]
        adversaries.discriminator_step(pairs_of(real, latents, places[0]), GradientNoise(None, 1.0, 3.0))
        adversaries.generator_step(shown(latents, places[0]), 0.5)
        adams = adversaries.discriminator_adam, adversaries.generator_adam
        taken = [vector for adam in adams for vector in (adam.gradient, adam.means, adam.squares, adam.weights)]
        return [
            *sums,
            *taken,
            adversaries.total,
            adversaries.mean,
            adversaries.generator.generate(shown(latents, places[0])),
        ]

    first, *others = map(everything, kernels)
    assert all(a.tobytes() == b.tobytes() for other in others for a, b in zip(first, other, strict=True))


def test_only_float32_layers_that_fit_each_other_are_taken() -> None:
    assert is_perceptron(perceptron(3, 4, 1))
    assert is_perceptron(nn.Sequential(nn.Linear(3, 2, bias=False)))
    for layers in (
        [], [nn.Linear(3, 4), nn.ReLU()], [nn.ReLU(), nn.Linear(3, 4)], [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)],
        [nn.Linear(3, 4), nn.LeakyReLU(-0.1), nn.Linear(4, 1)], [nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 1)],
        [nn.Linear(3, 4).double()], [nn.Conv2d(1, 1, 1)],
    ):  # fmt: skip
        assert not is_perceptron(nn.Sequential(*layers))
    assert not is_perceptron(nn.Linear(3, 4))


def test_rows_of_another_shape_or_type_are_refused(kernel: Kernel) -> None:
    discriminator, rows = Perceptron(kernel, perceptron(8, 5, 1)), torch.zeros(5, 8)
    with pytest.raises(ValueError, match="4 fake records need 4 indices of real records"):
        discriminator.clipped_sum(shown(rows), shown(rows[:4]), 1.0)
    for values in (rows.double(), rows[0]):
        with pytest.raises(ValueError, match="rows must be float32"):
            shown(values)
    for places in (torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)):
        with pytest.raises(ValueError, match="classes of 5 rows must be int64"):
            shown(rows, places)
    with pytest.raises(ValueError, match="the network takes rows of 8 numbers"):
        discriminator.clipped_sum(shown(rows[:, :7]), shown(rows[:, :7]), 1.0)
    with pytest.raises(ValueError, match="the network takes rows of 3 numbers and a class"):
        Perceptron(kernel, perceptron(8, 5, 1), 2).clipped_sum(shown(rows[:, :3]), shown(rows[:, :3]), 1.0)
    with pytest.raises(ValueError, match="cannot be divided into equal blocks for 3 classes"):
        Perceptron(kernel, perceptron(8, 5, 1), 3)
    for chosen in (np.zeros(4, np.int64), np.zeros(5, np.int32), np.zeros(10, np.int64)[::2]):
        with pytest.raises(ValueError, match="5 fake records need 5 indices of real records"):
            discriminator.clipped_sum(shown(rows), shown(rows), 1.0, chosen)


def test_records_and_classes_that_are_not_there_are_refused(kernel: Kernel) -> None:
    generator, discriminator = Generator(2, 4, 3, 2), perceptron(8, 5, 1)
    adversaries = learning(kernel, discriminator, generator)
    rows, latents, places = torch.zeros(5, 3), torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64)
    nothing = GradientNoise(None, 1.0, 1.0)
    for wrong in (-1, 2, 2**62):
        strange = places.clone()
        strange[3] = wrong
        for call in (
            lambda strange=strange: adversaries.discriminator.clipped_sum(
                shown(rows, strange), shown(rows, places), 1.0
            ),
            lambda strange=strange: adversaries.discriminator.clipped_sum(
                shown(rows, places), shown(rows, strange), 1.0
            ),
            lambda strange=strange: adversaries.generator.generate(shown(latents, strange)),
            lambda strange=strange: adversaries.generator_step(shown(latents, strange), 0.5),
            lambda strange=strange: adversaries.discriminator_step(pairs_of(rows, latents, strange), nothing),
        ):
            with pytest.raises(IndexError, match="indices of records or classes that do not exist"):
                call()
    for place in (-1, 5):
        with pytest.raises(IndexError, match="indices of records or classes that do not exist"):
            adversaries.discriminator.clipped_sum(shown(rows, places), shown(rows, places), 1.0, np.full(5, place))
        pairs = replace(pairs_of(rows, latents, places), chosen=np.full(5, place))
        with pytest.raises(IndexError, match="indices of records or classes that do not exist"):
            adversaries.discriminator_step(pairs, nothing)


def test_sums_and_weights_of_another_length_or_type_are_refused(kernel: Kernel) -> None:
    discriminator, generator = perceptron(3, 4, 1), Generator(2, 4, 3)
    adversaries = learning(kernel, discriminator, generator)
    pairs, plain = pairs_of(torch.zeros(5, 3), torch.zeros(5, 2)), GradientNoise(None, 1.0, 1.0)
    for noise in (np.zeros(20), np.zeros(21, np.float32), np.zeros(42)[::2]):
        with pytest.raises(ValueError, match="21 weights need as many numbers of noise"):
            adversaries.discriminator_step(pairs, replace(plain, noise=noise))
    for chosen in (np.zeros(4, np.int64), np.zeros(5, np.int32), np.zeros(10, np.int64)[::2]):
        with pytest.raises(ValueError, match="5 fake records need 5 indices of real records"):
            adversaries.discriminator_step(replace(pairs, chosen=chosen), plain)
    with pytest.raises(ValueError, match="the network takes rows of 3 numbers"):
        adversaries.discriminator_step(replace(pairs, real=shown(torch.zeros(5, 4))), plain)
    with pytest.raises(ValueError, match="the network takes rows of 2 numbers"):
        adversaries.discriminator_step(replace(pairs, latents=shown(torch.zeros(5, 3))), plain)
    for vector in (torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1), torch.zeros(6)[::2]):
        with pytest.raises(ValueError, match="a contiguous float32 vector"):
            CompiledAdam(vector, (0.5, 0.999), 1.0)
    parts = adversaries.discriminator_adam, adversaries.generator_adam, torch.from_numpy(adversaries.mean)
    networks = adversaries.discriminator, adversaries.generator
    for wrong in ((parts[1], parts[0], parts[2]), (*parts[:2], parts[2][1:])):
        with pytest.raises(ValueError, match="weights must be views of the vector of its Adam optimizer"):
            Adversaries(networks, *wrong)
    with pytest.raises(ValueError, match="does not accept the generator"):
        learning(kernel, perceptron(4, 4, 1), generator)
    discriminator[0].weight.data = discriminator[0].weight.data.clone()
    with pytest.raises(AssertionError, match="the weights have been moved"):
        adversaries.discriminator.clipped_sum(shown(torch.zeros(2, 3)), shown(torch.zeros(2, 3)), 1.0)


@CLASSES
def test_nothing_asked_for_is_nothing_made(kernel: Kernel, classes: int) -> None:
    discriminator, no_classes = perceptron(4 * classes or 3, 5, 1), torch.zeros(0, dtype=torch.int64)
    nothing = shown(torch.zeros(0, 3), no_classes)
    made = Generator(2, 4, 3, classes).compiled(kernel).generate(shown(torch.zeros(0, 2), no_classes))
    assert made.shape == (0, 3)
    assert not Perceptron(kernel, discriminator, classes).clipped_sum(nothing, nothing, 1.0).any()


def test_rows_that_lie_apart_are_read_as_they_are(kernel: Kernel) -> None:
    discriminator, rows = Perceptron(kernel, perceptron(3, 5, 1)), torch.rand(8, 9)
    apart = [rows[:, ::3], rows[:, 1::3]]
    sums = [
        discriminator.clipped_sum(*map(shown, parts), 1.0) for parts in (apart, [part.contiguous() for part in apart])
    ]
    assert np.array_equal(*sums)
