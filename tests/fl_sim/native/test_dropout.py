"""Dropout in the compiled trainer: masks are what they should be, and handed to PyTorch they give the same model."""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from types import ModuleType

import pytest
import torch
from torch import nn

from fl_sim.local_plan import Ascent, Batch, Contrast, Distillation, LocalPlan, LossTerm, Mix
from fl_sim.models import ResidualBlock
from fl_sim.native.kernel import Kernel
from fl_sim.native.layers import describe
from fl_sim.native.request import Draws, KernelJob
from fl_sim.params import detached, flattened
from fl_sim.seeding import rng, torch_kept
from fl_sim.training.loop import train
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask, Params, Trained

CLASSES, COUNT = 4, 45
SETTINGS = LocalSettings(0.05, 0.9, 1e-3, batch_size=20, epochs=2)  # the last batch of an epoch has 5 records
ROUNDING = 3e-5
"""How far results may lie from float64's, as a share of how far training moved the model."""


@pytest.fixture(scope="module")
def fuzz(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    """Which holds the masks in NumPy."""
    return load_benchmark("native_fuzz")


def perceptron(rate: float = 0.3) -> list[nn.Module]:
    return [nn.Dropout(rate), nn.Linear(13, 20), nn.Dropout(rate), nn.Linear(20, 9), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(9, CLASSES)]  # fmt: skip


def convolutions(rate: float = 0.2) -> list[nn.Module]:
    return [nn.Dropout(rate / 2), nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(rate),
            nn.Conv2d(6, 8, 3, padding=1), nn.Dropout(rate), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Dropout(rate), nn.Linear(32, 10), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(10, CLASSES)]  # fmt: skip


def residual() -> list[nn.Module]:
    block = ResidualBlock(4, 8, 2)
    block.body.insert(0, nn.Dropout(0.2))  # of what the shortcut reads as it is
    block.body.insert(4, nn.Dropout(0.3))
    same = ResidualBlock(8, 8, 1)
    same.body.append(nn.Dropout(0.3))  # of one part of the sum: the slope of the other keeps all its numbers
    return [nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), block, nn.Dropout(0.2),
            same, nn.AdaptiveAvgPool2d(1), nn.Dropout(0.2), nn.ReLU(), nn.Flatten(),
            nn.Linear(8, CLASSES)]  # fmt: skip


MODELS = {
    "perceptron": (perceptron, (13,)), "convolutions": (convolutions, (2, 9, 9)), "residual": (residual, (2, 8, 8)),
}  # fmt: skip


def made(layers: list[nn.Module]) -> nn.Sequential:
    model, generator = nn.Sequential(*layers), torch.Generator().manual_seed(5)
    for weight in model.parameters():
        nn.init.normal_(weight, 0.1, 0.2, generator)
    return model


def lesson(model: nn.Sequential, shape: tuple[int, ...], plan: LocalPlan = LocalPlan(), seed: int = 0) -> KernelJob:  # noqa: B008
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(COUNT, *shape, generator=generator)
    labels = torch.randint(0, CLASSES, (COUNT,), generator=generator)
    task = LocalTask(1, 0, 1, COUNT, SETTINGS, detached(model.named_parameters()))
    return KernelJob(task, plan, inputs, labels, Draws.of(task, plan, COUNT, rng(seed, "dropout")))


def by_kernel(kernel: Kernel, model: nn.Module, given: KernelJob) -> Trained:
    stack = describe(model, tuple(given.inputs.shape[1:]))
    assert stack is not None
    return kernel.train(stack, [given])[0]


def by_pytorch(fuzz: ModuleType, model: nn.Sequential, given: KernelJob, seed: int) -> Trained:
    """The same masks in PyTorch's loop, in float64."""
    plan = given.plan
    if (mix := plan.mix) is not None:
        plan = replace(plan, mix=replace(mix, inputs=mix.inputs.double(), labels=mix.labels.double()))
    if (contrast := plan.contrast) is not None:
        plan = replace(plan, contrast=replace(contrast, previous=doubled(contrast.previous)))
    exact = fuzz.with_masks(copy.deepcopy(model), given.draws.masks).double()
    task = replace(given.task, params=doubled(given.task.params))
    return train(exact, task, plan, given.inputs.double(), given.labels, rng(seed, "dropout"))


