"""The compiled backward pass: its gradients are PyTorch's, autograd reads them once, and loss terms can use them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.local_plan import Batch, LocalPlan, LossTerm
from fl_sim.models import MODELS
from fl_sim.native.differentiable import CompiledPasses
from fl_sim.native.kernel import Kernel
from fl_sim.native.layers import Stack, describe
from fl_sim.params import detached, vector_in
from fl_sim.seeding import rng, torch_kept
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask, Params

CLASSES, COUNT = 5, 70  # two passes of the library, whose last one has no full group
SHAPES = {"niid-cnn": (1, 16, 16), "dafl-cnn": (3, 8, 8), "mlp": (13,), "logistic": (13,), "resnet": (3, 6, 6)}


def given(name: str) -> tuple[nn.Module, Stack, torch.Tensor, torch.Tensor]:
    with torch_kept():
        torch.manual_seed(3)
        model = MODELS[name](SHAPES[name], CLASSES)
        records, labels = torch.randn(COUNT, *SHAPES[name]), torch.randint(0, CLASSES, (COUNT,))
    stack = describe(model, SHAPES[name])
    assert stack is not None
    return model, stack, records, labels


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-5 * wanted.abs().max())


@pytest.mark.parametrize("name", SHAPES)
def test_the_backward_pass_is_that_of_pytorch(kernels: list[Kernel], name: str) -> None:
    model, stack, records, labels = given(name)
    weights, images = list(model.parameters()), records.clone().requires_grad_()
    slopes = torch.linspace(-1, 1, COUNT * CLASSES).reshape(COUNT, CLASSES)
    by_images, *by_weights = torch.autograd.grad((model(images) * slopes).sum(), [images, *weights])
    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
    (pushing,) = torch.autograd.grad(loss, images)
    flat = vector_in(detached(model.named_parameters()), stack.layout)
    for kernel in kernels:
        for to_inputs in (True, False):
            to_weights, to_images = kernel.backward(stack, flat, records, slopes, to_inputs=to_inputs)
            assert near(to_weights, torch.cat([one.flatten() for one in by_weights]))
            assert (to_images is not None) == to_inputs
            assert to_images is None or near(to_images, by_images)
        assert near(kernel.input_slopes(stack, flat, records, labels), pushing)


def test_what_the_backward_pass_cannot_read_is_refused(kernel: Kernel) -> None:
    model, stack, records, labels = given("logistic")
    flat = vector_in(detached(model.named_parameters()), stack.layout)
    with pytest.raises(IndexError, match="outside of the model's 5 classes"):
        kernel.input_slopes(stack, flat, records, labels + 1)
    with pytest.raises(ValueError, match="the gradient by the logits have the shape"):
        kernel.backward(stack, flat, records, torch.zeros(COUNT, 4), to_inputs=True)
    assert kernel.backward(stack, flat, records[:0], torch.zeros(0, 5), to_inputs=True)[1] is not None
    dropping = describe(nn.Sequential(nn.Linear(13, 8), nn.Dropout(0.5), nn.Linear(8, 5)), (13,))
    assert dropping is not None
    with pytest.raises(ValueError, match="layers are not supported"):
        kernel.backward(dropping, torch.zeros(157), records, torch.zeros(COUNT, 5), to_inputs=True)


def test_autograd_and_functional_gradients_pass_through_once(kernel: Kernel) -> None:
    model, stack, records, labels = given("mlp")
    params: Params = dict(model.named_parameters())
    first = next(iter(params))
    passes = CompiledPasses(kernel, stack, {first: params[first].detach()})
    rest = {name: value for name, value in params.items() if name != first}  # the first parameter is frozen
    entropy = nn.functional.cross_entropy
    loss, wanted = entropy(passes.logits(rest, records), labels), entropy(model(records), labels)
    found = torch.autograd.grad(loss, list(rest.values()))
    assert all(map(near, found, torch.autograd.grad(wanted, list(rest.values()))))
    by_records: Any = torch.func.grad(lambda images: entropy(passes.logits(detached(rest.items()), images), labels))
    assert near(by_records(records) * COUNT, passes.input_slopes(rest, records, labels))
    images = records.clone().requires_grad_()
    (slope,) = torch.autograd.grad(entropy(passes.logits(rest, images), labels), images, create_graph=True)
    with pytest.raises(UserError, match="remove first_order=True"):
        torch.autograd.grad(slope.sum(), images)


def _at_pushed_records(batch: Batch) -> torch.Tensor:
    pushed = batch.inputs + 0.1 * batch.input_slopes(batch.params, batch.inputs, batch.labels)
    return nn.functional.cross_entropy(batch.logits_of(batch.params, pushed), batch.labels, reduction="none")


def test_a_first_order_loss_term_trains_to_the_same_model(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, records, labels = given("niid-cnn")
    settings = LocalSettings(0.05, 0.9, 1e-3, batch_size=32, epochs=2)
    task = LocalTask(1, 0, 1, COUNT, settings, detached(model.named_parameters()))
    plan = LocalPlan(loss_term=LossTerm(_at_pushed_records))
    compiled = replace(plan, loss_term=LossTerm(_at_pushed_records, first_order=True))

    def trained(trainer: Trainer, plan: LocalPlan) -> torch.Tensor:
        job = LocalJob(task, plan, Records.of(records, labels), rng(0, "differentiable"))
        params = trainer.train(job).params
        return torch.cat([(params[name] - value).flatten() for name, value in task.params.items()])

    wanted = trained(Trainer(model, None), compiled)
    assert torch.equal(trained(Trainer(model, kernel), plan), wanted)  # PyTorch's loop
    calls = list[int]()
    backward = CompiledPasses.input_slopes
    monkeypatch.setattr(CompiledPasses, "input_slopes", lambda *given: (calls.append(1), backward(*given))[1])
    found = trained(Trainer(model, kernel), compiled)
    assert len(calls) == 6
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
