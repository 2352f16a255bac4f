"""Frozen parameters in all trainers: the same steps as where a local plan trains the other parameters alone."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim.local_plan import Ascent, Contrast, LocalPlan
from fl_sim.models import mlp
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.params import copied, detached, trainable
from fl_sim.training.records import Records
from fl_sim.training.stacked import StackedTrainer
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask, Params, Trained

SHAPE, CLASSES, COUNT = (1, 4, 4), 3, 21
LOCAL = LocalSettings(learning_rate=0.1, momentum=0.9, weight_decay=0.1, batch_size=8, epochs=2)
TRAINED = ("3.weight", "5.bias")


def whole() -> nn.Module:
    torch.manual_seed(0)
    return mlp(SHAPE, CLASSES)


def partly() -> nn.Module:
    model = whole()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in TRAINED)
    return model


def job(model: nn.Module, plan: LocalPlan, local: LocalSettings = LOCAL) -> LocalJob:
    inputs = torch.randn(COUNT, *SHAPE, generator=torch.Generator().manual_seed(1))
    records = Records.of(inputs, torch.arange(COUNT) % CLASSES)
    params = detached(trainable(model).items())
    return LocalJob(LocalTask(1, 0, 1, COUNT, local, params), plan, records, np.random.default_rng(2))


def moved(params: Params, by: float) -> Params:
    return {name: value + by for name, value in params.items()}


PLANS = {
    "plain": lambda params: LocalPlan(),
    "offset": lambda params: LocalPlan(gradient_offset=moved(params, 0.5), step_offset=moved(params, -0.1)),
    "proximal": lambda params: LocalPlan(proximal_mu=0.5),
    "warm": lambda params: LocalPlan(momentum_buffers=moved(params, 0.2)),
    "contrast": lambda params: LocalPlan(contrast=Contrast(1.0, 0.5, moved(params, 0.1)), class_features=True),
    "ascent": lambda params: LocalPlan(ascent=Ascent(0.1)),
}  # fmt: skip


def by_plan(name: str, local: LocalSettings) -> Trained:
    """Train the same parameters of the whole model by the local plan, in PyTorch."""
    full = detached(whole().named_parameters())
    plan = PLANS[name](full)
    if plan.contrast is not None:  # the other parameters of the previous model are frozen, too
        previous = {**full, **{key: plan.contrast.previous[key] for key in TRAINED}}
        plan = replace(plan, contrast=replace(plan.contrast, previous=previous))
    return Trainer(whole(), None).train(job(whole(), replace(plan, trained=frozenset(TRAINED)), local))


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    found, why_not = load_kernel()
    if found is None:
        pytest.skip(why_not)
    return found


@pytest.mark.parametrize("local", [LOCAL, replace(LOCAL, momentum=0.0, optimizer="adamw", learning_rate=0.01)])
@pytest.mark.parametrize("name", PLANS)
def test_every_trainer_leaves_frozen_parameters_out(name: str, local: LocalSettings, kernel: Kernel) -> None:
    if name == "warm" and local.optimizer != "sgd":
        return
    wanted, tolerance = by_plan(name, local), 1e-5 if local.optimizer == "sgd" else 2e-3  # Adam divides by tiny numbers
    plan = PLANS[name](detached(trainable(partly()).items()))
    trainers = {
        "compiled": Trainer(partly(), kernel).train,
        "pytorch": Trainer(partly(), None).train,
        "stacked": lambda one: StackedTrainer(partly()).train([one, copy.deepcopy(one)])[1],
    }
    for what, train in trainers.items():
        found = train(job(partly(), plan, local))
        assert found.params.keys() == set(TRAINED), what
        for key, value in found.params.items():
            assert torch.allclose(value, wanted.params[key], rtol=1e-4, atol=tolerance), (what, key)
        assert found.momentum_buffers.keys() <= set(TRAINED)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
        if plan.class_features:
            assert torch.allclose(found.feature_sums, wanted.feature_sums, rtol=1e-3, atol=1e-4), what


def test_the_compiled_trainer_takes_and_evaluates_such_a_model(kernel: Kernel) -> None:
    trainer = Trainer(partly(), kernel)
    assert trainer.is_native(SHAPE)
    assert not trainer.is_native(SHAPE, LocalPlan(ascent=Ascent(0.1)))  # PyTorch trains it
    inputs, labels = torch.randn(9, *SHAPE), torch.arange(9) % CLASSES
    params = moved(detached(trainable(partly()).items()), 0.3)
    full = {**detached(whole().named_parameters()), **params}
    found, wanted = (one.evaluate(some, inputs, labels).loss for one, some in (
        (trainer, params), (Trainer(whole(), None), full)
    ))  # fmt: skip
    assert found == pytest.approx(wanted, rel=1e-5)


def test_clients_of_one_received_model_share_the_completed_one(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Kernel, "prepare", lambda self, stack, jobs, precision: seen.extend(jobs) or _Nothing())
    one = job(partly(), LocalPlan())
    Trainer(partly(), kernel).prepare([one, replace(one, generator=np.random.default_rng(3))])
    assert seen[0].task.params is seen[1].task.params
    assert seen[0].plan.trained == frozenset(TRAINED)


def test_threads_share_the_frozen_parameters_and_nothing_else() -> None:
    model = partly()
    again = copied(model)
    for name, weight in model.named_parameters():
        assert (again.get_parameter(name) is weight) == (name not in TRAINED)
    assert torch.equal(again.get_parameter("5.bias"), model.get_parameter("5.bias"))
    trainer = Trainer(model, None)
    trainer.train(job(model, LocalPlan()))
    assert trainer._thread.model.get_parameter("1.weight") is model.get_parameter("1.weight")


class _Nothing:
    def train(self) -> list[Trained]:
        return []
