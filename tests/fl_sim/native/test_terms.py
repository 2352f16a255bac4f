"""What a plan does to the loss and its gradient: the compiled trainer against autograd of the formula in float64."""

import copy
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fl_sim.local_plan import Ascent, Contrast, Distillation, LocalPlan, Mix, Pull, Suppression
from fl_sim.models import MODELS
from fl_sim.native.kernel import Kernel
from fl_sim.native.layers import describe
from fl_sim.native.request import Draws, KernelJob
from fl_sim.params import detached, flattened
from fl_sim.seeding import rng, torch_kept
from fl_sim.training.features import feature_sums
from fl_sim.training.loop import train
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask, Params, Trained

CLASSES, COUNT = 5, 45
SETTINGS = LocalSettings(0.05, 0.9, 1e-3, batch_size=20, epochs=2)  # the last batch of an epoch has 5 records
SHAPES = {"niid-cnn": (1, 16, 16), "dafl-cnn": (3, 8, 8), "mlp": (13,), "logistic": (13,), "resnet": (3, 6, 6)}
ROUNDING = 3e-5
"""How far results may lie from float64's, as a share of how far training moved the model."""

INFINITE = float("inf")
VALUES = torch.tensor([0.3, -0.7, 0.0, 1.1, 0.4])


def model_of(name: str) -> nn.Sequential:
    with torch_kept():
        torch.manual_seed(5)
        made = MODELS[name](SHAPES[name], CLASSES)
    assert isinstance(made, nn.Sequential)
    return made


def records(name: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (COUNT,), generator=generator)  # nothing is of the last class
    return torch.randn(COUNT, *SHAPES[name], generator=generator), labels


def lesson(name: str, plan: LocalPlan, seed: int = 0, settings: LocalSettings = SETTINGS) -> KernelJob:
    inputs, labels = records(name, seed)
    params = detached(model_of(name).named_parameters())
    task = LocalTask(1, 0, 1, COUNT, settings, params)
    return KernelJob(task, plan, inputs, labels, Draws.of(task, plan, COUNT, rng(0, "terms")))


def by_kernel(kernel: Kernel, name: str, given: KernelJob) -> Trained:
    stack = describe(model_of(name), SHAPES[name])
    assert stack is not None
    return kernel.train(stack, [given])[0]


