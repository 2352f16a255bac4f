"""How clients train beyond plain SGD: each setting against torch's own, alike in the loop and in a stack."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fl_sim.errors import UserError
from fl_sim.local_plan import LocalPlan, Mix
from fl_sim.native.kernel import load_kernel
from fl_sim.params import detached
from fl_sim.seeding import rng, torch_kept
from fl_sim.training.loop import train
from fl_sim.training.losses import mixed_losses
from fl_sim.training.records import Records
from fl_sim.training.stacked import StackedTrainer
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask, Params, Trained

SHAPE, CLASSES = (1, 4, 4), 3
SIZES = (5, 16, 0, 7)
SETTINGS = LocalSettings(0.05, 0.9, 1e-2, batch_size=4, epochs=2)
ADAM: dict[str, Any] = {"optimizer": "adam", "momentum": 0.0}
CLIPPED = replace(SETTINGS, clip_norm=0.7)


def model() -> nn.Module:
    with torch_kept():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def job(client: int, settings: LocalSettings, plan: LocalPlan | None = None) -> LocalJob:
    generator, size = torch.Generator().manual_seed(client), SIZES[client]
    inputs, labels = torch.randn(size, *SHAPE, generator=generator), torch.arange(size) % CLASSES
    task = LocalTask(1, client, len(SIZES), size, settings, detached(model().named_parameters()))
    return LocalJob(task, plan or LocalPlan(), Records.of(inputs, labels), rng(0, "batches", client))


def jobs(settings: LocalSettings, plan: LocalPlan | None = None) -> list[LocalJob]:
    return [job(client, settings, plan) for client in range(len(SIZES))]


def by_loop(given: list[LocalJob]) -> list[Trained]:
    return [train(model(), one.task, one.plan, *one.records.tensors(), one.generator) for one in given]


def by_trainer(given: list[LocalJob]) -> list[Trained]:
    """Let the compiled trainer train, where it is there."""
    return Trainer(model(), load_kernel()[0]).train_all(given)


def by_torch(given: LocalJob, optimizer_of: Callable[[Any], torch.optim.Optimizer]) -> Params:
    """Train whole epochs with torch's own classes, the plan's offset and proximal term as parts of the loss."""
    network, settings, (inputs, labels) = model(), given.task.settings, given.records.tensors()
    optimizer, loss_of = (
        optimizer_of(network.parameters()),
        nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing),
    )
    for _ in range(int(settings.epochs)):
        for batch in torch.from_numpy(given.generator.permutation(len(labels))).split(settings.batch_size):
            optimizer.zero_grad()
            loss_of(network(inputs[batch]), labels[batch]).backward()
            for name, weight in network.named_parameters():
                assert weight.grad is not None
                if given.plan.gradient_offset:
                    weight.grad += given.plan.gradient_offset[name]
                if given.plan.proximal_mu:
                    weight.grad.add_(weight.detach() - given.task.params[name], alpha=given.plan.proximal_mu)
            if settings.clip_norm:
                nn.utils.clip_grad_norm_(network.parameters(), settings.clip_norm)
            optimizer.step()
    return detached(network.named_parameters())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=1e-2)


def flat(params: Params) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in params.values()])


def assert_stack_is_loop(settings: LocalSettings, plan: LocalPlan | None = None) -> None:
    """Hold them against each other within the bound of test_plans.py."""
    found, expected = StackedTrainer(model()).train(jobs(settings, plan)), by_loop(jobs(settings, plan))
    for one, other in zip(found, expected, strict=True):
        assert one.num_steps == other.num_steps
        assert one.loss == (None if other.loss is None else pytest.approx(other.loss, rel=1e-4))
        assert one.momentum_buffers.keys() == other.momentum_buffers.keys()
        torch.testing.assert_close(flat(one.params), flat(other.params), rtol=0, atol=3e-6)


def corrected() -> LocalPlan:
    """Return a plan that adds to gradients what an algorithm may add."""
    generator, params = torch.Generator().manual_seed(7), detached(model().named_parameters())
    offset = {name: torch.randn(value.shape, generator=generator) for name, value in params.items()}
    return LocalPlan(gradient_offset=offset, proximal_mu=0.3)


@pytest.mark.parametrize("plan", [LocalPlan(), corrected()], ids=["alone", "with corrections"])
def test_clipping_is_torchs_after_what_the_plan_adds_and_before_weight_decay(plan: LocalPlan) -> None:
    [trained] = by_loop([job(1, CLIPPED, plan)])
    expected = by_torch(job(1, CLIPPED, plan), sgd)
    torch.testing.assert_close(flat(trained.params), flat(expected), rtol=0, atol=1e-7)
    assert float((flat(expected) - flat(by_torch(job(1, SETTINGS, plan), sgd))).norm()) > 1e-3
    assert_stack_is_loop(CLIPPED, plan)


def test_a_bound_that_no_gradient_reaches_changes_no_bit() -> None:
    for one, other in zip(by_loop(jobs(replace(SETTINGS, clip_norm=1e6))), by_loop(jobs(SETTINGS)), strict=True):
        assert torch.equal(flat(one.params), flat(other.params))


@pytest.mark.parametrize(
    ("epochs", "steps", "count", "expected"),
    [(2, 0, 9, 6), (0.5, 0, 16, 2), (0.5, 0, 9, 2), (0.01, 0, 16, 1), (2.5, 0, 9, 8), (0.7, 0, 40, 7), (0, 7, 5, 7),
     (0, 7, 0, 0), (0.5, 0, 0, 0), (3, 0, 0, 0)],
)  # fmt: skip
def test_parts_of_epochs_are_rounded_up_and_an_empty_shard_takes_no_step(
    epochs: float, steps: int, count: int, expected: int
) -> None:
    assert replace(SETTINGS, epochs=epochs, steps=steps).num_steps(count) == expected


@pytest.mark.parametrize(
    ("as_steps", "same"),
    [({"epochs": 0, "steps": 8}, {"epochs": 2}), ({"epochs": 0.5}, {"epochs": 0, "steps": 2}),
     ({"epochs": 1.25}, {"epochs": 0, "steps": 5})],
    ids=["steps", "half", "more than one"],
)  # fmt: skip
def test_as_many_steps_are_the_same_steps_bit_for_bit(as_steps: dict[str, Any], same: dict[str, Any]) -> None:
    plan = LocalPlan(mix=Mix(torch.ones(3, *SHAPE), torch.full((3, CLASSES), 1 / 3), 0.1, linearise=True))
    for chosen in (LocalPlan(), plan):  # a mixing partner is drawn for every step, between the shuffles
        [one], [other] = (by_loop([job(1, replace(SETTINGS, **parts), chosen)]) for parts in (as_steps, same))
        assert one.num_steps == other.num_steps
        assert torch.equal(flat(one.params), flat(other.params))
        assert_stack_is_loop(replace(SETTINGS, **as_steps), chosen)


def test_a_part_of_an_epoch_is_its_first_batches() -> None:
    given = job(1, replace(SETTINGS, epochs=0.5))
    first = torch.from_numpy(given.generator.permutation(16))[:8]
    inputs, labels = given.records.tensors()
    network = model()
    optimizer = sgd(network.parameters())
    for batch in first.split(4):
        optimizer.zero_grad()
        functional.cross_entropy(network(inputs[batch]), labels[batch]).backward()
        optimizer.step()
    [trained] = by_loop([job(1, replace(SETTINGS, epochs=0.5))])
    assert torch.equal(flat(trained.params), flat(detached(network.named_parameters())))


@pytest.mark.parametrize("parts", [{"epochs": 0.5}, {"epochs": 0, "steps": 3}, {"clip_norm": 1.0}])
def test_the_compiled_trainer_takes_as_many_steps_and_clips_as_the_loop_does(parts: dict[str, Any]) -> None:
    settings = replace(SETTINGS, **parts)
    for one, other in zip(
        Trainer(model(), load_kernel()[0]).train_all(jobs(settings)), by_loop(jobs(settings)), strict=True
    ):
        assert one.num_steps == other.num_steps
        torch.testing.assert_close(flat(one.params), flat(other.params), rtol=0, atol=3e-6)


def test_the_compiled_trainer_hands_on_what_it_does_not_take() -> None:
    settings = replace(SETTINGS, label_smoothing=0.1)
    for one, other in zip(
        Trainer(model(), load_kernel()[0]).train_all(jobs(settings)), by_loop(jobs(settings)), strict=True
    ):
        assert one.num_steps == other.num_steps
        assert torch.equal(flat(one.params), flat(other.params))


def test_smoothing_is_torchs_bit_for_bit_and_alike_in_a_stack() -> None:
    smooth = replace(SETTINGS, label_smoothing=0.3)
    [trained] = by_loop([job(1, smooth)])
    assert torch.equal(flat(trained.params), flat(by_torch(job(1, smooth), sgd)))
    assert float((flat(trained.params) - flat(by_torch(job(1, SETTINGS), sgd))).norm()) > 1e-3
    assert_stack_is_loop(smooth, LocalPlan(logit_shift=torch.arange(CLASSES) / 2.0))


@pytest.mark.parametrize("linearise", [True, False])
def test_smoothed_mixing_is_mixing_with_smoothed_labels(*, linearise: bool) -> None:
    network, inputs = model(), torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(0))
    mean = torch.ones(SHAPE), torch.tensor([0.5, 0.5, 0.0])

    def mixed(label: int, proportions: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        return mixed_losses(
            network, inputs.clone(), torch.tensor([label]), (mean[0], proportions), 0.2, linearise=linearise,
            smoothing=smoothing,
        ).mean()  # fmt: skip

    spread = 0.7 * mean[1] + 0.3 / CLASSES
    expected = 0.7 * mixed(1, spread) + 0.3 * sum(mixed(label, spread) for label in range(CLASSES)) / CLASSES
    torch.testing.assert_close(mixed(1, mean[1], smoothing=0.3), expected)
    plan = LocalPlan(mix=Mix(torch.ones(3, *SHAPE), torch.full((3, CLASSES), 1 / 3), 0.2, linearise=linearise))
    assert_stack_is_loop(replace(SETTINGS, label_smoothing=0.3), plan)


@pytest.mark.parametrize("trained_by", [by_loop, lambda given: StackedTrainer(model()).train(given)])
def test_labels_are_not_spread_over_classes_that_are_not_in_the_softmax(trained_by: Any) -> None:
    plan = LocalPlan(logit_shift=torch.tensor([0.0, 0.0, -torch.inf]))
    with pytest.raises(UserError, match=r"local\.label_smoothing=0\.3 .*every class"):
        trained_by(jobs(replace(SETTINGS, label_smoothing=0.3), plan))


@pytest.mark.parametrize(("optimizer", "torchs"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
@pytest.mark.parametrize("clip_norm", [0.0, 0.7])
@pytest.mark.parametrize("plan", [LocalPlan(), corrected()], ids=["alone", "with corrections"])
def test_adam_is_torchs_and_alike_compiled_and_in_a_stack(
    optimizer: Any, torchs: Any, clip_norm: float, plan: LocalPlan
) -> None:
    settings = LocalSettings(0.01, 0.0, 0.1, batch_size=4, epochs=2, clip_norm=clip_norm, optimizer=optimizer)
    expected = by_torch(job(1, settings, plan), lambda weights: torchs(weights, lr=0.01, weight_decay=0.1))
    for trained_by in (by_loop, by_trainer):
        [trained] = trained_by([job(1, settings, plan)])
        torch.testing.assert_close(flat(trained.params), flat(expected), rtol=0, atol=1e-6)
        assert trained.momentum_buffers == {}
    assert_stack_is_loop(settings, plan)


@pytest.mark.skipif(load_kernel()[0] is None, reason=f"no native trainer: {load_kernel()[1]}")
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_the_compiled_trainer_takes_adam_and_starts_every_client_anew(optimizer: Any) -> None:
    settings, trainer = replace(SETTINGS, optimizer=optimizer, momentum=0.0), Trainer(model(), load_kernel()[0])
    assert trainer.is_native(SHAPE, LocalPlan(), settings)
    together, alone = trainer.train_all([job(1, settings), job(1, settings)]), trainer.train_all([job(1, settings)])
    for one in together:
        assert torch.equal(flat(one.params), flat(alone[0].params))


def test_adam_starts_anew_in_every_round_of_a_stack() -> None:
    trainer, settings = StackedTrainer(model()), replace(SETTINGS, **ADAM)
    first, again = trainer.train(jobs(settings)), trainer.train(jobs(settings))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(flat(one.params), flat(other.params))


@pytest.mark.parametrize("trained_by", [by_loop, by_trainer, lambda given: StackedTrainer(model()).train(given)])
def test_adam_has_no_place_for_momentum_nor_a_warm_start(trained_by: Any) -> None:
    warm = LocalPlan(momentum_buffers=detached(model().named_parameters()))
    for given in (jobs(replace(SETTINGS, optimizer="adam")), jobs(replace(SETTINGS, **ADAM), warm)):
        with pytest.raises(UserError, match=r"cannot be used with optimizer=adam"):
            trained_by(given)
