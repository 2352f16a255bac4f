"""Who computes the steps of the small networks, compiled code or PyTorch; and what is seen of their D steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from clients.dafl.dpcgan import nets, training
from clients.dafl.dpcgan.clipping import MARGIN, ClientPairs
from clients.dafl.dpcgan.training import Adam
from fl_sim.native import perceptrons as adversarial
from fl_sim.native.kernel import load_kernel
from fl_sim.native.perceptrons import Adversaries, Perceptron, Shown


@pytest.fixture(params=["compiled", "pytorch"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take the test's steps by the one, and then by the other."""
    kernel, why_not = load_kernel()
    if request.param == "compiled" and kernel is None:
        pytest.skip(why_not)
    if request.param == "pytorch":
        monkeypatch.setattr(nets, "load_kernel", lambda: (None, "asked for"))
    return str(request.param)


@dataclass
class Step:
    """One D step: what was summed, and what reached the optimiser."""

    real: torch.Tensor
    fake: torch.Tensor
    bound: float
    total: torch.Tensor
    gradient: torch.Tensor | None = None


@pytest.fixture
def steps(computed_by: str, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Every D step taken from here on, by the one or the other."""
    del computed_by
    taken: list[Step] = []
    _watch_pytorch(taken, monkeypatch)
    _watch_compiled(taken, monkeypatch)
    return taken


def _watch_pytorch(taken: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    clipped_sums, adam_step = training.clipped_sums, Adam.step

    def summed(clients: Sequence[ClientPairs]) -> list[torch.Tensor]:
        totals = clipped_sums(clients)
        for one, total in zip(clients, totals, strict=True):
            taken.append(Step(one.real.clone(), one.fake.clone(), one.clipping_norm, total.clone()))
        return totals

    def step(adam: Any, gradients: Any) -> None:
        kept = [torch.cat([part.flatten() for part in one]) for one in gradients]
        for one, gradient in zip(taken[-len(kept) :], kept, strict=False):
            one.gradient = gradient if one.gradient is None else one.gradient
        adam_step(adam, gradients)

    monkeypatch.setattr(training, "clipped_sums", summed)
    monkeypatch.setattr(Adam, "step", step)


def _watch_compiled(taken: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    original = Adversaries.discriminator_step

    def step(adversaries: Adversaries, pairs: adversarial.Pairs, release: adversarial.GradientNoise) -> None:
        net = adversaries.discriminator
        fakes = Shown(adversaries.generator.generate(pairs.latents), pairs.latents.classes)
        records = inputs(net, pairs.real)[pairs.chosen]
        original(adversaries, pairs, release)
        total, gradient = (
            torch.from_numpy(vector.copy()) for vector in (adversaries.total, adversaries.discriminator_adam.gradient)
        )
        taken.append(Step(records, inputs(net, fakes), pairs.bound / (1 - MARGIN), total, gradient))

    monkeypatch.setattr(Adversaries, "discriminator_step", step)


def inputs(net: Perceptron, rows: Shown) -> torch.Tensor:
    """Return what enters a network's first layer."""
    values = torch.from_numpy(rows.values.copy())
    if not net.num_classes or rows.classes is None:
        return values
    return nets.gated(values, torch.eye(net.num_classes)[torch.from_numpy(rows.classes)])
