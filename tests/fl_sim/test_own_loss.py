"""Models with a loss of their own: every trainer descends it, and perplexity is measured."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim import models
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.local_plan import Distillation, LocalPlan
from fl_sim.own_loss import Outcome
from fl_sim.seeding import rng
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.tables.filling import TableState, fill
from fl_sim.tables.plan import TableSettings, plan_table
from fl_sim.training.evaluation import OwnTests, evaluate
from fl_sim.training.loop import train
from fl_sim.training.records import Records
from fl_sim.training.stacked import StackedTrainer
from fl_sim.training.trainer import LocalJob
from fl_sim.types import LocalSettings, LocalTask
from tests.fl_sim.test_sequences import play

SETTINGS = LocalSettings(0.1, 0.9, 0.0, 4, 2)
TEXTS = torch.tensor([[1.0, 2, 3, 1], [1, 2, 3, 1], [2, 3, 1, 0], [3, 1, 2, 3], [1, 2, 0, 0], [2, 0, 0, 0]])
LABELS = torch.zeros(len(TEXTS), dtype=torch.int64)


def decoder() -> nn.Module:
    return models.build("decoder", (4,), 2, seed=0, vocabulary=4)


def task_for(model: nn.Module, settings: LocalSettings = SETTINGS) -> LocalTask:
    params = {name: value.detach().clone() for name, value in model.named_parameters()}
    return LocalTask(1, 0, 1, len(TEXTS), settings, params)


def test_training_is_descent_of_the_mean_of_the_records_losses():
    model = decoder()
    task = task_for(model, replace(SETTINGS, epochs=1, batch_size=6, momentum=0.0))
    loss = model.loss_of(TEXTS, LABELS).losses.mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    trained = train(model, task, LocalPlan(), TEXTS, LABELS, rng(0, "batches"))
    for (name, before), gradient in zip(task.params.items(), gradients, strict=True):
        torch.testing.assert_close(trained.params[name], before - 0.1 * gradient, rtol=1e-4, atol=1e-6)
    assert trained.loss == pytest.approx(float(loss.detach()))


def test_stacked_clients_descend_the_same_loss():
    model = decoder()
    task = task_for(model)
    alone = train(decoder(), task, LocalPlan(), TEXTS, LABELS, rng(0, "batches"))
    job = LocalJob(task, LocalPlan(), Records.of(TEXTS, LABELS), rng(0, "batches"))
    (stacked,) = StackedTrainer(decoder()).train([job])
    for name, value in alone.params.items():
        torch.testing.assert_close(stacked.params[name], value, rtol=1e-3, atol=1e-5)
    assert stacked.loss == pytest.approx(alone.loss, rel=1e-4)


def test_measures_are_over_all_predictions():
    model = decoder()
    scores = evaluate(model, task_for(model).params, TEXTS, LABELS)
    with torch.no_grad():
        outcome = model.loss_of(TEXTS, LABELS)
    assert scores.predictions[1].tolist() == [3, 3, 2, 3, 1, 0]
    total = float((outcome.losses.double() * outcome.counts).sum()) / 12
    assert scores.loss == pytest.approx(total)
    assert scores.perplexity == pytest.approx(math.exp(total))
    assert scores.accuracy == int(outcome.right.sum()) / 12
    own = OwnTests(np.array([0, 0, 0, 1, 1, 2]), 3).by_client(scores)
    right = outcome.right.tolist()
    assert own[:2].tolist() == [sum(right[:3]) / 8, sum(right[3:5]) / 4]
    assert np.isnan(own[2])  # its only text has no prediction


@pytest.mark.parametrize(
    ("plan", "settings", "field"),
    [
        (LocalPlan(distillation=Distillation(1.0)), SETTINGS, "distillation"),
        (LocalPlan(logit_shift=torch.zeros(2)), SETTINGS, "logit_shift"),
        (LocalPlan(), replace(SETTINGS, label_smoothing=0.1), "label_smoothing"),
    ],
)
def test_what_changes_a_cross_entropy_is_refused(plan, settings, field):
    model = decoder()
    with pytest.raises(UserError, match=f"Decoder computes its own loss .loss_of., and {field} changes the cross-ent"):
        train(model, task_for(model, settings), plan, TEXTS, LABELS, rng(0, "batches"))
    job = LocalJob(task_for(model, settings), plan, Records.of(TEXTS, LABELS), rng(0, "batches"))
    with pytest.raises(UserError, match=f"{field} changes the cross-entropy"):
        StackedTrainer(decoder()).train([job])


@pytest.mark.parametrize(("algorithm", "field"), [("fedlc", "logit_shift"), ("moon", "contrast")])
def test_a_method_that_changes_a_cross_entropy_is_refused_before_any_round(tmp_path, algorithm, field):
    settings = {"data": play(tmp_path / "play", length=6), "model": "decoder", "partition": "natural", "clients": 3,
                "algorithm": algorithm}  # fmt: skip
    with pytest.raises(UserError, match=f"Decoder computes its own loss .loss_of., and {field} changes the cross-ent"):
        procedure_of(job_of(experiment_from(settings))).beginning()


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedadam"])
def test_a_language_model_is_trained_by_speaker_and_its_perplexity_is_told(tmp_path, algorithm):
    settings = {"data": play(tmp_path / "play", length=12), "model": "decoder", "partition": "natural", "clients": 3,
                "rounds": 3, "engine": "inprocess", "algorithm": algorithm,
                "local": {"learning_rate": 0.1, "momentum": 0.9, "epochs": 2, "batch_size": 10}}  # fmt: skip
    result = run(experiment_from(settings), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    perplexities = [line["test_perplexity"] for line in lines]
    assert perplexities[-1] == pytest.approx(math.exp(lines[-1]["test_loss"]))
    assert perplexities[-1] < 60
    measures = result["measures"]
    assert (measures["perplexity"], measures["predictions"]) == (perplexities[-1], 27 * 11)
    assert "recalls" not in measures
    assert measures["client_accuracy_is"] == "accuracy on each client's own test records"


class Autoencoder(nn.Module):
    """A user's own model of numbers whose loss needs no label: it reproduces its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 8)
        self.outer = nn.Linear(8, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(inputs.flatten(1)))

    def loss_of(self, inputs: torch.Tensor, labels: torch.Tensor) -> Outcome:
        losses = (self(inputs) - inputs.flatten(1)).square().mean(1)
        return Outcome(losses, torch.zeros_like(labels), torch.ones_like(labels))


def autoencoder(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    del input_shape, num_classes
    return Autoencoder()


def test_a_model_of_ones_own_brings_its_loss(tmp_path):
    settings = {"model": f"{__name__}:autoencoder", "partition": "iid", "clients": 2, "rounds": 2,
                "engine": "inprocess", "local": {"learning_rate": 0.05}}  # fmt: skip
    run(experiment_from(settings), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert lines[-1]["test_loss"] < lines[0]["test_loss"]


def test_a_table_of_language_models_has_perplexity_and_no_baseline_of_classes(tmp_path):
    base = {"data": play(tmp_path / "play", length=6), "model": "decoder", "partition": "natural", "clients": 3,
            "rounds": 1, "engine": "inprocess"}  # fmt: skip
    grid = {"algorithm": ["fedavg"], "seed": [0]}
    settings = TableSettings.model_validate({"base": base, "grid": grid, "centralized": False})
    fill(TableState(settings, plan_table(settings)), tmp_path / "out", 1, None, progress=False)
    text = (tmp_path / "out/table.md").read_text()
    assert "Perplexity of the next token after the last round:" in text
    assert "Baseline" not in text
