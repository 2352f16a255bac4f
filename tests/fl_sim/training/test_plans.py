"""What a plan asks for is done by every trainer, or handed on to one that does it, or refused by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fl_sim.errors import UserError
from fl_sim.local_plan import (
    Ascent,
    Batch,
    Contrast,
    Distillation,
    LocalPlan,
    LossTerm,
    Mix,
    Phase,
    Pull,
    Suppression,
    fields_in_use,
)
from fl_sim.native import request
from fl_sim.native.kernel import load_kernel
from fl_sim.native.layers import describe
from fl_sim.native.request import Draws, KernelJob
from fl_sim.params import detached
from fl_sim.seeding import rng, torch_kept
from fl_sim.training import loop, private_steps, stacked_step
from fl_sim.training.loop import train
from fl_sim.training.records import Records, Source
from fl_sim.training.stacked import StackedTrainer
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask, Params, Trained

SHAPE, CLASSES = (1, 4, 4), 3
SIZES = (5, 16, 0, 7)
SETTINGS = LocalSettings(0.05, 0.9, 1e-3, batch_size=4, epochs=2)
needs_kernel = pytest.mark.skipif(load_kernel()[0] is None, reason=f"no native trainer: {load_kernel()[1]}")


@dataclass(frozen=True)
class Sharp(LocalPlan):
    """A plan with a field that no trainer knows."""

    sharpness: float = 0.0


@dataclass(frozen=True)
class Nesterov(LocalSettings):
    """Settings with a field that no trainer knows."""

    nesterov: bool = False


def model() -> nn.Module:
    with torch_kept():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def like(params: Params, seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in params.items()}


POOL = torch.ones(2, *SHAPE), torch.full((2, CLASSES), 1 / 3)


def jobs(plan_of: Callable[[LocalTask], LocalPlan], settings: LocalSettings = SETTINGS) -> list[LocalJob]:
    params = detached(model().named_parameters())
    made = []
    for client, size in enumerate(SIZES):
        generator = torch.Generator().manual_seed(client)
        task = LocalTask(1, client, len(SIZES), size, settings, params, state={"previous": like(params, client)})
        inputs = torch.randn(size, *SHAPE, generator=generator)
        labels = torch.randint(0, CLASSES, (size,), generator=generator)
        made.append(LocalJob(task, plan_of(task), Records.of(inputs, labels), rng(0, "batches", client)))
    return made


def by_loop(given: Sequence[LocalJob]) -> list[Trained]:
    return [train(model(), job.task, job.plan, *job.records.tensors(), job.generator) for job in given]


def by_trainer(given: Sequence[LocalJob]) -> list[Trained]:
    return Trainer(model(), load_kernel()[0]).train_all(given)


def one_by_one(given: Sequence[LocalJob]) -> list[Trained]:
    trainer = Trainer(model(), load_kernel()[0])
    return [trainer.train(job) for job in given]


def by_stack(given: Sequence[LocalJob]) -> list[Trained]:
    return StackedTrainer(model()).train(given)


TRAINERS = [by_loop, by_trainer, one_by_one, by_stack]


def flat(params: Params) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in params.values()])


def assert_near(found: Sequence[Trained], expected: Sequence[Trained]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.num_steps == other.num_steps
        assert one.loss == (None if other.loss is None else pytest.approx(other.loss, rel=1e-4))
        torch.testing.assert_close(flat(one.params), flat(other.params), rtol=0, atol=3e-6)


def assert_apart(found: Sequence[Trained], expected: Sequence[Trained]) -> None:
    apart = [float((flat(one.params) - flat(other.params)).norm()) for one, other in zip(found, expected, strict=True)]
    assert all(distance > 1e-3 for distance, size in zip(apart, SIZES, strict=True) if size)


@pytest.mark.parametrize("trained_by", TRAINERS)
def test_a_field_that_nobody_knows_is_refused_by_name_and_nothing_at_its_default(trained_by: Any) -> None:
    with pytest.raises(UserError, match="no trainer supports sharpness of Sharp: leave it at its default"):
        trained_by(jobs(lambda task: Sharp(sharpness=0.5)))
    with pytest.raises(UserError, match="no trainer supports nesterov of Nesterov"):
        trained_by(jobs(lambda task: LocalPlan(), Nesterov(*vars(SETTINGS).values(), nesterov=True)))
    unused = jobs(lambda task: Sharp(), Nesterov(*vars(SETTINGS).values()))
    for one, other in zip(trained_by(unused), trained_by(jobs(lambda task: LocalPlan())), strict=True):
        assert torch.equal(flat(one.params), flat(other.params))


@pytest.mark.parametrize("trained_by", [by_trainer, one_by_one, by_stack])
def test_what_only_the_loop_knows_is_handed_on_to_it(trained_by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("fl_sim.training.trainer.train", lambda model, task, *_: asked.append(task.client))
    trained_by(jobs(lambda task: Sharp(sharpness=task.client * 0.5)))
    assert set(asked) >= {1, 2, 3}  # client 0 has it at its default


@needs_kernel
def test_the_compiled_trainer_itself_refuses_what_it_does_not_know() -> None:
    kernel, (job, *_) = load_kernel()[0], jobs(lambda task: Sharp(sharpness=0.5))
    stack = describe(model(), SHAPE)
    assert kernel is not None
    assert stack is not None
    draws = Draws.of(job.task, job.plan, len(job.records), job.generator)
    with pytest.raises(ValueError, match="does not support sharpness of the settings or the plan"):
        kernel.train(stack, [KernelJob(job.task, job.plan, *job.records.tensors(), draws)])
    trainer = Trainer(model(), kernel)
    assert [trainer.is_native(SHAPE, plan) for plan in (LocalPlan(), LocalPlan(proximal_mu=1.0))] == [True, True]
    assert not trainer.is_native(SHAPE, job.plan)
    assert not trainer.is_native(SHAPE, LocalPlan(loss_term=LossTerm(smooth)))


def test_trainers_name_fields_that_there_are() -> None:
    there = {part.name for kind in (LocalPlan, LocalSettings) for part in fields(kind)}
    assert there - {"phases", "private"} == loop.TAKES == stacked_step.TAKES | {"step_mask"}  # a phase is its own job
    assert there - {"phases", "private", "loss_term", "label_smoothing", "step_mask"} == request.TAKES
    assert {"private"} < private_steps.TAKES < there


def test_a_field_is_in_use_where_it_differs_from_its_default() -> None:
    @dataclass(frozen=True)
    class Many(LocalPlan):
        number: float = 0.0
        names: tuple[str, ...] = ()
        tensors: Params = field(default_factory=dict)

    zero, many = torch.zeros(()), {"a": torch.zeros(2), "b": torch.zeros(3)}
    assert fields_in_use(Many()) == set()
    assert fields_in_use(Many(number=0, names=(), tensors={})) == set()
    assert fields_in_use(Many(number=float("nan"), names=("",), tensors=many)) == {"number", "names", "tensors"}
    assert fields_in_use(Many(number=zero)) == {"number"}  # type: ignore[arg-type]  # what users write
    assert fields_in_use(Many(gradient_offset=many, mix=Mix(*POOL, 0.1, linearise=True))) == {"gradient_offset", "mix"}
    assert fields_in_use(SETTINGS) == {"learning_rate", "momentum", "weight_decay", "batch_size", "epochs"}


def proximal(batch: Batch) -> torch.Tensor:
    return sum((batch.params[name] - batch.anchor[name]).pow(2).sum() for name in batch.anchor) * 0.35  # type: ignore[return-value]


def smooth(batch: Batch) -> torch.Tensor:
    """A number for each record."""
    return -0.2 * functional.log_softmax(batch.logits, 1).mean(1)


def distil(batch: Batch) -> torch.Tensor:
    """Own predictions pulled to those of the previous and of the received model: a mean over the batch."""
    previous = batch.logits_of(batch.data, batch.inputs).softmax(1)
    received = batch.logits_of(batch.anchor, batch.inputs).softmax(1)
    own = functional.log_softmax(batch.logits, 1)
    return -(batch.weights @ ((previous + received) * own).sum(1))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


PARTS: dict[str, Callable[[LocalTask], dict[str, Any]]] = {
    "shift and scale": lambda task: {"logit_shift": task.client * numbers(CLASSES), "logit_scale": numbers(CLASSES)},
    "distillation": lambda task: {"distillation": Distillation(2.0, 2.0, exclude_true=True)},
    "distillation of some": lambda task: {"distillation": Distillation(2.0, classes=torch.arange(3) != task.client)},
    "suppression": lambda task: {"suppression": Suppression(numbers(CLASSES).abs() * (1 + task.client), 0.5)},
    "ascent": lambda task: {"ascent": Ascent(0.3, share=0.7), "gradient_scale": 0.5},
    "step offset": lambda task: {"step_offset": like(task.params, task.client + 50)},
    "adaptive ascent": lambda task: {"ascent": Ascent(0.9, adaptive=True), "proximal_mu": 0.3},
    "contrast": lambda task: {"contrast": Contrast(5.0, 0.5, task.state["previous"])},
    "frozen parameters": lambda task: {"trained": frozenset(list(task.params)[task.client % 2 :: 2])},
    "ascent beside frozen": lambda task: {"trained": frozenset(list(task.params)[1:]), "ascent": Ascent(0.3)},
    "pull": lambda task: {"pull": Pull(numbers(CLASSES, 6) + task.client, torch.arange(3) != 1, 0.3)},
    "mix beside others": lambda task: {
        "mix": Mix(*POOL, 0.1, linearise=True), "distillation": Distillation(2.0), "ascent": Ascent(0.3),
        "suppression": Suppression(torch.ones(CLASSES)),
    },
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_a_plan_trains_alike_everywhere(part: str) -> None:
    def planned(task: LocalTask) -> LocalPlan:
        return LocalPlan(**PARTS[part](task))

    expected = by_loop(jobs(planned))
    assert_apart(expected, by_loop(jobs(lambda task: LocalPlan())))
    for trained_by in (by_trainer, one_by_one, by_stack):
        assert_near(trained_by(jobs(planned)), expected)


@pytest.mark.parametrize("trained_by", TRAINERS)
@pytest.mark.parametrize(
    "more", [{}, {"clip_norm": 0.05}, {"optimizer": "adamw", "momentum": 0.0, "weight_decay": 0.1}], ids=str
)
def test_frozen_parameters_stay_to_the_bit(trained_by: Any, more: dict[str, Any]) -> None:
    settings = replace(SETTINGS, **more)
    head = list(detached(model().named_parameters()))[-2:]

    def planned(task: LocalTask) -> LocalPlan:
        return LocalPlan(trained=frozenset(head), step_offset=like(task.params, 3), proximal_mu=0.2)

    given, expected = jobs(planned, settings), by_loop(jobs(planned, settings))
    for job, found, other in zip(given, trained_by(jobs(planned, settings)), expected, strict=True):
        for name, before in job.task.params.items():
            assert torch.equal(found.params[name], before) == (name not in head or not len(job.records)), name
        torch.testing.assert_close(flat(found.params), flat(other.params), rtol=1e-4, atol=1e-5)
        assert found.momentum_buffers.keys() == other.momentum_buffers.keys()


@pytest.mark.parametrize("trained_by", [by_trainer, by_stack])
def test_what_fills_batches_up_is_never_of_a_class_that_a_client_has_not(trained_by: Any) -> None:
    """A record of somebody else's class would have an infinite loss, and that times a weight of 0 is no number."""

    def of_one_class() -> list[LocalJob]:
        made = jobs(
            lambda task: LocalPlan(logit_shift=torch.where(torch.arange(3) == min(task.client, 2), 0.0, -torch.inf))
        )
        everybody = Source(
            torch.cat([job.records.tensors()[0] for job in made]),
            torch.cat([torch.full((len(job.records),), min(job.task.client, 2)) for job in made]),
        )
        ends = [sum(SIZES[: client + 1]) for client in range(len(SIZES))]
        parts = [range(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
        return [replace(job, records=Records(((everybody, part),))) for job, part in zip(made, parts, strict=True)]

    found = trained_by(of_one_class())
    assert_near(found, by_loop(of_one_class()))
    assert all(torch.isfinite(flat(one.params)).all() for one in found)


@pytest.mark.parametrize("trained_by", [by_trainer, by_stack])
def test_sums_of_features_are_handed_back_by_every_trainer(trained_by: Any) -> None:
    planned = lambda task: LocalPlan(class_features=task.client != 1)  # noqa: E731
    for one, other in zip(trained_by(jobs(planned)), by_loop(jobs(planned)), strict=True):
        if other.feature_sums is None:
            assert one.feature_sums is None
        else:
            assert one.feature_sums is not None
            torch.testing.assert_close(one.feature_sums, other.feature_sums, rtol=1e-4, atol=1e-5)


def with_term(function: Callable[[Batch], torch.Tensor], **parts: Any) -> Callable[[LocalTask], LocalPlan]:
    return lambda task: LocalPlan(loss_term=LossTerm(function, task.state["previous"]), **parts)


@pytest.mark.parametrize(
    "parts",
    [{}, {"proximal_mu": 0.3}, {"mix": Mix(*POOL, 0.1, linearise=True)}],
    ids=["alone", "with proximal_mu", "with mix"],
)
@pytest.mark.parametrize("function", [proximal, smooth, distil])
def test_a_loss_term_trains_alike_everywhere(function: Any, parts: dict[str, Any]) -> None:
    expected = by_loop(jobs(with_term(function, **parts)))
    assert_apart(expected, by_loop(jobs(lambda task: LocalPlan(**parts))))
    for trained_by in (by_trainer, one_by_one, by_stack):
        assert_near(trained_by(jobs(with_term(function, **parts))), expected)


@pytest.mark.parametrize("trained_by", TRAINERS)
def test_half_mu_times_the_squared_distance_as_a_term_is_fedprox(trained_by: Any) -> None:
    as_term, as_gradient = (
        trained_by(jobs(plan)) for plan in (with_term(proximal), lambda _: LocalPlan(proximal_mu=0.7))
    )
    for one, other in zip(as_term, as_gradient, strict=True):
        torch.testing.assert_close(flat(one.params), flat(other.params), rtol=0, atol=3e-6)


@pytest.mark.parametrize("trained_by", TRAINERS)
@pytest.mark.parametrize(
    ("function", "found"),
    [(lambda batch: batch.logits, r"a tensor of shape \(\d, 3\)"), (lambda batch: 0.5, "a float"),
     (lambda batch: batch.weights[:1], r"a tensor of shape \(1,\)")],
)  # fmt: skip
def test_a_term_that_is_no_number_a_record_is_refused(trained_by: Any, function: Any, found: str) -> None:
    with pytest.raises(UserError, match=rf"the loss term .*lambda.* returned {found} for \d records: it must return"):
        trained_by(jobs(with_term(function))[1:2])


def test_clients_whose_plans_are_of_several_kinds_are_several_stacks() -> None:
    """Such as a warm start for those who were here before, and terms that are each client's own."""

    def plan(task: LocalTask) -> LocalPlan:
        weight = 0.1 + 0.4 * task.client
        own = LossTerm(lambda batch: weight * smooth(batch))
        return LocalPlan(momentum_buffers=task.state["previous"]) if task.client == 0 else LocalPlan(loss_term=own)

    assert_near(by_stack(jobs(plan)), by_loop(jobs(plan)))


def test_a_stack_mixes_as_each_round_says() -> None:
    trainer, first = StackedTrainer(model()), jobs(lambda task: LocalPlan())
    for weight in (0.1, 0.6):

        def again(weight: float = weight) -> list[LocalJob]:
            plan = LocalPlan(mix=Mix(*POOL, weight, linearise=False))
            return [replace(job, plan=plan, generator=rng(1, "batches", job.task.client)) for job in first]

        assert_near(trainer.train(again()), by_loop(again()))


def test_a_parameter_that_the_term_alone_moves_is_moved_in_a_stack_too() -> None:
    def partly() -> nn.Module:
        made = model()
        made.register_parameter("centre", nn.Parameter(torch.ones(2)))
        return made

    def pull(batch: Batch) -> torch.Tensor:
        return batch.params["centre"].pow(2).sum()

    def made() -> list[LocalJob]:
        params = detached(partly().named_parameters())
        plan = LocalPlan(loss_term=LossTerm(pull))
        return [
            replace(job, task=replace(job.task, params=params), plan=plan) for job in jobs(lambda task: LocalPlan())
        ]

    found = StackedTrainer(partly()).train(made())
    alone = [train(partly(), job.task, job.plan, *job.records.tensors(), job.generator) for job in made()]
    assert_near(found, alone)
    assert float(alone[0].params["centre"].max()) < 1


def test_a_plan_that_trains_unknown_parameters_or_none_is_refused() -> None:
    [job, *_] = jobs(lambda task: LocalPlan())
    for names, said in ((["body.wieght"], "trains body.wieght, and the model has"), ([], "trains no parameter")):
        for plan in (LocalPlan(trained=frozenset(names)), LocalPlan(phases=(Phase(frozenset(names), 1),))):
            with pytest.raises(ValueError, match=said):
                replace(job, plan=plan)
