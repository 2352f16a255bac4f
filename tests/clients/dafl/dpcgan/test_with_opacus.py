"""The GAN on Opacus: the same release as ours up to rounding, counted by its accountant as billed."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from clients.dafl.dpcgan import training
from clients.dafl.dpcgan.clipping import clipped_sum
from clients.dafl.dpcgan.nets import paper, small
from clients.dafl.dpcgan.settings import DpCgan
from clients.dafl.dpcgan.with_opacus import OpacusGradients, OpacusTerms
from clients.dafl.generator import GeneratorBill, PrivateRecords
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.renyi import ORDERS

TINY = DpCgan(gradients="opacus", discriminator_steps=6, batch_size=20, discriminator_width=8, generator_width=8)


def nets_and_pairs(kind: str, pairs: int = 9) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    nets = paper((1, 28, 28), 2, latent_dim=4) if kind == "paper" else small((1, 8, 8), 2, 4, 8, (12, 12))
    classes = torch.eye(2)[torch.randint(2, (2, pairs))]
    side = 28 if kind == "paper" else 8
    halves = [nets.join(nets.view(torch.rand(pairs, 1, side, side) * 2 - 1), classes[half]) for half in range(2)]
    return nets.discriminator, halves[0], halves[1]


def gradients_of(
    net: nn.Sequential, bound: float, *, std: float = 0.0, batch: float = 1.0, seed: int = 0
) -> OpacusGradients:
    z = std / bound if std else 0.0
    return OpacusGradients(net, OpacusTerms(GeneratorBill(None, 1, z, 1.0), batch, std, bound, Noise.seeded(seed)))


@pytest.mark.parametrize("kind", ["small", "paper"])
@pytest.mark.parametrize("bound", [0.3, 3.0, math.inf])
def test_sums_are_ours_to_float32_rounding(kind: str, bound: float) -> None:
    net, real, fake = nets_and_pairs(kind)
    for place, layer in enumerate(net):  # at a kink, rounding alone takes the other slope, on some processors
        if isinstance(layer, nn.LeakyReLU):
            net[place] = nn.Softplus()
    found = gradients_of(net, bound).released(real, fake, 0)
    expected = clipped_sum(net, real, fake, bound).float()
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-6 * scale)


@pytest.mark.parametrize("kind", ["small", "paper"])
@pytest.mark.parametrize("value", [1e3, math.nan, math.inf])
def test_no_record_moves_the_sum_by_more_than_the_bound(kind: str, value: float) -> None:
    net, real, fake = nets_and_pairs(kind)
    real[0].view(-1)[5] = value
    by_opacus = gradients_of(net, 0.2)
    moved = by_opacus.released(real, fake, 0) - by_opacus.released(real[1:], fake[1:], 0)
    assert moved.norm() <= 0.2 * (1 + 1e-6)
    if not math.isfinite(value):
        assert moved.norm() <= 1e-6


def test_the_bound_is_reached_by_a_pair_that_is_longer() -> None:
    net, real, fake = nets_and_pairs("small")
    assert gradients_of(net, 0.05).released(real[:1], fake[:1], 0).norm() == pytest.approx(0.05, rel=1e-3)


def test_an_empty_batch_is_noise_of_the_stated_size_divided_by_the_expected_one() -> None:
    net, real, fake = nets_and_pairs("small")
    noisy = [
        gradients_of(net, 0.5, std=2.0, batch=8.0, seed=seed).released(real[:0], fake[:0], 0) for seed in range(40)
    ]
    drawn = torch.stack(noisy)
    assert float(drawn.std()) == pytest.approx(2.0 / 8, rel=0.02)
    assert not torch.equal(drawn[0], drawn[1])


def test_opacus_own_noise_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.optimizers import optimizer  # noqa: PLC0415 (loads slowly)

    monkeypatch.setattr(optimizer, "_generate_noise", None)
    net, real, fake = nets_and_pairs("small")
    first, second = (gradients_of(net, 0.5, std=1.0, seed=3).released(real, fake, 4) for _ in range(2))
    assert torch.equal(first, second), "the same key and step give the same noise"


def release(settings: DpCgan, noise_multiplier: float = 0.8) -> torch.Tensor:
    inputs = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    records = PrivateRecords(inputs, torch.arange(60) % 2, 2)
    bill = GeneratorBill(None, settings.discriminator_steps, noise_multiplier, 20 / 60)
    return settings.generate(records, np.array([5, 4]), bill, Noise.seeded(1), np.random.default_rng(0))


@pytest.mark.parametrize("noise_multiplier", [0.8, 0.0])
def test_a_release_is_ours_up_to_rounding(noise_multiplier: float) -> None:
    ours = release(TINY.model_copy(update={"gradients": "own"}), noise_multiplier)
    torch.testing.assert_close(release(TINY, noise_multiplier), ours, rtol=0, atol=1e-4)


def test_opacus_accountant_counts_the_bill_and_agrees_on_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[OpacusGradients] = []
    original = training._opacus
    monkeypatch.setattr(training, "_opacus", lambda client: kept.append(original(client)) or kept[-1])
    settings = TINY.model_copy(update={"discriminator_steps": 30})
    bill = settings.bill(600, 2, 2.0, 1e-5)
    inputs = torch.rand(600, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    records = PrivateRecords(inputs, torch.arange(600) % 2, 2)
    settings.generate(records, np.array([5, 4]), bill, Noise.seeded(1), np.random.default_rng(0))
    [counted] = kept
    assert counted.accountant.history == [(bill.noise_multiplier, bill.sampling_rate, 30)]
    orders = [order for order in ORDERS if order == int(order)]
    theirs = counted.accountant.get_epsilon(1e-5, alphas=orders)
    ours = epsilon_of_counts({bill.event: bill.steps}, 1e-5)
    assert ours <= theirs * (1 + 1e-9)
    assert ours == pytest.approx(theirs, rel=0.05)  # at whole orders alone, which both compute alike
    counted.accountant.history.append((1.0, 0.1, 1))
    with pytest.raises(AssertionError, match="differ from the charged releases"):
        counted.check()
