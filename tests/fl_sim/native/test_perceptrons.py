"""The compiled steps of an adversarial network: PyTorch's to rounding, row by row, the same bits on any processor."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fl_sim.native.compiling import WIDTHS
from fl_sim.native.kernel import Kernel
from fl_sim.native.perceptrons import CompiledAdam, Perceptron, TwoWays, is_perceptron


class Generator(nn.Module):
    def __init__(self, inputs: int, wide: int, outputs: int) -> None:
        super().__init__()
        self.curved = nn.Sequential(
            nn.Linear(inputs, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, outputs)
        )
        self.straight = nn.Sequential(nn.Linear(inputs, outputs, bias=False))

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(2 * (self.curved(latents) + self.straight(latents)))

    def compiled(self, kernel: Kernel) -> TwoWays:
        return TwoWays(kernel, self.curved, self.straight)


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for entered, left in itertools.pairwise(widths):
        layers += [nn.LeakyReLU(0.2), nn.Linear(entered, left)]
    return nn.Sequential(*layers[1:])


def gated(views: torch.Tensor, places: torch.Tensor, classes: int) -> torch.Tensor:
    with_one = functional.pad(views, (0, 1), value=1.0)
    return (functional.one_hot(places, classes)[:, :, None] * with_one[:, None]).flatten(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


SIZES = [(1, 1, 1, 1), (5, 10, 64, 196), (7, 3, 17, 33), (130, 10, 64, 196)]


@pytest.mark.parametrize(("rows", "inputs", "wide", "outputs"), SIZES)
def test_what_a_generator_makes_is_what_pytorch_makes_of_it(
    kernel: Kernel, rows: int, inputs: int, wide: int, outputs: int
) -> None:
    generator, latents = Generator(inputs, wide, outputs), 3 * torch.randn(rows, inputs)
    torch.testing.assert_close(
        generator.compiled(kernel).generate(latents), generator(latents).detach(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("classes", [0, 1, 3])
@pytest.mark.parametrize(("rows", "inputs", "wide", "outputs"), SIZES)
def test_a_generators_gradient_is_pytorchs(
    kernel: Kernel, rows: int, inputs: int, wide: int, outputs: int, classes: int
) -> None:
    generator, latents = Generator(inputs, wide, outputs), torch.randn(rows, inputs)
    discriminator = perceptron((outputs + 1) * classes or outputs, wide, wide, 1)
    places = torch.randint(max(1, classes), (rows,)) if classes else None
    views = generator(latents)
    shown = views if places is None else gated(views, places, classes)
    loss = functional.softplus(-discriminator(shown)).mean()
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(generator.parameters()))])
    found = generator.compiled(kernel).gradient(Perceptron(kernel, discriminator), latents, places)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_numbers_far_out_and_no_numbers_pass_a_generator_as_in_pytorch(kernel: Kernel) -> None:
    generator = Generator(1, 2, 3)
    with torch.no_grad():
        for weight in generator.parameters():
            weight.fill_(1.0)
    latents = torch.tensor([0.0, 1e-30, 60.0, -60.0, 1e4, -1e4, float("inf"), float("nan")])[:, None]
    torch.testing.assert_close(
        generator.compiled(kernel).generate(latents), generator(latents).detach(), rtol=1e-6, atol=1e-30, equal_nan=True
    )


def test_a_row_becomes_the_same_bits_whatever_rows_are_beside_it(kernel: Kernel) -> None:
    generator, latents = Generator(10, 64, 196), torch.randn(120, 10)
    together = generator.compiled(kernel).generate(latents)
    for rows in (slice(0, 1), slice(3, 20), slice(95, 98), slice(119, 120)):
        assert torch.equal(generator.compiled(kernel).generate(latents[rows]), together[rows])


def test_adams_step_is_its_definition(kernel: Kernel) -> None:
    weights, gradient = torch.randn(101), torch.randn(101)
    own = nn.Parameter(weights.clone())
    compiled = CompiledAdam(kernel, weights, (torch.zeros(101), torch.zeros(101)), (0.5, 0.999), 1e-2)
    adam = torch.optim.Adam([own], lr=1e-2, betas=(0.5, 0.999))
    for step in range(1, 6):
        own.grad = gradient * step
        adam.step()
        compiled.step(gradient * step, step)
    torch.testing.assert_close(weights, own.detach(), rtol=1e-6, atol=1e-7)


def test_every_width_of_vectors_gives_the_same_bits(kernel: Kernel) -> None:
    widths = [lanes for lanes in sorted(WIDTHS) if lanes <= kernel.lanes]
    kernels = [replace(kernel, lanes=lanes) for lanes in widths]
    generator, discriminator = Generator(10, 20, 37), perceptron(38 * 2, 33, 20, 1)
    latents, places = torch.randn(41, 10), torch.randint(2, (41,))
    real, fake = torch.rand(2, 41, 38 * 2)
    real[3, 5] = float("nan")

    def everything(kernel: Kernel) -> list[torch.Tensor]:
        vectors = [torch.linspace(0, 1, 41), torch.zeros(41), torch.zeros(41)]
        CompiledAdam(kernel, vectors[0], (vectors[1], vectors[2]), (0.5, 0.999), 1e-2).step(
            latents[:, 0].contiguous(), 1
        )
        sums = [Perceptron(kernel, discriminator).clipped_sum(real, fake, norm) for norm in (0.1, float("inf"))]
        gradient = generator.compiled(kernel).gradient(Perceptron(kernel, discriminator), latents, places)
        return [*vectors, *sums, gradient, generator.compiled(kernel).generate(latents)]

    first, *others = map(everything, kernels)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


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
    generator, discriminator = Generator(2, 4, 3), perceptron(8, 5, 1)
    latents, places = torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64)
    rows = torch.zeros(5, 8)
    with pytest.raises(ValueError, match="5 records and 4 fakes are no pairs"):
        Perceptron(kernel, discriminator).clipped_sum(rows, rows[:4], 1.0)
    for real, fake in ((rows[:, :7], rows[:, :7]), (rows, rows.double()), (rows[0], rows[0])):
        with pytest.raises(ValueError, match="the compiled step wants float32 of the shape"):
            Perceptron(kernel, discriminator).clipped_sum(real, fake, 1.0)
    with pytest.raises(ValueError, match="the latent vectors"):
        generator.compiled(kernel).generate(torch.zeros(5, 3))
    for wrong in (None, places[:4], places.int(), places + 2, places - 1):
        with pytest.raises(ValueError, match="a discriminator of 8 inputs does not take 5 rows of 3 numbers"):
            generator.compiled(kernel).gradient(Perceptron(kernel, discriminator), latents, wrong)
    adam = CompiledAdam(kernel, rows[0], (rows[1], rows[2]), (0.5, 0.9), 1e-3)
    for gradient in (rows[3, :7], rows[3].double(), rows[:, 0]):
        with pytest.raises(ValueError, match="the compiled step of Adam wants 8 float32 numbers"):
            adam.step(gradient, 1)


def test_nothing_asked_for_is_nothing_made(kernel: Kernel) -> None:
    generator, discriminator = Generator(2, 4, 3), perceptron(3, 5, 1)
    assert generator.compiled(kernel).generate(torch.zeros(0, 2)).shape == (0, 3)
    assert not Perceptron(kernel, discriminator).clipped_sum(torch.zeros(0, 3), torch.zeros(0, 3), 1.0).any()


def test_rows_that_lie_apart_are_read_as_they_are(kernel: Kernel) -> None:
    discriminator, rows = perceptron(3, 5, 1), torch.rand(8, 9)
    apart = [rows[:, ::3], rows[:, 1::3]]
    together = [part.contiguous() for part in apart]
    assert torch.equal(
        Perceptron(kernel, discriminator).clipped_sum(*apart, 1.0),
        Perceptron(kernel, discriminator).clipped_sum(*together, 1.0),
    )