def doubled(params: Params) -> Params:
    return {name: value.double() for name, value in params.items()}


def moved(trained: Trained, start: Params) -> torch.Tensor:
    return torch.cat([(trained.params[name].double() - start[name].double()).flatten() for name in start])


def agree(kernel: Kernel, fuzz: ModuleType, name: str, plan: LocalPlan = LocalPlan()) -> None:  # noqa: B008
    """On one of three sets of records, as a ReLU or a maximum may hang on the last bit: see test_kernel.agree."""
    layers, shape = MODELS[name]
    errors = []
    for seed in range(3):
        model = made(layers())
        given = lesson(model, shape, plan, seed)
        found, exact = by_kernel(kernel, model, given), by_pytorch(fuzz, model, given, seed)
        assert found.loss is not None
        assert exact.loss is not None
        truth = moved(exact, given.task.params)
        error = float((moved(found, given.task.params) - truth).norm() / truth.norm())
        errors.append(max(error, abs(found.loss / exact.loss - 1)))
        if errors[-1] <= ROUNDING:
            return
    raise AssertionError(errors)


def same_bits(left: Trained, right: Trained) -> bool:
    return torch.equal(flattened(left.params).flat, flattened(right.params).flat) and left.loss == right.loss


@pytest.mark.parametrize("name", MODELS)
def test_its_masks_handed_to_pytorch_give_the_same_model(kernel: Kernel, fuzz: ModuleType, name: str) -> None:
    agree(kernel, fuzz, name)


@pytest.mark.parametrize("linearise", [True, False])
def test_mixed_records_and_their_derivatives_go_through_the_same_masks(
    kernel: Kernel, fuzz: ModuleType, *, linearise: bool
) -> None:
    pool = torch.randn(4, 2, 9, 9, generator=torch.Generator().manual_seed(1)), torch.full((4, CLASSES), 1 / CLASSES)
    agree(kernel, fuzz, "convolutions", LocalPlan(mix=Mix(*pool, 0.2, linearise=linearise)))


def test_every_way_uphill_has_masks_of_its_own(kernel: Kernel, fuzz: ModuleType) -> None:
    agree(kernel, fuzz, "convolutions", LocalPlan(ascent=Ascent(0.1, share=0.5)))


def test_teachers_leave_nothing_out_and_features_are_those_that_the_head_sees(kernel: Kernel, fuzz: ModuleType) -> None:
    previous = {name: 1.1 * value for name, value in made(perceptron()).named_parameters()}
    agree(kernel, fuzz, "perceptron", LocalPlan(distillation=Distillation(2.0), contrast=Contrast(1.0, 0.5, previous)))


