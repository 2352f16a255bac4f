"""FedRoD: its generic model is that of balanced softmax to the bit; the personal head's steps are written down here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import fl_sim
from fl_sim import models
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.native.kernel import load_kernel
from fl_sim.params import detached
from fl_sim.seeding import rng
from fl_sim.training.courses import follow
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalTask, Trained
from strategies.balanced_softmax import BalancedSoftmax
from strategies.fedrod import FedRoD

SMALL: dict[str, Any] = {
    "data": "digits", "partition": "label-2", "clients": 5, "model": "mlp", "rounds": 3,
    "evaluate": {"clients": "class-shares"},
}  # fmt: skip
CLASSES = 10
BODY, HEAD = "mlp", ("5.weight", "5.bias")


def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 4


def job_of(settings: Any, count: int = 30, **state: Any) -> LocalJob:
    """Return the local training of one client. ``settings``: its local settings; ``state``: its client state."""
    inputs, labels = drawn(count)
    params = detached(models.build(BODY, (1, 8, 8), CLASSES, seed=0).named_parameters())
    counts = tuple(torch.bincount(labels, minlength=CLASSES).tolist())
    task = LocalTask(1, 0, 1, count, settings, params, state=state, class_counts=counts, initial=params)
    return LocalJob(task, FedRoD().plan(task), Records.of(inputs, labels), rng(0, "batches"))


def trainer_of(name: str) -> Trainer:
    kernel = load_kernel()[0] if name == "compiled" else None
    return Trainer(models.build(BODY, (1, 8, 8), CLASSES, seed=0), kernel)


def trained(job: LocalJob, trainer: str = "pytorch") -> Trained:
    return follow(FedRoD(), [job], trainer_of(trainer).train_all)[0]


@pytest.mark.parametrize("trainer", ["compiled", "pytorch"])
@pytest.mark.parametrize(
    "given", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"clip_norm": 0.1, "epochs": 2}, {"steps": 5}]
)
def test_the_generic_model_has_the_bits_of_balanced_softmax(settings: Any, given: Any, trainer: str) -> None:
    chosen = settings(**{"learning_rate": 0.1, "batch_size": 8, **given})
    plain = trainer_of(trainer).train(job_of(chosen))
    ours = trained(job_of(chosen), trainer)
    assert BalancedSoftmax().plan(job_of(chosen).task).logit_shift is not None
    assert all(torch.equal(value, plain.params[name]) for name, value in ours.params.items())
    assert ours.num_steps == plain.num_steps
    assert ours.loss == pytest.approx(plain.loss, rel=1e-6)


@pytest.mark.parametrize("trainer", ["compiled", "pytorch"])
def test_the_personal_head_makes_the_steps_of_the_paper(settings: Any, trainer: str) -> None:
    rate, momentum, decay, count = 0.1, 0.8, 0.02, 24
    chosen = settings(learning_rate=rate, momentum=momentum, weight_decay=decay, batch_size=count, epochs=3)
    generator = torch.Generator().manual_seed(5)
    network = models.build(BODY, (1, 8, 8), CLASSES, seed=0)
    start = dict(network.named_parameters())
    shapes = {name: tuple(start[name].shape) for name in HEAD}
    personal = {name: torch.randn(shape, generator=generator) / 10 for name, shape in shapes.items()}
    found = trained(job_of(chosen, count, **{"personal-head": personal}), trainer)

    inputs, labels = drawn(count)
    shift = (torch.bincount(labels, minlength=CLASSES).float() + 1e-9).log()
    heads = [personal[name].clone().requires_grad_() for name in HEAD]
    optimizers = [torch.optim.SGD(one, rate, momentum, weight_decay=decay) for one in (network.parameters(), heads)]
    for _ in range(3):
        logits = network(inputs)
        z = torch.nn.Sequential(*list(network)[:-1])(inputs).detach()
        losses = (
            functional.cross_entropy(logits + shift, labels),
            functional.cross_entropy(logits.detach() + functional.linear(z, *heads), labels),
        )
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, head in zip(HEAD, heads, strict=True):
        torch.testing.assert_close(found.further["personal-head"].params[name], head.detach(), rtol=1e-4, atol=1e-6)
    for name, value in network.named_parameters():
        torch.testing.assert_close(found.params[name], value.detach(), rtol=1e-4, atol=1e-6)


def test_the_own_model_has_the_sum_of_both_heads_logits(settings: Any) -> None:
    network = models.build(BODY, (1, 8, 8), CLASSES, seed=0).requires_grad_(requires_grad=False)
    job = job_of(settings(learning_rate=0.5, batch_size=10))
    head = trained(job).further["personal-head"].params
    assert any(value.abs().max() > 0 for value in head.values())
    task = LocalTask(2, 0, 1, 30, job.task.settings, job.task.params, state={"personal-head": head})
    own = FedRoD().own_model(task)
    assert list(own) == list(job.task.params)
    inputs, _ = drawn(30)
    z = torch.nn.Sequential(*list(network)[:-1])(inputs)
    expected = network(inputs) + functional.linear(z, *(head[name] for name in HEAD))
    network.load_state_dict(own)
    torch.testing.assert_close(network(inputs), expected, rtol=1e-5, atol=1e-5)


def test_before_its_first_round_a_client_uses_the_received_model(settings: Any) -> None:
    task = job_of(settings()).task
    assert all(torch.equal(value, task.params[name]) for name, value in FedRoD().own_model(task).items())


@pytest.mark.parametrize("stack", [1, 5])
def test_runs_end_in_the_bits_of_balanced_softmax_and_clients_predict_better(tmp_path: Path, stack: int) -> None:
    ends, measured = [], []
    for algorithm in ("balanced-softmax", "fedrod"):
        out = tmp_path / algorithm
        local = {"learning_rate": 0.1, "batch_size": 32, "momentum": 0.9}
        settings = {**SMALL, "local": local, "engine": {"kind": "inprocess", "stack": stack}}
        fl_sim.run({**settings, "algorithm": algorithm}, out=out, progress=False)
        ends.append(load_file(out / "model.safetensors"))
        measured.append(json.loads((out / "result.json").read_text())["personal"])
    if stack == 1:
        assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
        assert measured[0]["received_accuracy"] == measured[1]["received_accuracy"]
    else:
        for name, value in ends[0].items():
            torch.testing.assert_close(value, ends[1][name], rtol=1e-4, atol=1e-5)
    assert measured[1]["own_accuracy"] > measured[0]["own_accuracy"]


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ({"personal": "head"}, "leave local.personal out"),
        ({"optimizer": "adam"}, "each local step is an SGD step of both heads"),
    ],
)
def test_settings_that_do_not_fit_are_refused(local: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        experiment_from({"algorithm": "fedrod", "local": {"momentum": 0.0, **local}})
