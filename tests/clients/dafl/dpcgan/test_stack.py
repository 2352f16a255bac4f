"""DP conditional GANs that train as one stack: each client gets what it would get alone, and nothing of the others."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from clients.dafl.dpcgan import nets
from clients.dafl.dpcgan.clipping import ClientPairs, clipped_sums
from clients.dafl.dpcgan.nets import Networks, paper, small
from clients.dafl.dpcgan.settings import DpCgan
from clients.dafl.dpcgan.training import GanClient
from clients.dafl.generator import GeneratorBill, GeneratorRequest, PrivateRecords
from fl_sim.errors import RunError
from fl_sim.privacy.audit import noise_calibration
from fl_sim.privacy.mechanisms import Noise

SETTINGS = DpCgan(discriminator_steps=9, batch_size=20, ratio=2, discriminator_width=8, generator_width=8)
CLIENTS = {0: (60, [0]), 1: (7, [2, 1]), 2: (200, [0, 1, 2]), 3: (33, [1]), 4: (1, [2])}
"""Client: (records, classes), as unequal as can be."""


def request(client: int, *, steps: int = 9, noise: float = 1.0, shape: tuple[int, ...] = (1, 8, 8)) -> GeneratorRequest:
    number, classes = CLIENTS[client]
    inputs = torch.rand(number, *shape, generator=torch.Generator().manual_seed(client)) * 2 - 1
    labels = torch.tensor(classes)[torch.arange(number) % len(classes)]
    rate = min(1.0, 20 / number)
    bill = GeneratorBill(dp_event.GaussianDpEvent(1.0), steps, noise, rate)
    counts = np.zeros(3, dtype=np.int64)
    counts[classes] = 1 + client
    return GeneratorRequest(
        PrivateRecords(inputs, labels, 3), counts, bill, Noise.seeded(client), np.random.default_rng(client)
    )


def alone(one: GeneratorRequest, settings: DpCgan = SETTINGS) -> torch.Tensor:
    return settings.generate(one.records, one.counts, one.bill, one.noise, one.generator)


@pytest.mark.usefixtures("computed_by")
def test_a_client_of_a_stack_releases_the_bits_that_it_releases_alone() -> None:
    together = SETTINGS.generate_stacked([request(client) for client in CLIENTS])
    for client, made in enumerate(together):
        assert isinstance(made, torch.Tensor)
        assert torch.equal(made, alone(request(client)))
    fewer = SETTINGS.generate_stacked([request(client) for client in (3, 1)])
    assert all(torch.equal(made, together[client]) for client, made in zip((3, 1), fewer, strict=True))  # type: ignore[arg-type]


@pytest.mark.usefixtures("computed_by")
def test_clients_may_take_different_numbers_of_steps() -> None:
    steps = [9, 4, 9, 6, 1]
    together = SETTINGS.generate_stacked([request(client, steps=number) for client, number in enumerate(steps)])
    for client, made in enumerate(together):
        assert isinstance(made, torch.Tensor)
        assert torch.equal(made, alone(request(client, steps=steps[client])))


def test_the_papers_networks_train_one_by_one_and_so_with_the_same_bits() -> None:
    settings = SETTINGS.model_copy(update={"networks": "paper"})
    made = settings.generate_stacked([request(client, steps=2) for client in (1, 4)])
    assert all(
        torch.equal(a, alone(request(client, steps=2), settings)) for client, a in zip((1, 4), made, strict=True)
    )  # type: ignore[arg-type]


def test_what_one_client_raises_is_its_own_and_one_without_labels_makes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = GanClient.samples

    def failing(client: GanClient) -> torch.Tensor:
        if len(client.views) == 33:
            raise RunError("not finite")
        return samples(client)

    monkeypatch.setattr(GanClient, "samples", failing)
    nothing_picked = replace(request(0), counts=np.zeros(3, dtype=np.int64))
    first, second, third = SETTINGS.generate_stacked([request(2), request(3), nothing_picked])
    assert isinstance(first, torch.Tensor)
    assert torch.equal(first, alone(request(2)))
    assert isinstance(second, RunError)
    assert isinstance(third, torch.Tensor)
    assert len(third) == 0


def test_training_ends_at_the_step_at_which_it_is_told_to() -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SETTINGS.generate_stacked([request(0), request(1)], check)
    assert len(calls) == 4


def nets_of(kind: str, classes: int) -> Networks:
    if kind == "paper":
        return paper((1, 28, 28), classes, latent_dim=4)
    return small((1, 28, 28), classes, 4, resolution=8, widths=(12, 12))


def stack(kind: str, norm: float = 0.5) -> list[ClientPairs]:
    """Return the step of clients with 6, 40 and 17 pairs, of one class, three and two."""
    torch.manual_seed(0)
    pairs = []
    for number, classes in ((6, 0), (40 if kind == "small" else 9, 3), (17, 2)):
        nets = nets_of(kind, classes)
        one_hot = torch.eye(3)[torch.randint(max(classes, 1), (2, number))][..., :classes]
        real, fake = (nets.join(nets.view(torch.rand(number, 1, 28, 28) * 2 - 1), half) for half in one_hot)
        pairs.append(ClientPairs(nets.discriminator, real, fake, norm))
    return pairs


@pytest.mark.parametrize("kind", ["small", "paper"])
@pytest.mark.parametrize("norm", [0.5, math.inf])
def test_the_sums_of_a_stack_are_those_of_its_clients_to_rounding(kind: str, norm: float) -> None:
    clients = stack(kind, norm)
    for one, found in zip(clients, clipped_sums(clients), strict=True):
        [expected] = clipped_sums([one])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(expected.norm())))


@pytest.mark.parametrize("kind", ["small", "paper"])
@pytest.mark.parametrize("scale", [1.0, 1e6, math.nan])
def test_a_record_moves_its_own_clients_sum_by_the_norm_at_most_and_no_others_at_all(kind: str, scale: float) -> None:
    clients = stack(kind)
    before = clipped_sums(clients)
    real = clients[1].real.clone()
    real[3] *= scale
    with_it = clipped_sums([clients[0], replace(clients[1], real=real), clients[2]])
    keep = [row for row in range(len(real)) if row != 3]
    without = replace(clients[1], real=real[keep], fake=clients[1].fake[keep])
    without_it = clipped_sums([clients[0], without, clients[2]])
    moved = with_it[1] - without_it[1]
    assert moved.norm() <= 0.5
    if scale == 1e6:
        assert moved.norm() > 0.49
    for other in (0, 2):
        if kind == "small":
            assert torch.equal(with_it[other], before[other])
            assert torch.equal(without_it[other], before[other])
        else:  # convolutions round by the place of their rows in memory
            torch.testing.assert_close(without_it[other], before[other], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["small", "paper"])
def test_what_fills_a_stack_up_adds_nothing_to_a_sum(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = stack(kind, math.inf)
    before = clipped_sums(clients)
    monkeypatch.setattr(nets, "_BLOCK", 128)
    for found, expected in zip(clipped_sums(clients), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.norm()))
    # A discriminator that tells nothing apart: gradients of length zero, which a bound of zero must not make nan.
    with torch.no_grad():
        for weight in clients[0].discriminator.parameters():
            weight.zero_()
    assert clipped_sums(clients)[0].isfinite().all()


def test_every_client_has_noise_of_its_own_as_its_bill_says(computed_by: str, steps: list[Any]) -> None:
    settings = SETTINGS.model_copy(update={"ratio": 400, "clipping_norm": 0.5})
    multipliers = {0: 1.0, 3: 2.5}
    settings.generate_stacked([request(client, steps=60, noise=z) for client, z in multipliers.items()])
    noise = []
    for place, (client, z) in enumerate(multipliers.items()):
        divisor = min(1.0, 20 / CLIENTS[client][0]) * CLIENTS[client][0]
        own = slice(60 * place, 60 * place + 60) if computed_by == "compiled" else slice(place, None, 2)
        gradients = torch.stack([step.gradient for step in steps[own] if step.gradient is not None])
        residuals = (gradients.double() * divisor - torch.stack([step.total for step in steps[own]])) / (z * 0.5)
        assert min(noise_calibration(residuals.numpy()).values()) > 1e-3
        noise.append(residuals.numpy().ravel())
    assert abs(np.corrcoef(*noise)[0, 1]) < 4 / math.sqrt(len(noise[0]))