def test_a_loss_term_of_ones_own_hears_teachers_without_dropout() -> None:
    model, heard = made(perceptron()), []

    def term(batch: Batch) -> torch.Tensor:
        heard.append((batch.logits_of(batch.anchor, batch.inputs), batch.features_of(batch.anchor, batch.inputs)))
        heard.append((batch.logits.detach(), batch.features.detach() if batch.features is not None else None))
        assert all(part.training for part in model.modules())
        return batch.logits.sum() * 0

    given = lesson(model, (13,))
    task = replace(given.task, settings=replace(SETTINGS, batch_size=COUNT, epochs=1))
    start = copy.deepcopy(model).eval()
    with torch_kept():
        torch.manual_seed(0)
        plan = LocalPlan(loss_term=LossTerm(term, features=True))
        train(model, task, plan, given.inputs, given.labels, rng(0, "dropout"))
    order = torch.from_numpy(rng(0, "dropout").permutation(COUNT))
    teacher, own = heard
    expected = start(given.inputs[order]), start[:-1](given.inputs[order])
    assert all(torch.equal(*pair) for pair in zip(teacher, expected, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(own, expected, strict=True))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_as_much_is_left_out_as_asked_and_the_rest_makes_up_for_it(kernel: Kernel, rate: float) -> None:
    """Read off the step of a model of zeros on records of ones, which are all of one class."""
    records, features = 64, 700
    model = nn.Sequential(nn.Dropout(rate), nn.Linear(features, 2))
    for weight in model.parameters():
        nn.init.zeros_(weight)
    settings = LocalSettings(1.0, 0.0, 0.0, batch_size=records, epochs=1)
    task = LocalTask(1, 0, 1, records, settings, detached(model.named_parameters()))
    inputs, labels = torch.ones(records, features), torch.zeros(records, dtype=torch.int64)
    draws = Draws.of(task, LocalPlan(), records, rng(0, "dropout"))
    found = by_kernel(kernel, model, KernelJob(task, LocalPlan(), inputs, labels, draws))
    means = 2 * found.params["1.weight"][0].double()  # of a feature's mask over the records
    kept = means * records * (1 - rate)
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-3)
    deviation = (rate / (1 - rate)) ** 0.5
    assert float(means.mean()) == pytest.approx(1, abs=4 * deviation / (records * features) ** 0.5)
    assert float(means.std()) == pytest.approx(deviation / records**0.5, rel=0.1)  # records are left out one by one


def test_masks_differ_by_client_epoch_and_layer(fuzz: ModuleType) -> None:
    again = fuzz.Masks(1, 0, 0.5)
    masks = [fuzz.Masks(key, number, 0.5)(torch.ones(16, 50)) for key in (1, 2) for number in (0, 1)]
    masks += [again(torch.ones(16, 50)) for _ in range(2)][1:]
    for left, right in combinations(masks, 2):
        assert 0.4 < float((left == right).double().mean()) < 0.6
    task = lesson(made(perceptron()), (13,)).task
    first, second = (Draws.of(task, LocalPlan(), 5, rng(0, "batches", client)) for client in (0, 1))
    assert first.masks != second.masks


@pytest.mark.parametrize("name", MODELS)
def test_a_rate_of_zero_is_the_model_without_dropout_bit_for_bit(kernel: Kernel, name: str) -> None:
    layers, shape = MODELS[name]
    zero, plain = made(layers()), made([layer for layer in layers() if type(layer) is not nn.Dropout])
    for block in (part for part in plain.modules() if isinstance(part, ResidualBlock)):
        block.body = nn.Sequential(*(part for part in block.body if type(part) is not nn.Dropout))
    for part in zero.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    left, right = (by_kernel(kernel, model, lesson(model, shape)) for model in (zero, plain))
    assert torch.equal(flattened(left.params).flat, flattened(right.params).flat)
    assert left.loss == right.loss


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_leaves_nothing_out(kernel: Kernel, name: str) -> None:
    layers, shape = MODELS[name]
    model = made(layers())
    given = lesson(model, shape)
    trainer = Trainer(model, kernel)
    assert trainer.is_native(shape)
    assert trainer.is_parallel(shape)
    trainer.train(LocalJob(given.task, given.plan, Records.of(given.inputs, given.labels), rng(0, "dropout")))
    found = trainer.evaluate(given.task.params, given.inputs, given.labels)
    expected = Trainer(model, None).evaluate(given.task.params, given.inputs, given.labels)
    assert found.accuracy == expected.accuracy
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


def test_a_client_has_the_same_masks_whoever_goes_before_it(kernel: Kernel) -> None:
    model = made(convolutions())
    stack = describe(model, (2, 9, 9))
    assert stack is not None
    first, second = (lesson(model, (2, 9, 9), seed=seed) for seed in (0, 1))
    alone = [kernel.train(stack, [given])[0] for given in (first, second)]
    together = kernel.train(stack, [second, first])[::-1]
    assert all(map(same_bits, alone, together))
    other = replace(first.draws, masks=first.draws.masks ^ 1)
    assert not same_bits(kernel.train(stack, [first._replace(draws=other)])[0], alone[0])