def loss_of(
    model: nn.Sequential, received: nn.Sequential, plan: LocalPlan, inputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """The batch's loss as fl_sim.local_plan words it."""
    logits = model(inputs)
    scale = torch.ones(CLASSES) if plan.logit_scale is None else plan.logit_scale
    shift = torch.zeros(CLASSES) if plan.logit_shift is None else plan.logit_shift
    loss = functional.cross_entropy(scale * logits + shift, labels)
    with torch.no_grad():
        taught = received(inputs)
    for record, label in enumerate(labels.tolist()):
        loss = loss + distilled(plan.distillation, logits[record], taught[record], label) / len(labels)
    loss = loss + suppressed(plan.suppression, logits, labels)
    return loss + contrasted(plan.contrast, model, received, inputs) + pulled(plan.pull, model[:-1](inputs), labels)


def contrasted(
    term: Contrast | None, model: nn.Sequential, received: nn.Sequential, inputs: torch.Tensor
) -> torch.Tensor:
    if term is None:
        return torch.zeros(())
    previous = copy.deepcopy(received)
    previous.load_state_dict(dict(term.previous))
    own, before, now = (one[:-1](inputs).flatten(1) for one in (model, previous, received))
    alive = own.detach().norm(dim=1) > 0  # a vector of zeros has no angle: cosine 0, gradient 0
    cosines = [torch.zeros(len(inputs), dtype=torch.float64) for _ in range(2)]
    for cosine, other in zip(cosines, (before, now), strict=True):
        cosine[alive] = functional.cosine_similarity(own[alive], other[alive].detach())
    return term.weight * functional.softplus((cosines[0] - cosines[1]) / term.temperature).mean()


def pulled(term: Pull | None, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for record, label in enumerate(labels.tolist()):
        if term is not None and term.present[label]:
            total = total + (features[record] - term.prototypes[label]).square().sum() * term.weight / len(labels)
    return total


def distilled(term: Distillation | None, own: torch.Tensor, received: torch.Tensor, label: int) -> torch.Tensor:
    """One record's part, over the classes that take part and no others."""
    if term is None:
        return torch.zeros(())
    allowed = range(CLASSES) if term.classes is None else term.classes.nonzero().flatten().tolist()
    chosen = [k for k in allowed if not (term.exclude_true and k == label)]
    own, received = (functional.log_softmax(one[chosen] / term.temperature, 0) for one in (own, received))
    return term.weight * term.temperature**2 * (received.exp() * (received - own)).sum()


def suppressed(term: Suppression | None, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for k in range(CLASSES):
        if term is not None and term.shares[k] > 0:
            others = logits[labels != k, k].exp().sum() / term.shares[k] / CLASSES
            total = total + term.weight * term.shares[k] * ((others + (labels == k).sum()) / len(labels)).log()
    return total


def by_formula(name: str, given: KernelJob) -> tuple[Params, float]:
    """SGD in float64 on ``loss_of``: the parameters and the mean loss."""
    task, plan, inputs, labels, draws = given
    settings, model, received = task.settings, model_of(name).double(), model_of(name).double()
    weights = dict(model.named_parameters())
    anchor = {key: value.detach().clone() for key, value in weights.items()}
    buffers, losses = {key: torch.zeros_like(value) for key, value in weights.items()}, []
    for order in draws.order:
        for batch in torch.split(torch.from_numpy(order), settings.batch_size):
            loss, gradients = gradients_of(model, received, plan, inputs[batch].double(), labels[batch])
            losses.append(loss)
            steps = {
                key: plan.gradient_scale * gradient
                + plan.proximal_mu * (weight.detach() - anchor[key])
                + (plan.gradient_offset[key] if plan.gradient_offset else 0.0)
                for (key, weight), gradient in zip(weights.items(), gradients, strict=True)
            }
            length = sum(step.square().sum() for step in steps.values()) ** 0.5
            factor = min(settings.clip_norm / float(length + 1e-6), 1.0) if settings.clip_norm else 1.0
            for key, weight in weights.items():
                with torch.no_grad():
                    buffers[key] = (
                        settings.momentum * buffers[key] + factor * steps[key] + settings.weight_decay * weight
                    )
                    drift = plan.step_offset[key] if plan.step_offset else 0.0
                    weight.sub_(settings.learning_rate * (buffers[key] + drift))
    return detached(weights.items()), float(np.mean(losses))


def gradients_of(
    model: nn.Sequential, received: nn.Sequential, plan: LocalPlan, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[float, list[torch.Tensor]]:
    """The loss at the weights, and the gradient where ``ascent`` says."""
    weights = list(model.parameters())
    loss = loss_of(model, received, plan, inputs, labels)
    here = list(torch.autograd.grad(loss, weights))
    if (ascent := plan.ascent) is None:
        return float(loss.detach()), here
    factors = [weight.detach().abs() if ascent.adaptive else torch.ones_like(weight) for weight in weights]
    length = sum((factor * gradient).square().sum() for factor, gradient in zip(factors, here, strict=True)) ** 0.5
    above = copy.deepcopy(model)
    with torch.no_grad():
        for weight, factor, gradient in zip(above.parameters(), factors, here, strict=True):
            weight.add_(ascent.radius * factor**2 * gradient / (length + 1e-12))
    there = gradients_of(above, received, replace(plan, ascent=None), inputs, labels)[1]
    blend = [(1 - ascent.share) * one + ascent.share * other for one, other in zip(here, there, strict=True)]
    return float(loss.detach()), blend


def moved(params: Params, start: Params) -> torch.Tensor:
    return torch.cat([(params[key].double() - start[key].double()).reshape(-1) for key in start])


def agree(kernel: Kernel, name: str, plan: LocalPlan, settings: LocalSettings = SETTINGS) -> None:
    """Assert that the kernel follows the formula, on one of three sets of records: see test_kernel.agree."""
    errors = []
    for seed in range(3):
        given = lesson(name, plan, seed, settings)
        found, (expected, loss) = by_kernel(kernel, name, given), by_formula(name, given)
        truth = moved(expected, given.task.params)
        error = float((moved(found.params, given.task.params) - truth).norm() / truth.norm())
        errors.append(max(error, abs(found.loss / loss - 1)))
        if errors[-1] <= ROUNDING:
            return
    raise AssertionError(errors)


def same_bits(left: Trained, right: Trained) -> bool:
    return torch.equal(flattened(left.params).flat, flattened(right.params).flat) and left.loss == right.loss


def offset(name: str) -> Params:
    generator = torch.Generator().manual_seed(9)
    named = model_of(name).named_parameters()
    return {key: 0.02 * torch.randn(value.shape, generator=generator) for key, value in named}


ADJUSTED = LocalPlan(logit_scale=VALUES.abs() + 0.2, logit_shift=-VALUES)
ABSENT = LocalPlan(logit_shift=torch.tensor([0.1, -0.4, 0.0, 0.2, -INFINITE]))
SOME, NONE = torch.tensor([False, True, True, False, True]), torch.zeros(CLASSES, dtype=torch.bool)
SHARES = torch.tensor([0.3, 0.5, 0.0, 0.2, 0.0])
PLANS: dict[str, LocalPlan] = {
    "scale and shift": ADJUSTED,
    "a class that leaves the softmax": ABSENT,
    "all classes distilled": LocalPlan(distillation=Distillation(2.0)),
    "those that are not true": LocalPlan(distillation=Distillation(1.5, 3.0, exclude_true=True)),
    "some": LocalPlan(distillation=Distillation(1.5, 0.5, SOME, exclude_true=True)),
    "suppression": LocalPlan(suppression=Suppression(SHARES, 0.7)),
    "ascent": LocalPlan(ascent=Ascent(0.3)),
    "adaptive ascent, a share": LocalPlan(ascent=Ascent(2.0, adaptive=True, share=0.6)),
    "FedVLS": replace(ABSENT, distillation=Distillation(0.5, classes=SOME), suppression=Suppression(SHARES)),
}


def contrast(name: str, weight: float = 3.0) -> Contrast:
    params = detached(model_of(name).named_parameters())
    return Contrast(weight, 0.5, {key: value + offset(name)[key] for key, value in params.items()})


def pull(name: str, weight: float = 0.4) -> Pull:
    """Towards prototypes of all classes but one, whose prototype is the mean of no records."""
    prototypes = torch.randn(CLASSES, model_of(name)[-1].in_features, generator=torch.Generator().manual_seed(6))
    prototypes[2] = torch.nan
    return Pull(prototypes, torch.arange(CLASSES) != 2, weight)


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_clipped_with_all_that_is_added_to_them(kernel: Kernel, name: str) -> None:
    plan = LocalPlan(gradient_offset=offset(name), proximal_mu=0.3, gradient_scale=0.5, ascent=Ascent(0.1))
    agree(kernel, name, plan, replace(SETTINGS, clip_norm=0.2))
    agree(kernel, name, LocalPlan(), replace(SETTINGS, clip_norm=0.5))
    loose = lesson(name, plan, settings=replace(SETTINGS, clip_norm=1e9))
    assert same_bits(by_kernel(kernel, name, loose), by_kernel(kernel, name, lesson(name, plan)))


@pytest.mark.parametrize("settings", [{"epochs": 1.5}, {"epochs": 0.3}, {"steps": 2}, {"steps": 7}])
@pytest.mark.parametrize("pooled", [True, False])
def test_parts_of_epochs_and_a_number_of_steps(kernel: Kernel, settings: dict[str, Any], *, pooled: bool) -> None:
    """As the loop has them: records that are used up are shuffled again."""
    pool = Mix(records("mlp")[0][:4], torch.full((4, CLASSES), 1 / CLASSES), 0.2, linearise=True)
    given = lesson("mlp", LocalPlan(mix=pool if pooled else None), settings=replace(SETTINGS, **settings))
    found = by_kernel(kernel, "mlp", given)
    expected = train(model_of("mlp"), given.task, given.plan, given.inputs, given.labels, rng(0, "terms"))
    truth = moved(expected.params, given.task.params)
    assert found.num_steps == expected.num_steps
    assert float((moved(found.params, given.task.params) - truth).norm()) <= ROUNDING * float(truth.norm())
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


def test_an_offset_of_the_step_joins_behind_momentum(kernel: Kernel) -> None:
    agree(kernel, "niid-cnn", LocalPlan(step_offset=offset("niid-cnn"), ascent=Ascent(0.1, share=0.5)))


@pytest.mark.parametrize("name", SHAPES)
def test_features_are_summed_by_class_under_the_new_model(kernel: Kernel, name: str) -> None:
    given = lesson(name, LocalPlan(class_features=True))
    records = Records.of(given.inputs, given.labels)
    [trained] = Trainer(model_of(name), kernel).train_all([LocalJob(given.task, given.plan, records, rng(0, "terms"))])
    expected = feature_sums(model_of(name), trained.params, given.inputs, given.labels)
    assert trained.feature_sums is not None
    assert float((trained.feature_sums - expected).norm()) <= 1e-5 * float(expected.norm())
    assert not trained.feature_sums[4].any()  # nothing is of that class
    [without] = Trainer(model_of(name), kernel).train_all([LocalJob(given.task, LocalPlan(), records, rng(0, "terms"))])
    assert same_bits(trained, without)
    assert without.feature_sums is None


@pytest.mark.parametrize("name", SHAPES)
def test_features_are_contrasted_and_pulled_on_every_model(kernel: Kernel, name: str) -> None:
    agree(kernel, name, LocalPlan(contrast=contrast(name)))
    agree(kernel, name, LocalPlan(pull=pull(name)))


def test_all_terms_go_together(kernel: Kernel) -> None:
    terms = replace(PLANS["FedVLS"], contrast=contrast("dafl-cnn"), pull=pull("dafl-cnn"), ascent=Ascent(0.1))
    agree(kernel, "dafl-cnn", replace(terms, gradient_scale=0.5, proximal_mu=0.1))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("plan", PLANS)
def test_every_term_follows_its_formula_on_every_model(kernel: Kernel, name: str, plan: str) -> None:
    agree(kernel, name, PLANS[plan])


def test_the_gradient_is_scaled_before_anything_is_added_to_it(kernel: Kernel) -> None:
    offsets = LocalPlan(gradient_offset=offset("mlp"), proximal_mu=0.5, gradient_scale=0.3)
    agree(kernel, "mlp", offsets)
    agree(kernel, "mlp", replace(offsets, ascent=Ascent(0.2), distillation=Distillation(0.5)))


NOTHING: dict[str, LocalPlan] = {
    "scale 1": LocalPlan(logit_scale=torch.ones(CLASSES)), "shift 0": LocalPlan(logit_shift=torch.zeros(CLASSES)),
    "weight 0": LocalPlan(distillation=Distillation(0.0), suppression=Suppression(SHARES, 0.0)),
    "no class": LocalPlan(distillation=Distillation(2.0, 3.0, NONE)),
    "one class": LocalPlan(distillation=Distillation(2.0, 3.0, torch.arange(CLASSES) == 3)),
    "radius 0": LocalPlan(ascent=Ascent(0.0, share=0.5)),
    "adaptive radius 0": LocalPlan(ascent=Ascent(0.0, adaptive=True)),
    "nothing of the ascent": LocalPlan(ascent=Ascent(0.3, share=0.0)),
    "no share": LocalPlan(suppression=Suppression(torch.zeros(CLASSES))),
}  # fmt: skip


@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("name", ["dafl-cnn", "mlp"])
def test_a_term_of_no_strength_is_plain_sgd_bit_for_bit(kernel: Kernel, name: str, nothing: str) -> None:
    plain = by_kernel(kernel, name, lesson(name, LocalPlan()))
    assert same_bits(by_kernel(kernel, name, lesson(name, NOTHING[nothing])), plain)


def test_a_label_that_has_left_the_softmax_has_an_infinite_loss(kernel: Kernel) -> None:
    shift = torch.zeros(CLASSES)
    shift[0] = -INFINITE
    assert by_kernel(kernel, "mlp", lesson("mlp", LocalPlan(logit_shift=shift))).loss == INFINITE


FOREIGN = {
    "doubles": LocalPlan(logit_shift=VALUES.double()),
    "numbers for a mask": LocalPlan(distillation=Distillation(1.0, classes=SHARES)),
    "mixing with a teacher": LocalPlan(
        distillation=Distillation(1.0),
        mix=Mix(torch.zeros(2, *SHAPES["mlp"]), torch.full((2, CLASSES), 1 / CLASSES), 0.1, linearise=False),
    ),
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_pytorch_may_know_is_handed_on_to_it(
    kernel: Kernel, foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LocalPlan] = []
    monkeypatch.setattr("fl_sim.training.trainer.train", lambda model, task, plan, *_: asked.append(plan))
    trainer = Trainer(model_of("mlp"), kernel)
    for plan in (ADJUSTED, FOREIGN[foreign]):
        given = lesson("mlp", plan)
        trainer.train(LocalJob(given.task, plan, Records.of(given.inputs, given.labels), rng(0, "terms")))
        assert trainer.is_native(SHAPES["mlp"], plan) == (plan is ADJUSTED)
    assert asked == [FOREIGN[foreign]]


def test_a_model_whose_head_is_not_its_last_linear_layer_is_left_to_pytorch(kernel: Kernel) -> None:
    """As its user says which layer's input the features are."""
    made = nn.Sequential(OrderedDict(body=nn.Linear(13, 4), head=nn.Linear(4, 4), last=nn.Linear(4, CLASSES)))
    trainer, params = Trainer(made, kernel), detached(made.named_parameters())
    plans = (
        LocalPlan(),
        LocalPlan(contrast=Contrast(1.0, 0.5, params)),
        LocalPlan(contrast=Contrast(0.0, 0.5, params)),
    )
    assert [trainer.is_native((13,), plan) for plan in plans] == [True, False, False]


def test_no_contrast_where_previous_and_received_model_are_the_same(kernel: Kernel) -> None:
    """Such as in a client's first round: the loss is a constant, its gradient exactly 0."""
    plain = by_kernel(kernel, "niid-cnn", lesson("niid-cnn", LocalPlan()))
    received = lesson("niid-cnn", LocalPlan()).task.params
    found = by_kernel(kernel, "niid-cnn", lesson("niid-cnn", LocalPlan(contrast=Contrast(5.0, 0.5, received))))
    assert torch.equal(flattened(found.params).flat, flattened(plain.params).flat)
    assert found.loss == pytest.approx(plain.loss + 5 * np.log(2))


def test_records_without_features_are_not_moved_by_a_contrast(kernel: Kernel) -> None:
    """Where all ReLUs in front of the last layer are dead there is no angle to turn."""
    given = lesson("mlp", LocalPlan())
    dead = {key: value.clone() for key, value in given.task.params.items()}
    dead["3.bias"] -= 100.0
    given = given._replace(task=replace(given.task, params=dead))
    plain = by_kernel(kernel, "mlp", given)
    found = by_kernel(kernel, "mlp", given._replace(plan=LocalPlan(contrast=contrast("mlp"))))
    assert torch.equal(flattened(found.params).flat, flattened(plain.params).flat)


def test_contrast_and_pull_of_no_weight_are_plain_sgd_bit_for_bit(kernel: Kernel) -> None:
    plain = by_kernel(kernel, "mlp", lesson("mlp", LocalPlan()))
    nothing = LocalPlan(contrast=contrast("mlp", 0.0), pull=pull("mlp", 0.0))
    assert same_bits(by_kernel(kernel, "mlp", lesson("mlp", nothing)), plain)


def test_the_first_step_of_a_round_feels_no_teacher(kernel: Kernel) -> None:
    """As long as own and received model are the same, they say the same."""
    once = replace(SETTINGS, batch_size=COUNT, epochs=1)
    plain, taught = (
        by_kernel(kernel, "niid-cnn", lesson("niid-cnn", plan, settings=once))
        for plan in (LocalPlan(), LocalPlan(distillation=Distillation(5.0, 2.0, exclude_true=True)))
    )
    start = lesson("niid-cnn", LocalPlan()).task.params
    apart = moved(taught.params, start) - moved(plain.params, start)
    assert float(apart.norm()) < 1e-5 * float(moved(plain.params, start).norm())
    assert taught.loss == pytest.approx(plain.loss, rel=1e-6)
